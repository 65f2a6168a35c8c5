// data/token_writer.h   Streams tokens into PREFIX.bin (llm.c) or PREFIX.bin and PREFIX.idx (Megatron), with PREFIX.mask on demand.
//
// An llm.c file holds at most 2^31 - 1 tokens, because its header counts in 32 bits. Longer output becomes shards PREFIX_000000.bin,
// PREFIX_000001.bin ... which a glob (PREFIX_*.bin) reads as one. Nothing has its final name before commit().
#pragma once
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "base/file.h"
#include "data/token_file.h"

namespace trifold {

// The type that each format's own writers choose: llm.c u16 or u32, Megatron u16 below 65500 ids, else i32.
TokenType token_type_for(TokenFormat format, int64_t vocab_size);

struct WriterOptions {
    std::string prefix;
    TokenFormat format = TokenFormat::llmc;
    TokenType type = TokenType::u16;
    int64_t shard_tokens = LlmcHeader::max_tokens;  // llm.c only
    bool mask = false;                              // write prompt bits (dropped again when no token was a prompt)
};

// A file that lies under a temporary name, in a folder that is made, until it is complete.
struct NewFile {
    explicit NewFile(const std::string& path);
    Unfinished unfinished;
    OutputFile out;
};

class MaskWriter {
public:
    explicit MaskWriter(const std::string& path);
    // `count` tokens: one byte for each, 0 or 1, or none, as when all are 0.
    void append(std::span<const uint8_t> prompt, int64_t count);
    void finish();
    void commit_as(const std::string& path) { file_.unfinished.commit_as(path); }

private:
    NewFile file_;
    uint64_t tokens_ = 0;
    unsigned byte_ = 0;
};

struct WrittenTokens {
    std::vector<std::string> files{};  // token files first
    int64_t tokens = 0, documents = 0, prompt_tokens = 0;
};

class TokenWriter {
public:
    explicit TokenWriter(WriterOptions options);
    // `prompt` has one byte per id, or none: no prompt.
    void append(std::span<const int32_t> ids, std::span<const uint8_t> prompt = {});
    void end_document();
    // Everything is on the disk, under temporary names. Closes a document that was left open.
    void finish();
    // Gives the files their names. What had them is replaced; an .idx or .mask that does not belong to the new .bin disappears.
    WrittenTokens commit();
    const WrittenTokens& written() const { return written_; }  // so far; no files

private:
    struct Shard {
        std::unique_ptr<NewFile> bin;
        std::unique_ptr<MaskWriter> mask;
        int64_t tokens = 0;
    };
    void open_shard();
    void close_shard();
    void write_index();
    std::string shard_name(size_t shard) const;  // without .bin; final only after the last shard was opened

    WriterOptions options_;
    std::vector<Shard> shards_;
    std::unique_ptr<NewFile> index_;
    std::vector<int32_t> sequence_tokens_;  // Megatron
    std::vector<int64_t> document_sequences_{0};
    int64_t open_document_ = 0;  // tokens of the document that is not closed yet
    WrittenTokens written_;
};

}  // namespace trifold
