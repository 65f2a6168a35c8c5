// kernels/cpu/embedding.cpp   Rows of the token and position tables: gathered in forward, added to in backward.
//
// forward    x[n] = wte[token[n] - first] (+ wpe[position[n]])
// backward   dwte[token[n] - first] += dx[n],  dwpe[position[n]] += dx[n]: the tokens of the table's rows are sorted by
//            row (stable), then every row belongs to one thread, which adds its tokens in their order: no atomics, the
//            same for all thread counts
// Split      a table of rows [first, first + V) of the vocabulary: other tokens are rows of zeros, and are left out
//            before the sort
// Traffic    forward: N rows in and out. backward: N rows of dx and the rows they go to; with `overwrite` the whole
//            table is written once. The sort moves 4 bytes per token.
#include <numeric>
#include <span>

#include "kernels/cpu/parallel.h"

namespace trifold::cpu {
namespace {

using simd::f32x16;

// Rows of a large table lie anywhere: without this each one begins with a wait for memory.
template <class T>
TRIFOLD_INLINE void prefetch(const T* row, int64_t C) {
    for (int64_t i = 0; i < C; i += 64 / static_cast<int64_t>(sizeof(T))) __builtin_prefetch(row + i);
}

// Rows [first, first + count) of a table, and where in it each of N tokens (or positions) belongs.
struct Rows {
    const int32_t* index_N;
    int64_t N, first, count;

    int64_t of(int64_t n) const { return index_N[n] - first; }
    bool has(int64_t n) const { return of(n) >= 0 && of(n) < count; }
};

template <class T>
void forward(const EmbeddingForward& a) {
    const int64_t C = a.C;
    const Rows tokens{a.token_N.as<int32_t>(), a.N, a.first, a.V};
    const Rows positions{a.position_N.as<int32_t>(), a.N, 0, a.wpe_TC.elems / C};
    parallel_rows(a.N, C, [&](int64_t n) {
        TRIFOLD_ASSERT(tokens.index_N[n] >= 0);
        const bool own = tokens.has(n);
        const T* wte = own ? a.wte_VC.as<T>() + tokens.of(n) * C : nullptr;
        if (n + 1 < a.N && tokens.has(n + 1)) prefetch(a.wte_VC.as<T>() + tokens.of(n + 1) * C, C);
        T* x = a.x_NC.as<T>() + n * C;
        if (!a.wpe_TC) {
            if (own)
                std::copy(wte, wte + C, x);
            else
                std::fill(x, x + C, T(0.0f));
            return;
        }
        TRIFOLD_ASSERT(positions.has(n));
        const T* wpe = a.wpe_TC.as<T>() + positions.of(n) * C;
        if (own)
            simd::for_groups(
                C, [&](int64_t i, auto w) TRIFOLD_BODY { store(x + i, load(wte + i, w) + load(wpe + i, w), w); });
        else
            std::copy(wpe, wpe + C, x);
    });
}

// The n that belong into the table, sorted by row, equal ones in their order: a radix sort by 11 bits at a time. Uses
// 2 N int32 of workspace and returns the part of it that holds the result.
std::span<const int32_t> sorted_by_row(const Rows& rows, int32_t* workspace) {
    constexpr int bits = 11, digits = 1 << bits;
    int32_t *order = workspace, *next = workspace + rows.N;
    int64_t own = 0;
    for (int32_t n = 0; n < rows.N; ++n)
        if (rows.has(n)) order[own++] = n;
    for (int shift = 0; (rows.count - 1) >> shift > 0 && own > 0; shift += bits) {
        const auto digit = [&](int32_t n) { return (rows.of(n) >> shift) % digits; };
        int32_t first[digits + 1] = {};
        for (int64_t i = 0; i < own; ++i) ++first[digit(order[i]) + 1];
        std::partial_sum(first, first + digits, first);
        for (int64_t i = 0; i < own; ++i) next[first[digit(order[i])]++] = order[i];
        std::swap(order, next);
    }
    return {order, static_cast<size_t>(own)};
}

// table[row of n] += dx[n] for all n that belong into it.
template <class T>
void scatter(const Rows& rows, const T* dx, float* table, int64_t C, Accumulate accumulate, int32_t* workspace) {
    const std::span<const int32_t> order = sorted_by_row(rows, workspace);
    const int32_t* const end = order.data() + order.size();
    // Common tokens stand close together: small blocks, and the team takes them as it comes.
    const Blocks blocks{rows.count, std::clamp<int64_t>(rows.count / 1024, 1, 16)};
#pragma omp parallel for schedule(dynamic, 4)
    for (int64_t b = 0; b < blocks.count(); ++b) {
        const int64_t first = blocks.begin(b), last = blocks.end(b);
        if (accumulate == Accumulate::overwrite) std::fill(table + first * C, table + last * C, 0.0f);
        const int32_t* n =
            std::lower_bound(order.data(), end, first, [&](int32_t m, int64_t row) { return rows.of(m) < row; });
        for (; n != end && rows.of(*n) < last; ++n) {
            const T* from = dx + *n * C;
            float* to = table + rows.of(*n) * C;
            simd::for_groups(
                C, [&](int64_t i, auto w) TRIFOLD_BODY { store(to + i, load(to + i, w) + load(from + i, w), w); });
        }
    }
}

}  // namespace

void embedding_forward(const EmbeddingForward& a) {
    TRIFOLD_ASSERT(a.token_N.elems >= a.N && a.x_NC.elems >= a.N * a.C && (!a.wpe_TC || a.position_N.elems >= a.N));
    TRIFOLD_ASSERT(a.first >= 0 && a.V >= 0 && a.wte_VC.elems >= a.V * a.C);
    with_act(a.x_NC.dtype, [&](auto type) { forward<decltype(type)>(a); });
}

void embedding_backward(const EmbeddingBackward& a) {
    TRIFOLD_ASSERT(a.token_N.elems >= a.N && a.dx_NC.elems >= a.N * a.C && a.dwte_VC.elems >= a.V * a.C);
    TRIFOLD_ASSERT(!a.dwpe_TC || (a.position_N.elems >= a.N && a.dwpe_TC.elems >= a.positions * a.C));
    TRIFOLD_ASSERT(a.first >= 0 && a.V >= 0 && a.workspace.bytes() >= embedding_backward_workspace(a.N, a.V));
    const Rows tokens{a.token_N.as<int32_t>(), a.N, a.first, a.V},
        positions{a.position_N.as<int32_t>(), a.N, 0, a.positions};
    for (int64_t n = 0; n < a.N; ++n)
        TRIFOLD_ASSERT(tokens.index_N[n] >= 0 && (!a.dwpe_TC || positions.has(n)));
    with_act(a.dx_NC.dtype, [&](auto type) {
        const auto* dx = a.dx_NC.as<decltype(type)>();
        auto* workspace = static_cast<int32_t*>(a.workspace.data);
        scatter(tokens, dx, a.dwte_VC.as<float>(), a.C, a.accumulate_wte, workspace);
        if (a.dwpe_TC) scatter(positions, dx, a.dwpe_TC.as<float>(), a.C, a.accumulate_wpe, workspace);
    });
}

int64_t embedding_backward_workspace(int64_t N, int64_t) { return 2 * N * static_cast<int64_t>(sizeof(int32_t)); }

}  // namespace trifold::cpu
