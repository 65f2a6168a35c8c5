// checkpoint/digest.cpp   See digest.h.
#include "checkpoint/digest.h"

#include <fmt/format.h>
#include <sys/stat.h>
#include <unistd.h>
#include <xxhash.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "base/error.h"
#include "checkpoint/files.h"

namespace trifold {

struct Hasher::States {
    struct Free {
        void operator()(XXH3_state_t* s) const { XXH3_freeState(s); }
    };
    std::unique_ptr<XXH3_state_t, Free> whole{XXH3_createState()}, block{XXH3_createState()};
    int64_t in_block = 0;
};

Hasher::Hasher() : states_(new States) {
    XXH3_64bits_reset(states_->whole.get());
    XXH3_64bits_reset(states_->block.get());
}

Hasher::~Hasher() = default;

void Hasher::add(const void* data, int64_t bytes) {
    const char* from = static_cast<const char*>(data);
    while (bytes > 0) {
        // Small steps, so that the second hash finds its input in the cache.
        const int64_t n = std::min({bytes, int64_t{1} << 17, digest_block_bytes - states_->in_block});
        XXH3_64bits_update(states_->whole.get(), from, static_cast<size_t>(n));
        XXH3_64bits_update(states_->block.get(), from, static_cast<size_t>(n));
        from += n;
        bytes -= n;
        digest_.bytes += n;
        states_->in_block += n;
        if (states_->in_block == digest_block_bytes) {
            digest_.blocks.push_back(XXH3_64bits_digest(states_->block.get()));
            XXH3_64bits_reset(states_->block.get());
            states_->in_block = 0;
        }
    }
}

FileDigest Hasher::finish() {
    if (states_->in_block > 0) digest_.blocks.push_back(XXH3_64bits_digest(states_->block.get()));
    digest_.xxh3 = XXH3_64bits_digest(states_->whole.get());
    return std::move(digest_);
}

uint64_t xxh3(const std::string& text) { return XXH3_64bits(text.data(), text.size()); }

std::string to_hex(uint64_t hash) { return fmt::format("{:016x}", hash); }

uint64_t from_hex(const std::string& digits) {
    if (digits.size() != 16 || digits.find_first_not_of("0123456789abcdef") != std::string::npos)
        throw Problem(Exit::checkpoint, fmt::format("'{}' is not a hash of 16 hexadecimal digits", digits));
    return std::stoull(digits, nullptr, 16);
}

void verify_file(const std::string& path, const FileDigest& expected, ProgressCounter& progress) {
    const Fd fd = open_for_reading(path);
    struct stat info {};
    if (::fstat(fd.get(), &info) != 0 || info.st_size != expected.bytes)
        throw Problem(Exit::checkpoint,
                      fmt::format("{} ends at byte {} instead of byte {}", path, info.st_size, expected.bytes));
    Hasher hasher;
    std::vector<char> buffer(size_t{1} << 20);
    for (int64_t done = 0; done < expected.bytes;) {
        // read, not mmap: a bad disk then gives an error that can be reported instead of SIGBUS
        const ssize_t n = ::read(fd.get(), buffer.data(), buffer.size());
        if (n < 0 && errno == EINTR) continue;
        if (n <= 0)
            throw Problem(Exit::checkpoint, fmt::format("cannot read byte {} of {}: {}", done, path,
                                                        n < 0 ? std::strerror(errno) : "the file became shorter"));
        hasher.add(buffer.data(), n);
        done += n;
        progress.add(n);
    }
    const FileDigest found = hasher.finish();
    if (found.xxh3 == expected.xxh3) return;
    const auto [bad, _] =
        std::mismatch(found.blocks.begin(), found.blocks.end(), expected.blocks.begin(), expected.blocks.end());
    const int64_t from = std::min((bad - found.blocks.begin()) * digest_block_bytes, expected.bytes);
    throw Problem(
        Exit::checkpoint,
        fmt::format("{} is damaged between byte {} and byte {}: its xxh3 is {} instead of {}", path, from,
                    std::min(from + digest_block_bytes, expected.bytes), to_hex(found.xxh3), to_hex(expected.xxh3)));
}

}  // namespace trifold
