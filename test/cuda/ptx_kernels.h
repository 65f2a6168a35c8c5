// test/cuda/ptx_kernels.h   One kernel per group of wrappers of kernels/cuda/ptx.h: what one warp gets from each instruction.
#pragma once
#include <cstdint>

struct CUstream_st;

namespace trifold::test {

// All memory is the device's. `tile` holds 4 matrices of 8x8 2-byte elements; for each wrapper the registers of all lanes follow:
// x4 [32][4], x4_trans [32][4], x2 [32][2], x2_trans [32][2].
void run_ldmatrix(CUstream_st*, const uint16_t* tile, uint32_t* registers);
// d[16][8] += a[16][16] @ b[16][8], row-major; a and b in bf16.
void run_mma(CUstream_st*, const uint16_t* a, const uint16_t* b, float* d);
// out = 32 pieces of 16 bytes copied, then 32 of which every second is zero; groups are waited for one by one.
void run_cp_async(CUstream_st*, const uint32_t* in, uint32_t* out);
void run_exp2(CUstream_st*, const float* x, float* y, int count);
// `blocks` blocks add their number to a sum, each after the one before it.
void run_turns(CUstream_st*, int blocks, int* turn, int* order);

}  // namespace trifold::test
