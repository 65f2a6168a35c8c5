// kernels/cpu/gemm_avx512.cpp   Tiles of 8 x 48 in 24 of the 32 registers.
#include "kernels/cpu/gemm.h"

#if defined(__x86_64__)
#include <immintrin.h>

#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,avx2,fma")

namespace trifold::cpu {
namespace {

constexpr int lanes = 16;
using Vec [[gnu::vector_size(64)]] = float;

[[gnu::always_inline]] inline Vec widen_bf16(const bf16* p) {
    // The masked form, with all lanes: GCC 12 warns about its own header otherwise.
    const __m256i bits = _mm256_loadu_si256(reinterpret_cast<const __m256i_u*>(p));
    return (Vec)_mm512_maskz_slli_epi32(0xffff, _mm512_maskz_cvtepu16_epi32(0xffff, bits), 16);
}
[[gnu::always_inline]] inline Vec broadcast(const float* p) {
    Vec v = _mm512_set1_ps(*p);
    // Kept in a register: folded into each of three multiply-adds it would be loaded three times, and loads become the
    // bottleneck.
    asm("" : "+v"(v));
    return v;
}
[[gnu::always_inline]] inline Vec multiply_add(Vec x, Vec y, Vec z) { return _mm512_fmadd_ps(x, y, z); }

}  // namespace
}  // namespace trifold::cpu

#include "kernels/cpu/gemm_panels.h"

namespace trifold::cpu {
extern const GemmKernels gemm_kernels_avx512;
const GemmKernels gemm_kernels_avx512 = {"avx512",         tile_rows,       tile_cols,
                                         pack<tile_rows>, pack<tile_cols>, multiply,  multiply_few};
}  // namespace trifold::cpu
#endif
