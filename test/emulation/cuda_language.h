// test/emulation/cuda_language.h   The CUDA language for a C++ compiler: what kernels/cuda/launch.h includes in the emulated build.
//
// Types and bf16 arithmetic come from NVIDIA's own headers, which serve host compilers too. Shared variables become static
// ones in a section of their own, so that they can be filled with NaN before each block. Under the address sanitizer they
// stay plain statics, which it surrounds with red zones (and GCC ignores the section of statics in templates).
#pragma once
#include <cuda_bf16.h>
#include <cuda_runtime_api.h>
#include <vector_functions.h>

#include <cstring>
#include <tuple>
#include <type_traits>

#include "test/emulation/block.h"
#include "test/emulation/intrinsics.h"
#include "test/emulation/race_detector.h"
#include "test/emulation/symbols.h"

#undef __shared__
#undef __launch_bounds__
#undef __forceinline__
#undef __grid_constant__
#define __launch_bounds__(...)
#define __grid_constant__
#define __forceinline__ inline __attribute__((always_inline))
#if defined(__has_feature)
#if __has_feature(address_sanitizer)
#define __SANITIZE_ADDRESS__ 1
#endif
#endif
#if defined(__SANITIZE_ADDRESS__)
#define __shared__ static
#else
#define __shared__ static __attribute__((section("emulation_shared")))
#endif

#define DYNAMIC_SHARED(T, name) T* const name = reinterpret_cast<T*>(::trifold::emulation::block.dynamic_shared)

#define threadIdx (::trifold::emulation::current->index)
#define blockIdx (::trifold::emulation::block.index)
#define blockDim (::trifold::emulation::block.dim)
#define gridDim (::trifold::emulation::block.grid)
constexpr int warpSize = 32;

namespace trifold::emulation {

template <class... P, class... A>
void launch(CUstream_st* stream, dim3 blocks, dim3 threads, size_t shared_bytes, void (*kernel)(P...), A... args) {
    Launch l{function_name(reinterpret_cast<const void*>(kernel)), blocks, threads, shared_bytes, [=] { kernel(args...); }, {}};
    enqueue(stream, std::move(l));
}

// The mask's other lanes exchange values of at most 16 bytes; a lane outside [first, first + width) gives its own back.
template <class T>
T shuffled(const Site& site, unsigned mask, T value, int from, int width) {
    static_assert(std::is_trivially_copyable_v<T> && sizeof(T) <= 16);
    const int lane = current->lane, first = lane & ~(width - 1);
    if (width <= 0 || width > warp_lanes || (width & (width - 1))) die("the width of a shuffle must be a power of two (" + site.text() + ")");
    shuffle(site, mask, &value, sizeof(T), from >= first && from < first + width ? from : lane);
    return value;
}

// One step as far as the emulator goes, since it switches threads only where they wait. The race detector does not see the
// plain accesses but is told of an atomic one.
template <class T, class F>
__attribute__((noinline, no_sanitize("thread"))) T atomically(T* p, F f) {
    static_assert(std::is_integral_v<T>, "floating-point atomics make results depend on timing");
    races::record(*current, p, sizeof(T), races::Kind::atomic, __builtin_return_address(0));
    const T old = *p;
    *p = f(old);
    return old;
}

}  // namespace trifold::emulation

// ---------------------------------------------------------------- barriers

inline void __syncthreads(TRIFOLD_EMULATION_HERE) {
    trifold::emulation::block_barrier(0, TRIFOLD_EMULATION_SITE("__syncthreads"));
}
inline int __syncthreads_count(int predicate, TRIFOLD_EMULATION_HERE) {
    return trifold::emulation::block_barrier(predicate, TRIFOLD_EMULATION_SITE("__syncthreads_count")).votes;
}
inline int __syncthreads_or(int predicate, TRIFOLD_EMULATION_HERE) {
    return trifold::emulation::block_barrier(predicate, TRIFOLD_EMULATION_SITE("__syncthreads_or")).votes > 0;
}
inline int __syncthreads_and(int predicate, TRIFOLD_EMULATION_HERE) {
    const auto [arrived, votes] = trifold::emulation::block_barrier(predicate, TRIFOLD_EMULATION_SITE("__syncthreads_and"));
    return arrived == votes;
}
inline void __syncwarp(unsigned mask = ~0u, TRIFOLD_EMULATION_HERE) {
    trifold::emulation::warp_barrier(TRIFOLD_EMULATION_SITE("__syncwarp"), mask);
}
inline void __threadfence() {}  // one thread runs at a time; the race detector never orders blocks
inline void __threadfence_block() {}

// ---------------------------------------------------------------- warp collectives

template <class T>
T __shfl_sync(unsigned mask, T value, int lane, int width = warpSize, TRIFOLD_EMULATION_HERE) {
    const int from = (trifold::emulation::current->lane & ~(width - 1)) + (lane & (width - 1));
    return trifold::emulation::shuffled(TRIFOLD_EMULATION_SITE("__shfl_sync"), mask, value, from, width);
}
template <class T>
T __shfl_xor_sync(unsigned mask, T value, int bits, int width = warpSize, TRIFOLD_EMULATION_HERE) {
    return trifold::emulation::shuffled(TRIFOLD_EMULATION_SITE("__shfl_xor_sync"), mask, value, trifold::emulation::current->lane ^ bits, width);
}
template <class T>
T __shfl_down_sync(unsigned mask, T value, unsigned by, int width = warpSize, TRIFOLD_EMULATION_HERE) {
    const int from = trifold::emulation::current->lane + static_cast<int>(by);
    return trifold::emulation::shuffled(TRIFOLD_EMULATION_SITE("__shfl_down_sync"), mask, value, from, width);
}
template <class T>
T __shfl_up_sync(unsigned mask, T value, unsigned by, int width = warpSize, TRIFOLD_EMULATION_HERE) {
    const int from = trifold::emulation::current->lane - static_cast<int>(by);
    return trifold::emulation::shuffled(TRIFOLD_EMULATION_SITE("__shfl_up_sync"), mask, value, from, width);
}
inline unsigned __ballot_sync(unsigned mask, int predicate, TRIFOLD_EMULATION_HERE) {
    return trifold::emulation::ballot(TRIFOLD_EMULATION_SITE("__ballot_sync"), mask, predicate != 0);
}
inline int __any_sync(unsigned mask, int predicate, TRIFOLD_EMULATION_HERE) {
    return trifold::emulation::ballot(TRIFOLD_EMULATION_SITE("__any_sync"), mask, predicate != 0) != 0;
}
inline int __all_sync(unsigned mask, int predicate, TRIFOLD_EMULATION_HERE) {
    return trifold::emulation::ballot(TRIFOLD_EMULATION_SITE("__all_sync"), mask, predicate != 0) == mask;
}
template <class T>
unsigned __match_any_sync(unsigned mask, T value, TRIFOLD_EMULATION_HERE) {
    uint64_t bits = 0;
    std::memcpy(&bits, &value, sizeof(T));
    return trifold::emulation::match_any(TRIFOLD_EMULATION_SITE("__match_any_sync"), mask, bits);
}
#define TRIFOLD_EMULATION_REDUCE(name, T, reduction)                                                             \
    inline T name(unsigned mask, T value, TRIFOLD_EMULATION_HERE) {                                              \
        return static_cast<T>(trifold::emulation::reduce(TRIFOLD_EMULATION_SITE(#name), mask, int64_t{value},    \
                                                         trifold::emulation::Reduction::reduction));             \
    }
TRIFOLD_EMULATION_REDUCE(__reduce_add_sync, int, add)
TRIFOLD_EMULATION_REDUCE(__reduce_add_sync, unsigned, add)
TRIFOLD_EMULATION_REDUCE(__reduce_min_sync, int, min)
TRIFOLD_EMULATION_REDUCE(__reduce_min_sync, unsigned, min)
TRIFOLD_EMULATION_REDUCE(__reduce_max_sync, int, max)
TRIFOLD_EMULATION_REDUCE(__reduce_max_sync, unsigned, max)
TRIFOLD_EMULATION_REDUCE(__reduce_and_sync, unsigned, bit_and)
TRIFOLD_EMULATION_REDUCE(__reduce_or_sync, unsigned, bit_or)
TRIFOLD_EMULATION_REDUCE(__reduce_xor_sync, unsigned, bit_xor)
#undef TRIFOLD_EMULATION_REDUCE
unsigned __activemask() = delete;  // which lanes run together is nobody's business but the scheduler's

// ---------------------------------------------------------------- atomics, integers only

#define TRIFOLD_EMULATION_ATOMIC(name, result)                                              \
    template <class T>                                                                      \
    __forceinline__ T name(T* p, std::type_identity_t<T> v) {                                               \
        return trifold::emulation::atomically(p, [v](T old) -> T { return (result); });     \
    }
TRIFOLD_EMULATION_ATOMIC(atomicAdd, old + v)
TRIFOLD_EMULATION_ATOMIC(atomicSub, old - v)
TRIFOLD_EMULATION_ATOMIC(atomicMin, old < v ? old : v)
TRIFOLD_EMULATION_ATOMIC(atomicMax, old > v ? old : v)
TRIFOLD_EMULATION_ATOMIC(atomicAnd, old & v)
TRIFOLD_EMULATION_ATOMIC(atomicOr, old | v)
TRIFOLD_EMULATION_ATOMIC(atomicXor, old ^ v)
TRIFOLD_EMULATION_ATOMIC(atomicExch, (static_cast<void>(old), v))
TRIFOLD_EMULATION_ATOMIC(atomicInc, old >= v ? 0 : old + 1)
#undef TRIFOLD_EMULATION_ATOMIC
template <class T>
__forceinline__ T atomicCAS(T* p, std::type_identity_t<T> expected, std::type_identity_t<T> v) {
    return trifold::emulation::atomically(p, [=](T old) { return old == expected ? v : old; });
}

// ---------------------------------------------------------------- loads and stores with a cache hint

#define TRIFOLD_EMULATION_LOAD(name) \
    template <class T>               \
    T name(const T* p) {             \
        return *p;                   \
    }
#define TRIFOLD_EMULATION_STORE(name)              \
    template <class T>                             \
    void name(T* p, std::type_identity_t<T> v) {   \
        *p = v;                                    \
    }
TRIFOLD_EMULATION_LOAD(__ldg)
TRIFOLD_EMULATION_LOAD(__ldca)
TRIFOLD_EMULATION_LOAD(__ldcg)
TRIFOLD_EMULATION_LOAD(__ldcs)
TRIFOLD_EMULATION_LOAD(__ldlu)
TRIFOLD_EMULATION_LOAD(__ldcv)
TRIFOLD_EMULATION_STORE(__stwb)
TRIFOLD_EMULATION_STORE(__stcg)
TRIFOLD_EMULATION_STORE(__stcs)
TRIFOLD_EMULATION_STORE(__stwt)
#undef TRIFOLD_EMULATION_LOAD
#undef TRIFOLD_EMULATION_STORE
