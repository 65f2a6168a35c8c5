// data/file_io.h   Files as the data part uses them: mapped for reading, streamed under a temporary name for writing.
#pragma once
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

namespace trifold {

// A whole file, mapped read-only. Pages come in when they are touched.
class DataFile {
public:
    // `what` names the file's purpose in errors ("token file"). Missing, unreadable, not a plain file:
    // Problem(Exit::data).
    DataFile(const std::string& path, const std::string& what);
    ~DataFile();
    DataFile(DataFile&& other) noexcept;
    DataFile& operator=(DataFile&&) = delete;

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
    // xxh3 of the size, both ends and blocks between them: tells data sets apart at the price of a few page faults.
    uint64_t sampled_hash() const;

private:
    std::string path_;
    const std::byte* data_ = nullptr;
    int64_t bytes_ = 0;
};

// Written in order under PATH.tmp; gets its own name when it is complete, or disappears. Every failure is a
// Problem(Exit::data) with path, position and the system's reason.
class StreamedFile {
public:
    explicit StreamedFile(const std::string& path);
    ~StreamedFile();
    StreamedFile(const StreamedFile&) = delete;
    StreamedFile& operator=(const StreamedFile&) = delete;

    void write(const void* data, int64_t bytes);
    template <class T>
    void put(const T& value) {
        write(&value, sizeof(T));
    }
    // Replaces bytes that were written before.
    void patch(int64_t offset, const void* data, int64_t bytes);
    int64_t position() const { return flushed_ + std::ssize(buffer_); }
    const std::string& path() const { return path_; }
    // All bytes are on the disk under the temporary name.
    void finish();
    // finish(), then the file appears as `path`, replacing what had that name.
    void commit_as(const std::string& path);

private:
    void flush();
    void write_at(const std::byte* data, int64_t bytes, int64_t offset);
    [[noreturn]] void fail(const char* action, int64_t offset, int error) const;

    std::string path_, temporary_;
    std::vector<std::byte> buffer_;
    int64_t flushed_ = 0;
    int file_ = -1;
    bool present_ = false;  // the temporary file exists
};

// Removes a file that may not exist.
void remove_if_present(const std::string& path);

}  // namespace trifold
