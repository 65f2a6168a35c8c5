// data/tokenize.h   Text files, folders and JSONL -> token files, streaming and on all cores: `trifold data tokenize`.
//
// The calling thread reads chunks and writes results in the order of the chunks; worker threads encode. At most 4
// chunks per thread are under way. The output does not depend on the number of threads.
//
// Each document is the tokenizer's prefix (none, or Llama-3's <|begin_of_text|>), its text, and the end-of-document id.
// Empty documents are left out and counted.
#pragma once
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "data/text_input.h"
#include "data/token_writer.h"

namespace trifold {

struct TokenizeOptions {
    std::vector<std::string> inputs{};
    TextKind kind = TextKind::by_name;
    std::string tokenizer = "bytes";
    std::string end_of_document{};  // a token; empty: the tokenizer's own
    std::string prefix{};           // PREFIX.bin ..., or PREFIX_train.bin and PREFIX_val.bin with a validation part
    TokenFormat format = TokenFormat::llmc;
    double validation = 0;  // below 1: share of the text; from 1 on: bytes of the text; 0: no validation part
    SpecialText special = SpecialText::match;
    std::string text_key = "text";  // JSONL
    int64_t shard_tokens = LlmcHeader::max_tokens;
    int threads = 0;  // 0: usable_cpus()
    int64_t chunk_bytes = int64_t{1} << 20;
};

struct TokenizeProgress {
    int64_t bytes_read = 0, bytes_total = 0;  // of the input files on disk
    int64_t tokens = 0;
};

struct TokenizeOutput : WrittenTokens {
    std::string part;  // all, train or val
};

struct TokenizeResult {
    std::vector<TokenizeOutput> outputs;
    int64_t input_files = 0, input_bytes = 0;
    int64_t empty_documents = 0;
    int64_t vocab = 0;
    std::string dtype;
};

// `progress` is called from the calling thread, often. Nothing is left behind when a Problem is thrown.
TokenizeResult tokenize(const TokenizeOptions& options, const std::function<void(const TokenizeProgress&)>& progress = {});

}  // namespace trifold
