// kernels/cpu/attention_mask.h   Which keys a query sees, and which parts of a pair of tiles can be skipped.
//
// A query sees the keys of one interval: up to itself, within the window, from the start of its document on. Tiles that
// no query sees are skipped; in the others, squares of 4 x 4 pairs are; what is left of them is masked pair by pair.
#pragma once
#include <algorithm>
#include <cstdint>
#include <cstring>

#include "kernels/cpu/simd.h"

namespace trifold::cpu::attention {

using simd::lanes;

inline constexpr int64_t tile = 64;            // queries or keys of a tile
inline constexpr int64_t cell = 4;             // queries or keys of a square that can be skipped
inline constexpr int64_t cells = tile / cell;  // of one edge of a tile

constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
constexpr int64_t round_up(int64_t a, int64_t b) { return ceil_div(a, b) * b; }

struct Range {
    int64_t begin = 0, end = 0;
    bool empty() const { return begin >= end; }
    int64_t size() const { return end - begin; }
    bool operator==(const Range&) const = default;
    // The smallest range that holds both.
    Range with(Range other) const {
        if (empty()) return other;
        if (other.empty()) return *this;
        return {std::min(begin, other.begin), std::max(end, other.end)};
    }
    Range within(Range other) const { return {std::max(begin, other.begin), std::min(end, other.end)}; }
};

// The keys that each query of a tile sees: [first, last], empty for lanes that hold no query.
struct Limits {
    alignas(64) int32_t first[tile], last[tile];
    int64_t queries = 0;
    Range all;     // keys that any of the queries sees
    Range common;  // keys that all of the queries see; empty where the tile has fewer than 64 queries
};

// What decides that, for one sequence.
struct Masking {
    int64_t q_offset, window, keys;
    const int32_t* doc_start;  // of its queries, or null; does not decrease
};

inline Limits limits_of(const Masking& m, int64_t query, int64_t queries) {
    Limits out;
    out.queries = queries;
    out.common = {0, queries == tile ? m.keys : 0};
    for (int64_t i = 0; i < tile; ++i) {
        const int64_t position = query + i + m.q_offset;
        const int64_t window_start = m.window > 0 ? std::max<int64_t>(0, position - m.window + 1) : 0;
        const int64_t document = m.doc_start && i < queries ? m.doc_start[query + i] : 0;
        Range seen{std::max(window_start, document), std::min(position + 1, m.keys)};
        if (i >= queries) seen = {INT32_MAX, 0};
        out.first[i] = static_cast<int32_t>(seen.begin);
        out.last[i] = static_cast<int32_t>(seen.end - 1);
        out.all = out.all.with(seen);
        out.common = out.common.within(seen);
    }
    return out;
}

// Which cells of a pair of tiles hold a visible pair, as ranges of queries or keys inside the tiles.
struct Visible {
    bool whole = true;        // every query sees every key: no masks
    int64_t key = 0;          // the key tile's first key
    Range keys_of[cells];     // of each row of 4 queries
    Range queries_of[cells];  // of each row of 4 keys
    Range vectors_of[cells];  // the same, widened to whole vectors

    Range keys_of_vector(int64_t v) const {
        Range out;
        for (int64_t g = v * lanes / cell; g < (v + 1) * lanes / cell; ++g) out = out.with(keys_of[g]);
        return out;
    }
};

inline Visible visible_cells(const Limits& limits, int64_t key) {
    Visible out;
    out.key = key;
    out.whole = limits.common.begin <= key && key + tile <= limits.common.end;
    if (out.whole) {
        std::fill(out.keys_of, out.keys_of + cells, Range{0, tile});
        std::fill(out.queries_of, out.queries_of + cells, Range{0, tile});
        std::fill(out.vectors_of, out.vectors_of + cells, Range{0, tile});
        return out;
    }
    for (int64_t g = 0; g < cells; ++g) {
        Range keys;
        for (int64_t i = g * cell; i < (g + 1) * cell; ++i)
            keys = keys.with(Range{limits.first[i] - key, limits.last[i] + 1 - key}.within({0, tile}));
        if (keys.empty()) continue;
        out.keys_of[g] = {keys.begin / cell * cell, round_up(keys.end, cell)};
        for (int64_t k = out.keys_of[g].begin / cell; k < out.keys_of[g].end / cell; ++k)
            out.queries_of[k] = out.queries_of[k].with({g * cell, (g + 1) * cell});
    }
    for (int64_t g = 0; g < cells; ++g)
        out.vectors_of[g] = {out.queries_of[g].begin / lanes * lanes, round_up(out.queries_of[g].end, lanes)};
    return out;
}

// Calls body(row, rows, range) for runs of cells that have the same range, at most 16 rows at a time.
template <class Body>
void for_runs(const Range (&ranges)[cells], Body body) {
    for (int64_t g = 0, next; g < cells; g = next) {
        for (next = g + 1; next < cells && next % cell && ranges[next] == ranges[g];) ++next;
        if (!ranges[g].empty()) body(g * cell, (next - g) * cell, ranges[g]);
    }
}

// Lanes of queries [16 v, 16 v + 16) that see `key`.
struct LaneLimits {
    simd::Lanes<int32_t> first, last;
    LaneLimits(const Limits& limits, int64_t v) {
        std::memcpy(&first, limits.first + v * lanes, sizeof first);
        std::memcpy(&last, limits.last + v * lanes, sizeof last);
    }
    TRIFOLD_INLINE simd::Mask see(int64_t key) const {
        const auto k = static_cast<int32_t>(key);
        return (first < simd::Lanes<int32_t>(k + 1)) & (last > simd::Lanes<int32_t>(k - 1));
    }
};

}  // namespace trifold::cpu::attention
