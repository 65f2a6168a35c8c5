// kernels/cuda/utility.cu   Addition and conversion, copies, zeroing, and a sum in double.
//
// Traffic    add_into: x (and y) in, y out. Memory bound.
// Numerics   add_into: fp32, rounded once. sum: one block; thread t adds elements t, t + 1024, ..., then the block as
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
