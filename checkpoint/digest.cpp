// checkpoint/digest.cpp   See digest.h.
#include "checkpoint/digest.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <xxhash.h>

#include <algorithm>
#include <cerrno>

#include "base/file.h"
#include "base/refuse.h"

namespace trifold {

Hasher::Hasher() : whole_(XXH3_createState(), XXH3_freeState), block_(XXH3_createState(), XXH3_freeState) {
    XXH3_64bits_reset(whole_.get());
    XXH3_64bits_reset(block_.get());
}

void Hasher::end_block() {
    digest_.blocks.push_back(XXH3_64bits_digest(block_.get()));
    XXH3_64bits_reset(block_.get());
}

void Hasher::add(const void* data, int64_t bytes) {
    for (const char* from = static_cast<const char*>(data); bytes > 0;) {
        // Small steps, so that the second hash finds its input in the cache.
        const int64_t n = std::min({bytes, int64_t{1} << 17, digest_block_bytes - digest_.bytes % digest_block_bytes});
        XXH3_64bits_update(whole_.get(), from, static_cast<size_t>(n));
        XXH3_64bits_update(block_.get(), from, static_cast<size_t>(n));
        from += n;
        bytes -= n;
        digest_.bytes += n;
        if (digest_.bytes % digest_block_bytes == 0) end_block();
    }
}

FileDigest Hasher::finish() {
    if (digest_.bytes % digest_block_bytes != 0) end_block();
    digest_.xxh3 = XXH3_64bits_digest(whole_.get());
    return std::move(digest_);
}

uint64_t xxh3(const std::string& text) { return XXH3_64bits(text.data(), text.size()); }

std::string to_hex(uint64_t hash) { return fmt::format("{:016x}", hash); }

void verify_file(const std::string& path, const FileDigest& expected) {
    const Fd fd(::open(path.c_str(), O_RDONLY | O_CLOEXEC));
    if (!fd) refuse_file(Exit::checkpoint, "open", path, errno);
    struct stat info {};
    if (::fstat(fd.get(), &info) != 0 || info.st_size != expected.bytes)
        refuse(Exit::checkpoint, "{} ends at byte {} instead of byte {}", path, info.st_size, expected.bytes);
    Hasher hasher;
    std::vector<char> buffer(size_t{1} << 20);
    for (int64_t done = 0; done < expected.bytes;) {
        // read, not mmap: a bad disk then gives an error that can be reported instead of SIGBUS
        const int64_t n = read_some(fd, buffer.data(), buffer.size());
        if (n <= 0) refuse(Exit::checkpoint, "cannot read byte {} of {}: {}", done, path, n < 0 ? std::strerror(errno) : "the file became shorter");
        hasher.add(buffer.data(), n);
        done += n;
    }
    const FileDigest found = hasher.finish();
    if (found.xxh3 == expected.xxh3) return;
    const auto [bad, _] = std::mismatch(found.blocks.begin(), found.blocks.end(), expected.blocks.begin(), expected.blocks.end());
    const int64_t from = std::min((bad - found.blocks.begin()) * digest_block_bytes, expected.bytes);
    refuse(Exit::checkpoint, "{} is damaged between byte {} and byte {}: its xxh3 is {} instead of {}", path, from,
           std::min(from + digest_block_bytes, expected.bytes), to_hex(found.xxh3), to_hex(expected.xxh3));
}

}  // namespace trifold
