// kernels/cpu/norm.cpp   LayerNorm and RMSNorm with the residual addition before them.
//
// forward    s = x (+ delta);  y = (s - mean) * rstd * w (+ b),  rstd = 1 / sqrt(mean((s - mean)^2) + eps)
// backward   g = dy * w,  h = (s - mean) * rstd:  dx = dresidual + rstd * (g - mean(g) - h * mean(g * h)),
//            dw = sum over rows of dy * h,  db = sum over rows of dy
// RMSNorm    the same without mean and mean(g)
// Traffic    forward reads x (and delta), writes y (and s); backward reads dy, s (and dresidual), writes dx: each once.
//            The later sweeps over a row find it in the first-level cache. Memory bound.
// Numerics   fp32 in 16 partial sums per row; the variance is taken around the mean, of s as it was stored. dw and db
//            are added per block of rows, then in block order: the same for every number of threads.
// Saves      mean_N and rstd_N.
#include <cmath>

#include "kernels/cpu/parallel.h"

namespace trifold::cpu {
namespace {

using simd::f32x16;
using simd::for_groups;

template <class T>
float mean_of(const T* s, int64_t C) {
    f32x16 total = 0.0f;
    for_groups(C, [&](int64_t i, auto w) TRIFOLD_BODY { total += load(s + i, w); });
    return sum(total) / static_cast<float>(C);
}

// s = x + delta, rounded to the activation type before anything else uses it. Returns its mean.
template <class T>
float add_and_mean(const T* x, const T* delta, T* s, int64_t C) {
    f32x16 total = 0.0f;
    for_groups(C, [&](int64_t i, auto w) TRIFOLD_BODY {
        store(s + i, load(x + i, w) + load(delta + i, w), w);
        total += load(s + i, w);
    });
    return sum(total) / static_cast<float>(C);
}

template <class T>
float mean_square_around(float mean, const T* s, int64_t C) {
    f32x16 total = 0.0f;
    for_groups(C, [&](int64_t i, auto w) TRIFOLD_BODY {
        const f32x16 d = keep(load(s + i, w) - mean, w);
        total += d * d;
    });
    return sum(total) / static_cast<float>(C);
}

template <class T>
void scale_row(const T* s, float mean, float rstd, const T* weight, const T* bias, T* y, int64_t C) {
    if (bias) {
        for_groups(C, [&](int64_t i, auto w) TRIFOLD_BODY {
            store(y + i, (load(s + i, w) - mean) * rstd * load(weight + i, w) + load(bias + i, w), w);
        });
    } else {
        for_groups(C, [&](int64_t i, auto w)
                          TRIFOLD_BODY { store(y + i, (load(s + i, w) - mean) * rstd * load(weight + i, w), w); });
    }
}

template <class T>
void forward(const NormForward& a) {
    const T *x = a.x_NC.as<T>(), *delta = a.delta_NC.as<T>(), *weight = a.weight_C.as<T>(), *bias = a.bias_C.as<T>();
    T *total = a.sum_NC.as<T>(), *y = a.y_NC.as<T>();
    float *means = a.mean_N.as<float>(), *rstds = a.rstd_N.as<float>();
    const int64_t C = a.C;
    const float eps = a.eps;
    const bool centred = a.kind == NormKind::layernorm;
    parallel_rows(a.N, C, [=](int64_t n) {
        const int64_t row = n * C;
        const T* s = (delta ? total : x) + row;
        float mean = delta ? add_and_mean(x + row, delta + row, total + row, C) : centred ? mean_of(s, C) : 0.0f;
        if (!centred) mean = 0.0f;
        const float rstd = 1.0f / std::sqrt(mean_square_around(mean, s, C) + eps);
        scale_row(s, mean, rstd, weight, bias, y + row, C);
        if (centred) means[n] = mean;
        rstds[n] = rstd;
    });
}

// One row of the backward pass.
template <class T>
struct Row {
    const T *dy, *x, *weight, *dresidual;
    T* dx;
    float mean, rstd;
    int64_t C;

    // Adds to dw and (if there is one) db; returns mean(g) and mean(g * h).
    struct Means {
        float g, gh;
    };
    Means reduce(float* dw, float* db) const {
        f32x16 g_total = 0.0f, gh_total = 0.0f;
        for_groups(C, [&](int64_t i, auto w) TRIFOLD_BODY {
            const f32x16 d = load(dy + i, w), g = d * load(weight + i, w), h = (load(x + i, w) - mean) * rstd;
            g_total += g;
            gh_total += g * h;
            store(dw + i, load(dw + i, w) + d * h, w);
            if (db) store(db + i, load(db + i, w) + d, w);
        });
        return {sum(g_total) / static_cast<float>(C), sum(gh_total) / static_cast<float>(C)};
    }
    void write_dx(Means means) const {
        for_groups(C, [&](int64_t i, auto w) TRIFOLD_BODY {
            const f32x16 g = load(dy + i, w) * load(weight + i, w), h = (load(x + i, w) - mean) * rstd;
            f32x16 d = (g - means.g - h * means.gh) * rstd;
            if (dresidual) d += load(dresidual + i, w);
            store(dx + i, d, w);
        });
    }
};

template <class T>
void backward(const NormBackward& a) {
    const bool centred = a.kind == NormKind::layernorm;
    const int64_t C = a.C;
    const float *means = a.mean_N.as<float>(), *rstds = a.rstd_N.as<float>();
    const Row<T> first{
        a.dy_NC.as<T>(), a.x_NC.as<T>(), a.weight_C.as<T>(), a.dresidual_NC.as<T>(), a.dx_NC.as<T>(), 0, 0, C};
    const RowSums sums(a.N, a.dbias_C ? 2 * C : C, a.workspace);
    sums.for_rows([&](int64_t n, float* dw) {
        Row<T> row = first;
        row.dy += n * C, row.x += n * C, row.dx += n * C;
        if (row.dresidual) row.dresidual += n * C;
        row.mean = centred ? means[n] : 0.0f;
        row.rstd = rstds[n];
        auto m = row.reduce(dw, a.dbias_C ? dw + C : nullptr);
        if (!centred) m.g = 0.0f;
        row.write_dx(m);
    });
    sums.finish(0, C, a.dweight_C.as<float>(), a.accumulate);
    if (a.dbias_C) sums.finish(C, C, a.dbias_C.as<float>(), a.accumulate);
}

}  // namespace

void norm_forward(const NormForward& a) {
    TRIFOLD_ASSERT(a.x_NC.elems >= a.N * a.C && a.y_NC.elems >= a.N * a.C && a.rstd_N.elems >= a.N);
    TRIFOLD_ASSERT(!a.delta_NC || a.sum_NC.elems >= a.N * a.C);
    TRIFOLD_ASSERT(a.kind == NormKind::rmsnorm || a.mean_N.elems >= a.N);
    with_act(a.x_NC.dtype, [&](auto type) { forward<decltype(type)>(a); });
}

void norm_backward(const NormBackward& a) {
    TRIFOLD_ASSERT(a.dy_NC.elems >= a.N * a.C && a.x_NC.elems >= a.N * a.C && a.dx_NC.elems >= a.N * a.C);
    TRIFOLD_ASSERT(a.dweight_C.elems >= a.C && (!a.dbias_C || a.dbias_C.elems >= a.C));
    with_act(a.x_NC.dtype, [&](auto type) { backward<decltype(type)>(a); });
}

int64_t norm_backward_workspace(int64_t N, int64_t C) { return RowSums::bytes(N, 2 * C); }

}  // namespace trifold::cpu
