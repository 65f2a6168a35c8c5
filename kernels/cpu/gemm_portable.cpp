// kernels/cpu/gemm_portable.cpp   Vectors of four for every other processor. Products are rounded before they are
// added, so the bits differ from those of gemm_avx2.cpp and gemm_avx512.cpp.
#include "kernels/cpu/gemm.h"

namespace trifold::cpu {
namespace {

constexpr int lanes = 4;
using Vec [[gnu::vector_size(16)]] = float;

inline Vec broadcast(const float* p) { return Vec{*p, *p, *p, *p}; }
inline Vec widen_bf16(const bf16* p) { return Vec{float(p[0]), float(p[1]), float(p[2]), float(p[3])}; }
inline Vec multiply_add(Vec x, Vec y, Vec z) { return x * y + z; }

}  // namespace
}  // namespace trifold::cpu

#include "kernels/cpu/gemm_panels.h"

namespace trifold::cpu {
extern const GemmKernels gemm_kernels_portable;
const GemmKernels gemm_kernels_portable = {"portable",       tile_rows,       tile_cols,
                                           pack<tile_rows>, pack<tile_cols>, multiply,  multiply_few};
}  // namespace trifold::cpu
