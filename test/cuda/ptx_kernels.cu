// test/cuda/ptx_kernels.cu   See ptx_kernels.h.
#include "test/cuda/ptx_kernels.h"

#include "kernels/cuda/launch.h"
#include "kernels/cuda/ptx.h"

namespace trifold::test {
namespace {

namespace ptx = cuda::ptx;

__global__ void __launch_bounds__(32) ldmatrix_kernel(const uint16_t* tile, uint32_t* registers) {
    __shared__ __align__(16) uint16_t rows[32][8];
    const int lane = static_cast<int>(threadIdx.x);
    for (int i = 0; i < 8; ++i) rows[lane][i] = tile[8 * lane + i];
    __syncwarp();
    uint32_t x4[4], x4_trans[4], x2[2], x2_trans[2];
    ptx::ldmatrix_x4(x4, rows[lane]);
    ptx::ldmatrix_x4_trans(x4_trans, rows[lane]);
    ptx::ldmatrix_x2(x2, rows[lane % 16]);
    ptx::ldmatrix_x2_trans(x2_trans, rows[lane % 16]);
    for (int i = 0; i < 4; ++i) {
        registers[4 * lane + i] = x4[i];
        registers[128 + 4 * lane + i] = x4_trans[i];
    }
    for (int i = 0; i < 2; ++i) {
        registers[256 + 2 * lane + i] = x2[i];
        registers[320 + 2 * lane + i] = x2_trans[i];
    }
}

__device__ uint32_t pair(uint16_t low, uint16_t high) { return static_cast<uint32_t>(low) | static_cast<uint32_t>(high) << 16; }

// Fragments are put together by hand, so that this tests mma and not ldmatrix.
__global__ void __launch_bounds__(32) mma_kernel(const uint16_t* a, const uint16_t* b, float* d) {
    const int g = static_cast<int>(threadIdx.x) / 4, t = static_cast<int>(threadIdx.x) % 4;
    uint32_t fa[4], fb[2];
    for (int i = 0; i < 4; ++i) {
        const uint16_t* row = a + (g + 8 * (i % 2)) * 16 + 2 * t + 8 * (i / 2);
        fa[i] = pair(row[0], row[1]);
    }
    for (int i = 0; i < 2; ++i) fb[i] = pair(b[(2 * t + 8 * i) * 8 + g], b[(2 * t + 8 * i + 1) * 8 + g]);
    float sums[4];
    for (int i = 0; i < 4; ++i) sums[i] = d[(g + 8 * (i / 2)) * 8 + 2 * t + i % 2];
    ptx::mma_m16n8k16_bf16(sums, fa, fb);
    for (int i = 0; i < 4; ++i) d[(g + 8 * (i / 2)) * 8 + 2 * t + i % 2] = sums[i];
}

__global__ void __launch_bounds__(32) cp_async_kernel(const uint32_t* in, uint32_t* out) {
    __shared__ __align__(16) uint32_t tile[2][32][4];
    const int lane = static_cast<int>(threadIdx.x);
    ptx::cp_async_16(tile[0][lane], in + 4 * lane);
    ptx::cp_async_commit();
    ptx::cp_async_16_or_zero(tile[1][lane], in + 4 * lane, lane % 2 == 0);
    ptx::cp_async_commit();
    ptx::cp_async_wait<1>();
    __syncwarp();
    for (int i = 0; i < 4; ++i) out[4 * lane + i] = tile[0][31 - lane][i];
    ptx::cp_async_wait<0>();
    __syncwarp();
    for (int i = 0; i < 4; ++i) out[128 + 4 * lane + i] = tile[1][31 - lane][i];
}

__global__ void exp2_kernel(const float* x, float* y, int count) {
    const int i = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
    if (i < count) y[i] = ptx::exp2_approx(x[i]);
}

// Blocks draw numbers, for they may start in any order, and pass the turn on in the order of these.
__global__ void __launch_bounds__(32) turns_kernel(int* turn, int* order) {
    __shared__ int mine;
    if (threadIdx.x == 0) {
        mine = atomicAdd(turn, 1);
        while (ptx::load_acquire(turn + 1) != mine) {
        }
    }
    __syncthreads();
    if (threadIdx.x == 0) order[mine] = mine == 0 ? 1 : order[mine - 1] + 1;
    __syncthreads();
    if (threadIdx.x == 0) ptx::store_release(turn + 1, mine + 1);
}

}  // namespace

using cuda::launch;

void run_ldmatrix(cudaStream_t s, const uint16_t* tile, uint32_t* registers) { launch(s, {.blocks = 1, .threads = 32}, ldmatrix_kernel, tile, registers); }
void run_mma(cudaStream_t s, const uint16_t* a, const uint16_t* b, float* d) { launch(s, {.blocks = 1, .threads = 32}, mma_kernel, a, b, d); }
void run_cp_async(cudaStream_t s, const uint32_t* in, uint32_t* out) { launch(s, {.blocks = 1, .threads = 32}, cp_async_kernel, in, out); }
void run_exp2(cudaStream_t s, const float* x, float* y, int count) {
    launch(s, {.blocks = static_cast<unsigned>((count + 127) / 128), .threads = 128}, exp2_kernel, x, y, count);
}
void run_turns(cudaStream_t s, int blocks, int* turn, int* order) {
    launch(s, {.blocks = static_cast<unsigned>(blocks), .threads = 32}, turns_kernel, turn, order);
}

}  // namespace trifold::test
