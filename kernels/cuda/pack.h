// kernels/cuda/pack.h   Neighbouring elements as one access of up to 16 bytes, and their fp32 values.
//
// Pack<T, N>      N elements as they lie in memory (T is float or __nv_bfloat16), aligned to min(16, N * sizeof(T))
//                 bytes: one access, or several of 16 bytes. pack_elems<T> of them make exactly 16 bytes.
// Floats<N>       the same elements in fp32, in registers. Every index must be known at compile time (unrolled loops).
// load, store     the usual cache policy; load_streaming and store_streaming for data that nobody reads again soon
// Numerics        to bf16: round to nearest even; NaN stays NaN.
#pragma once
#include <cuda_bf16.h>

#include <cstdint>

#include "kernels/cuda/launch.h"
#include "kernels/tensor.h"

namespace trifold::cuda {

template <class T>
inline constexpr int pack_elems = 16 / static_cast<int>(sizeof(T));

template <int N>
struct Floats {
    float at[N];
    __device__ __forceinline__ float& operator[](int i) { return at[i]; }
    __device__ __forceinline__ float operator[](int i) const { return at[i]; }
    __device__ __forceinline__ Floats operator+(const Floats& b) const {
        Floats sum;
#pragma unroll
        for (int i = 0; i < N; ++i) sum.at[i] = at[i] + b.at[i];
        return sum;
    }
};

template <int bytes>
struct AccessOf;
template <>
struct AccessOf<16> {
    using Type = uint4;
};
template <>
struct AccessOf<8> {
    using Type = uint2;
};
template <>
struct AccessOf<4> {
    using Type = unsigned;
};
template <>
struct AccessOf<2> {
    using Type = unsigned short;
};

template <class T, int N>
struct Pack {
    static constexpr int bytes = N * static_cast<int>(sizeof(T));
    static constexpr int access_bytes = bytes < 16 ? bytes : 16;
    static constexpr int accesses = bytes / access_bytes;
    using Access = typename AccessOf<access_bytes>::Type;
    Access raw[accesses];
};

// ---------------------------------------------------------------- memory

template <int N, class T>
__device__ __forceinline__ Pack<T, N> load_pack(const T* p) {
    Pack<T, N> pack;
#pragma unroll
    for (int i = 0; i < pack.accesses; ++i) pack.raw[i] = reinterpret_cast<const typename Pack<T, N>::Access*>(p)[i];
    return pack;
}
template <int N, class T>
__device__ __forceinline__ Pack<T, N> load_pack_streaming(const T* p) {
    Pack<T, N> pack;
#pragma unroll
    for (int i = 0; i < pack.accesses; ++i)
        pack.raw[i] = __ldcs(reinterpret_cast<const typename Pack<T, N>::Access*>(p) + i);
    return pack;
}
template <int N, class T>
__device__ __forceinline__ void store_pack(T* p, const Pack<T, N>& pack) {
#pragma unroll
    for (int i = 0; i < pack.accesses; ++i) reinterpret_cast<typename Pack<T, N>::Access*>(p)[i] = pack.raw[i];
}
template <int N, class T>
__device__ __forceinline__ void store_pack_streaming(T* p, const Pack<T, N>& pack) {
#pragma unroll
    for (int i = 0; i < pack.accesses; ++i) __stcs(reinterpret_cast<typename Pack<T, N>::Access*>(p) + i, pack.raw[i]);
}

// ---------------------------------------------------------------- to and from fp32

template <int N>
__device__ __forceinline__ Floats<N> to_floats(const Pack<float, N>& pack) {
    return __builtin_bit_cast(Floats<N>, pack);
}
// A bf16 is the upper half of its fp32.
template <int N>
__device__ __forceinline__ Floats<N> to_floats(const Pack<__nv_bfloat16, N>& pack) {
    Floats<N> f;
    if constexpr (N == 1) {
        f[0] = __builtin_bit_cast(float, static_cast<uint32_t>(pack.raw[0]) << 16);
    } else {
        struct Words {
            uint32_t at[N / 2];
        };
        const Words words = __builtin_bit_cast(Words, pack);
#pragma unroll
        for (int i = 0; i < N; i += 2) {
            f[i] = __builtin_bit_cast(float, words.at[i / 2] << 16);
            f[i + 1] = __builtin_bit_cast(float, words.at[i / 2] & 0xffff0000u);
        }
    }
    return f;
}

template <class T, int N>
__device__ __forceinline__ Pack<T, N> to_pack(const Floats<N>& f) {
    if constexpr (sizeof(T) == 4) {
        return __builtin_bit_cast(Pack<float, N>, f);
    } else if constexpr (N == 1) {
        return {{__bfloat16_as_ushort(__float2bfloat16_rn(f[0]))}};
    } else {
        struct Words {
            uint32_t at[N / 2];
        } words;
#pragma unroll
        for (int i = 0; i < N; i += 2) {
            const __nv_bfloat162_raw pair = __floats2bfloat162_rn(f[i], f[i + 1]);
            words.at[i / 2] = static_cast<uint32_t>(pair.y) << 16 | pair.x;
        }
        return __builtin_bit_cast(Pack<__nv_bfloat16, N>, words);
    }
}

template <int N, class T>
__device__ __forceinline__ Floats<N> load(const T* p) {
    return to_floats(load_pack<N>(p));
}
template <int N, class T>
__device__ __forceinline__ Floats<N> load_streaming(const T* p) {
    return to_floats(load_pack_streaming<N>(p));
}
template <int N, class T>
__device__ __forceinline__ void store(T* p, const Floats<N>& f) {
    store_pack(p, to_pack<T>(f));
}
template <int N, class T>
__device__ __forceinline__ void store_streaming(T* p, const Floats<N>& f) {
    store_pack_streaming(p, to_pack<T>(f));
}

// ---------------------------------------------------------------- from views to elements

// The memory of a view; null when it is empty.
template <class T>
__host__ __device__ __forceinline__ T* elements(const Tensor& t) {
    return static_cast<T*>(t.data);
}

// Host: calls body with a value of the element type that stands for an activation type in kernels.
template <class Body>
void with_element(DType type, const Body& body) {
    TRIFOLD_ASSERT(type == DType::f32 || type == DType::bf16);
    if (type == DType::f32)
        body(float{});
    else
        body(__nv_bfloat16{});
}

// A number of elements as a type, so that generic lambdas can take it.
template <int N>
struct Width {
    __host__ __device__ constexpr operator int() const { return N; }
};

// Host: calls body with the number of elements per access: N if all rows are whole packs of N, else 1.
template <int N, class Body>
void with_width(bool packs_fit, const Body& body) {
    if (packs_fit)
        body(Width<N>{});
    else
        body(Width<1>{});
}

// Host: whether rows of `row_elems` elements are whole packs of N, aligned, in all of these views (empty ones always
// are).
template <int N, class... Views>
bool packs_fit(int64_t row_elems, const Views&... views) {
    const auto aligned = [&](const Tensor& t) {
        const int64_t bytes = N * size_of(t.dtype);
        return reinterpret_cast<uintptr_t>(t.data) % static_cast<uintptr_t>(bytes < 16 ? bytes : 16) == 0;
    };
    return row_elems % N == 0 && (aligned(views) && ...);
}

}  // namespace trifold::cuda
