// base/file.h   Files: mapped for reading, and written through a buffer.
//
// Every failure is a Problem with path, byte position and the system's reason; its exit code is that of the part that uses the file.
#pragma once
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include "base/error.h"
#include "base/fd.h"

namespace trifold {

// "cannot WHAT PATH: the system's reason"
[[noreturn]] void refuse_file(Exit code, const std::string& what, const std::string& path, int error);

// Bytes read, after interruptions too; 0: the end; -1: errno says why.
int64_t read_some(const Fd& fd, void* to, size_t bytes);

// The text of a file or pipe. `what` names its purpose in errors: "configuration file".
std::string read_text(const std::string& path, Exit code, const std::string& what = "");

// A whole file as memory, read-only. Pages come in when they are touched; an empty file has no data.
class MappedFile {
public:
    MappedFile(const std::string& path, Exit code, const std::string& what = "");
    ~MappedFile();
    MappedFile(MappedFile&& other) noexcept
        : path_(std::move(other.path_)), data_(std::exchange(other.data_, nullptr)), bytes_(std::exchange(other.bytes_, 0)) {}
    MappedFile& operator=(MappedFile&&) = delete;

    const std::string& path() const { return path_; }
    int64_t bytes() const { return bytes_; }
    const std::byte* at(int64_t offset) const { return data_ + offset; }
    // A little-endian value at any offset, aligned or not.
    template <class T>
    T load(int64_t offset) const {
        T value;
        std::memcpy(&value, data_ + offset, sizeof(T));
        return value;
    }

private:
    std::string path_;
    const std::byte* data_ = nullptr;
    int64_t bytes_ = 0;
};

// A new file. It counts only after finish(); what it held before that may be lost in a crash.
class OutputFile {
public:
    // Replaces an existing file. `full_disk` is what to do when there is no space left.
    OutputFile(const std::string& path, Exit code, std::string full_disk = "");
    void write(const void* data, int64_t bytes);
    template <class T>
    void put(const T& value) {
        write(&value, sizeof(T));
    }
    void patch(int64_t offset, const void* data, int64_t bytes);  // replaces bytes that were written before
    void finish();  // fsync and close; when this fails, nothing may be assumed about the content
    int64_t bytes() const { return flushed_ + std::ssize(buffer_); }
    const std::string& path() const { return path_; }

private:
    void flush();
    void write_at(const void* data, int64_t bytes, int64_t offset);

    std::string path_;
    Exit code_;
    std::string full_disk_;
    Fd fd_;
    std::vector<std::byte> buffer_;
    int64_t flushed_ = 0;
};

// Something new, a file or a folder, that is made as PATH.tmp and gets its name when all is complete, or disappears.
class Unfinished {
public:
    enum class Kind : uint8_t { file, folder };  // a folder disappears with all that is in it
    Unfinished(const std::string& path, Exit code, Kind kind = Kind::file) : path_(path + ".tmp"), code_(code), kind_(kind) {}
    ~Unfinished();
    Unfinished(const Unfinished&) = delete;
    const std::string& path() const { return path_; }
    // It appears as `path` and replaces a file of that name.
    void commit_as(const std::string& path);

private:
    std::string path_;  // empty: it has its name
    Exit code_;
    Kind kind_;
};

}  // namespace trifold
