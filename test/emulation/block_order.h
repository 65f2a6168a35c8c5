// test/emulation/block_order.h   Which accesses of other blocks a thread comes after. Internal to the race detector.
//
// Blocks of a grid are ordered by nothing but a release store that an acquire load reads: what a block did before its
// last barrier, and what it knew of others itself, is then known to the acquiring thread at once and to its block after
// the next barrier. Accesses of the releasing thread since the last barrier count as not published.
// Time is counted in the race detector's intervals; those of one block follow each other.
#pragma once
#include <algorithm>
#include <cstdint>
#include <map>

#include "test/emulation/block.h"

namespace trifold::emulation::races {

class BlockOrder {
public:
    void grid_begins() { published_.clear(); }
    void block_begins(uint32_t interval) {
        first_ = interval;
        block_.clear();
        threads_.clear();
    }
    void barrier() {
        for (const auto& [thread, known] : threads_) join(block_, known);
        threads_.clear();
    }
    void release(const Thread& by, const void* at, uint32_t interval) {
        Known& known = published_[at] = block_;
        if (const auto own = threads_.find(by.number); own != threads_.end()) join(known, own->second);
        if (interval > first_) known[first_] = interval - 1;
    }
    void acquire(const Thread& by, const void* at) {
        if (const auto found = published_.find(at); found != published_.end()) join(threads_[by.number], found->second);
    }
    bool knows(const Thread& by, uint32_t interval) const {
        const auto own = threads_.find(by.number);
        return knows(block_, interval) || (own != threads_.end() && knows(own->second, interval));
    }

private:
    using Known = std::map<uint32_t, uint32_t>;  // of each block: its first interval, and the last one that is known

    static void join(Known& into, const Known& more) {
        for (const auto& [first, last] : more) into[first] = std::max(into[first], last);
    }
    static bool knows(const Known& known, uint32_t interval) {
        auto block = known.upper_bound(interval);
        return block != known.begin() && (--block)->second >= interval;
    }

    uint32_t first_ = 0;                    // interval of the running block
    Known block_;                           // what all its threads know
    std::map<int, Known> threads_;          // what single ones have learnt since the last barrier
    std::map<const void*, Known> published_;
};

}  // namespace trifold::emulation::races
