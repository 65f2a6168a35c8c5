// kernels/cpu/embedding.cpp   Rows of the token and position tables: gathered in forward, added to in backward.
//
// forward    x[n] = wte[token[n]] (+ wpe[position[n]])
// backward   dwte[token[n]] += dx[n],  dwpe[position[n]] += dx[n]: the tokens are sorted by destination row (stable),
//            then every row belongs to one thread, which adds its tokens in their order: no atomics, the same for all
//            thread counts
// Traffic    forward: N rows in and out. backward: N rows of dx and the rows they go to; with `overwrite` the whole
//            table is written once. The sort moves 4 bytes per token.
#include <numeric>

#include "kernels/cpu/parallel.h"

namespace trifold::cpu {
namespace {

using simd::f32x16;

// Rows of a large table lie anywhere: without this each one begins with a wait for memory.
template <class T>
TRIFOLD_INLINE void prefetch(const T* row, int64_t C) {
    for (int64_t i = 0; i < C; i += 64 / static_cast<int64_t>(sizeof(T))) __builtin_prefetch(row + i);
}

template <class T>
void forward(const EmbeddingForward& a) {
    const int64_t C = a.C, V = a.wte_VC.elems / C, positions = a.wpe_TC.elems / C;
    parallel_rows(a.N, C, [&](int64_t n) {
        const int64_t token = a.token_N.as<int32_t>()[n];
        TRIFOLD_ASSERT(token >= 0 && token < V);
        const T* wte = a.wte_VC.as<T>() + token * C;
        if (n + 1 < a.N) prefetch(a.wte_VC.as<T>() + a.token_N.as<int32_t>()[n + 1] * C, C);
        T* x = a.x_NC.as<T>() + n * C;
        if (!a.wpe_TC) {
            std::copy(wte, wte + C, x);
            return;
        }
        const int64_t position = a.position_N.as<int32_t>()[n];
        TRIFOLD_ASSERT(position >= 0 && position < positions);
        const T* wpe = a.wpe_TC.as<T>() + position * C;
        simd::for_groups(C,
                         [&](int64_t i, auto w) TRIFOLD_BODY { store(x + i, load(wte + i, w) + load(wpe + i, w), w); });
    });
}

// The numbers 0..N-1 sorted by row_of, equal ones in their order: a radix sort by 11 bits at a time. Uses 2 N int32 of
// workspace and returns the half that holds the result.
const int32_t* sorted_by_row(const int32_t* row_of, int64_t N, int64_t rows, int32_t* workspace) {
    constexpr int bits = 11, digits = 1 << bits;
    int32_t *order = workspace, *next = workspace + N;
    std::iota(order, order + N, 0);
    for (int64_t n = 0; n < N; ++n) TRIFOLD_ASSERT(row_of[n] >= 0 && row_of[n] < rows);
    for (int shift = 0; (rows - 1) >> shift > 0; shift += bits) {
        const auto digit = [&](int32_t n) { return (row_of[n] >> shift) % digits; };
        int32_t first[digits + 1] = {};
        for (int32_t n = 0; n < N; ++n) ++first[digit(n) + 1];
        std::partial_sum(first, first + digits, first);
        for (int64_t i = 0; i < N; ++i) next[first[digit(order[i])]++] = order[i];
        std::swap(order, next);
    }
    return order;
}

// table[row_of[n]] += dx[n] for all n.
template <class T>
void scatter(const int32_t* row_of, int64_t N, const T* dx, float* table, int64_t rows, int64_t C,
             Accumulate accumulate, int32_t* workspace) {
    const int32_t *order = sorted_by_row(row_of, N, rows, workspace), *end = order + N;
    // Common tokens stand close together: small blocks, and the team takes them as it comes.
    const Blocks blocks{rows, std::clamp<int64_t>(rows / 1024, 1, 16)};
#pragma omp parallel for schedule(dynamic, 4)
    for (int64_t b = 0; b < blocks.count(); ++b) {
        const int64_t first = blocks.begin(b), last = blocks.end(b);
        if (accumulate == Accumulate::overwrite) std::fill(table + first * C, table + last * C, 0.0f);
        const int32_t* n = std::lower_bound(order, end, first, [&](int32_t m, int64_t row) { return row_of[m] < row; });
        for (; n != end && row_of[*n] < last; ++n) {
            const T* from = dx + *n * C;
            float* to = table + row_of[*n] * C;
            simd::for_groups(
                C, [&](int64_t i, auto w) TRIFOLD_BODY { store(to + i, load(to + i, w) + load(from + i, w), w); });
        }
    }
}

}  // namespace

void embedding_forward(const EmbeddingForward& a) {
    TRIFOLD_ASSERT(a.token_N.elems >= a.N && a.x_NC.elems >= a.N * a.C && (!a.wpe_TC || a.position_N.elems >= a.N));
    with_act(a.x_NC.dtype, [&](auto type) { forward<decltype(type)>(a); });
}

void embedding_backward(const EmbeddingBackward& a) {
    TRIFOLD_ASSERT(a.token_N.elems >= a.N && a.dx_NC.elems >= a.N * a.C && a.dwte_VC.elems >= a.V * a.C);
    TRIFOLD_ASSERT(!a.dwpe_TC || (a.position_N.elems >= a.N && a.dwpe_TC.elems >= a.positions * a.C));
    TRIFOLD_ASSERT(a.workspace.bytes() >= embedding_backward_workspace(a.N, a.V));
    with_act(a.dx_NC.dtype, [&](auto type) {
        const auto* dx = a.dx_NC.as<decltype(type)>();
        auto* workspace = static_cast<int32_t*>(a.workspace.data);
        scatter(a.token_N.as<int32_t>(), a.N, dx, a.dwte_VC.as<float>(), a.V, a.C, a.accumulate_wte, workspace);
        if (a.dwpe_TC)
            scatter(a.position_N.as<int32_t>(), a.N, dx, a.dwpe_TC.as<float>(), a.positions, a.C, a.accumulate_wpe,
                    workspace);
    });
}

int64_t embedding_backward_workspace(int64_t N, int64_t) { return 2 * N * static_cast<int64_t>(sizeof(int32_t)); }

}  // namespace trifold::cpu
