// data/dataset.h   Whole data sets, read from end to end: `trifold data inspect`, `convert` and `unigram`.
#pragma once
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "data/token_writer.h"

namespace trifold {

struct DatasetSummary {
    TokenFormat format = TokenFormat::llmc;
    TokenType type = TokenType::u16;
    int64_t files = 0, bytes = 0;  // bytes of the .bin files
    int64_t tokens = 0;
    // Listed by the Megatron index; llm.c: stretches between end-of-document ids, empty ones not counted.
    int64_t documents = 0;
    int64_t vocab_max = -1;  // the largest id; -1: no tokens
    int64_t vocab_min = 0;
    // The id that ends documents. llm.c: as given, or a guess: 256 (bytes) when no id is larger, else 50256 (GPT-2) in
    // u16 and 128000 (Llama-3) in u32 files. Megatron: the id that every document ends with, if there is one.
    std::optional<int32_t> end_of_document;
    std::optional<int64_t> prompt_tokens;  // of the masks, when every file has one
};

using DatasetProgress = std::function<void(int64_t tokens_done, int64_t tokens_total)>;

// `path` is a file, a Megatron prefix or a glob; files of a glob must be of one format.
DatasetSummary inspect(const std::string& path, std::optional<int32_t> end_of_document, const DatasetProgress& progress = {});

struct ConvertOptions {
    std::string input, prefix;  // as for inspect; PREFIX.bin ...
    TokenFormat format = TokenFormat::llmc;
    // Ends documents of an llm.c input; is appended to documents of a Megatron input that do not end with it. Not
    // given: the id that inspect finds.
    std::optional<int32_t> end_of_document{};
    int64_t vocab = 0;  // chooses the output's type; 0: the largest id that occurs, plus 1
    int64_t shard_tokens = LlmcHeader::max_tokens;
};

struct ConvertResult : WrittenTokens {
    DatasetSummary input;
    int64_t appended_ends = 0;
};

// Masks are taken along.
ConvertResult convert(const ConvertOptions& options, const DatasetProgress& progress = {});

// What a model that knows only how often each token occurs would reach: the baseline a trained model must beat.
struct UnigramLoss {
    double loss = 0;     // nats per token of `val`
    int64_t tokens = 0;  // of `val`
};
// Frequencies are counted on `train` and every id up to the largest one seen gets one more (Laplace), so that none has probability zero. Both
// are paths or globs of token files. Problem(Exit::data) for bad files.
UnigramLoss unigram_loss(const std::string& train, const std::string& val);

}  // namespace trifold
