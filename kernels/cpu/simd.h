// kernels/cpu/simd.h   Sixteen lanes: what the memory-bound CPU operations share.
//
// Width      always 16 lanes, held in as many registers as the instruction set needs (one of AVX-512, two of AVX2, four
//            of SSE or NEON). So the order of every sum is a property of the source, not of the compiler's flags or of
//            the threads. All files that include this one must be compiled for the same instruction set.
// Tails      a group of fewer than 16 elements takes the same arithmetic in the same lanes; the others are ignored.
//            Where a run of elements is cut therefore never changes a value that is computed element by element.
// Functions  no libm. Bounds below are relative errors, 1 ulp = 2^-23; a NaN in any lane stays a NaN.
#pragma once
#if defined(__AVX512F__)
#include <immintrin.h>
#endif

#include <cstdint>
#include <cstring>

#include "kernels/normal_tail.h"
#include "kernels/tensor.h"

#define TRIFOLD_INLINE [[gnu::always_inline]] inline
// Goes behind the parameters of a lambda given to for_groups: a loop body that is called keeps its sums in memory.
#define TRIFOLD_BODY __attribute__((always_inline))

namespace trifold::simd {

inline constexpr int64_t lanes = 16;
#if defined(__AVX512F__)
inline constexpr int register_bytes = 64;
#elif defined(__AVX2__)
inline constexpr int register_bytes = 32;
#else
inline constexpr int register_bytes = 16;
#endif

// Sixteen values of type T. Comparisons give all ones or all zeros per lane.
template <class T>
struct Lanes {
    static constexpr int parts = static_cast<int>(lanes * sizeof(T)) / register_bytes;
    using Register [[gnu::vector_size(register_bytes)]] = T;
    Register part[parts];

    Lanes() = default;
    TRIFOLD_INLINE Lanes(Register r) requires(parts == 1) : part{r} {}  // NOLINT: implicit on purpose, for intrinsics
    TRIFOLD_INLINE Lanes(T value) {  // NOLINT: implicit on purpose, so that constants can stand in formulas
        for (Register& r : part) r = value - Register{};
    }
    // Applies f to the registers of the arguments; their types may differ, the number of registers may not. The cast
    // between vector types keeps the bits.
    template <class F, class... Args>
    TRIFOLD_INLINE static Lanes map(F f, const Args&... args) {
        Lanes out;
        for (int p = 0; p < parts; ++p) out.part[p] = (Register)f(args.part[p]...);
        return out;
    }
#define TRIFOLD_LANEWISE(Result, op)                                             \
    TRIFOLD_INLINE friend Result operator op(const Lanes& a, const Lanes& b) {   \
        return Result::map([](Register x, Register y) { return x op y; }, a, b); \
    }
    TRIFOLD_LANEWISE(Lanes, +)
    TRIFOLD_LANEWISE(Lanes, -)
    TRIFOLD_LANEWISE(Lanes, *)
    TRIFOLD_LANEWISE(Lanes, /)
    TRIFOLD_LANEWISE(Lanes, &)
    TRIFOLD_LANEWISE(Lanes, |)
    TRIFOLD_LANEWISE(Lanes<int32_t>, <)
    TRIFOLD_LANEWISE(Lanes<int32_t>, >)
    TRIFOLD_LANEWISE(Lanes<int32_t>, ==)
#undef TRIFOLD_LANEWISE
    TRIFOLD_INLINE friend Lanes operator<<(const Lanes& a, int n) {
        return map([n](Register x) { return x << n; }, a);
    }
    TRIFOLD_INLINE friend Lanes operator>>(const Lanes& a, int n) {
        return map([n](Register x) { return x >> n; }, a);
    }
    TRIFOLD_INLINE Lanes operator-() const {
        return map([](Register x) { return -x; }, *this);
    }
    TRIFOLD_INLINE Lanes& operator+=(const Lanes& b) { return *this = *this + b; }
};
using f32x16 = Lanes<float>;
using f64x16 = Lanes<double>;
using u32x16 = Lanes<uint32_t>;
using Mask = Lanes<int32_t>;

TRIFOLD_INLINE u32x16 bits_of(const f32x16& v) {
    return u32x16::map([](auto x) { return x; }, v);
}
TRIFOLD_INLINE f32x16 from_bits(const u32x16& v) {
    return f32x16::map([](auto x) { return x; }, v);
}
template <class T>
TRIFOLD_INLINE Lanes<T> select(const Mask& mask, const Lanes<T>& yes, const Lanes<T>& no) {
    return Lanes<T>::map([](auto m, auto y, auto n) { return m ? y : n; }, mask, yes, no);
}

// ---------------------------------------------------------------- groups of elements

// How many lanes of a group are elements: all of them, or the first `count`.
struct Full {};
struct Part {
    int64_t count;
};

// Calls body(i, width) for elements [i, i + 16), and once with a Part for what is left of [0, n).
template <class Body>
TRIFOLD_INLINE void for_groups(int64_t n, Body&& body) {
    int64_t i = 0;
    for (; i + lanes <= n; i += lanes) body(i, Full{});
    if (i < n) body(i, Part{n - i});
}

// Register by register: GCC takes a copy of the whole through the stack.
TRIFOLD_INLINE f32x16 load(const float* p, Full) {
    f32x16 v;
    for (int i = 0; i < f32x16::parts; ++i) std::memcpy(&v.part[i], p + i * (register_bytes / 4), register_bytes);
    return v;
}
TRIFOLD_INLINE void store(float* p, const f32x16& v, Full) {
    for (int i = 0; i < f32x16::parts; ++i) std::memcpy(p + i * (register_bytes / 4), &v.part[i], register_bytes);
}

// Sixteen bf16 to and from the upper halves of 32-bit lanes; the lower halves come as zero and are cut off. Three
// forms, because GCC 12 makes detours of each one where it does not fit (and its unmasked intrinsics warn for no
// reason).
using Eight16 [[gnu::vector_size(16)]] = uint16_t;
TRIFOLD_INLINE u32x16 load_upper(const bf16* p) {
    u32x16 v;
#if defined(__AVX512F__)
    v = (u32x16::Register)_mm512_maskz_cvtepu16_epi32(0xffff,
                                                      _mm256_loadu_si256(reinterpret_cast<const __m256i_u*>(p)));
    return v << 16;
#else
    for (int i = 0; i < 2; ++i) {
        Eight16 h;
        std::memcpy(&h, p + 8 * i, sizeof h);
#if defined(__AVX2__)
        v.part[i] = __builtin_convertvector(h, u32x16::Register) << 16;
#else
        v.part[2 * i] = (u32x16::Register)__builtin_shufflevector(Eight16{}, h, 0, 8, 1, 9, 2, 10, 3, 11);
        v.part[2 * i + 1] = (u32x16::Register)__builtin_shufflevector(Eight16{}, h, 0, 12, 1, 13, 2, 14, 3, 15);
#endif
    }
    return v;
#endif
}
TRIFOLD_INLINE void store_upper(bf16* p, const u32x16& v) {
#if defined(__AVX512F__)
    const u32x16 lower = v >> 16;
    _mm256_storeu_si256(reinterpret_cast<__m256i_u*>(p), _mm512_maskz_cvtepi32_epi16(0xffff, (__m512i)lower.part[0]));
#else
    Eight16 pairs[4];
    for (int i = 0; i < u32x16::parts; ++i) std::memcpy(&pairs[i * register_bytes / 16], &v.part[i], register_bytes);
    for (int i = 0; i < 2; ++i) {
        const Eight16 h = __builtin_shufflevector(pairs[2 * i], pairs[2 * i + 1], 1, 3, 5, 7, 9, 11, 13, 15);
        std::memcpy(p + 8 * i, &h, sizeof h);
    }
#endif
}
TRIFOLD_INLINE f32x16 load(const bf16* p, Full) { return from_bits(load_upper(p)); }
// The same rounding as bf16(float), lane by lane.
TRIFOLD_INLINE void store(bf16* p, const f32x16& v, Full) {
    const u32x16 u = bits_of(v);
    const u32x16 rounded = u + 0x7fffu + ((u >> 16) & 1u);
    const u32x16 quiet_nan = u | 0x00400000u;
    store_upper(p, select(v == v, rounded, quiet_nan));
}

// The first `count` lanes; the others are zero.
template <class T>
TRIFOLD_INLINE f32x16 load(const T* p, Part part) {
    T group[lanes] = {};
    std::memcpy(group, p, static_cast<size_t>(part.count) * sizeof(T));
    return load(group, Full{});
}
template <class T>
TRIFOLD_INLINE void store(T* p, const f32x16& v, Part part) {
    T group[lanes];
    store(group, v, Full{});
    std::memcpy(p, group, static_cast<size_t>(part.count) * sizeof(T));
}

// `fill` in the lanes that are no elements.
TRIFOLD_INLINE f32x16 keep(const f32x16& v, Full, float = 0) { return v; }
TRIFOLD_INLINE f32x16 keep(const f32x16& v, Part part, float fill = 0) {
    float group[lanes];
    for (int64_t i = 0; i < lanes; ++i) group[i] = fill;
    std::memcpy(group, &v, static_cast<size_t>(part.count) * sizeof(float));
    return load(group, Full{});
}
TRIFOLD_INLINE f64x16 widen(const f32x16& v) {
    using Half [[gnu::vector_size(register_bytes / 2)]] = float;
    Half h[f64x16::parts];
    std::memcpy(h, &v, sizeof v);
    f64x16 out;
    for (int i = 0; i < f64x16::parts; ++i) out.part[i] = __builtin_convertvector(h[i], f64x16::Register);
    return out;
}

// ---------------------------------------------------------------- over lanes

// Halves are folded onto each other: lane i and i + 8, then i and i + 4, ...
template <int half, class T, class Fold>
TRIFOLD_INLINE T fold(const T* v, Fold f) {
    if constexpr (half == 0) {
        return v[0];
    } else {
        T folded[half];
        for (int i = 0; i < half; ++i) folded[i] = f(v[i], v[i + half]);
        return fold<half / 2>(folded, f);
    }
}
template <class T, class Fold>
TRIFOLD_INLINE T fold(const Lanes<T>& v, Fold f) {
    T all[lanes];
    std::memcpy(all, &v, sizeof all);
    return fold<lanes / 2>(all, f);
}
template <class T>
TRIFOLD_INLINE T sum(const Lanes<T>& v) {
    return fold(v, [](T a, T b) { return a + b; });
}
// NaN lanes are passed over: for places where a NaN shows up elsewhere.
TRIFOLD_INLINE f32x16 max(const f32x16& a, const f32x16& b) { return select(a > b, a, b); }
TRIFOLD_INLINE float max(const f32x16& v) {
    return fold(v, [](float a, float b) { return a > b ? a : b; });
}
// Keeps a NaN.
TRIFOLD_INLINE f32x16 clamp(const f32x16& v, float low, float high) {
    const f32x16 above = select(f32x16(low) > v, f32x16(low), v);
    return select(f32x16(high) < above, f32x16(high), above);
}
TRIFOLD_INLINE f32x16 abs(const f32x16& v) { return from_bits(bits_of(v) & 0x7fffffffu); }
TRIFOLD_INLINE f32x16 sqrt(const f32x16& v) {
    return f32x16::map(
        [](f32x16::Register x) {
            for (size_t i = 0; i < sizeof x / sizeof x[0]; ++i) x[i] = __builtin_sqrtf(x[i]);
            return x;
        },
        v);
}

// ---------------------------------------------------------------- functions

// e^x for -87 <= x <= 88, within 1 ulp. x = k ln 2 + r with |r| <= ln 2 / 2: the degree-6 polynomial (Chebyshev
// interpolation, error 1.1e-8) gives e^r. Adding 1.5 * 2^23 rounds to an integer and leaves it in the low bits.
TRIFOLD_INLINE f32x16 exp_in_range(const f32x16& x) {
    constexpr float shift = 12582912.0f;
    const f32x16 shifted = x * 1.44269504f + shift;
    const f32x16 k = shifted - shift;
    const f32x16 r = (x - k * 0.693145752f) - k * 1.42860677e-6f;
    f32x16 q = r * 0.00139262131f + 0.00836320315f;
    q = q * r + 0.0416665561f;
    q = q * r + 0.166665763f;
    q = q * r + 0.5f;
    q = q * r + 1.0f;
    q = q * r + 1.0f;
#if defined(__AVX512F__)
    return {_mm512_maskz_scalef_ps(0xffff, q.part[0], k.part[0])};
#else
    return q * from_bits((bits_of(shifted) << 23) + 0x3f800000u);  // k in the exponent field
#endif
}

// e^x for x <= 88; 0 below -87.
TRIFOLD_INLINE f32x16 exp(const f32x16& x) { return select(x < -87.0f, f32x16(0.0f), exp_in_range(x)); }

// 1 / (1 + e^-z) and its complement for |z| <= 80, both within 3 ulp.
struct Sigmoid {
    f32x16 value, complement;
};
TRIFOLD_INLINE Sigmoid sigmoid(const f32x16& z) {
    const f32x16 e = exp_in_range(-z), value = f32x16(1.0f) / (e + 1.0f);
    return {value, e * value};
}

// The standard normal distribution: its integral (1 + erf(x / sqrt 2)) / 2 and its density, within (4 + x^2 / 2) ulp
// for |x| <= 13; beyond that as at +-13 (1e-38 from 0 or 1).
struct Normal {
    f32x16 integral, density;
};
TRIFOLD_INLINE Normal normal(const f32x16& unbounded) {
    const f32x16 x = clamp(unbounded, -13.0f, 13.0f);
    const f32x16 e = exp_in_range(x * x * -0.5f);
    const f32x16 t = f32x16(1.0f) / (abs(x) * 0.3f + 1.0f);
    const f32x16 tail = e * normal_tail(t);
    return {select(x < 0.0f, tail, f32x16(1.0f) - tail), e * 0.398942280f};
}

}  // namespace trifold::simd
