// data/text_input.cpp
#include "data/text_input.h"

#include <fcntl.h>
#include <unistd.h>
#include <zlib.h>

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <limits>

#include "base/file.h"
#include "base/refuse.h"
#include "data/utf8.h"

namespace trifold {

namespace fs = std::filesystem;

namespace {

bool is_packed(const std::string& path) { return path.ends_with(".gz") || path.ends_with(".dz"); }

bool is_jsonl(std::string path) {
    if (is_packed(path)) path.resize(path.size() - 3);
    return path.ends_with(".jsonl") || path.ends_with(".ndjson");
}

// The files of a folder and those in it, sorted.
std::vector<std::string> files_in(const std::string& folder) {
    std::vector<fs::path> found;
    try {
        for (auto entry = fs::recursive_directory_iterator(folder); entry != fs::recursive_directory_iterator(); ++entry) {
            const bool hidden = entry->path().filename().string().starts_with('.');
            if (hidden && entry->is_directory()) entry.disable_recursion_pending();
            if (!hidden && entry->is_regular_file()) found.push_back(entry->path());
        }
    } catch (const fs::filesystem_error& error) {
        refuse(Exit::data, "cannot read the folder {}: {}", folder, error.code().message());
    }
    if (found.empty()) refuse(Exit::data, "the folder {} has no files (names that begin with a dot are left out)", folder);
    std::sort(found.begin(), found.end());
    return {found.begin(), found.end()};
}

}  // namespace

std::vector<TextFile> find_text(const std::vector<std::string>& inputs, TextKind kind) {
    std::vector<TextFile> files;
    for (const std::string& input : inputs) {
        std::error_code error;
        const fs::file_status status = fs::status(input, error);
        if (!fs::exists(status)) refuse(Exit::data, "there is no file or folder {}", input);
        for (const std::string& name : fs::is_directory(status) ? files_in(input) : std::vector{input}) {
            const auto bytes = fs::file_size(name, error);
            if (error) refuse(Exit::data, "cannot read {}: {}", name, error.message());
            const bool jsonl = kind == TextKind::by_name ? is_jsonl(name) : kind == TextKind::jsonl;
            files.push_back({name, static_cast<int64_t>(bytes), jsonl, is_packed(name)});
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
    explicit Source(const TextFile& file) : file(file), fd_(::open(file.path.c_str(), O_RDONLY | O_CLOEXEC)) {
        if (!fd_) fail("open");
        ::posix_fadvise(fd_.get(), 0, 0, POSIX_FADV_SEQUENTIAL);
        if (!file.packed) return;
        unpacker_.reset(::gzdopen(::dup(fd_.get()), "rb"));
        if (!unpacker_) fail("unpack");
        ::gzbuffer(unpacker_.get(), 1 << 18);
    }

    // Appends up to `bytes` bytes to `pending`; fewer only at the end of the file.
    void read(int64_t bytes) {
        const size_t before = pending.size();
        pending.resize(before + static_cast<size_t>(bytes));
        size_t got = before;
        while (got < pending.size() && !at_end_) got += read_some(pending.data() + got, pending.size() - got);
        pending.resize(got);
    }
    bool at_end() const { return at_end_; }
    int64_t bytes_on_disk() const { return unpacker_ ? ::gzoffset(unpacker_.get()) : read_; }

    // The next `bytes` pending bytes as a chunk.
    TextChunk take(size_t bytes, int64_t first_document) {
        TextChunk chunk{.file = &file, .text = pending.substr(0, bytes), .offset = offset, .first_document = first_document, .part = Part::by_number};
        pending.erase(0, bytes);
        offset += static_cast<int64_t>(bytes);
        return chunk;
    }

    // The place behind the next line feed at or after `offset`, or `offset` moved to the beginning of a character when
    // no line feed is near. Not for packed files.
    int64_t line_after(int64_t offset) const {
        std::string near(size_t{1} << 16, '\0');
        const ssize_t got = ::pread(fd_.get(), near.data(), near.size(), offset);
        near.resize(got > 0 ? static_cast<size_t>(got) : 0);
        if (const size_t feed = near.find('\n'); feed != std::string::npos) return offset + static_cast<int64_t>(feed) + 1;
        return offset + (std::find_if(near.begin(), near.end(), [](char c) { return (static_cast<uint8_t>(c) & 0xC0) != 0x80; }) - near.begin());
    }

    const TextFile& file;
    std::string pending{};  // read, not given out
    int64_t offset = 0;     // of pending in the file
    int64_t line = 1;
    int64_t tail = -1;       // where the file's validation part begins; -1: it has none
    bool begins = true;      // the next chunk begins a document
    bool text_done = false;  // the last document of a text file was given out

private:
    size_t read_some(char* to, size_t bytes) {
        bytes = std::min(bytes, size_t{1} << 30);
        int64_t got = 0;
        if (!unpacker_) {
            got = trifold::read_some(fd_, to, bytes);
            if (got < 0) fail("read");
            read_ += got;
        } else {
            got = ::gzread(unpacker_.get(), to, static_cast<unsigned>(bytes));
            int code = Z_OK;
            const char* message = ::gzerror(unpacker_.get(), &code);
            if (got < 0 || code == Z_BUF_ERROR)  // Z_BUF_ERROR: the file ends too early
                refuse(Exit::data, "cannot unpack {}: it is damaged or cut off ({})", file.path, message);
        }
        at_end_ = got == 0;
        return static_cast<size_t>(got);
    }
    [[noreturn]] void fail(const char* what) const { refuse_file(Exit::data, what, file.path, errno); }

    struct Close {
        void operator()(gzFile_s* file) const { ::gzclose(file); }
    };
    Fd fd_;
    std::unique_ptr<gzFile_s, Close> unpacker_;
    int64_t read_ = 0;
    bool at_end_ = false;
};

ChunkReader::ChunkReader(const std::vector<TextFile>& files, const Tokenizer& tokenizer, const ChunkOptions& options)
    : files_(files), tokenizer_(tokenizer), options_(options) {}
ChunkReader::~ChunkReader() = default;

int64_t ChunkReader::bytes_read() const { return finished_bytes_ + (source_ ? source_->bytes_on_disk() : 0); }

void ChunkReader::open_next_file() {
    const TextFile& file = files_[next_file_++];
    source_ = std::make_unique<Source>(file);
    const bool large = files_.size() == 1 || file.bytes >= options_.large_file;
    if (options_.validation <= 0 || file.jsonl || file.packed || !large) return;
    const int64_t tail = source_->line_after(static_cast<int64_t>(static_cast<double>(file.bytes) * (1 - options_.validation)));
    if (tail < file.bytes) source_->tail = tail;
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
    std::string& pending = source_->pending;
    while (true) {
        source_->read(std::min(options_.chunk_bytes, document_end - source_->offset - std::ssize(pending)));
        if (source_->at_end() || source_->offset + std::ssize(pending) == document_end) return 0;
        if (const size_t cut = tokenizer_.last_cut(pending); cut > 0) return cut;
        // Bad text has no good place to be cut: whoever encodes it will say where it is bad.
        const size_t bad = invalid_utf8(pending);
        if (bad != std::string::npos && bad + incomplete_tail(pending) < pending.size()) return pending.size();
    }
}

bool ChunkReader::next_text(TextChunk& chunk) {
    Source& s = *source_;
    if (s.text_done) return false;
    const bool before_tail = s.offset < s.tail;
    const size_t cut = read_to_cut(before_tail ? s.tail : std::numeric_limits<int64_t>::max());
    const bool ends = cut == 0;
    chunk = s.take(ends ? s.pending.size() : cut, document_);
    chunk.begins_document = s.begins;
    chunk.ends_document = ends;
    if (s.tail >= 0) chunk.part = before_tail ? Part::train : Part::validation;
    s.begins = ends;
    s.text_done = ends && (s.at_end() || !before_tail);
    if (s.text_done && s.tail < 0) ++document_;
    return true;
}

// Whole lines.
bool ChunkReader::next_lines(TextChunk& chunk) {
    Source& s = *source_;
    size_t cut = 0;
    while (cut == 0 && !s.at_end()) {
        s.read(options_.chunk_bytes);
        cut = s.at_end() ? s.pending.size() : s.pending.rfind('\n') + 1;
    }
    if (cut == 0) return false;
    chunk = s.take(cut, document_);
    chunk.first_line = s.line;
    const int64_t lines = std::count(chunk.text.begin(), chunk.text.end(), '\n') + (chunk.text.back() != '\n');
    s.line += lines;
    document_ += lines;
    return true;
}

}  // namespace trifold
