// kernels/cuda/strips.cuh   Matrices for element-wise kernels: each row is cut into strips, and a warp takes one strip.
//
// A lane has 4 accesses of V elements in its strip, 32 * V elements apart. Kernels first issue all loads of a strip,
// then compute and store: with 16-byte accesses that is 2 KiB per operand and warp on the way, enough to fill the
// memory system.
#pragma once
#include "kernels/cuda/pack.h"

namespace trifold::cuda {

constexpr int strip_packs = 4, strip_warps = 8;

struct Matrix {
    int64_t rows = 0, columns = 0;
};

template <int V>
constexpr int strip_elems = strip_packs * 32 * V;

template <int V>
__host__ __device__ __forceinline__ int64_t strips_per_row(const Matrix& m) {
    return (m.columns + strip_elems<V> - 1) / strip_elems<V>;
}

template <int V>
Grid strip_grid(const Matrix& m) {
    const int64_t warps = m.rows * strips_per_row<V>(m);
    return {.blocks = dim3(static_cast<unsigned>((warps + strip_warps - 1) / strip_warps)),
            .threads = dim3(32 * strip_warps)};
}

// This lane's part of this warp's strip.
template <int V>
struct Strip {
    int64_t row, first, columns;

    // The number of strips must be below 2^32.
    __device__ __forceinline__ explicit Strip(const Matrix& m) : columns(m.columns) {
        const unsigned strip = blockIdx.x * strip_warps + threadIdx.x / 32,
                       per_row = static_cast<unsigned>(strips_per_row<V>(m));
        row = strip / per_row;
        first = int64_t{strip % per_row} * strip_elems<V> + static_cast<int>(threadIdx.x % 32) * V;
        if (row >= m.rows) columns = 0;  // a warp too many in the last block
    }
    __device__ __forceinline__ int64_t column(int i) const { return first + i * 32 * V; }
    __device__ __forceinline__ bool has(int i) const { return column(i) < columns; }
};

// The loads of a strip, all at once; what lies outside the row is zero.
template <int V, class T>
__device__ __forceinline__ void load_strip(Pack<T, V> (&packs)[strip_packs], const T* row, const Strip<V>& strip) {
#pragma unroll
    for (int i = 0; i < strip_packs; ++i)
        packs[i] = strip.has(i) ? load_pack_streaming<V>(row + strip.column(i)) : Pack<T, V>{};
}

}  // namespace trifold::cuda
