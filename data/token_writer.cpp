// data/token_writer.cpp
#include "data/token_writer.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <filesystem>
#include <limits>

#include "base/error.h"

namespace trifold {

namespace {

constexpr int64_t max_sequence = std::numeric_limits<int32_t>::max();  // lengths in .idx are int32

template <class T>
void write_as(StreamedFile& file, std::span<const int32_t> ids) {
    std::array<T, 4096> block;
    while (!ids.empty()) {
        const size_t some = std::min(ids.size(), block.size());
        for (size_t i = 0; i < some; ++i) {
            TRIFOLD_ASSERT(ids[i] >= 0 &&
                           static_cast<int64_t>(ids[i]) <= static_cast<int64_t>(std::numeric_limits<T>::max()));
            block[i] = static_cast<T>(ids[i]);
        }
        file.write(block.data(), static_cast<int64_t>(some * sizeof(T)));
        ids = ids.subspan(some);
    }
}

}  // namespace

TokenType token_type_for(TokenFormat format, int64_t vocab_size) {
    if (format == TokenFormat::llmc) return vocab_size <= 65536 ? TokenType::u16 : TokenType::u32;
    return vocab_size < 65500 ? TokenType::u16 : TokenType::i32;
}

TokenWriter::TokenWriter(WriterOptions options) : options_(std::move(options)) {
    TRIFOLD_ASSERT(options_.shard_tokens > 0 && options_.shard_tokens <= LlmcHeader::max_tokens);
    refuse_older_shards();
    if (options_.format == TokenFormat::megatron) index_ = std::make_unique<StreamedFile>(options_.prefix + ".idx");
    open_shard();
}

TokenWriter::~TokenWriter() = default;

// They might be anybody's, so they are not removed, but a glob would read them together with what is written now.
void TokenWriter::refuse_older_shards() const {
    for (int s = 0; s < 2; ++s) {
        const std::string older = fmt::format("{}_{:06}.bin", options_.prefix, s);
        if (std::filesystem::exists(older)) {
            throw Problem(
                Exit::data,
                fmt::format("{} exists and looks like a shard of an earlier output of this name; move it away, or "
                            "choose another --out",
                            older));
        }
    }
}

std::string TokenWriter::shard_name(size_t shard) const {
    return shards_.size() == 1 ? options_.prefix : fmt::format("{}_{:06}", options_.prefix, shard);
}

void TokenWriter::open_shard() {
    Shard shard;
    // The first shard may turn out to be the only one, so its temporary name is PREFIX.bin.tmp in any case.
    const std::string name =
        shards_.empty() ? options_.prefix : fmt::format("{}_{:06}", options_.prefix, shards_.size());
    shard.bin = std::make_unique<StreamedFile>(name + ".bin");
    if (options_.mask) shard.mask = std::make_unique<MaskWriter>(name + ".mask");
    if (options_.format == TokenFormat::llmc) {
        std::array<int32_t, 256> header{};  // filled in by close_shard
        shard.bin->put(header);
    }
    shards_.push_back(std::move(shard));
}

void TokenWriter::close_shard() {
    Shard& shard = shards_.back();
    if (options_.format == TokenFormat::llmc) {
        const bool wide = options_.type == TokenType::u32;
        const std::array<int32_t, 3> header = {wide ? LlmcHeader::magic_u32 : LlmcHeader::magic_u16,
                                               wide ? LlmcHeader::version_u32 : LlmcHeader::version_u16,
                                               static_cast<int32_t>(shard.tokens)};
        shard.bin->patch(0, header.data(), sizeof(header));
    }
    shard.bin->finish();
    if (shard.mask) shard.mask->finish();
}

void TokenWriter::append(std::span<const int32_t> ids, std::span<const uint8_t> prompt) {
    TRIFOLD_ASSERT(prompt.empty() || (prompt.size() == ids.size() && options_.mask));
    open_document_ += std::ssize(ids);
    while (!ids.empty()) {
        int64_t some = std::ssize(ids);
        if (options_.format == TokenFormat::llmc) {
            if (shards_.back().tokens == options_.shard_tokens) close_shard(), open_shard();
            some = std::min(some, options_.shard_tokens - shards_.back().tokens);
        }
        const auto count = static_cast<size_t>(some);
        Shard& shard = shards_.back();
        write_ids(ids.first(count));
        if (shard.mask && prompt.empty()) shard.mask->append_targets(some);
        if (!prompt.empty()) {
            shard.mask->append(prompt.first(count));
            prompt_tokens_ += std::count(prompt.begin(), prompt.begin() + some, uint8_t{1});
            prompt = prompt.subspan(count);
        }
        shard.tokens += some;
        tokens_ += some;
        if (options_.format == TokenFormat::megatron) extend_sequence(some);
        ids = ids.subspan(count);
    }
}

void TokenWriter::write_ids(std::span<const int32_t> ids) {
    StreamedFile& file = *shards_.back().bin;
    switch (options_.type) {
        case TokenType::u16:
            return write_as<uint16_t>(file, ids);
        case TokenType::u32:
            return write_as<uint32_t>(file, ids);
        case TokenType::i32:
            return write_as<int32_t>(file, ids);
        default:
            TRIFOLD_ASSERT(!"a type that is read, but never written");
    }
}

// A document of more than 2^31 - 1 tokens becomes several sequences, which the document list allows.
void TokenWriter::extend_sequence(int64_t tokens) {
    while (open_sequence_ + tokens > max_sequence) {
        tokens -= max_sequence - open_sequence_;
        open_sequence_ = max_sequence;
        close_sequence();
    }
    open_sequence_ += tokens;
}

void TokenWriter::close_sequence() {
    sequence_tokens_.push_back(static_cast<int32_t>(open_sequence_));
    open_sequence_ = 0;
}

void TokenWriter::end_document() {
    if (options_.format == TokenFormat::megatron) {
        close_sequence();
        document_sequences_.push_back(std::ssize(sequence_tokens_));
    }
    open_document_ = 0;
    ++documents_;
}

void TokenWriter::write_index() {
    index_->write(MegatronIndex::magic, MegatronIndex::magic_bytes);
    index_->put(MegatronIndex::version);
    index_->put(static_cast<uint8_t>(options_.type));
    index_->put(static_cast<uint64_t>(sequence_tokens_.size()));
    index_->put(static_cast<uint64_t>(document_sequences_.size()));
    index_->write(sequence_tokens_.data(), std::ssize(sequence_tokens_) * 4);
    int64_t offset = 0;
    for (const int32_t tokens : sequence_tokens_) {
        index_->put(offset);
        offset += tokens * size_of(options_.type);
    }
    index_->write(document_sequences_.data(), std::ssize(document_sequences_) * 8);
    index_->finish();
}

void TokenWriter::finish() {
    if (open_document_ > 0) end_document();
    close_shard();
    if (index_) write_index();
}

void TokenWriter::commit() {
    // What has these names now is replaced, or would be taken for a part of this output.
    if (!index_) remove_if_present(options_.prefix + ".idx");
    if (shards_.size() > 1) remove_if_present(options_.prefix + ".bin");
    for (size_t s = 0; s < shards_.size(); ++s) {
        const std::string name = shard_name(s);
        if (prompt_tokens_ == 0) remove_if_present(name + ".mask");
        shards_[s].bin->commit_as(name + ".bin");
        if (prompt_tokens_ > 0) shards_[s].mask->commit_as(name + ".mask");
    }
    if (index_) index_->commit_as(options_.prefix + ".idx");
}

std::vector<std::string> TokenWriter::files() const {
    std::vector<std::string> names;
    for (size_t s = 0; s < shards_.size(); ++s) names.push_back(shard_name(s) + ".bin");
    if (index_) names.push_back(options_.prefix + ".idx");
    for (size_t s = 0; prompt_tokens_ > 0 && s < shards_.size(); ++s) names.push_back(shard_name(s) + ".mask");
    return names;
}

}  // namespace trifold
