// kernels/cuda/attention_fragments.cuh   bf16 tiles in shared memory and products of them on the tensor cores.
//
// Tile       rows of `columns` elements, each padded by 16 bytes: eight rows at one column then lie in eight different
//            groups of four banks, so ldmatrix, and 4-byte stores of accumulators, never meet in a bank. Unlike a
//            swizzle, padding leaves every address a constant away from the lane's own.
// Product    acc[i][j] += A B of one warp, in steps of m16n8k16. An operand is read by ldmatrix where its k runs along
//            the rows of the tile, by ldmatrix.trans where it runs down the columns. One ldmatrix.x4 brings two column
//            tiles; with 32 rows per warp it serves four products, which keeps shared memory from being the limit.
// Fragment   element e of acc[i][j] is row 16 i + lane / 4 + 8 (e / 2), column 8 j + 2 (lane % 4) + e % 2.
#pragma once
#include <cstring>

#include "kernels/cuda/attention_operands.cuh"
#include "kernels/cuda/ptx.h"

namespace trifold::cuda::attention {

using Element = __nv_bfloat16;

template <int rows_, int columns_>
struct Tile {
    static constexpr int rows = rows_, columns = columns_;
    static constexpr int stride = columns + 8;
    static constexpr int elems = rows * stride;
    static constexpr int bytes = elems * 2;
};

__device__ __forceinline__ int lane_id() { return static_cast<int>(threadIdx.x % 32); }
__device__ __forceinline__ int warp_id() { return static_cast<int>(threadIdx.x / 32); }

// How the threads of a block share out the 16-byte packs of a tile: each keeps its columns and goes down the rows.
template <class T, int threads>
struct Packs {
    static constexpr int across = T::columns == 96 ? 4 : T::columns / 8;
    static constexpr int rows_at_once = threads / across;
    static constexpr bool idle = T::rows < rows_at_once;  // threads without a row
    static_assert(idle || T::rows % rows_at_once == 0);
};

// Starts copying rows [first, first + T::rows) into a tile; rows from `end` on become zeros.
template <class T, int threads>
__device__ __forceinline__ void copy_rows(Element* tile, Rows<const Element> from, int first, int end) {
    using P = Packs<T, threads>;
    const int row = static_cast<int>(threadIdx.x) / P::across, column = static_cast<int>(threadIdx.x) % P::across * 8;
    const Element* source = from[first + row] + column;
    Element* const target = tile + row * T::stride + column;
    if (P::idle && row >= T::rows) return;
#pragma unroll
    for (int r = 0; r < T::rows; r += P::rows_at_once) {
#pragma unroll
        for (int c = 0; c < T::columns; c += P::across * 8)
            ptx::cp_async_16_or_zero(target + r * T::stride + c, source + c, first + row + r < end);
        source += P::rows_at_once * from.stride;
    }
}

// The first `rows` rows of a tile to memory, 16 bytes at a time, by `threads` threads; the last row stored is before
// `end`.
template <class T, int rows, int threads>
__device__ __forceinline__ void store_rows(const Element* tile, Rows<Element> to, int first, int end, int thread) {
    using P = Packs<Tile<rows, T::columns>, threads>;
    static_assert(!P::idle);
    const int row = thread / P::across, column = thread % P::across * 8;
#pragma unroll
    for (int r = 0; r < rows; r += P::rows_at_once) {
        if (first + row + r >= end) continue;
#pragma unroll
        for (int c = 0; c < T::columns; c += P::across * 8)
            __stwb(reinterpret_cast<uint4*>(to[first + row + r] + column + c),  // a plain store is taken apart by the compiler
                   load_pack<8>(tile + (row + r) * T::stride + column + c).raw[0]);
    }
}

// ---------------------------------------------------------------- fragments

enum class Along : uint8_t { rows, columns };  // which way k runs through the tile

// A[i0 .. i0+16)[k0 .. k0+16)
template <Along k_along>
__device__ __forceinline__ void load_a(uint32_t (&a)[4], const Element* tile, int stride, int i0, int k0) {
    const int l = lane_id();
    if constexpr (k_along == Along::rows)
        ptx::ldmatrix_x4(a, tile + (i0 + l % 16) * stride + k0 + l / 16 * 8);
    else
        ptx::ldmatrix_x4_trans(a, tile + (k0 + l % 8 + l / 16 * 8) * stride + i0 + l / 8 % 2 * 8);
}

// B[k0 .. k0+16)[j0 .. j0+16): b[0], b[1] for the left eight columns, b[2], b[3] for the right
template <Along k_along>
__device__ __forceinline__ void load_b(uint32_t (&b)[4], const Element* tile, int stride, int j0, int k0) {
    const int l = lane_id();
    if constexpr (k_along == Along::rows)
        ptx::ldmatrix_x4(b, tile + (j0 + l % 8 + l / 16 * 8) * stride + k0 + l / 8 % 2 * 8);
    else
        ptx::ldmatrix_x4_trans(b, tile + (k0 + l % 16) * stride + j0 + l / 16 * 8);
}
// B[k0 .. k0+16)[j0 .. j0+8)
template <Along k_along>
__device__ __forceinline__ void load_b(uint32_t (&b)[2], const Element* tile, int stride, int j0, int k0) {
    const int l = lane_id();
    if constexpr (k_along == Along::rows)
        ptx::ldmatrix_x2(b, tile + (j0 + l % 8) * stride + k0 + l / 8 % 2 * 8);
    else
        ptx::ldmatrix_x2_trans(b, tile + (k0 + l % 16) * stride + j0);
}

template <int row_tiles, int column_tiles>
__device__ __forceinline__ void clear(float (&acc)[row_tiles][column_tiles][4]) {
#pragma unroll
    for (int i = 0; i < row_tiles; ++i)
#pragma unroll
        for (int j = 0; j < column_tiles; ++j)
#pragma unroll
            for (int e = 0; e < 4; ++e) acc[i][j][e] = 0.0f;
}

// acc += a B for one step of k, B at column j0.
template <Along b_along, int row_tiles, int column_tiles>
__device__ __forceinline__ void multiply_step(float (&acc)[row_tiles][column_tiles][4],
                                              const uint32_t (&a)[row_tiles][4], const Element* b_tile, int b_stride,
                                              int j0, int k0) {
#pragma unroll
    for (int j = 0; j + 1 < column_tiles; j += 2) {
        uint32_t b[4];
        load_b<b_along>(b, b_tile, b_stride, j0 + j * 8, k0);
        const uint32_t left[2] = {b[0], b[1]}, right[2] = {b[2], b[3]};
#pragma unroll
        for (int i = 0; i < row_tiles; ++i) {
            ptx::mma_m16n8k16_bf16(acc[i][j], a[i], left);
            ptx::mma_m16n8k16_bf16(acc[i][j + 1], a[i], right);
        }
    }
    if constexpr (column_tiles % 2 == 1) {
        uint32_t b[2];
        load_b<b_along>(b, b_tile, b_stride, j0 + (column_tiles - 1) * 8, k0);
#pragma unroll
        for (int i = 0; i < row_tiles; ++i) ptx::mma_m16n8k16_bf16(acc[i][column_tiles - 1], a[i], b);
    }
}

// An operand of a product: a tile and the row or column of the result where this warp's part begins.
template <Along along, class T>
struct Side {
    const Element* tile;
    int at;
};

// acc += A B over k in [0, depth).
template <int depth, Along a_along, class A, Along b_along, class B, int row_tiles, int column_tiles>
__device__ __forceinline__ void multiply(float (&acc)[row_tiles][column_tiles][4], Side<a_along, A> a_side,
                                         Side<b_along, B> b_side) {
#pragma unroll
    for (int k = 0; k < depth; k += 16) {
        uint32_t a[row_tiles][4];
#pragma unroll
        for (int i = 0; i < row_tiles; ++i) load_a<a_along>(a[i], a_side.tile, A::stride, a_side.at + 16 * i, k);
        multiply_step<b_along>(acc, a, b_side.tile, B::stride, b_side.at, k);
    }
}

__device__ __forceinline__ uint32_t pair(float low, float high) {
    const __nv_bfloat162 both = __floats2bfloat162_rn(low, high);
    uint32_t word;
    memcpy(&word, &both, sizeof word);
    return word;
}
__device__ __forceinline__ void store_pair(Element* to, float low, float high) {
    *reinterpret_cast<uint32_t*>(to) = pair(low, high);
}

// acc * factor as bf16 into a tile, from row i0 and column j0 on.
template <class T, int row_tiles, int column_tiles>
__device__ __forceinline__ void store_fragments(const float (&acc)[row_tiles][column_tiles][4], float factor,
                                                Element* tile, int i0, int j0) {
    Element* const own = tile + (i0 + lane_id() / 4) * T::stride + j0 + lane_id() % 4 * 2;
#pragma unroll
    for (int i = 0; i < row_tiles; ++i)
#pragma unroll
        for (int j = 0; j < column_tiles; ++j)
#pragma unroll
            for (int half = 0; half < 2; ++half)
                store_pair(own + (16 * i + 8 * half) * T::stride + 8 * j, acc[i][j][2 * half] * factor,
                           acc[i][j][2 * half + 1] * factor);
}

}  // namespace trifold::cuda::attention
