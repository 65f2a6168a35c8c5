// data/text_input.cpp
#include "data/text_input.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <unistd.h>
#include <zlib.h>

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <limits>

#include "base/error.h"
#include "data/utf8.h"

namespace trifold {

namespace fs = std::filesystem;

namespace {

bool is_packed(const std::string& path) { return path.ends_with(".gz") || path.ends_with(".dz"); }

bool is_jsonl(std::string path) {
    if (is_packed(path)) path.resize(path.size() - 3);
    return path.ends_with(".jsonl") || path.ends_with(".ndjson");
}

void add_file(const fs::path& path, TextKind kind, std::vector<TextFile>& files) {
    const std::string name = path.string();
    std::error_code error;
    const auto bytes = fs::file_size(path, error);
    if (error) throw Problem(Exit::data, fmt::format("cannot read {}: {}", name, error.message()));
    const bool jsonl = kind == TextKind::by_name ? is_jsonl(name) : kind == TextKind::jsonl;
    files.push_back({name, static_cast<int64_t>(bytes), jsonl, is_packed(name)});
}

void add_folder(const fs::path& folder, TextKind kind, std::vector<TextFile>& files) {
    std::vector<fs::path> found;
    try {
        for (auto entry = fs::recursive_directory_iterator(folder); entry != fs::recursive_directory_iterator();
             ++entry) {
            const bool hidden = entry->path().filename().string().starts_with('.');
            if (hidden && entry->is_directory()) entry.disable_recursion_pending();
            if (!hidden && entry->is_regular_file()) found.push_back(entry->path());
        }
    } catch (const fs::filesystem_error& error) {
        throw Problem(Exit::data,
                      fmt::format("cannot read the folder {}: {}", folder.string(), error.code().message()));
    }
    std::sort(found.begin(), found.end());
    for (const fs::path& path : found) add_file(path, kind, files);
}

}  // namespace

std::vector<TextFile> find_text(const std::vector<std::string>& inputs, TextKind kind) {
    std::vector<TextFile> files;
    for (const std::string& input : inputs) {
        std::error_code error;
        const fs::file_status status = fs::status(input, error);
        const size_t before = files.size();
        if (!fs::exists(status)) throw Problem(Exit::data, fmt::format("there is no file or folder {}", input));
        if (fs::is_directory(status)) {
            add_folder(input, kind, files);
            if (files.size() == before)
                throw Problem(
                    Exit::data,
                    fmt::format("the folder {} has no files (names that begin with a dot are left out)", input));
        } else {
            add_file(input, kind, files);
        }
    }
    return files;
}

bool is_validation_document(int64_t number, double share) {
    const auto n = static_cast<double>(number);
    return std::floor((n + 1) * share) > std::floor(n * share);
}

// Reads the bytes of one file, unpacked.
class ChunkReader::Source {
public:
    explicit Source(const TextFile& file) : file(file), descriptor_(::open(file.path.c_str(), O_RDONLY | O_CLOEXEC)) {
        if (descriptor_ < 0) fail("cannot open");
        ::posix_fadvise(descriptor_, 0, 0, POSIX_FADV_SEQUENTIAL);
        if (!file.packed) return;
        unpacker_ = ::gzdopen(descriptor_, "rb");
        if (unpacker_ == nullptr) fail("cannot unpack");
        ::gzbuffer(unpacker_, 1 << 18);
    }
    ~Source() { unpacker_ != nullptr ? ::gzclose(unpacker_) : ::close(descriptor_); }
    Source(const Source&) = delete;

    // Appends up to `bytes` bytes; fewer only at the end of the file.
    void read(std::string& out, int64_t bytes) {
        const size_t before = out.size();
        out.resize(before + static_cast<size_t>(bytes));
        size_t got = before;
        while (got < out.size() && !at_end_) got += read_some(out.data() + got, out.size() - got);
        out.resize(got);
    }
    bool at_end() const { return at_end_; }
    int64_t bytes_on_disk() const { return unpacker_ != nullptr ? ::gzoffset(unpacker_) : read_; }

    // The place behind the next line feed at or after `offset`, or `offset` moved to the beginning of a character when
    // no line feed is near. Not for packed files.
    int64_t line_after(int64_t offset) const {
        std::string near(size_t{1} << 16, '\0');
        const ssize_t got = ::pread(descriptor_, near.data(), near.size(), offset);
        near.resize(got > 0 ? static_cast<size_t>(got) : 0);
        if (const size_t feed = near.find('\n'); feed != std::string::npos)
            return offset + static_cast<int64_t>(feed) + 1;
        size_t inside = 0;
        while (inside < near.size() && (static_cast<uint8_t>(near[inside]) & 0xC0) == 0x80) ++inside;
        return offset + static_cast<int64_t>(inside);
    }

    const TextFile& file;

private:
    size_t read_some(char* to, size_t bytes) {
        bytes = std::min(bytes, size_t{1} << 30);
        if (unpacker_ == nullptr) {
            const ssize_t got = ::read(descriptor_, to, bytes);
            if (got < 0 && errno == EINTR) return 0;
            if (got < 0) fail("cannot read");
            at_end_ = got == 0;
            read_ += got;
            return static_cast<size_t>(got);
        }
        const int got = ::gzread(unpacker_, to, static_cast<unsigned>(bytes));
        int code = Z_OK;
        const char* message = ::gzerror(unpacker_, &code);
        if (got < 0 || code == Z_BUF_ERROR) {  // Z_BUF_ERROR: the file ends too early
            throw Problem(Exit::data,
                          fmt::format("cannot unpack {}: it is damaged or cut off ({})", file.path, message));
        }
        at_end_ = got == 0;
        return static_cast<size_t>(got);
    }
    [[noreturn]] void fail(const char* what) const {
        throw Problem(Exit::data, fmt::format("{} {}: {}", what, file.path, std::strerror(errno)));
    }

    int descriptor_;
    gzFile unpacker_ = nullptr;
    int64_t read_ = 0;
    bool at_end_ = false;
};

ChunkReader::ChunkReader(const std::vector<TextFile>& files, const Tokenizer& tokenizer, const ChunkOptions& options)
    : files_(files), tokenizer_(tokenizer), options_(options) {}
ChunkReader::~ChunkReader() = default;

int64_t ChunkReader::bytes_read() const { return finished_bytes_ + (source_ ? source_->bytes_on_disk() : 0); }

bool ChunkReader::has_own_tail(const TextFile& file) const {
    if (options_.validation <= 0 || file.jsonl || file.packed) return false;
    return files_.size() == 1 || file.bytes >= options_.large_file;
}

void ChunkReader::open_next_file() {
    const TextFile& file = files_[next_file_++];
    source_ = std::make_unique<Source>(file);
    pending_.clear();
    offset_ = 0;
    line_ = 1;
    begins_ = true;
    text_done_ = false;
    tail_ = -1;
    if (has_own_tail(file)) {
        tail_ = source_->line_after(static_cast<int64_t>(static_cast<double>(file.bytes) * (1 - options_.validation)));
        if (tail_ >= file.bytes) tail_ = -1;
    }
}

bool ChunkReader::next(TextChunk& chunk) {
    while (true) {
        if (!source_) {
            if (next_file_ == files_.size()) return false;
            open_next_file();
        }
        if (source_->file.jsonl ? next_lines(chunk) : next_text(chunk)) return true;
        finished_bytes_ += source_->file.bytes;
        source_.reset();
    }
}

// Reads until the document can be cut or ends, at the end of the file or where the file's tail begins. 0: it ends.
size_t ChunkReader::read_to_cut(int64_t document_end) {
    while (true) {
        const int64_t have = std::ssize(pending_), wanted = have + options_.chunk_bytes;
        source_->read(pending_, std::min(wanted, document_end - offset_) - have);
        if (source_->at_end() || offset_ + std::ssize(pending_) == document_end) return 0;
        if (const size_t cut = tokenizer_.last_cut(pending_); cut > 0) return cut;
        // Bad text has no good place to be cut: whoever encodes it will say where it is bad.
        const size_t bad = invalid_utf8(pending_);
        if (bad != std::string::npos && bad + incomplete_tail(pending_) < pending_.size()) return pending_.size();
    }
}

bool ChunkReader::next_text(TextChunk& chunk) {
    if (text_done_) return false;
    const bool before_tail = offset_ < tail_;
    const size_t cut = read_to_cut(before_tail ? tail_ : std::numeric_limits<int64_t>::max());
    const bool ends = cut == 0;
    chunk = {.file = &source_->file,
             .text = pending_.substr(0, ends ? pending_.size() : cut),
             .offset = offset_,
             .first_document = document_,
             .part = Part::by_number,
             .begins_document = begins_,
             .ends_document = ends};
    if (tail_ >= 0) chunk.part = before_tail ? Part::train : Part::validation;
    pending_.erase(0, chunk.text.size());
    offset_ += std::ssize(chunk.text);
    begins_ = ends;
    text_done_ = ends && (source_->at_end() || !before_tail);
    if (text_done_ && tail_ < 0) ++document_;
    return true;
}

// Whole lines.
bool ChunkReader::next_lines(TextChunk& chunk) {
    size_t cut = 0;
    while (cut == 0) {
        source_->read(pending_, options_.chunk_bytes);
        const size_t feed = pending_.rfind('\n');
        if (source_->at_end()) {
            cut = pending_.size();
            break;
        }
        cut = feed == std::string::npos ? 0 : feed + 1;
    }
    if (cut == 0) return false;
    chunk = {.file = &source_->file,
             .text = pending_.substr(0, cut),
             .offset = offset_,
             .first_line = line_,
             .first_document = document_,
             .part = Part::by_number};
    pending_.erase(0, cut);
    offset_ += std::ssize(chunk.text);
    const int64_t lines = std::count(chunk.text.begin(), chunk.text.end(), '\n') + (chunk.text.back() != '\n');
    line_ += lines;
    document_ += lines;
    return true;
}

}  // namespace trifold
