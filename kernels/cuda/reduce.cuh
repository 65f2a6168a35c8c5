// kernels/cuda/reduce.cuh   Sums and maxima over a warp or a block.
//
// Order      lanes in a butterfly (distance 16, 8, 4, 2, 1), then warps in the same butterfly: always the same for a
//            given block size, so results repeat bit for bit. Every thread of the warp or block gets the same value.
// Block      all threads of the block must call; the size is a multiple of 32 and at most 1024. Several values that are
//            reduced in one call share two barriers; after the call the shared memory is free for the next one.
#pragma once
#include "kernels/cuda/pack.h"

namespace trifold::cuda {

template <class T>
__device__ __forceinline__ T warp_sum(T v) {
#pragma unroll
    for (int distance = 16; distance > 0; distance /= 2) v += __shfl_xor_sync(0xffffffffu, v, distance);
    return v;
}
// NaN lanes are passed over.
__device__ __forceinline__ float warp_max(float v) {
#pragma unroll
    for (int distance = 16; distance > 0; distance /= 2) v = fmaxf(v, __shfl_xor_sync(0xffffffffu, v, distance));
    return v;
}

// Each of N sums over the block.
template <class T, int N>
__device__ __forceinline__ void block_sums(T (&v)[N]) {
    __shared__ T of_warp[N][32];
    const int lane = static_cast<int>(threadIdx.x % 32), warp = static_cast<int>(threadIdx.x / 32);
#pragma unroll
    for (int i = 0; i < N; ++i) v[i] = warp_sum(v[i]);
    if (lane == 0) {
#pragma unroll
        for (int i = 0; i < N; ++i) of_warp[i][warp] = v[i];
    }
    __syncthreads();
#pragma unroll
    for (int i = 0; i < N; ++i) v[i] = warp_sum(lane < static_cast<int>(blockDim.x / 32) ? of_warp[i][lane] : T(0));
    __syncthreads();
}
template <class T>
__device__ __forceinline__ T block_sum(T v) {
    T one[1] = {v};
    block_sums(one);
    return one[0];
}
__device__ __forceinline__ float block_max(float v) {
    __shared__ float of_warp[32];
    const int lane = static_cast<int>(threadIdx.x % 32), warp = static_cast<int>(threadIdx.x / 32);
    v = warp_max(v);
    if (lane == 0) of_warp[warp] = v;
    __syncthreads();
    v = warp_max(lane < static_cast<int>(blockDim.x / 32) ? of_warp[lane] : -INFINITY);
    __syncthreads();
    return v;
}

}  // namespace trifold::cuda
