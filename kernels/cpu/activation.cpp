// kernels/cpu/activation.cpp   GELU (tanh and erf form) and SwiGLU.
//
// gelu_tanh  y = x/2 (1 + tanh u) = x * sigmoid(2u),  u = sqrt(2/pi) (x + 0.044715 x^3): the second form has no
//            cancellation for negative x (Hendrycks & Gimpel, arXiv 1606.08415)
// gelu_erf   y = x * Phi(x),  dy/dx = Phi(x) + x * phi(x): one exponential serves both
// swiglu     y = silu(gate) * up,  silu(g) = g * sigmoid(g);  x holds gate, then up, in each row (Shazeer, arXiv
//            2002.05202)
// Traffic    x in, y out; backward x and dy in, dx out. Memory bound in fp32; in bf16 the exponentials weigh as much.
// Saves      nothing but x.
#include "kernels/cpu/parallel.h"

namespace trifold::cpu {
namespace {

using simd::f32x16;
using simd::for_groups;
using simd::Normal;
using simd::Sigmoid;

struct GeluTanh {
    static constexpr float two_root = 1.59576912f;  // 2 sqrt(2/pi)
    // Beyond |x| = 9.6 sigmoid(2u) is within 1e-34 of 0 or 1.
    TRIFOLD_INLINE static f32x16 bounded(const f32x16& x) { return clamp(x, -9.6f, 9.6f); }
    TRIFOLD_INLINE static Sigmoid gate(const f32x16& b) { return sigmoid((b * b * 0.044715f + 1.0f) * b * two_root); }
    TRIFOLD_INLINE static f32x16 value(const f32x16& x) { return x * gate(bounded(x)).value; }
    TRIFOLD_INLINE static f32x16 slope(const f32x16& x) {
        const f32x16 b = bounded(x), du = (b * b * (3 * 0.044715f) + 1.0f) * two_root;
        const Sigmoid s = gate(b);
        return s.value + b * s.value * s.complement * du;
    }
};

struct GeluErf {
    TRIFOLD_INLINE static f32x16 value(const f32x16& x) { return x * normal(x).integral; }
    TRIFOLD_INLINE static f32x16 slope(const f32x16& x) {
        const Normal p = normal(x);
        return p.integral + clamp(x, -13.0f, 13.0f) * p.density;
    }
};

template <class Gelu, class T>
void gelu_forward(const ActivationForward& a) {
    const T* x = a.x_NF.as<T>();
    T* y = a.y_NF.as<T>();
    parallel_elems(a.N * a.F, [=](int64_t begin, int64_t end) {
        for_groups(end - begin, [&](int64_t i, auto w)
                                    TRIFOLD_BODY { store(y + begin + i, Gelu::value(load(x + begin + i, w)), w); });
    });
}

template <class Gelu, class T>
void gelu_backward(const ActivationBackward& a) {
    const T *x = a.x_NF.as<T>(), *dy = a.dy_NF.as<T>();
    T* dx = a.dx_NF.as<T>();
    parallel_elems(a.N * a.F, [=](int64_t begin, int64_t end) {
        for_groups(end - begin, [&](int64_t i, auto w) TRIFOLD_BODY {
            store(dx + begin + i, load(dy + begin + i, w) * Gelu::slope(load(x + begin + i, w)), w);
        });
    });
}

// Beyond |g| = 80 the sigmoid is within 2e-35 of 0 or 1.
TRIFOLD_INLINE Sigmoid silu_gate(const f32x16& g) { return sigmoid(clamp(g, -80.0f, 80.0f)); }

template <class T>
void swiglu_forward(const ActivationForward& a) {
    const int64_t F = a.F;
    parallel_rows(a.N, 2 * F, [&](int64_t n) {
        const T *gate = a.x_NF.as<T>() + n * 2 * F, *up = gate + F;
        T* y = a.y_NF.as<T>() + n * F;
        for_groups(F, [&](int64_t i, auto w) TRIFOLD_BODY {
            const f32x16 g = load(gate + i, w);
            store(y + i, g * silu_gate(g).value * load(up + i, w), w);
        });
    });
}

// silu'(g) = s (1 + g (1 - s)) with s = sigmoid(g)
template <class T>
void swiglu_backward(const ActivationBackward& a) {
    const int64_t F = a.F;
    parallel_rows(a.N, 2 * F, [&](int64_t n) {
        const T *gate = a.x_NF.as<T>() + n * 2 * F, *up = gate + F, *dy = a.dy_NF.as<T>() + n * F;
        T *dgate = a.dx_NF.as<T>() + n * 2 * F, *dup = dgate + F;
        for_groups(F, [&](int64_t i, auto w) TRIFOLD_BODY {
            const f32x16 g = load(gate + i, w), u = load(up + i, w), d = load(dy + i, w);
            const Sigmoid s = silu_gate(g);
            store(dgate + i, d * u * s.value * (g * s.complement + 1.0f), w);
            store(dup + i, d * g * s.value, w);
        });
    });
}

int64_t columns(ActivationKind kind, int64_t F) { return kind == ActivationKind::swiglu ? 2 * F : F; }

}  // namespace

void activation_forward(const ActivationForward& a) {
    TRIFOLD_ASSERT(a.x_NF.elems >= a.N * columns(a.kind, a.F) && a.y_NF.elems >= a.N * a.F);
    with_act(a.x_NF.dtype, [&](auto type) {
        using T = decltype(type);
        switch (a.kind) {
            case ActivationKind::gelu_tanh:
                return gelu_forward<GeluTanh, T>(a);
            case ActivationKind::gelu_erf:
                return gelu_forward<GeluErf, T>(a);
            case ActivationKind::swiglu:
                return swiglu_forward<T>(a);
        }
    });
}

void activation_backward(const ActivationBackward& a) {
    TRIFOLD_ASSERT(a.x_NF.elems >= a.N * columns(a.kind, a.F) && a.dx_NF.elems >= a.N * columns(a.kind, a.F));
    TRIFOLD_ASSERT(a.dy_NF.elems >= a.N * a.F);
    with_act(a.x_NF.dtype, [&](auto type) {
        using T = decltype(type);
        switch (a.kind) {
            case ActivationKind::gelu_tanh:
                return gelu_backward<GeluTanh, T>(a);
            case ActivationKind::gelu_erf:
                return gelu_backward<GeluErf, T>(a);
            case ActivationKind::swiglu:
                return swiglu_backward<T>(a);
        }
    });
}

}  // namespace trifold::cpu
