// kernels/cuda/partials.cuh   Sums over rows (gradients of biases and norm weights): each block of a first kernel leaves its
// partial sums as one row of a workspace; a second kernel adds these rows in their order.
//
// The number of partial rows depends on the sizes alone, never on the device, so the sums repeat bit for bit anywhere.
#pragma once
#include <algorithm>

#include "kernels/cuda/launch.h"
#include "kernels/ops.h"

namespace trifold::cuda {

// Blocks for N rows of C columns: 16 warps on each of 132 multiprocessors where a warp takes 512 columns of a row, and
// at least 4 rows a block, so that the partial sums stay a small part of the traffic. No blocks for no rows.
inline int64_t partial_rows(int64_t N, int64_t C) {
    const int64_t warps = std::max<int64_t>(1, (C + 511) / 512);
    return std::min<int64_t>((N + 3) / 4, std::max<int64_t>(132, 2112 / warps));
}

// Partial rows hold the columns of `first`, then those of `second`, which may be null; both are `columns` wide.
struct PartialSums {
    const float* partials;
    int64_t rows, columns;
    float *first, *second;
    Accumulate accumulate;
};

namespace {

constexpr int partial_columns = 32, most_partial_lanes = 32;

// A warp reads 32 columns of a row at once; of L warps, warp y adds rows y, y + L, ...; then warp 0 adds the L sums of
// each column.
__global__ void __launch_bounds__(partial_columns* most_partial_lanes) add_partials_kernel(const PartialSums a) {
    __shared__ float sums[most_partial_lanes][partial_columns];
    const int x = static_cast<int>(threadIdx.x), y = static_cast<int>(threadIdx.y),
              lanes = static_cast<int>(blockDim.y);
    const int64_t width = a.second ? 2 * a.columns : a.columns;
    const int64_t column = int64_t{blockIdx.x} * partial_columns + x;
    float total = 0.0f;
    if (column < width) {
#pragma unroll 8
        for (int64_t row = y; row < a.rows; row += lanes) total += a.partials[row * width + column];
    }
    sums[y][x] = total;
    __syncthreads();
    if (y != 0 || column >= width) return;
    total = 0.0f;
    for (int i = 0; i < lanes; ++i) total += sums[i][x];
    float* const out = column < a.columns ? a.first + column : a.second + (column - a.columns);
    *out = a.accumulate == Accumulate::add ? *out + total : total;
}

}  // namespace

// No rows add up to zero.
inline void add_partials(cudaStream_t stream, const PartialSums& a) {
    const int64_t width = a.second ? 2 * a.columns : a.columns;
    const auto blocks = static_cast<unsigned>((width + partial_columns - 1) / partial_columns);
    const auto lanes = static_cast<unsigned>(std::clamp<int64_t>(a.rows, 1, most_partial_lanes));
    launch(stream, {.blocks = dim3(blocks), .threads = dim3(partial_columns, lanes)}, add_partials_kernel, a);
}

}  // namespace trifold::cuda
