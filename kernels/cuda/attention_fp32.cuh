// kernels/cuda/attention_fp32.cuh   fp32 tiles in shared memory and their products by plain multiply-adds, no TF32.
//
// Tiles     64 queries by 64 keys, or 32 by 32 where that is too much for the room of a block (room.h); 256 threads as
//           16 x 16. Of a square, thread (x, y) holds rows s y + i and columns x + 16 j, i, j < s = 4 (or 2); of a result
//           with D columns, rows s y + i and columns 2 x + 32 c and the next. Rows of D numbers are padded to D + 4:
//           threads that read one column of different rows, 16 bytes each, meet no bank conflicts.
// Squares   are stored with k running down: [k][64 + 4], so that a product reads its s rows at once.
// Purpose   the numerical reference on the GPU; clarity before speed.
#pragma once
#include "kernels/cuda/attention_operands.cuh"

namespace trifold::cuda::attention::fp32 {

constexpr int threads = 256;

template <int D_, int tile_>
struct Shape {
    static constexpr int D = D_, tile = tile_, side = tile / 16;
    static constexpr int row_stride = D + 4, tile_elems = tile * row_stride;
    static constexpr int square_stride = tile + 4, square_elems = tile * square_stride;
    using Square = float[side][side];
    using Wide = float[side][D / 32][2];
};

// The shape for a kernel that has so many tiles and squares in shared memory.
template <int D, int room, int tiles, int squares>
using ShapeFor = Shape<D, (tiles * Shape<D, 64>::tile_elems + squares * Shape<D, 64>::square_elems) * 4 <= room ? 64 : 32>;

__device__ __forceinline__ int thread_x() { return static_cast<int>(threadIdx.x % 16); }
__device__ __forceinline__ int thread_y() { return static_cast<int>(threadIdx.x / 16); }

// Rows [first, first + tile); those from `end` on become zeros.
template <class S>
__device__ __forceinline__ void load_rows(float* to, Rows<const float> from, int first, int end) {
    for (int i = static_cast<int>(threadIdx.x); i < S::tile * S::D / 4; i += threads) {
        const int row = i / (S::D / 4), column = i % (S::D / 4) * 4;
        Floats<4> x{};
        if (first + row < end) x = load<4>(from[first + row] + column);
        store(to + row * S::row_stride + column, x);
    }
}

template <class S>
__device__ __forceinline__ void clear(typename S::Wide& x) {
#pragma unroll
    for (int i = 0; i < S::side; ++i)
#pragma unroll
        for (int c = 0; c < S::D / 32; ++c) x[i][c][0] = x[i][c][1] = 0.0f;
}

// s[i][j] = row side y + i of a times row x + 16 j of b
template <class S>
__device__ __forceinline__ void multiply_rows(typename S::Square& s, const float* a, const float* b) {
#pragma unroll
    for (int i = 0; i < S::side; ++i)
#pragma unroll
        for (int j = 0; j < S::side; ++j) s[i][j] = 0.0f;
#pragma unroll 2
    for (int d = 0; d < S::D; d += 4) {
        Floats<4> a_d[S::side], b_d[S::side];
#pragma unroll
        for (int i = 0; i < S::side; ++i) a_d[i] = load<4>(a + (S::side * thread_y() + i) * S::row_stride + d);
#pragma unroll
        for (int j = 0; j < S::side; ++j) b_d[j] = load<4>(b + (thread_x() + 16 * j) * S::row_stride + d);
#pragma unroll
        for (int i = 0; i < S::side; ++i)
#pragma unroll
            for (int j = 0; j < S::side; ++j)
#pragma unroll
                for (int e = 0; e < 4; ++e) s[i][j] = fmaf(a_d[i][e], b_d[j][e], s[i][j]);
    }
}

// sum += square^T rows: row r of the result is the sum over k of square[k][r] * rows[k].
template <class S>
__device__ __forceinline__ void add_product(typename S::Wide& sum, const float* square, const float* rows) {
#pragma unroll 4
    for (int k = 0; k < S::tile; ++k) {
        const Floats<S::side> factor = load<S::side>(square + k * S::square_stride + S::side * thread_y());
#pragma unroll
        for (int c = 0; c < S::D / 32; ++c) {
            const Floats<2> x = load<2>(rows + k * S::row_stride + 2 * thread_x() + 32 * c);
#pragma unroll
            for (int i = 0; i < S::side; ++i)
#pragma unroll
                for (int e = 0; e < 2; ++e) sum[i][c][e] = fmaf(factor[i], x[e], sum[i][c][e]);
        }
    }
}

// square[column][row] = s and square[row][column] = s
template <class S>
__device__ __forceinline__ void store_transposed(const typename S::Square& s, float* square) {
#pragma unroll
    for (int j = 0; j < S::side; ++j) {
        Floats<S::side> column;
#pragma unroll
        for (int i = 0; i < S::side; ++i) column[i] = s[i][j];
        store(square + (thread_x() + 16 * j) * S::square_stride + S::side * thread_y(), column);
    }
}
template <class S>
__device__ __forceinline__ void store_square(const typename S::Square& s, float* square) {
#pragma unroll
    for (int i = 0; i < S::side; ++i)
#pragma unroll
        for (int j = 0; j < S::side; ++j)
            square[(S::side * thread_y() + i) * S::square_stride + thread_x() + 16 * j] = s[i][j];
}

// x * factor(i) to the rows [first, first + tile) that are before `end`.
template <class S, class Factor>
__device__ __forceinline__ void store_rows(const typename S::Wide& x, const Factor& factor, Rows<float> to, int first,
                                           int end) {
#pragma unroll
    for (int i = 0; i < S::side; ++i) {
        const int row = first + S::side * thread_y() + i;
        if (row >= end) continue;
#pragma unroll
        for (int c = 0; c < S::D / 32; ++c)
            store(to[row] + 2 * thread_x() + 32 * c, Floats<2>{{x[i][c][0] * factor(i), x[i][c][1] * factor(i)}});
    }
}

}  // namespace trifold::cuda::attention::fp32
