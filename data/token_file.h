// data/token_file.h   Files of token ids: llm.c's .bin and Megatron's .bin with .idx, and masks beside them, read in place through mmap.
//
//   llm.c      256 x int32 header (magic, version, tokens, zeros), then the ids: 20240520, version 1: u16; 20240801, version 7 (Llama-3): u32.
//              At most 2^31 - 1 tokens a file. A document ends with an id that the file does not name.
//   Megatron   .bin: ids back to back. .idx: 9 bytes "MMIDIDX\0\0", u64 version = 1, u8 type, u64 sequences S, u64 entries D of the document
//              list, i32[S] tokens, i64[S] byte offsets, i64[D] the sequence with which each document begins, and S last. Nothing is aligned.
//   mask       x.mask beside x.bin: which tokens are prompt and therefore no targets of the loss. 8 bytes "TRIFMASK", u64 version = 1,
//              u64 tokens as in the token file; then token i is bit i % 8 (1 << i % 8) of byte i / 8, 1: prompt. Padded with 0.
//
// All counts and offsets are 64 bits wide. A malformed file is a Problem(Exit::data), found when it is opened.
#pragma once
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "base/file.h"

namespace trifold {

enum class TokenFormat : uint8_t { llmc, megatron };
const char* name_of(TokenFormat format);

// Megatron's codes; u32 occurs in llm.c files only.
enum class TokenType : uint8_t { u8 = 1, i8 = 2, i16 = 3, i32 = 4, i64 = 5, u16 = 8, u32 = 32 };
int64_t size_of(TokenType type);
const char* name_of(TokenType type);

struct LlmcHeader {
    static constexpr int64_t bytes = 256 * 4;
    static constexpr int32_t magic_u16 = 20240520, magic_u32 = 20240801;
    static constexpr int32_t version_u16 = 1, version_u32 = 7;
    static constexpr int64_t max_tokens = (int64_t{1} << 31) - 1;
};
struct MegatronIndex {
    static constexpr char magic[] = "MMIDIDX\0";  // with the terminator: 9 bytes
    static constexpr int64_t magic_bytes = 9, header_bytes = 34;
    static constexpr uint64_t version = 1;
};

class TokenFile {
public:
    // The path of an llm.c file, or of Megatron's PREFIX, PREFIX.bin or PREFIX.idx.
    explicit TokenFile(const std::string& path);

    const std::string& path() const { return bin_.path(); }
    TokenFormat format() const { return index_ ? TokenFormat::megatron : TokenFormat::llmc; }
    TokenType type() const { return type_; }
    int64_t tokens() const { return tokens_; }
    // Ids of tokens [first, first + out.size()). Those that do not fit come out as the nearest int32 (no vocabulary has it).
    void read(int64_t first, std::span<int32_t> out) const;
    int64_t at(int64_t token) const;  // one id, exactly as stored
    int64_t byte_offset(int64_t token) const { return first_byte_ + token * size_of(type_); }

    // Documents that the index lists; none: llm.c.
    std::optional<int64_t> listed_documents() const;
    // The first listed document that begins behind `token`, as a token position; tokens() when there is none.
    int64_t next_listed_document(int64_t token) const;

    uint64_t sampled_hash() const;

private:
    void open_llmc();
    void open_megatron();
    void check_sequences() const;
    void check_documents() const;
    int64_t document_start(int64_t document) const;

    MappedFile bin_;
    std::optional<MappedFile> index_;  // none: llm.c
    TokenType type_ = TokenType::u16;
    int64_t tokens_ = 0;
    int64_t first_byte_ = 0;                        // of the ids in bin_
    int64_t sequences_ = 0, document_entries_ = 0;  // of index_
    int64_t offsets_at_ = 0, documents_at_ = 0;     // bytes of index_
};

struct MaskHeader {
    static constexpr char magic[] = "TRIFMASK";
    static constexpr uint64_t version = 1;
    static constexpr int64_t bytes = 24;
};
// The name of the mask that belongs to a token file: x.bin -> x.mask.
std::string mask_path(const std::string& token_file);

class MaskFile {
public:
    // A file that is not a mask of `tokens` tokens is a Problem(Exit::data).
    MaskFile(const std::string& path, int64_t tokens);
    bool is_prompt(int64_t token) const { return (std::to_integer<unsigned>(*file_.at(MaskHeader::bytes + token / 8)) >> token % 8 & 1u) != 0; }
    int64_t count(int64_t first, int64_t count) const;  // prompt tokens among [first, first + count)
    const MappedFile& file() const { return file_; }

private:
    MappedFile file_;
};

// xxh3 of the size, both ends and blocks between them: tells data sets apart at the price of a few page faults.
uint64_t sampled_hash(const MappedFile& file);

// The token files of one data source: a path as above or a glob, in the order of their names. None, or a folder: a Problem.
std::vector<TokenFile> open_token_files(const std::string& path_or_glob);

}  // namespace trifold
