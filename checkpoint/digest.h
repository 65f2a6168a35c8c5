// checkpoint/digest.h   xxh3 of a file as a whole, and of every 16 MiB of it.
//
// The whole hash decides (`xxhsum -H3` prints the same number). The block hashes only say where a damaged file went wrong.
#pragma once
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

struct XXH3_state_s;

namespace trifold {

inline constexpr int64_t digest_block_bytes = int64_t{16} << 20;

struct FileDigest {
    int64_t bytes = 0;
    uint64_t xxh3 = 0;
    std::vector<uint64_t> blocks;
};

class Hasher {
public:
    Hasher();
    void add(const void* data, int64_t bytes);
    FileDigest finish();

private:
    void end_block();

    std::shared_ptr<XXH3_state_s> whole_, block_;
    FileDigest digest_;
};

uint64_t xxh3(const std::string& text);
std::string to_hex(uint64_t hash);  // 16 digits

// Reads the file and compares. A difference throws Problem with the file and the first damaged bytes.
void verify_file(const std::string& path, const FileDigest& expected);

}  // namespace trifold
