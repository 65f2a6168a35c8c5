// data/file_io.cpp
#include "data/file_io.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>
#include <xxhash.h>

#include <algorithm>
#include <bit>
#include <cerrno>
#include <cstdio>
#include <filesystem>
#include <utility>

#include "base/error.h"

namespace trifold {

static_assert(std::endian::native == std::endian::little, "token files are little-endian and are read in place");

namespace {

constexpr int64_t buffer_bytes = int64_t{1} << 20;

}  // namespace

DataFile::DataFile(const std::string& path, const std::string& what) : path_(path) {
    const int file = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
    if (file < 0) throw Problem(Exit::data, fmt::format("cannot open the {} {}: {}", what, path, std::strerror(errno)));
    struct stat status {};
    if (::fstat(file, &status) != 0 || !S_ISREG(status.st_mode)) {
        ::close(file);
        throw Problem(Exit::data, fmt::format("the {} {} is not a plain file", what, path));
    }
    bytes_ = status.st_size;
    void* data = bytes_ > 0 ? ::mmap(nullptr, static_cast<size_t>(bytes_), PROT_READ, MAP_SHARED, file, 0) : nullptr;
    const int error = errno;
    ::close(file);
    if (data == MAP_FAILED) {
        throw Problem(Exit::data, fmt::format("cannot map the {} bytes of the {} {}: {}", bytes_, what, path,
                                              std::strerror(error)));
    }
    data_ = static_cast<const std::byte*>(data);
}

DataFile::~DataFile() {
    if (data_ != nullptr) ::munmap(const_cast<std::byte*>(data_), static_cast<size_t>(bytes_));
}

DataFile::DataFile(DataFile&& other) noexcept
    : path_(std::move(other.path_)),
      data_(std::exchange(other.data_, nullptr)),
      bytes_(std::exchange(other.bytes_, 0)) {}

uint64_t DataFile::sampled_hash() const {
    constexpr int64_t block = 4096, samples = 64;
    uint64_t hash = XXH3_64bits(&bytes_, sizeof(bytes_));
    const int64_t last = std::max<int64_t>(0, bytes_ - block);
    const int64_t count = bytes_ <= block * samples ? (bytes_ + block - 1) / block : samples;
    for (int64_t i = 0; i < count; ++i) {
        // Divided before it is multiplied where the product would not fit: sizes go up to 2^63.
        const int64_t offset =
            count == samples ? last / (samples - 1) * i + last % (samples - 1) * i / (samples - 1) : i * block;
        hash = XXH3_64bits_withSeed(data_ + offset, static_cast<size_t>(std::min(block, bytes_ - offset)), hash);
    }
    return hash;
}

StreamedFile::StreamedFile(const std::string& path) : path_(path), temporary_(path + ".tmp") {
    std::error_code error;
    const auto folder = std::filesystem::path(path).parent_path();
    if (!folder.empty()) std::filesystem::create_directories(folder, error);  // a failure shows in open()
    file_ = ::open(temporary_.c_str(), O_RDWR | O_CREAT | O_TRUNC | O_CLOEXEC, 0666);
    if (file_ < 0) throw Problem(Exit::data, fmt::format("cannot create {}: {}", temporary_, std::strerror(errno)));
    present_ = true;
    buffer_.reserve(buffer_bytes);
}

StreamedFile::~StreamedFile() {
    if (file_ >= 0) ::close(file_);
    if (present_) ::unlink(temporary_.c_str());
}

void StreamedFile::fail(const char* action, int64_t offset, int error) const {
    const char* advice =
        error == ENOSPC || error == EDQUOT ? "; nothing was kept: free space or choose another --out" : "";
    throw Problem(Exit::data, fmt::format("{} {} failed at byte {}: {}{}", action, temporary_, offset,
                                          std::strerror(error), advice));
}

void StreamedFile::write_at(const std::byte* data, int64_t bytes, int64_t offset) {
    while (bytes > 0) {
        const ssize_t written = ::pwrite(file_, data, static_cast<size_t>(bytes), offset);
        if (written < 0 && errno == EINTR) continue;
        if (written <= 0) fail("writing", offset, written < 0 ? errno : ENOSPC);
        data += written;
        bytes -= written;
        offset += written;
    }
}

void StreamedFile::flush() {
    write_at(buffer_.data(), std::ssize(buffer_), flushed_);
    flushed_ += std::ssize(buffer_);
    buffer_.clear();
}

void StreamedFile::write(const void* data, int64_t bytes) {
    const auto* from = static_cast<const std::byte*>(data);
    while (bytes > 0) {
        const int64_t some = std::min(bytes, buffer_bytes - std::ssize(buffer_));
        buffer_.insert(buffer_.end(), from, from + some);
        from += some;
        bytes -= some;
        if (std::ssize(buffer_) == buffer_bytes) flush();
    }
}

void StreamedFile::patch(int64_t offset, const void* data, int64_t bytes) {
    flush();
    TRIFOLD_ASSERT(offset >= 0 && offset + bytes <= flushed_);
    write_at(static_cast<const std::byte*>(data), bytes, offset);
}

void StreamedFile::finish() {
    if (file_ < 0) return;
    flush();
    if (::fsync(file_) != 0) fail("writing", flushed_, errno);
    if (::close(std::exchange(file_, -1)) != 0) fail("closing", flushed_, errno);
}

void StreamedFile::commit_as(const std::string& path) {
    finish();
    if (::rename(temporary_.c_str(), path.c_str()) != 0) {
        throw Problem(Exit::data, fmt::format("cannot rename {} to {}: {}", temporary_, path, std::strerror(errno)));
    }
    present_ = false;
}

void remove_if_present(const std::string& path) { std::remove(path.c_str()); }

}  // namespace trifold
