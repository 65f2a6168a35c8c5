// kernels/cuda/ptx.h   Every PTX instruction that CUDA C++ has no word for: one function each, and no assembler elsewhere.
//
// The emulator has its own version of each function (test/emulation/ptx.h), written from the PTX manual. Fragments are held
// by the warp as the manual draws them; g = lane / 4, t = lane % 4:
//
//   mma m16n8k16   a[0..3]  A[g][2t..], A[g+8][2t..], A[g][2t+8..], A[g+8][2t+8..]   two bf16 each, the lower column in the lower half
//                  b[0..1]  B[2t..][g], B[2t+8..][g]                               two rows of a column each
//                  d[0..3]  D[g][2t], D[g][2t+1], D[g+8][2t], D[g+8][2t+1]         fp32
//   ldmatrix       8x8 matrices of 2-byte elements. Matrix m's row i starts at the address given by lane 8m + i, 16 bytes
//                  aligned; r[m] holds M[g][2t..] (two columns), or with trans M[2t..][g] (two rows).
//
// So ldmatrix of row-major A gives a; of B stored as [n][k] it gives b; of B stored as [k][n], ldmatrix_trans gives b.
#pragma once

#if defined(TRIFOLD_EMULATION)
#include "test/emulation/ptx.h"
#else
#include <cstdint>

namespace trifold::cuda::ptx {

__device__ __forceinline__ uint32_t shared_address(const void* p) { return static_cast<uint32_t>(__cvta_generic_to_shared(p)); }

// ---------------------------------------------------------------- asynchronous copies, 16 bytes, both sides 16 bytes aligned

// The copy belongs to the thread's open group. Its target must not be touched before a wait covers the group; the wait
// makes it visible to this thread alone, a barrier to the others.
__device__ __forceinline__ void cp_async_16(void* shared, const void* global) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared_address(shared)), "l"(global) : "memory");
}

// 16 zero bytes instead when `copy` is false; `global` is then not read.
__device__ __forceinline__ void cp_async_16_or_zero(void* shared, const void* global, bool copy) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(shared)), "l"(global), "r"(copy ? 16 : 0) : "memory");
}

// Closes the group of copies issued since the last commit; it may be empty.
__device__ __forceinline__ void cp_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Waits until at most N of this thread's latest groups are unfinished.
template <int N>
__device__ __forceinline__ void cp_async_wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory");
}

// ---------------------------------------------------------------- matrices from shared memory: all 32 lanes together

__device__ __forceinline__ void ldmatrix_x4(uint32_t (&r)[4], const void* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(shared_address(row)) : "memory");
}
__device__ __forceinline__ void ldmatrix_x4_trans(uint32_t (&r)[4], const void* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(shared_address(row)) : "memory");
}
// Addresses come from lanes 0 to 15; those of the others are ignored.
__device__ __forceinline__ void ldmatrix_x2(uint32_t (&r)[2], const void* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0,%1}, [%2];"
                 : "=r"(r[0]), "=r"(r[1]) : "r"(shared_address(row)) : "memory");
}
__device__ __forceinline__ void ldmatrix_x2_trans(uint32_t (&r)[2], const void* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0,%1}, [%2];"
                 : "=r"(r[0]), "=r"(r[1]) : "r"(shared_address(row)) : "memory");
}

// ---------------------------------------------------------------- arithmetic

// D += A B for one warp: A 16x16 and B 16x8 in bf16, D 16x8 in fp32.
__device__ __forceinline__ void mma_m16n8k16_bf16(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

// 2^x to 2^-22 (relative); subnormal results are 0. exp2_approx(-infinity) is 0.
__device__ __forceinline__ float exp2_approx(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// ---------------------------------------------------------------- order between the blocks of a grid

// What happened before a release store (for a block: before the barrier that its thread came from) has happened for whoever
// sees the stored value by an acquire load (for its block: after the next barrier). Whole GPU.
__device__ __forceinline__ int load_acquire(const int* global) {
    int value;
    asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(value) : "l"(global) : "memory");
    return value;
}
__device__ __forceinline__ void store_release(int* global, int value) {
    asm volatile("st.release.gpu.global.s32 [%0], %1;" ::"l"(global), "r"(value) : "memory");
}

}  // namespace trifold::cuda::ptx
#endif
