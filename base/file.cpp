// base/file.cpp   See file.h.
#include "base/file.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <cerrno>
#include <cstdio>
#include <filesystem>

namespace trifold {

static_assert(std::endian::native == std::endian::little, "token files and weights are little-endian and are read in place");

constexpr int64_t buffer_bytes = int64_t{1} << 20;

static std::string subject_of(const std::string& path, const std::string& what) { return what.empty() ? path : fmt::format("the {} {}", what, path); }

void refuse_file(Exit code, const std::string& what, const std::string& path, int error) {
    throw Problem(code, fmt::format("cannot {} {}: {}", what, path, std::strerror(error)));
}

int64_t read_some(const Fd& fd, void* to, size_t bytes) {
    while (true) {
        const ssize_t n = ::read(fd.get(), to, bytes);
        if (n >= 0 || errno != EINTR) return n;
    }
}

std::string read_text(const std::string& path, Exit code, const std::string& what) {
    const std::string subject = subject_of(path, what);
    const Fd fd(::open(path.c_str(), O_RDONLY | O_CLOEXEC));
    if (!fd) refuse_file(code, "open", subject, errno);
    std::string text;
    char buffer[1 << 16];
    while (const int64_t n = read_some(fd, buffer, sizeof buffer)) {
        if (n < 0 && errno == EISDIR) throw Problem(code, subject + " is a folder: name a file");
        if (n < 0) refuse_file(code, fmt::format("read byte {} of", text.size()), subject, errno);
        text.append(buffer, static_cast<size_t>(n));
    }
    return text;
}

MappedFile::MappedFile(const std::string& path, Exit code, const std::string& what) : path_(path) {
    const std::string subject = subject_of(path, what);
    const Fd fd(::open(path.c_str(), O_RDONLY | O_CLOEXEC));
    if (!fd) refuse_file(code, "open", subject, errno);
    struct stat info {};
    if (::fstat(fd.get(), &info) != 0 || !S_ISREG(info.st_mode)) throw Problem(code, subject + " is not a regular file");
    bytes_ = info.st_size;
    if (bytes_ == 0) return;
    void* at = ::mmap(nullptr, static_cast<size_t>(bytes_), PROT_READ, MAP_SHARED, fd.get(), 0);
    if (at == MAP_FAILED) refuse_file(code, fmt::format("map the {} bytes of", bytes_), subject, errno);
    data_ = static_cast<const std::byte*>(at);
}

MappedFile::~MappedFile() {
    if (data_) ::munmap(const_cast<std::byte*>(data_), static_cast<size_t>(bytes_));
}

OutputFile::OutputFile(const std::string& path, Exit code, std::string full_disk)
    : path_(path), code_(code), full_disk_(std::move(full_disk)), fd_(::open(path.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666)) {
    if (!fd_) refuse_file(code_, "create", path, errno);
    ::signal(SIGXFSZ, SIG_IGN);  // a write beyond `ulimit -f` is an error then, not the end of the process
}

void OutputFile::write_at(const void* data, int64_t bytes, int64_t offset) {
    for (const auto* from = static_cast<const std::byte*>(data); bytes > 0;) {
        const ssize_t n = ::pwrite(fd_.get(), from, static_cast<size_t>(std::min<int64_t>(bytes, 1 << 30)), offset);
        if (n < 0 && errno == EINTR) continue;
        if (n <= 0) {
            const int error = n < 0 ? errno : EIO;
            const std::string& advice = error == ENOSPC || error == EDQUOT ? full_disk_ : "";
            throw Problem(code_, fmt::format("cannot write byte {} of {}: {}{}", offset, path_, std::strerror(error), advice));
        }
        from += n;
        bytes -= n;
        offset += n;
    }
}

void OutputFile::flush() {
    write_at(buffer_.data(), std::ssize(buffer_), flushed_);
    flushed_ += std::ssize(buffer_);
    buffer_.clear();
}

void OutputFile::write(const void* data, int64_t bytes) {
    if (std::ssize(buffer_) + bytes > buffer_bytes) flush();
    if (bytes >= buffer_bytes) {
        write_at(data, bytes, flushed_);
        flushed_ += bytes;
    } else {
        const auto* from = static_cast<const std::byte*>(data);
        buffer_.insert(buffer_.end(), from, from + bytes);
    }
}

void OutputFile::patch(int64_t offset, const void* data, int64_t bytes) {
    flush();
    TRIFOLD_ASSERT(offset >= 0 && offset + bytes <= flushed_);
    write_at(data, bytes, offset);
}

void OutputFile::finish() {
    flush();
    if (::fsync(fd_.get()) != 0) refuse_file(code_, "sync", path_, errno);
    // close() reports errors that a network file system kept back; the descriptor is gone either way.
    if (::close(fd_.release()) != 0 && errno != EINTR) refuse_file(code_, "close", path_, errno);
}

Unfinished::~Unfinished() {
    std::error_code ignored;
    if (path_.empty()) return;
    if (kind_ == Kind::folder) std::filesystem::remove_all(path_, ignored);
    if (kind_ == Kind::file) ::unlink(path_.c_str());  // and no folder that was there before
}

void Unfinished::commit_as(const std::string& path) {
    if (std::rename(path_.c_str(), path.c_str()) != 0) refuse_file(code_, fmt::format("rename {} to", path_), path, errno);
    path_.clear();
}

}  // namespace trifold
