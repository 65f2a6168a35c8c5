// data/token_writer.cpp
#include "data/token_writer.h"

#include <algorithm>
#include <array>
#include <filesystem>
#include <limits>

#include "base/refuse.h"

namespace fs = std::filesystem;

namespace trifold {
namespace {

constexpr int64_t max_sequence = std::numeric_limits<int32_t>::max();  // lengths in .idx are int32

template <class T>
void write_as(OutputFile& file, std::span<const int32_t> ids) {
    std::array<T, 4096> block;
    while (!ids.empty()) {
        const size_t some = std::min(ids.size(), block.size());
        for (size_t i = 0; i < some; ++i) {
            TRIFOLD_ASSERT(ids[i] >= 0 && static_cast<int64_t>(ids[i]) <= static_cast<int64_t>(std::numeric_limits<T>::max()));
            block[i] = static_cast<T>(ids[i]);
        }
        file.write(block.data(), static_cast<int64_t>(some * sizeof(T)));
        ids = ids.subspan(some);
    }
}

// PATH, once its folder is there.
const std::string& with_folder(const std::string& path) {
    std::error_code ignored;  // a failure shows when the file is opened
    if (const auto folder = fs::path(path).parent_path(); !folder.empty()) fs::create_directories(folder, ignored);
    return path;
}

}  // namespace

NewFile::NewFile(const std::string& path)
    : unfinished(with_folder(path), Exit::data), out(unfinished.path(), Exit::data, "; nothing was kept: free space or choose another --out") {}

MaskWriter::MaskWriter(const std::string& path) : file_(path) {
    file_.out.write(MaskHeader::magic, 8);
    file_.out.put(MaskHeader::version);
    file_.out.put(tokens_);  // patched at the end
}

void MaskWriter::append(std::span<const uint8_t> prompt, int64_t count) {
    for (int64_t i = 0; i < count; ++i) {
        byte_ |= (prompt.empty() ? 0u : prompt[static_cast<size_t>(i)]) << tokens_ % 8;
        if (++tokens_ % 8 == 0) file_.out.put(static_cast<uint8_t>(std::exchange(byte_, 0)));
    }
}

void MaskWriter::finish() {
    if (tokens_ % 8 != 0) file_.out.put(static_cast<uint8_t>(byte_));
    file_.out.patch(16, &tokens_, sizeof(tokens_));
    file_.out.finish();
}

TokenType token_type_for(TokenFormat format, int64_t vocab_size) {
    if (format == TokenFormat::llmc) return vocab_size <= 65536 ? TokenType::u16 : TokenType::u32;
    return vocab_size < 65500 ? TokenType::u16 : TokenType::i32;
}

TokenWriter::TokenWriter(WriterOptions options) : options_(std::move(options)) {
    TRIFOLD_ASSERT(options_.shard_tokens > 0 && options_.shard_tokens <= LlmcHeader::max_tokens);
    // They might be anybody's, so they are not removed, but a glob would read them together with what is written now.
    for (const char* number : {"_000000.bin", "_000001.bin"})
        if (fs::exists(options_.prefix + number))
            refuse(Exit::data, "{}{} exists and looks like a shard of an earlier output of this name; move it away, or choose another --out",
                   options_.prefix, number);
    if (options_.format == TokenFormat::megatron) index_ = std::make_unique<NewFile>(options_.prefix + ".idx");
    open_shard();
}

std::string TokenWriter::shard_name(size_t shard) const {
    return shards_.size() == 1 ? options_.prefix : fmt::format("{}_{:06}", options_.prefix, shard);
}

void TokenWriter::open_shard() {
    // The first shard may turn out to be the only one, so its temporary name is PREFIX.bin.tmp in any case.
    const std::string name = shards_.empty() ? options_.prefix : fmt::format("{}_{:06}", options_.prefix, shards_.size());
    Shard& shard = shards_.emplace_back();
    shard.bin = std::make_unique<NewFile>(name + ".bin");
    if (options_.mask) shard.mask = std::make_unique<MaskWriter>(name + ".mask");
    if (!index_) shard.bin->out.put(std::array<int32_t, 256>{});  // the header, filled in by close_shard
}

void TokenWriter::close_shard() {
    Shard& shard = shards_.back();
    if (!index_) {
        const bool wide = options_.type == TokenType::u32;
        const std::array<int32_t, 3> header = {wide ? LlmcHeader::magic_u32 : LlmcHeader::magic_u16,
                                               wide ? LlmcHeader::version_u32 : LlmcHeader::version_u16, static_cast<int32_t>(shard.tokens)};
        shard.bin->out.patch(0, header.data(), sizeof(header));
    }
    shard.bin->out.finish();
    if (shard.mask) shard.mask->finish();
}

void TokenWriter::append(std::span<const int32_t> ids, std::span<const uint8_t> prompt) {
    TRIFOLD_ASSERT(prompt.empty() || (prompt.size() == ids.size() && options_.mask));
    const auto write = options_.type == TokenType::u16   ? write_as<uint16_t>
                       : options_.type == TokenType::u32 ? write_as<uint32_t>
                                                         : write_as<int32_t>;
    open_document_ += std::ssize(ids);
    written_.tokens += std::ssize(ids);
    written_.prompt_tokens += std::count(prompt.begin(), prompt.end(), uint8_t{1});
    while (!ids.empty()) {
        if (!index_ && shards_.back().tokens == options_.shard_tokens) close_shard(), open_shard();
        Shard& shard = shards_.back();
        const int64_t some = index_ ? std::ssize(ids) : std::min(std::ssize(ids), options_.shard_tokens - shard.tokens);
        write(shard.bin->out, ids.first(static_cast<size_t>(some)));
        if (shard.mask) shard.mask->append(prompt, some);
        if (!prompt.empty()) prompt = prompt.subspan(static_cast<size_t>(some));
        shard.tokens += some;
        ids = ids.subspan(static_cast<size_t>(some));
    }
}

// A document of more than 2^31 - 1 tokens becomes several sequences, which the document list allows.
void TokenWriter::end_document() {
    if (index_) {
        for (; open_document_ > max_sequence; open_document_ -= max_sequence) sequence_tokens_.push_back(max_sequence);
        sequence_tokens_.push_back(static_cast<int32_t>(open_document_));
        document_sequences_.push_back(std::ssize(sequence_tokens_));
    }
    open_document_ = 0;
    ++written_.documents;
}

void TokenWriter::write_index() {
    OutputFile& out = index_->out;
    out.write(MegatronIndex::magic, MegatronIndex::magic_bytes);
    out.put(MegatronIndex::version);
    out.put(options_.type);
    out.put(static_cast<uint64_t>(sequence_tokens_.size()));
    out.put(static_cast<uint64_t>(document_sequences_.size()));
    out.write(sequence_tokens_.data(), std::ssize(sequence_tokens_) * 4);
    int64_t offset = 0;
    for (const int32_t tokens : sequence_tokens_) {
        out.put(offset);
        offset += tokens * size_of(options_.type);
    }
    out.write(document_sequences_.data(), std::ssize(document_sequences_) * 8);
    out.finish();
}

void TokenWriter::finish() {
    if (open_document_ > 0) end_document();
    close_shard();
    if (index_) write_index();
}

WrittenTokens TokenWriter::commit() {
    // What has these names now is replaced, or would be taken for a part of this output.
    if (!index_) std::remove((options_.prefix + ".idx").c_str());
    if (shards_.size() > 1) std::remove((options_.prefix + ".bin").c_str());
    std::vector<std::string>& files = written_.files;
    std::vector<std::string> masks;
    for (size_t s = 0; s < shards_.size(); ++s) {
        const std::string mask = shard_name(s) + ".mask";
        if (written_.prompt_tokens == 0) std::remove(mask.c_str());
        shards_[s].bin->unfinished.commit_as(files.emplace_back(shard_name(s) + ".bin"));
        if (written_.prompt_tokens > 0) shards_[s].mask->commit_as(masks.emplace_back(mask));
    }
    if (index_) index_->unfinished.commit_as(files.emplace_back(options_.prefix + ".idx"));
    files.insert(files.end(), masks.begin(), masks.end());
    return written_;
}

}  // namespace trifold
