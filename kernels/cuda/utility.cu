// kernels/cuda/utility.cu   Addition and conversion, copies, zeroing, and a sum in double.
//
// Traffic    add_into: x (and y) in, y out. sum_parts: all parts in, y out. extend_cache: new rows in and out. Memory bound.
// Numerics   add_into, sum_parts: fp32, rounded once. sum: one block; thread t adds elements t, t + 1024, ..., then the block as
//            in reduce.cuh: an order that depends on the size alone. It is meant for the losses of one step, some 10^5
//            elements.
#include <algorithm>

#include "kernels/cuda/reduce.cuh"
#include "kernels/cuda/strips.cuh"
#include "kernels/ops.h"

namespace trifold::cuda {
namespace {

template <class X, class Y, int V>
__global__ void __launch_bounds__(32 * strip_warps) add_kernel(const AddInto a) {
    const Strip<V> strip(Matrix{1, a.x.elems});
    const bool add = a.accumulate == Accumulate::add;
    Y* const y = elements<Y>(a.y);
    Pack<X, V> xs[strip_packs];
    Pack<Y, V> ys[strip_packs] = {};
    load_strip(xs, elements<const X>(a.x), strip);
    if (add) load_strip(ys, y, strip);
#pragma unroll
    for (int i = 0; i < strip_packs; ++i) {
        if (!strip.has(i)) continue;
        const Floats<V> x = to_floats(xs[i]);
        store(y + strip.column(i), add ? x + to_floats(ys[i]) : x);
    }
}

template <class T, int V>
__global__ void __launch_bounds__(32 * strip_warps) sum_parts_kernel(const SumParts a) {
    const int64_t n = a.y.elems;
    const Strip<V> strip(Matrix{1, n});
    const auto part = [&](int64_t q) {
        return q == a.rank ? elements<const T>(a.own) : elements<const T>(a.others) + (q - (q > a.rank)) * n;
    };
    Floats<V> sums[strip_packs];
    Pack<T, V> packs[strip_packs];
    load_strip(packs, part(0), strip);
#pragma unroll
    for (int i = 0; i < strip_packs; ++i) sums[i] = to_floats(packs[i]);
    for (int64_t q = 1; q < a.ranks; ++q) {
        load_strip(packs, part(q), strip);
#pragma unroll
        for (int i = 0; i < strip_packs; ++i) sums[i] = sums[i] + to_floats(packs[i]);
    }
#pragma unroll
    for (int i = 0; i < strip_packs; ++i)
        if (strip.has(i)) store(elements<T>(a.y) + strip.column(i), sums[i]);
}

// A row is the keys and values of a token.
template <class T, int V>
__global__ void __launch_bounds__(32 * strip_warps) extend_cache_kernel(const ExtendCache a) {
    const Strip<V> strip(Matrix{a.B * a.T, 2 * a.width});
    Pack<T, V> packs[strip_packs];
    load_strip(packs, elements<const T>(a.kv_NS) + strip.row * a.stride, strip);
    const int64_t to = (strip.row / a.T * a.capacity + a.length + strip.row % a.T) * a.width;
#pragma unroll
    for (int i = 0; i < strip_packs; ++i) {
        if (!strip.has(i)) continue;
        const int64_t c = strip.column(i);
        store_pack(c < a.width ? elements<T>(a.k_BLW) + to + c : elements<T>(a.v_BLW) + to + c - a.width, packs[i]);
    }
}

constexpr int sum_threads = 1024;

__global__ void __launch_bounds__(sum_threads) sum_kernel(const Sum a) {
    double total = 0.0;
#pragma unroll 4
    for (int64_t i = threadIdx.x; i < a.x.elems; i += sum_threads) total += double{elements<const float>(a.x)[i]};
    total = block_sum(total);
    if (threadIdx.x != 0) return;
    double* const sum = elements<double>(a.sum);
    *sum = a.accumulate == Accumulate::add ? *sum + total : total;
}

}  // namespace

void add_into(cudaStream_t stream, const AddInto& a) {
    TRIFOLD_ASSERT(a.x.elems == a.y.elems);
    if (!a.x) return;
    with_element(a.x.dtype, [&](auto from) {
        with_element(a.y.dtype, [&](auto to) {
            using X = decltype(from);
            using Y = decltype(to);
            constexpr int most = std::min(pack_elems<X>, pack_elems<Y>);
            with_width<most>(packs_fit<most>(a.x.elems, a.x, a.y), [&](auto V) {
                launch(stream, strip_grid<V>({1, a.x.elems}), add_kernel<X, Y, V>, a);
            });
        });
    });
}

void sum_parts(cudaStream_t stream, const SumParts& a) {
    const int64_t n = a.y.elems;
    TRIFOLD_ASSERT(a.ranks > 0 && a.rank >= 0 && a.rank < a.ranks && a.own.elems == n &&
                   a.others.elems == (a.ranks - 1) * n);
    TRIFOLD_ASSERT(a.own.dtype == a.y.dtype && (!a.others || a.others.dtype == a.y.dtype));
    if (n == 0) return;
    with_element(a.y.dtype, [&](auto element) {
        using T = decltype(element);
        with_width<pack_elems<T>>(packs_fit<pack_elems<T>>(n, a.own, a.others, a.y), [&](auto V) {
            launch(stream, strip_grid<V>({1, n}), sum_parts_kernel<T, V>, a);
        });
    });
}

void extend_cache(cudaStream_t stream, const ExtendCache& a) {
    const int64_t N = a.B * a.T;
    if (N == 0) return;
    TRIFOLD_ASSERT(a.k_BLW.dtype == a.kv_NS.dtype && a.v_BLW.dtype == a.kv_NS.dtype);
    TRIFOLD_ASSERT(a.kv_NS.elems >= (N - 1) * a.stride + 2 * a.width && a.length + a.T <= a.capacity);
    TRIFOLD_ASSERT(a.k_BLW.elems >= a.B * a.capacity * a.width && a.v_BLW.elems >= a.B * a.capacity * a.width);
    with_element(a.kv_NS.dtype, [&](auto element) {
        using T = decltype(element);
        constexpr int most = pack_elems<T>;
        with_width<most>(a.stride % most == 0 && packs_fit<most>(a.width, a.kv_NS, a.k_BLW, a.v_BLW), [&](auto V) {
            launch(stream, strip_grid<V>({N, 2 * a.width}), extend_cache_kernel<T, V>, a);
        });
    });
}

void copy(cudaStream_t stream, const Copy& a) {
    TRIFOLD_ASSERT(a.x.bytes() == a.y.bytes());
    if (!a.y) return;
    CUDA_CHECK(cudaMemcpyAsync(a.y.data, a.x.data, static_cast<size_t>(a.y.bytes()), cudaMemcpyDefault, stream));
}

void zero(cudaStream_t stream, const Zero& a) {
    if (!a.y) return;
    CUDA_CHECK(cudaMemsetAsync(a.y.data, 0, static_cast<size_t>(a.y.bytes()), stream));
}

void sum(cudaStream_t stream, const Sum& a) {
    launch(stream, {.blocks = dim3(1), .threads = dim3(sum_threads)}, sum_kernel, a);
}

}  // namespace trifold::cuda
