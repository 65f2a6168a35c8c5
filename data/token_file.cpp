// data/token_file.cpp
#include "data/token_file.h"

#include <glob.h>
#include <xxhash.h>

#include <algorithm>
#include <bit>
#include <filesystem>
#include <limits>

#include "base/refuse.h"
#include "base/text.h"

namespace trifold {
namespace {

namespace fs = std::filesystem;

bool is_file(const std::string& path) {
    std::error_code ignored;
    return fs::exists(path, ignored) && !fs::is_directory(path, ignored);
}

std::string without(const std::string& path, std::string_view ending) {
    return path.ends_with(ending) ? path.substr(0, path.size() - ending.size()) : path;
}

// The file of the ids that belongs to any name of a token file.
std::string bin_of(const std::string& path) {
    const std::string prefix = without(without(path, ".bin"), ".idx");
    if (is_file(prefix + ".idx")) {
        if (is_file(prefix + ".bin")) return prefix + ".bin";
        refuse(Exit::data, "the Megatron index {0}.idx has no {0}.bin beside it", prefix);
    }
    std::error_code ignored;
    if (fs::is_directory(path, ignored))
        refuse(Exit::data, "{} is a folder; name the token files in it, such as '{}/*.bin'", path, without(path, "/"));
    for (const std::string& name : {path, prefix + ".bin"})
        if (is_file(name)) return name;
    refuse(Exit::data, "there is no token file {}; text is made into one by `trifold data tokenize`", path);
}

template <class... Args>
[[noreturn]] void wrong(const std::string& path, fmt::format_string<Args...> why, Args&&... args) {
    refuse(Exit::data, "token file {} {}", path, fmt::format(why, std::forward<Args>(args)...));
}

template <class T>
void widen(const std::byte* from, std::span<int32_t> out) {
    for (size_t i = 0; i < out.size(); ++i) {
        T id;
        std::memcpy(&id, from + i * sizeof(T), sizeof(T));
        if constexpr (sizeof(T) < 4 || std::is_same_v<T, int32_t>)
            out[i] = id;
        else
            out[i] = static_cast<int32_t>(std::clamp<int64_t>(id, std::numeric_limits<int32_t>::min(), std::numeric_limits<int32_t>::max()));
    }
}

struct TypeRow {
    TokenType type;
    const char* name;
    int64_t bytes;
    void (*read)(const std::byte* from, std::span<int32_t> out);
};
constexpr TypeRow types[] = {{TokenType::u8, "uint8", 1, widen<uint8_t>},  {TokenType::i8, "int8", 1, widen<int8_t>},
                             {TokenType::i16, "int16", 2, widen<int16_t>}, {TokenType::u16, "uint16", 2, widen<uint16_t>},
                             {TokenType::i32, "int32", 4, widen<int32_t>}, {TokenType::u32, "uint32", 4, widen<uint32_t>},
                             {TokenType::i64, "int64", 8, widen<int64_t>}};

const TypeRow& row_of(TokenType type) { return *std::ranges::find(types, type, &TypeRow::type); }

}  // namespace

const char* name_of(TokenFormat format) { return format == TokenFormat::llmc ? "llmc" : "megatron"; }
int64_t size_of(TokenType type) { return row_of(type).bytes; }
const char* name_of(TokenType type) { return row_of(type).name; }

uint64_t sampled_hash(const MappedFile& file) {
    constexpr int64_t block = 4096, samples = 64;
    const int64_t bytes = file.bytes(), last = std::max<int64_t>(0, bytes - block);
    uint64_t hash = XXH3_64bits(&bytes, sizeof(bytes));
    const int64_t count = bytes <= block * samples ? (bytes + block - 1) / block : samples;
    for (int64_t i = 0; i < count; ++i) {
        // Divided before it is multiplied where the product would not fit: sizes go up to 2^63.
        const int64_t offset = count == samples ? last / (samples - 1) * i + last % (samples - 1) * i / (samples - 1) : i * block;
        hash = XXH3_64bits_withSeed(file.at(offset), static_cast<size_t>(std::min(block, bytes - offset)), hash);
    }
    return hash;
}

TokenFile::TokenFile(const std::string& path) : bin_(bin_of(path), Exit::data, "token file") {
    if (bin_.bytes() == 0) wrong(bin_.path(), "is empty");
    const std::string index = without(bin_.path(), ".bin") + ".idx";
    if (is_file(index)) {
        index_.emplace(index, Exit::data, "token index");
        open_megatron();
    } else {
        open_llmc();
    }
}

void TokenFile::open_llmc() {
    const std::string& path = bin_.path();
    const int32_t magic = bin_.bytes() >= 4 ? bin_.load<int32_t>(0) : 0;
    if (magic == 20240522) wrong(path, "is an llm.c evaluation set (magic 20240522), not a stream of tokens");
    if (magic != LlmcHeader::magic_u16 && magic != LlmcHeader::magic_u32)
        wrong(path,
              "begins with {:#010x}, which is not llm.c's magic (20240520 or 20240801), and has no .idx beside it (Megatron); text is made into "
              "tokens by `trifold data tokenize`",
              static_cast<uint32_t>(magic));
    if (bin_.bytes() < LlmcHeader::bytes) wrong(path, "is cut off: {} bytes, but the header alone has {}", bin_.bytes(), LlmcHeader::bytes);
    const bool wide = magic == LlmcHeader::magic_u32;
    type_ = wide ? TokenType::u32 : TokenType::u16;
    const int32_t version = bin_.load<int32_t>(4), wanted = wide ? LlmcHeader::version_u32 : LlmcHeader::version_u16;
    if (version != wanted) wrong(path, "has version {}; with magic {} it must be {}", version, magic, wanted);
    tokens_ = bin_.load<int32_t>(8);
    if (tokens_ < 0) wrong(path, "claims {} tokens: its writer overflowed 32 bits; write smaller files", tokens_);
    first_byte_ = LlmcHeader::bytes;
    const int64_t body = bin_.bytes() - LlmcHeader::bytes;
    if (body % size_of(type_) != 0) wrong(path, "has {} bytes of tokens, not a multiple of {} ({})", body, size_of(type_), name_of(type_));
    if (body != tokens_ * size_of(type_))
        wrong(path, "claims {} tokens, which makes {} bytes, but it has {}: cut off, or still being written", tokens_,
              LlmcHeader::bytes + tokens_ * size_of(type_), bin_.bytes());
}

void TokenFile::open_megatron() {
    const std::string& path = index_->path();
    const int64_t bytes = index_->bytes();
    if (bytes == 0) wrong(path, "is empty");
    if (bytes < MegatronIndex::header_bytes) wrong(path, "is cut off: {} bytes, but the header alone has {}", bytes, MegatronIndex::header_bytes);
    if (std::memcmp(index_->at(0), MegatronIndex::magic, MegatronIndex::magic_bytes) != 0)
        wrong(path, "does not begin with MMIDIDX: it is no Megatron index");
    if (const auto version = index_->load<uint64_t>(9); version != MegatronIndex::version) wrong(path, "has version {}; only 1 is known", version);
    const auto code = index_->load<uint8_t>(17);
    if (code == 6 || code == 7)
        wrong(path, "says that its tokens are {} (type code {}); tokens are whole numbers", code == 6 ? "float64" : "float32", code);
    if (code == 0 || code > 8) wrong(path, "has the unknown type code {}", code);
    type_ = static_cast<TokenType>(code);
    const auto sequences = index_->load<uint64_t>(18), entries = index_->load<uint64_t>(26);
    // Compared before anything is multiplied: a damaged count must not wrap around.
    const auto limit = static_cast<uint64_t>(bytes);
    const bool fits = sequences <= limit / 12 && entries <= limit / 8;
    const uint64_t wanted = MegatronIndex::header_bytes + 12 * sequences + 8 * entries;
    if (fits && wanted + sequences == limit && sequences > 0) wrong(path, "lists modes of its sequences: multi-modal data is not supported");
    if (!fits || wanted != limit)
        wrong(path, "claims {} sequences and {} document entries, which does not make its {} bytes: cut off, or still being written", sequences,
              entries, bytes);
    sequences_ = static_cast<int64_t>(sequences);
    document_entries_ = static_cast<int64_t>(entries);
    offsets_at_ = MegatronIndex::header_bytes + 4 * sequences_;
    documents_at_ = offsets_at_ + 8 * sequences_;
    if (bin_.bytes() % size_of(type_) != 0)
        wrong(bin_.path(), "has {} bytes, not a multiple of {} ({})", bin_.bytes(), size_of(type_), name_of(type_));
    tokens_ = bin_.bytes() / size_of(type_);
    check_sequences();
    check_documents();
}

// Sequences must lie back to back, as every writer of the field puts them: token positions are then byte offsets.
void TokenFile::check_sequences() const {
    int64_t end = 0;
    for (int64_t s = 0; s < sequences_; ++s) {
        const auto length = index_->load<int32_t>(MegatronIndex::header_bytes + 4 * s);
        const auto offset = index_->load<int64_t>(offsets_at_ + 8 * s);
        if (length < 0) wrong(index_->path(), "gives sequence {} the length {}", s, length);
        if (offset < 0 || offset > bin_.bytes() || length * size_of(type_) > bin_.bytes() - offset)
            wrong(index_->path(), "points beyond {}: sequence {} has {} tokens at byte {}, the file has {} bytes", bin_.path(), s, length, offset,
                  bin_.bytes());
        if (offset != end)
            wrong(index_->path(), "puts sequence {} at byte {}, but the one before ends at {}: gaps and other orders are not supported", s, offset,
                  end);
        end = offset + length * size_of(type_);
    }
    if (end != bin_.bytes())
        wrong(index_->path(), "covers {} bytes of {}, which has {}: they do not belong together", end, bin_.path(), bin_.bytes());
}

void TokenFile::check_documents() const {
    int64_t before = 0;
    for (int64_t d = 0; d < document_entries_; ++d) {
        const auto sequence = index_->load<int64_t>(documents_at_ + 8 * d);
        if (sequence < before || sequence > sequences_ || (d == 0 && sequence != 0))
            wrong(index_->path(), "lets document {} begin with sequence {}, after {} and of {} sequences", d, sequence, before, sequences_);
        before = sequence;
    }
    if (before != sequences_) wrong(index_->path(), "lists documents up to sequence {} of {}", before, sequences_);
}

std::optional<int64_t> TokenFile::listed_documents() const {
    if (!index_) return std::nullopt;
    return std::max<int64_t>(0, document_entries_ - 1);
}

int64_t TokenFile::document_start(int64_t document) const {
    const auto sequence = index_->load<int64_t>(documents_at_ + 8 * document);
    return sequence == sequences_ ? tokens_ : index_->load<int64_t>(offsets_at_ + 8 * sequence) / size_of(type_);
}

int64_t TokenFile::next_listed_document(int64_t token) const {
    int64_t low = 0, high = document_entries_;  // the answer is among entries [low, high], `high` standing for the end
    while (low < high) {
        const int64_t middle = low + (high - low) / 2;
        if (document_start(middle) > token)
            high = middle;
        else
            low = middle + 1;
    }
    return low == document_entries_ ? tokens_ : document_start(low);
}

void TokenFile::read(int64_t first, std::span<int32_t> out) const {
    TRIFOLD_ASSERT(first >= 0 && first + std::ssize(out) <= tokens_);
    row_of(type_).read(bin_.at(byte_offset(first)), out);
}

int64_t TokenFile::at(int64_t token) const {
    TRIFOLD_ASSERT(token >= 0 && token < tokens_);
    if (type_ == TokenType::i64) return bin_.load<int64_t>(byte_offset(token));
    if (type_ == TokenType::u32) return bin_.load<uint32_t>(byte_offset(token));
    int32_t id = 0;
    read(token, {&id, 1});
    return id;
}

uint64_t TokenFile::sampled_hash() const { return trifold::sampled_hash(bin_) ^ (index_ ? trifold::sampled_hash(*index_) * 0x9E3779B97F4A7C15u : 0); }

std::string mask_path(const std::string& token_file) { return fs::path(token_file).replace_extension(".mask").string(); }

MaskFile::MaskFile(const std::string& path, int64_t tokens)
    : file_(path, Exit::data, "prompt mask (data.mask_prompt; `trifold data tokenize` makes it from JSONL with prompts or messages)") {
    if (file_.bytes() < MaskHeader::bytes || std::memcmp(file_.at(0), MaskHeader::magic, 8) != 0 || file_.load<uint64_t>(8) != MaskHeader::version)
        refuse(Exit::data, "{} is not a prompt mask (it must begin with TRIFMASK, version 1)", path);
    const auto said = file_.load<uint64_t>(16);
    if (said != static_cast<uint64_t>(tokens) || file_.bytes() != MaskHeader::bytes + (tokens + 7) / 8)
        refuse(Exit::data, "the prompt mask {} is for {} tokens in {} bytes, but its token file has {}: it belongs to other data", path, said,
               file_.bytes(), tokens);
}

int64_t MaskFile::count(int64_t first, int64_t count) const {
    int64_t prompts = 0, i = first;
    const int64_t end = first + count;
    for (; i < end && i % 8 != 0; ++i) prompts += is_prompt(i);
    for (; i + 8 <= end; i += 8) prompts += std::popcount(std::to_integer<unsigned>(*file_.at(MaskHeader::bytes + i / 8)));
    for (; i < end; ++i) prompts += is_prompt(i);
    return prompts;
}

std::vector<TokenFile> open_token_files(const std::string& path_or_glob) {
    std::vector<TokenFile> files;
    std::error_code ignored;
    const bool pattern = path_or_glob.find_first_of("*?[") != std::string::npos && !fs::exists(path_or_glob, ignored);
    if (!pattern) {
        files.emplace_back(path_or_glob);
        return files;
    }
    glob_t found{};
    ::glob(path_or_glob.c_str(), 0, nullptr, &found);
    const std::vector<std::string> names(found.gl_pathv, found.gl_pathv + found.gl_pathc);  // sorted
    ::globfree(&found);
    for (const std::string& name : names) {
        const bool companion = name.ends_with(".idx") || name.ends_with(".mask") || name.ends_with(".tmp");
        if (!companion) files.emplace_back(name);
    }
    if (files.empty()) refuse(Exit::data, "no token file matches {}", path_or_glob);
    return files;
}

}  // namespace trifold
