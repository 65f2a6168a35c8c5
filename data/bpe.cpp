// data/bpe.cpp
#include "data/bpe.h"

#include <xxhash.h>

#include <algorithm>
#include <bit>
#include <cstring>
#include <functional>
#include <limits>

#include "base/error.h"

namespace trifold {
namespace {

constexpr uint64_t no_pair = std::numeric_limits<uint64_t>::max();
constexpr size_t cache_lines = size_t{1} << 14;  // 1 MiB per thread: stays in the second-level cache

uint64_t key_of(int32_t left, int32_t right) { return static_cast<uint64_t>(left) << 32 | static_cast<uint32_t>(right); }

}  // namespace

Bpe::Bpe(BpeTable table) : table_(std::move(table)) {
    const size_t slots = std::bit_ceil(2 * table_.merges.size() + 1);
    entries_.assign(slots, {no_pair, 0, 0});
    mask_ = slots - 1;
    for (size_t rank = 0; rank < table_.merges.size(); ++rank) {
        const BpeTable::Merge& m = table_.merges[rank];
        entries_[slot_of(key_of(m.left, m.right))] = {key_of(m.left, m.right), static_cast<int32_t>(rank), m.merged};
    }
}

size_t Bpe::slot_of(uint64_t pair) const {
    const uint64_t mixed = pair * 0x9E3779B97F4A7C15u;
    size_t slot = (mixed ^ mixed >> 32) & mask_;
    while (entries_[slot].pair != pair && entries_[slot].pair != no_pair) slot = (slot + 1) & mask_;
    return slot;
}

BpeEncoder::BpeEncoder(const Bpe& model) : model_(model), cache_(cache_lines) { static_assert(sizeof(Line) == 64); }

void BpeEncoder::encode(std::string_view word, std::vector<int32_t>& ids) {
    if (word.empty()) return;
    if (word.size() > std::tuple_size_v<decltype(Line::word)>) return merge(word, ids);
    Line& line = cache_[XXH3_64bits(word.data(), word.size()) % cache_lines];
    if (line.bytes == word.size() && std::memcmp(line.word.data(), word.data(), word.size()) == 0) {
        ids.insert(ids.end(), line.id.begin(), line.id.begin() + line.ids);
        return;
    }
    const size_t before = ids.size();
    merge(word, ids);
    const size_t count = ids.size() - before;
    if (count > line.id.size()) return;
    line.bytes = static_cast<uint8_t>(word.size());
    line.ids = static_cast<uint8_t>(count);
    std::copy(word.begin(), word.end(), line.word.begin());
    std::copy(ids.end() - static_cast<std::ptrdiff_t>(count), ids.end(), line.id.begin());
}

// Looks up the pair that begins at this token and queues it.
void BpeEncoder::rate(int32_t at) {
    Node& node = nodes_[at];
    node.rank = -1;
    if (node.next < 0) return;
    const Bpe::Entry& entry = model_.entries_[model_.slot_of(key_of(node.id, nodes_[node.next].id))];
    if (entry.pair == no_pair) return;
    node.rank = entry.rank;
    node.merged = entry.merged;
    heap_.push_back(static_cast<uint64_t>(node.rank) << 32 | static_cast<uint32_t>(at));
    std::push_heap(heap_.begin(), heap_.end(), std::greater<>());
}

void BpeEncoder::merge(std::string_view word, std::vector<int32_t>& ids) {
    if (!model_.table_.whole_words.empty()) {
        const auto whole = model_.table_.whole_words.find(std::string(word));
        if (whole != model_.table_.whole_words.end()) return ids.push_back(whole->second);
    }
    TRIFOLD_ASSERT(word.size() <= static_cast<size_t>(std::numeric_limits<int32_t>::max()));
    const auto length = static_cast<int32_t>(word.size());
    nodes_.resize(word.size());
    heap_.clear();
    for (int32_t i = 0; i < length; ++i)
        nodes_[i] = {model_.table_.byte_ids[static_cast<uint8_t>(word[i])], i - 1, i + 1 < length ? i + 1 : -1, -1, 0};
    for (int32_t i = 0; i < length; ++i) rate(i);
    while (!heap_.empty()) {
        std::pop_heap(heap_.begin(), heap_.end(), std::greater<>());
        const uint64_t top = heap_.back();
        heap_.pop_back();
        const auto at = static_cast<int32_t>(top & 0xFFFFFFFFu);
        Node& node = nodes_[at];
        if (node.id < 0 || node.rank != static_cast<int32_t>(top >> 32)) continue;  // this pair has changed since
        Node& right = nodes_[node.next];
        node.id = node.merged;
        node.next = right.next;
        right.id = -1;
        if (node.next >= 0) nodes_[node.next].previous = at;
        rate(at);
        if (node.previous >= 0) rate(node.previous);
    }
    for (int32_t i = 0; i >= 0; i = nodes_[i].next) ids.push_back(nodes_[i].id);
}

}  // namespace trifold
