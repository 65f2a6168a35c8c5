// kernels/cpu/rotary.cpp   Rotary position embedding in place (Su et al., arXiv 2104.09864), "rotate half" form.
//
// (x[i], x[i + D/2]) is turned by the angle of frequency i at the row's position; direction -1 turns back. Scaled
// variants differ in the tables only.
// Traffic    x in and out; a row of the tables serves all heads of that row. Memory bound.
#include "kernels/cpu/parallel.h"

namespace trifold::cpu {
namespace {

using simd::f32x16;

template <class T>
void turn(T* x, const float* cosines, const float* sines, float direction, int64_t half) {
    simd::for_groups(half, [&](int64_t i, auto w) TRIFOLD_BODY {
        const f32x16 c = load(cosines + i, w), s = load(sines + i, w) * direction;
        const f32x16 first = load(x + i, w), second = load(x + half + i, w);
        store(x + i, first * c - second * s, w);
        store(x + half + i, second * c + first * s, w);
    });
}

}  // namespace

void rotary(const Rotary& a) {
    const int64_t half = a.D / 2;
    TRIFOLD_ASSERT(a.D % 2 == 0 && (a.direction == 1 || a.direction == -1) && a.position_N.elems >= a.N);
    TRIFOLD_ASSERT(a.N == 0 || a.x_NS.elems >= (a.N - 1) * a.stride + a.heads * a.D);
    with_act(a.x_NS.dtype, [&](auto type) {
        using T = decltype(type);
        parallel_rows(a.N, a.heads * a.D, [&](int64_t n) {
            const int64_t row = a.position_N.as<int32_t>()[n] * half;
            TRIFOLD_ASSERT(row >= 0 && row + half <= a.cos_TR.elems && row + half <= a.sin_TR.elems);
            const float *cosines = a.cos_TR.as<float>() + row, *sines = a.sin_TR.as<float>() + row;
            T* x = a.x_NS.as<T>() + n * a.stride;
            for (int64_t h = 0; h < a.heads; ++h)
                turn(x + h * a.D, cosines, sines, static_cast<float>(a.direction), half);
        });
    });
}

}  // namespace trifold::cpu
