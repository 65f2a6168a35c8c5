// kernels/normal_tail.h   The tail of the normal distribution that exact GELU needs, one polynomial for both devices.
//
// 1 - integral(|x|) = exp(-x^2 / 2) * t * q(t),  t = 1 / (1 + 0.3 |x|);  q by Chebyshev interpolation, within 2.5e-8.
#pragma once

#if defined(__CUDACC__) || defined(TRIFOLD_EMULATION)
#include "kernels/cuda/launch.h"
#define TRIFOLD_EVERYWHERE __host__ __device__ __forceinline__
#else
#define TRIFOLD_EVERYWHERE inline __attribute__((always_inline))
#endif

namespace trifold {

// t * q(t), for a float or a vector of them.
template <class F>
TRIFOLD_EVERYWHERE F normal_tail(const F& t) {
    F q = t * -0.0208300408f + 0.113590129f;
    q = q * t - 0.231002316f;
    q = q * t + 0.195594937f;
    q = q * t - 0.0826592445f;
    q = q * t + 0.097922124f;
    q = q * t + 0.0777729601f;
    q = q * t + 0.110368036f;
    q = q * t + 0.119555928f;
    q = q * t + 0.119687498f;
    return q * t;
}

}  // namespace trifold
