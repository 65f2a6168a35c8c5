// data/bpe.h   Byte-pair merging: a word starts as one token per byte; the adjacent pair of lowest rank is merged, the
// leftmost first, until no pair has a rank.
#pragma once
#include <array>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

namespace trifold {

// What a tokenizer.json says about its model, in plain bytes (its byte-level alphabet is decoded).
struct BpeTable {
    struct Merge {
        int32_t left, right, merged;  // token ids; the rank is the position in the list
    };
    std::array<int32_t, 256> byte_ids{};
    std::vector<Merge> merges;
    // Llama-3's `ignore_merges`: a word that is in this table is that token, whatever the merges say. Else empty.
    std::unordered_map<std::string, int32_t> whole_words;
};

class Bpe {
public:
    explicit Bpe(BpeTable table);

private:
    friend class BpeEncoder;
    struct Entry {
        uint64_t pair;
        int32_t rank, merged;
    };
    // Open addressing, at most half full; `pair` is left << 32 | right.
    size_t slot_of(uint64_t pair) const;  // where it is, or would be

    BpeTable table_;
    std::vector<Entry> entries_;
    uint64_t mask_ = 0;
};

// Encodes words, one after another; remembers short ones. One per thread; the model must outlive it.
class BpeEncoder {
public:
    explicit BpeEncoder(const Bpe& model);
    // Appends the ids of one word. A word of n bytes costs O(n log n).
    void encode(std::string_view word, std::vector<int32_t>& ids);

private:
    // Words repeat: a direct-mapped cache of one cache line per word.
    struct Line {
        uint8_t bytes = 0, ids = 0;
        std::array<char, 30> word;
        std::array<int32_t, 8> id;
    };
    // A token while its word is being merged. Tokens form a list in the order of their first bytes.
    struct Node {
        int32_t id, previous, next;  // next is -1 at the end; id is -1 once merged into the token before
        int32_t rank, merged;        // of the pair with the next token; rank -1: not mergeable
    };
    void merge(std::string_view word, std::vector<int32_t>& ids);
    void rate(int32_t at);

    const Bpe& model_;
    std::vector<Line> cache_;
    std::vector<Node> nodes_;
    std::vector<uint64_t> heap_;  // rank << 32 | position, smallest on top
};

}  // namespace trifold
