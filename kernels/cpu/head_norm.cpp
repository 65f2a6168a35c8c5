// kernels/cpu/head_norm.cpp   RMSNorm of every head of q and k ("QK-norm"), in place in rows of a wider matrix.
//
// forward    y = x * rstd * w,  rstd = 1 / sqrt(mean over the head of x^2 + eps)
// backward   g = dy * w,  h = x * rstd:  dx = rstd * (g - h * mean(g * h)),  dw = sum over rows and heads of dy * h
// Traffic    forward reads x, writes y and the saved x; backward reads dy and the saved x, writes dx. Memory bound.
// Numerics   as in norm.cpp.
#include <cmath>

#include "kernels/cpu/parallel.h"

namespace trifold::cpu {
namespace {

using simd::f32x16;
using simd::for_groups;

template <class T>
float forward_head(T* x, const T* weight, float eps, int64_t D) {
    f32x16 squares = 0.0f;
    for_groups(D, [&](int64_t i, auto w) TRIFOLD_BODY {
        const f32x16 v = load(x + i, w);
        squares += v * v;
    });
    const float rstd = 1.0f / std::sqrt(sum(squares) / static_cast<float>(D) + eps);
    for_groups(D,
               [&](int64_t i, auto w) TRIFOLD_BODY { store(x + i, load(x + i, w) * rstd * load(weight + i, w), w); });
    return rstd;
}

template <class T>
void backward_head(T* dx, const T* saved, const T* weight, float rstd, float* dw, int64_t D) {
    f32x16 gh_total = 0.0f;
    for_groups(D, [&](int64_t i, auto w) TRIFOLD_BODY {
        const f32x16 d = load(dx + i, w), h = load(saved + i, w) * rstd;
        gh_total += d * load(weight + i, w) * h;
        store(dw + i, load(dw + i, w) + d * h, w);
    });
    const float mean_gh = sum(gh_total) / static_cast<float>(D);
    for_groups(D, [&](int64_t i, auto w) TRIFOLD_BODY {
        const f32x16 g = load(dx + i, w) * load(weight + i, w), h = load(saved + i, w) * rstd;
        store(dx + i, (g - h * mean_gh) * rstd, w);
    });
}

template <class T>
void forward(const HeadNormForward& a) {
    parallel_rows(a.N, a.heads * a.D, [&](int64_t n) {
        T *x = a.x_NS.as<T>() + n * a.stride, *saved = a.saved_NHD.as<T>() + n * a.heads * a.D;
        float* rstd = a.rstd_NH.as<float>() + n * a.heads;
        std::copy(x, x + a.heads * a.D, saved);
        for (int64_t h = 0; h < a.heads; ++h) rstd[h] = forward_head(x + h * a.D, a.weight_D.as<T>(), a.eps, a.D);
    });
}

template <class T>
void backward(const HeadNormBackward& a) {
    const RowSums sums(a.N, a.D, a.workspace);
    sums.for_rows([&](int64_t n, float* dw) {
        T* dx = a.dx_NS.as<T>() + n * a.stride;
        const T* saved = a.saved_NHD.as<T>() + n * a.heads * a.D;
        for (int64_t h = 0; h < a.heads; ++h)
            backward_head(dx + h * a.D, saved + h * a.D, a.weight_D.as<T>(), a.rstd_NH.as<float>()[n * a.heads + h], dw,
                          a.D);
    });
    sums.finish(0, a.D, a.dweight_D.as<float>(), a.accumulate);
}

}  // namespace

void head_norm_forward(const HeadNormForward& a) {
    TRIFOLD_ASSERT(a.N == 0 || a.x_NS.elems >= (a.N - 1) * a.stride + a.heads * a.D);
    TRIFOLD_ASSERT(a.saved_NHD.elems >= a.N * a.heads * a.D && a.rstd_NH.elems >= a.N * a.heads);
    with_act(a.x_NS.dtype, [&](auto type) { forward<decltype(type)>(a); });
}

void head_norm_backward(const HeadNormBackward& a) {
    TRIFOLD_ASSERT(a.N == 0 || a.dx_NS.elems >= (a.N - 1) * a.stride + a.heads * a.D);
    TRIFOLD_ASSERT(a.saved_NHD.elems >= a.N * a.heads * a.D && a.rstd_NH.elems >= a.N * a.heads &&
                   a.dweight_D.elems >= a.D);
    with_act(a.dx_NS.dtype, [&](auto type) { backward<decltype(type)>(a); });
}

}  // namespace trifold::cpu
