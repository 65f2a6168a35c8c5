// checkpoint/files.cpp   See files.h.
#include "checkpoint/files.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <utility>
#include <vector>

#include "base/error.h"

namespace trifold {
namespace {

[[noreturn]] void fail(const std::string& what, const std::string& path, int error) {
    throw Problem(Exit::checkpoint, fmt::format("cannot {} {}: {}", what, path, std::strerror(error)));
}

}  // namespace

Fd& Fd::operator=(Fd&& other) noexcept {
    std::swap(fd_, other.fd_);
    return *this;
}

Fd::~Fd() {
    if (fd_ >= 0) ::close(fd_);
}

int Fd::release() { return std::exchange(fd_, -1); }

Fd open_for_reading(const std::string& path) {
    Fd fd(::open(path.c_str(), O_RDONLY | O_CLOEXEC));
    if (!fd.open()) fail("open", path, errno);
    return fd;
}

OutputFile::OutputFile(const std::string& path)
    : path_(path), fd_(::open(path.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0644)) {
    if (!fd_.open()) fail("create", path, errno);
}

void OutputFile::write(const void* data, int64_t bytes) {
    const char* from = static_cast<const char*>(data);
    const int64_t end = bytes_ + bytes;
    while (bytes_ < end) {
        const ssize_t n = ::write(fd_.get(), from, static_cast<size_t>(std::min<int64_t>(end - bytes_, 1 << 30)));
        if (n < 0 && errno == EINTR) continue;
        if (n < 0) fail(fmt::format("write byte {} of", bytes_), path_, errno);
        if (n == 0) fail(fmt::format("write byte {} of", bytes_), path_, EIO);
        from += n;
        bytes_ += n;
    }
}

void OutputFile::finish() {
    if (::fsync(fd_.get()) != 0) fail("sync", path_, errno);
    // close() reports errors that a network file system kept back; the descriptor is gone either way.
    if (::close(fd_.release()) != 0 && errno != EINTR) fail("close", path_, errno);
}

MappedFile::MappedFile(const std::string& path) : path_(path) {
    const Fd fd = open_for_reading(path);
    struct stat info {};
    if (::fstat(fd.get(), &info) != 0) fail("inspect", path, errno);
    if (!S_ISREG(info.st_mode)) throw Problem(Exit::checkpoint, path + " is not a regular file");
    bytes_ = info.st_size;
    if (bytes_ == 0) return;
    void* at = ::mmap(nullptr, static_cast<size_t>(bytes_), PROT_READ, MAP_SHARED, fd.get(), 0);
    if (at == MAP_FAILED) fail("map", path, errno);
    data_ = static_cast<const std::byte*>(at);
}

MappedFile::~MappedFile() {
    if (data_) ::munmap(const_cast<std::byte*>(data_), static_cast<size_t>(bytes_));
}

std::string read_text(const std::string& path) {
    const Fd fd = open_for_reading(path);
    std::string text;
    char buffer[1 << 16];
    for (;;) {
        const ssize_t n = ::read(fd.get(), buffer, sizeof buffer);
        if (n < 0 && errno == EINTR) continue;
        if (n < 0) fail(fmt::format("read byte {} of", text.size()), path, errno);
        if (n == 0) return text;
        text.append(buffer, static_cast<size_t>(n));
    }
}

void replace_text(const std::string& path, const std::string& text) {
    OutputFile file(path + ".tmp");
    file.write(text.data(), static_cast<int64_t>(text.size()));
    file.finish();
    rename_path(path + ".tmp", path);
    sync_directory(std::filesystem::path(path).parent_path().string());
}

void make_directories(const std::string& path) {
    namespace fs = std::filesystem;
    std::error_code error;
    std::vector<fs::path> parents_of_new;
    for (fs::path p = fs::absolute(path); !fs::exists(p, error) && p.has_relative_path(); p = p.parent_path())
        parents_of_new.push_back(p.parent_path());
    fs::create_directories(path, error);
    if (error) fail("create the directory", path, error.value());
    for (const fs::path& parent : parents_of_new) sync_directory(parent.string());
}

void rename_path(const std::string& from, const std::string& to) {
    if (::rename(from.c_str(), to.c_str()) != 0) fail(fmt::format("rename {} to", from), to, errno);
}

void remove_tree(const std::string& path) {
    std::error_code error;
    std::filesystem::remove_all(path, error);
    if (error) fail("remove", path, error.value());
}

void sync_directory(const std::string& path) {
    const std::string directory = path.empty() ? "." : path;
    const Fd fd(::open(directory.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
    if (!fd.open()) fail("open the directory", directory, errno);
    // Some file systems keep directories durable by themselves and answer EINVAL.
    if (::fsync(fd.get()) != 0 && errno != EINVAL) fail("sync the directory", directory, errno);
}

int64_t free_bytes(const std::string& directory) {
    struct statvfs info {};
    if (::statvfs(directory.c_str(), &info) != 0) fail("measure the free space of", directory, errno);
    return static_cast<int64_t>(info.f_bavail) * static_cast<int64_t>(info.f_frsize);
}

NoFileSizeSignal::NoFileSizeSignal() {
    sigset_t set, old;
    sigemptyset(&set);
    sigaddset(&set, SIGXFSZ);
    pthread_sigmask(SIG_BLOCK, &set, &old);
    was_blocked_ = sigismember(&old, SIGXFSZ) == 1;
}

NoFileSizeSignal::~NoFileSizeSignal() {
    if (was_blocked_) return;
    sigset_t set;
    sigemptyset(&set);
    sigaddset(&set, SIGXFSZ);
    // A pending one was sent to this thread by a write that already failed; take it before it can be delivered.
    const timespec now{};
    while (sigtimedwait(&set, nullptr, &now) == SIGXFSZ) {
    }
    pthread_sigmask(SIG_UNBLOCK, &set, nullptr);
}

}  // namespace trifold
