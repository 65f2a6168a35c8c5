// kernels/cuda/activation.cu   GELU (tanh and erf form) and SwiGLU.
//
// gelu_tanh  y = x/2 (1 + tanh u) = x * sigmoid(2u),  u = sqrt(2/pi) (x + 0.044715 x^3): the second form has no
//            cancellation for negative x (Hendrycks & Gimpel, arXiv 1606.08415)
// gelu_erf   y = x * Phi(x),  dy/dx = Phi(x) + x * phi(x): one exponential serves both
// swiglu     y = silu(gate) * up,  silu(g) = g * sigmoid(g);  x holds gate, then up, in each row (Shazeer, arXiv
//            2002.05202)
// Traffic    x in, y out; backward x and dy in, dx out. Memory bound.
// Numerics   fp32, rounded once; the functions are those of kernels/cpu/activation.cpp, within a few ulp.
// Saves      nothing but x.
#include "kernels/cuda/strips.cuh"
#include "kernels/normal_tail.h"
#include "kernels/ops.h"

namespace trifold::cuda {
namespace {

// Keeps a NaN, as fminf and fmaxf would not.
__device__ __forceinline__ float clamped(float v, float limit) { return v < -limit ? -limit : v > limit ? limit : v; }

// 1 / (1 + e^-z) and its complement for |z| <= 80.
struct Sigmoid {
    float value, complement;
    __device__ __forceinline__ explicit Sigmoid(float z) {
        const float e = expf(-z);
        value = __fdividef(1.0f, e + 1.0f);
        complement = e * value;
    }
};

struct GeluTanh {
    static constexpr float two_root = 1.59576912f;  // 2 sqrt(2/pi)
    // Beyond |x| = 9.6 sigmoid(2u) is within 1e-34 of 0 or 1.
    __device__ __forceinline__ static float bounded(float x) { return clamped(x, 9.6f); }
    __device__ __forceinline__ static Sigmoid gate(float b) {
        return Sigmoid((b * b * 0.044715f + 1.0f) * b * two_root);
    }
    __device__ __forceinline__ static float value(float x) { return x * gate(bounded(x)).value; }
    __device__ __forceinline__ static float slope(float x) {
        const float b = bounded(x), du = (b * b * (3 * 0.044715f) + 1.0f) * two_root;
        const Sigmoid s = gate(b);
        return s.value + b * s.value * s.complement * du;
    }
};

// The standard normal distribution (normal_tail.h).
struct Normal {
    float integral, density;
    __device__ __forceinline__ explicit Normal(float x) {
        const float e = expf(x * x * -0.5f);
        const float t = __fdividef(1.0f, fabsf(x) * 0.3f + 1.0f);
        const float tail = e * normal_tail(t);
        integral = x < 0.0f ? tail : 1.0f - tail;
        density = e * 0.398942280f;
    }
};

struct GeluErf {
    __device__ __forceinline__ static float bounded(float x) { return clamped(x, 13.0f); }
    __device__ __forceinline__ static float value(float x) { return x * Normal(bounded(x)).integral; }
    __device__ __forceinline__ static float slope(float x) {
        const float b = bounded(x);
        const Normal p(b);
        return p.integral + b * p.density;
    }
};

// Beyond |g| = 80 the sigmoid is within 2e-35 of 0 or 1.
__device__ __forceinline__ Sigmoid silu_gate(float g) { return Sigmoid(clamped(g, 80.0f)); }

// ---------------------------------------------------------------- GELU: one long row

template <class Gelu, class T, int V>
__global__ void __launch_bounds__(32 * strip_warps) gelu_forward(const ActivationForward a) {
    const Strip<V> strip(Matrix{1, a.N * a.F});
    Pack<T, V> x[strip_packs];
    load_strip(x, elements<const T>(a.x_NF), strip);
#pragma unroll
    for (int i = 0; i < strip_packs; ++i) {
        if (!strip.has(i)) continue;
        Floats<V> y = to_floats(x[i]);
#pragma unroll
        for (int j = 0; j < V; ++j) y[j] = Gelu::value(y[j]);
        store(elements<T>(a.y_NF) + strip.column(i), y);
    }
}

template <class Gelu, class T, int V>
__global__ void __launch_bounds__(32 * strip_warps) gelu_backward(const ActivationBackward a) {
    const Strip<V> strip(Matrix{1, a.N * a.F});
    Pack<T, V> x[strip_packs], dy[strip_packs];
    load_strip(x, elements<const T>(a.x_NF), strip);
    load_strip(dy, elements<const T>(a.dy_NF), strip);
#pragma unroll
    for (int i = 0; i < strip_packs; ++i) {
        if (!strip.has(i)) continue;
        const Floats<V> at = to_floats(x[i]);
        Floats<V> dx = to_floats(dy[i]);
#pragma unroll
        for (int j = 0; j < V; ++j) dx[j] *= Gelu::slope(at[j]);
        store(elements<T>(a.dx_NF) + strip.column(i), dx);
    }
}

// ---------------------------------------------------------------- SwiGLU: gate and up lie F apart

template <class T, int V>
__global__ void __launch_bounds__(32 * strip_warps) swiglu_forward(const ActivationForward a) {
    const Strip<V> strip(Matrix{a.N, a.F});
    const T* const gate_row = elements<const T>(a.x_NF) + strip.row * 2 * a.F;
    Pack<T, V> gate[strip_packs], up[strip_packs];
    load_strip(gate, gate_row, strip);
    load_strip(up, gate_row + a.F, strip);
#pragma unroll
    for (int i = 0; i < strip_packs; ++i) {
        if (!strip.has(i)) continue;
        const Floats<V> g = to_floats(gate[i]);
        Floats<V> y = to_floats(up[i]);
#pragma unroll
        for (int j = 0; j < V; ++j) y[j] *= g[j] * silu_gate(g[j]).value;
        store(elements<T>(a.y_NF) + strip.row * a.F + strip.column(i), y);
    }
}

// silu'(g) = s (1 + g (1 - s)) with s = sigmoid(g)
template <class T, int V>
__global__ void __launch_bounds__(32 * strip_warps) swiglu_backward(const ActivationBackward a) {
    const Strip<V> strip(Matrix{a.N, a.F});
    const int64_t gate_row = strip.row * 2 * a.F;
    Pack<T, V> gate[strip_packs], up[strip_packs], dy[strip_packs];
    load_strip(gate, elements<const T>(a.x_NF) + gate_row, strip);
    load_strip(up, elements<const T>(a.x_NF) + gate_row + a.F, strip);
    load_strip(dy, elements<const T>(a.dy_NF) + strip.row * a.F, strip);
#pragma unroll
    for (int i = 0; i < strip_packs; ++i) {
        if (!strip.has(i)) continue;
        const Floats<V> g = to_floats(gate[i]), u = to_floats(up[i]), d = to_floats(dy[i]);
        Floats<V> dgate, dup;
#pragma unroll
        for (int j = 0; j < V; ++j) {
            const Sigmoid s = silu_gate(g[j]);
            dgate[j] = d[j] * u[j] * s.value * (g[j] * s.complement + 1.0f);
            dup[j] = d[j] * g[j] * s.value;
        }
        T* const dx = elements<T>(a.dx_NF) + gate_row + strip.column(i);
        store(dx, dgate);
        store(dx + a.F, dup);
    }
}

int64_t columns(ActivationKind kind, int64_t F) { return kind == ActivationKind::swiglu ? 2 * F : F; }

}  // namespace

// ---------------------------------------------------------------- launches

void activation_forward(cudaStream_t stream, const ActivationForward& a) {
    TRIFOLD_ASSERT(a.x_NF.elems >= a.N * columns(a.kind, a.F) && a.y_NF.elems >= a.N * a.F);
    if (a.N == 0) return;
    const bool rows = a.kind == ActivationKind::swiglu;
    const Matrix matrix = rows ? Matrix{a.N, a.F} : Matrix{1, a.N * a.F};
    with_element(a.x_NF.dtype, [&](auto element) {
        using T = decltype(element);
        with_width<pack_elems<T>>(packs_fit<pack_elems<T>>(matrix.columns, a.x_NF, a.y_NF), [&](auto V) {
            const Grid grid = strip_grid<V>(matrix);
            switch (a.kind) {
                case ActivationKind::gelu_tanh:
                    return launch(stream, grid, gelu_forward<GeluTanh, T, V>, a);
                case ActivationKind::gelu_erf:
                    return launch(stream, grid, gelu_forward<GeluErf, T, V>, a);
                case ActivationKind::swiglu:
                    return launch(stream, grid, swiglu_forward<T, V>, a);
            }
        });
    });
}

void activation_backward(cudaStream_t stream, const ActivationBackward& a) {
    TRIFOLD_ASSERT(a.x_NF.elems >= a.N * columns(a.kind, a.F) && a.dx_NF.elems >= a.N * columns(a.kind, a.F));
    TRIFOLD_ASSERT(a.dy_NF.elems >= a.N * a.F);
    if (a.N == 0) return;
    const bool rows = a.kind == ActivationKind::swiglu;
    const Matrix matrix = rows ? Matrix{a.N, a.F} : Matrix{1, a.N * a.F};
    with_element(a.x_NF.dtype, [&](auto element) {
        using T = decltype(element);
        with_width<pack_elems<T>>(packs_fit<pack_elems<T>>(matrix.columns, a.x_NF, a.dy_NF, a.dx_NF), [&](auto V) {
            const Grid grid = strip_grid<V>(matrix);
            switch (a.kind) {
                case ActivationKind::gelu_tanh:
                    return launch(stream, grid, gelu_backward<GeluTanh, T, V>, a);
                case ActivationKind::gelu_erf:
                    return launch(stream, grid, gelu_backward<GeluErf, T, V>, a);
                case ActivationKind::swiglu:
                    return launch(stream, grid, swiglu_backward<T, V>, a);
            }
        });
    });
}

}  // namespace trifold::cuda
