// data/mask_file.cpp
#include "data/mask_file.h"

#include <bit>
#include <filesystem>

#include "base/refuse.h"

namespace trifold {

constexpr char magic[] = "TRIFMASK";
constexpr uint64_t version = 1;

std::string mask_path(const std::string& token_file) { return std::filesystem::path(token_file).replace_extension(".mask").string(); }

MaskFile::MaskFile(const std::string& path, int64_t tokens)
    : file_(path, Exit::data, "prompt mask (data.mask_prompt; `trifold data tokenize` makes it from JSONL with prompts or messages)") {
    if (file_.bytes() < header_bytes || std::memcmp(file_.at(0), magic, 8) != 0 || file_.load<uint64_t>(8) != version)
        refuse(Exit::data, "{} is not a prompt mask (it must begin with TRIFMASK, version 1)", path);
    const auto said = file_.load<uint64_t>(16);
    if (said != static_cast<uint64_t>(tokens) || file_.bytes() != header_bytes + (tokens + 7) / 8)
        refuse(Exit::data, "the prompt mask {} is for {} tokens in {} bytes, but its token file has {}: it belongs to other data", path, said,
               file_.bytes(), tokens);
}

int64_t MaskFile::count(int64_t first, int64_t count) const {
    int64_t prompts = 0, i = first;
    const int64_t end = first + count;
    for (; i < end && i % 8 != 0; ++i) prompts += is_prompt(i);
    for (; i + 8 <= end; i += 8) prompts += std::popcount(std::to_integer<unsigned>(*file_.at(header_bytes + i / 8)));
    for (; i < end; ++i) prompts += is_prompt(i);
    return prompts;
}

MaskWriter::MaskWriter(const std::string& path) : file_(path) {
    file_.out.write(magic, 8);
    file_.out.put(version);
    file_.out.put(tokens_);  // patched at the end
}

void MaskWriter::append_bit(unsigned bit) {
    byte_ |= bit << tokens_ % 8;
    if (++tokens_ % 8 == 0) file_.out.put(static_cast<uint8_t>(std::exchange(byte_, 0)));
}

void MaskWriter::append(std::span<const uint8_t> prompt) {
    for (const uint8_t bit : prompt) append_bit(bit);
}

void MaskWriter::append_targets(int64_t count) {
    for (; count > 0; --count) append_bit(0);
}

void MaskWriter::finish() {
    if (tokens_ % 8 != 0) file_.out.put(static_cast<uint8_t>(byte_));
    file_.out.patch(16, &tokens_, sizeof(tokens_));
    file_.out.finish();
}

}  // namespace trifold
