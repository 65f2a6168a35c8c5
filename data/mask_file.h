// data/mask_file.h   PREFIX.mask beside PREFIX.bin: which tokens are prompt and therefore no targets of the loss.
//
//   offset 0   8 bytes   "TRIFMASK"
//          8   u64       version = 1
//         16   u64       tokens, the same number as in the token file
//         24   bits      token i is bit i % 8 (1 << i % 8) of byte i / 8; 1: prompt, never a target. Padded with 0.
#pragma once
#include <cstdint>
#include <span>
#include <string>

#include "data/new_file.h"

namespace trifold {

// The name of the mask that belongs to a token file: x.bin -> x.mask.
std::string mask_path(const std::string& token_file);

class MaskFile {
public:
    // A file that is not a mask of `tokens` tokens is a Problem(Exit::data).
    MaskFile(const std::string& path, int64_t tokens);
    bool is_prompt(int64_t token) const { return (std::to_integer<unsigned>(*file_.at(header_bytes + token / 8)) >> token % 8 & 1u) != 0; }
    int64_t count(int64_t first, int64_t count) const;  // prompt tokens among [first, first + count)
    const MappedFile& file() const { return file_; }

    static constexpr int64_t header_bytes = 24;

private:
    MappedFile file_;
};

class MaskWriter {
public:
    explicit MaskWriter(const std::string& path);
    // One byte per token, 0 or 1; or `count` tokens that are not prompt.
    void append(std::span<const uint8_t> prompt);
    void append_targets(int64_t count);
    void finish();
    void commit_as(const std::string& path) { file_.commit_as(path); }

private:
    void append_bit(unsigned bit);
    NewFile file_;
    uint64_t tokens_ = 0;
    unsigned byte_ = 0;
};

}  // namespace trifold
