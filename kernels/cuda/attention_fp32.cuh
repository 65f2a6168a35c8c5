// kernels/cuda/attention_fp32.cuh   fp32 tiles in shared memory and their products by plain multiply-adds, no TF32.
//
// Tiles     64 queries by 64 keys, 256 threads as 16 x 16. Of a square, thread (x, y) holds rows 4 y + i and columns
//           x + 16 j; of a result with D columns, rows 4 y + i and columns 2 x + 32 c and the next. Rows of D numbers
//           are padded to D + 4: threads that read one column of different rows, 16 bytes each, meet no bank conflicts.
// Squares   are stored with k running down: [k][64 + 4], so that a product reads its four rows as one float4.
// Purpose   the numerical reference on the GPU; clarity before speed.
#pragma once
#include "kernels/cuda/attention_operands.cuh"

namespace trifold::cuda::attention::fp32 {

constexpr int tile = 64, threads = 256, square_stride = tile + 4, square_elems = tile * square_stride;

template <int D>
constexpr int row_stride = D + 4;
template <int D>
constexpr int tile_elems = tile* row_stride<D>;

using Square = float[4][4];
template <int D>
using Wide = float[4][D / 32][2];

__device__ __forceinline__ int thread_x() { return static_cast<int>(threadIdx.x % 16); }
__device__ __forceinline__ int thread_y() { return static_cast<int>(threadIdx.x / 16); }

// Rows [first, first + 64); those from `end` on become zeros.
template <int D>
__device__ __forceinline__ void load_rows(float* to, Rows<const float> from, int first, int end) {
    for (int i = static_cast<int>(threadIdx.x); i < tile * D / 4; i += threads) {
        const int row = i / (D / 4), column = i % (D / 4) * 4;
        Floats<4> x{};
        if (first + row < end) x = load<4>(from[first + row] + column);
        store(to + row * row_stride<D> + column, x);
    }
}

template <int D>
__device__ __forceinline__ void clear(Wide<D>& x) {
#pragma unroll
    for (int i = 0; i < 4; ++i)
#pragma unroll
        for (int c = 0; c < D / 32; ++c) x[i][c][0] = x[i][c][1] = 0.0f;
}

// s[i][j] = row 4 y + i of a times row x + 16 j of b
template <int D>
__device__ __forceinline__ void multiply_rows(Square& s, const float* a, const float* b) {
#pragma unroll
    for (int i = 0; i < 4; ++i)
#pragma unroll
        for (int j = 0; j < 4; ++j) s[i][j] = 0.0f;
#pragma unroll 2
    for (int d = 0; d < D; d += 4) {
        Floats<4> a_d[4], b_d[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) a_d[i] = load<4>(a + (4 * thread_y() + i) * row_stride<D> + d);
#pragma unroll
        for (int j = 0; j < 4; ++j) b_d[j] = load<4>(b + (thread_x() + 16 * j) * row_stride<D> + d);
#pragma unroll
        for (int i = 0; i < 4; ++i)
#pragma unroll
            for (int j = 0; j < 4; ++j)
#pragma unroll
                for (int e = 0; e < 4; ++e) s[i][j] = fmaf(a_d[i][e], b_d[j][e], s[i][j]);
    }
}

// sum += square^T rows: row r of the result is the sum over k of square[k][r] * rows[k].
template <int D>
__device__ __forceinline__ void add_product(Wide<D>& sum, const float* square, const float* rows) {
#pragma unroll 4
    for (int k = 0; k < tile; ++k) {
        const Floats<4> factor = load<4>(square + k * square_stride + 4 * thread_y());
#pragma unroll
        for (int c = 0; c < D / 32; ++c) {
            const Floats<2> x = load<2>(rows + k * row_stride<D> + 2 * thread_x() + 32 * c);
#pragma unroll
            for (int i = 0; i < 4; ++i)
#pragma unroll
                for (int e = 0; e < 2; ++e) sum[i][c][e] = fmaf(factor[i], x[e], sum[i][c][e]);
        }
    }
}

// square[column][row] = s and square[row][column] = s
__device__ __forceinline__ void store_transposed(const Square& s, float* square) {
#pragma unroll
    for (int j = 0; j < 4; ++j)
        store(square + (thread_x() + 16 * j) * square_stride + 4 * thread_y(),
              Floats<4>{{s[0][j], s[1][j], s[2][j], s[3][j]}});
}
__device__ __forceinline__ void store_square(const Square& s, float* square) {
#pragma unroll
    for (int i = 0; i < 4; ++i)
#pragma unroll
        for (int j = 0; j < 4; ++j) square[(4 * thread_y() + i) * square_stride + thread_x() + 16 * j] = s[i][j];
}

// x * factor to the rows [first, first + 64) that are before `end`.
template <int D>
__device__ __forceinline__ void store_rows(const Wide<D>& x, const float (&factor)[4], Rows<float> to, int first,
                                           int end) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const int row = first + 4 * thread_y() + i;
        if (row >= end) continue;
#pragma unroll
        for (int c = 0; c < D / 32; ++c)
            store(to[row] + 2 * thread_x() + 32 * c, Floats<2>{{x[i][c][0] * factor[i], x[i][c][1] * factor[i]}});
    }
}

}  // namespace trifold::cuda::attention::fp32
