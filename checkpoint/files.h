// checkpoint/files.h   Files that are either whole or not there: written under a temporary name, synced, then renamed.
//
// Every failure throws Problem(Exit::checkpoint) with path, byte position and the system's reason.
#pragma once
#include <cstddef>
#include <cstdint>
#include <string>

namespace trifold {

// An open file descriptor.
class Fd {
public:
    Fd() = default;
    explicit Fd(int fd) : fd_(fd) {}
    Fd(Fd&& other) noexcept : fd_(other.release()) {}
    Fd& operator=(Fd&& other) noexcept;
    ~Fd();
    int get() const { return fd_; }
    bool open() const { return fd_ >= 0; }
    int release();

private:
    int fd_ = -1;
};

Fd open_for_reading(const std::string& path);

// A new file. It counts only after finish(); what it held before that may be lost in a crash.
class OutputFile {
public:
    explicit OutputFile(const std::string& path);  // replaces an existing file
    void write(const void* data, int64_t bytes);   // all of it: short writes and interruptions are continued
    void finish();  // fsync and close; when this fails, nothing may be assumed about the content
    int64_t bytes() const { return bytes_; }
    const std::string& path() const { return path_; }

private:
    std::string path_;
    Fd fd_;
    int64_t bytes_ = 0;
};

// A whole file as memory, read-only. An empty file has no data.
class MappedFile {
public:
    explicit MappedFile(const std::string& path);
    ~MappedFile();
    MappedFile(const MappedFile&) = delete;
    MappedFile& operator=(const MappedFile&) = delete;
    const std::byte* data() const { return data_; }
    int64_t bytes() const { return bytes_; }
    const std::string& path() const { return path_; }

private:
    std::string path_;
    const std::byte* data_ = nullptr;
    int64_t bytes_ = 0;
};

std::string read_text(const std::string& path);
// Writes `path` through `path`.tmp; after return either the old or the new content survives a crash.
void replace_text(const std::string& path, const std::string& text);

void make_directories(const std::string& path);  // with parents, durably
void rename_path(const std::string& from, const std::string& to);
void remove_tree(const std::string& path);     // a file or a folder with all that is in it; nothing there is fine
void sync_directory(const std::string& path);  // makes renames inside it durable
int64_t free_bytes(const std::string& directory);

// While it lives, a write beyond the file size limit (ulimit -f) fails with an error instead of ending the process.
class NoFileSizeSignal {
public:
    NoFileSizeSignal();
    ~NoFileSizeSignal();
    NoFileSizeSignal(const NoFileSizeSignal&) = delete;
    NoFileSizeSignal& operator=(const NoFileSizeSignal&) = delete;

private:
    bool was_blocked_ = false;
};

}  // namespace trifold
