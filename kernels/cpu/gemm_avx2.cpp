// kernels/cpu/gemm_avx2.cpp   Tiles of 4 x 24 in 12 of the 16 registers.
#include "kernels/cpu/gemm.h"

#if defined(__x86_64__)
#include <immintrin.h>

#pragma GCC target("avx2,fma")

namespace trifold::cpu {
namespace {

constexpr int lanes = 8;
using Vec [[gnu::vector_size(32)]] = float;

[[gnu::always_inline]] inline Vec widen_bf16(const bf16* p) {
    return (Vec)_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i_u*>(p))), 16);
}
[[gnu::always_inline]] inline Vec broadcast(const float* p) { return _mm256_broadcast_ss(p); }
[[gnu::always_inline]] inline Vec multiply_add(Vec x, Vec y, Vec z) { return _mm256_fmadd_ps(x, y, z); }

}  // namespace
}  // namespace trifold::cpu

#include "kernels/cpu/gemm_panels.h"

namespace trifold::cpu {
extern const GemmKernels gemm_kernels_avx2;
const GemmKernels gemm_kernels_avx2 = {"avx2",           tile_rows,       tile_cols,
                                       pack<tile_rows>, pack<tile_cols>, multiply,  multiply_few};
}  // namespace trifold::cpu
#endif
