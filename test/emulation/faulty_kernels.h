// test/emulation/faulty_kernels.h   Small kernels of each kind that Trifold has, with faults that can be planted one by one.
//
// row_norms      y = x / |x| by rows: shuffles, two block reductions through the same shared array
// in_place       x becomes exp(x) by rows; before that, one thread keeps the row's element that `target` names
// multiply       C = A B with bf16 tensor-core instructions: two-stage cp.async pipeline, ldmatrix, mma; one warp a block
#pragma once
#include "kernels/cuda/launch.h"
#include "kernels/cuda/ptx.h"

namespace trifold::test {

enum class Fault {
    none,
    no_barrier_after_write,       // a block's partial sums are read before they are there
    no_barrier_before_reuse,      // ... or overwritten while others still read them
    no_barrier_before_in_place,   // an input is overwritten while another thread still needs it
    no_warp_sync_after_wait,      // the other lanes' asynchronous copies may not have landed
    no_warp_sync_before_stage,    // a stage is refilled while others still read it
    wait_for_too_few_groups,
    shared_index_off_by_one,
    divergent_barrier,
};

namespace {

namespace ptx = cuda::ptx;

template <Fault planted>
__device__ float block_sum(float v) {
    __shared__ float part[33];
    const unsigned warp = threadIdx.x / 32, warps = blockDim.x / 32;
    for (int bit = 16; bit; bit /= 2) v += __shfl_xor_sync(~0u, v, bit);
    if (threadIdx.x % 32 == 0) part[warp + (planted == Fault::shared_index_off_by_one)] = v;
    if constexpr (planted == Fault::divergent_barrier) {
        if (threadIdx.x < 32) __syncthreads();
        else __syncthreads();
    } else if constexpr (planted != Fault::no_barrier_after_write) {
        __syncthreads();
    }
    float sum = 0;
    for (unsigned w = 0; w < warps; ++w) sum += part[w];
    if constexpr (planted != Fault::no_barrier_before_reuse) __syncthreads();
    return sum;
}

// One block a row of C elements.
template <Fault planted>
__global__ void __launch_bounds__(128) row_norms(float* y, const float* x, int C) {
    const float* row = x + blockIdx.x * C;
    float largest = 0, squares = 0;
    for (int c = threadIdx.x; c < C; c += blockDim.x) largest += fabsf(row[c]);
    const float scale = block_sum<planted>(largest) / C;  // keeps the squares in range
    for (int c = threadIdx.x; c < C; c += blockDim.x) squares += row[c] / scale * (row[c] / scale);
    const float norm = rsqrtf(block_sum<planted>(squares)) / scale;
    for (int c = threadIdx.x; c < C; c += blockDim.x) y[blockIdx.x * C + c] = row[c] * norm;
}

template <Fault planted>
__global__ void __launch_bounds__(128) in_place(float* x, float* kept, const int* target, int C) {
    float* row = x + blockIdx.x * C;
    if (threadIdx.x == 0) kept[blockIdx.x] = row[target[blockIdx.x]];
    if constexpr (planted != Fault::no_barrier_before_in_place) __syncthreads();
    for (int c = threadIdx.x; c < C; c += blockDim.x) row[c] = __expf(row[c]);
}

// Rows 16 * blockIdx.y on, columns 8 * blockIdx.x on; N % 8 == 0, K % 16 == 0.
template <Fault planted>
__global__ void __launch_bounds__(32) multiply(float* c, const __nv_bfloat16* a, const __nv_bfloat16* b, int N, int K) {
    constexpr int padded = 24;  // columns of a row of A: ldmatrix then meets no bank twice
    __shared__ __align__(16) __nv_bfloat16 a_tile[2][16][padded], b_tile[2][16][8];
    const int lane = threadIdx.x, row = blockIdx.y * 16, column = blockIdx.x * 8;
    const auto fetch = [&](int stage, int k) {
        ptx::cp_async_16(&a_tile[stage][lane / 2][lane % 2 * 8], a + (row + lane / 2) * K + k + lane % 2 * 8);
        if (lane < 16) ptx::cp_async_16(&b_tile[stage][lane][0], b + (k + lane) * N + column);
        ptx::cp_async_commit();
    };
    float d[4] = {};
    fetch(0, 0);
    for (int k = 0; k < K; k += 16) {
        const int stage = k / 16 % 2;
        if (k + 16 < K) fetch(1 - stage, k + 16);
        else ptx::cp_async_commit();
        ptx::cp_async_wait<planted == Fault::wait_for_too_few_groups ? 2 : 1>();
        if constexpr (planted != Fault::no_warp_sync_after_wait) __syncwarp();
        uint32_t fa[4], fb[2];
        ptx::ldmatrix_x4(fa, &a_tile[stage][lane % 16][lane / 16 * 8]);
        ptx::ldmatrix_x2_trans(fb, &b_tile[stage][lane % 16][0]);
        ptx::mma_m16n8k16_bf16(d, fa, fb);
        if constexpr (planted != Fault::no_warp_sync_before_stage) __syncwarp();
    }
    ptx::cp_async_wait<0>();
    for (int e = 0; e < 4; ++e) c[(row + lane / 4 + 8 * (e / 2)) * N + column + lane % 4 * 2 + e % 2] = d[e];
}

}  // namespace
}  // namespace trifold::test
