// kernels/cuda/cross_entropy.cu   Softmax and cross-entropy without stored probabilities.
//
// loss = log(sum) - (x_target - r),  dx_v = scale * (e^(x_v - r) / sum - [v == target]),  sum = sum_v e^(x_v - r),
// r = max x
// Shapes     N rows of P columns, V of them real; one block works on a row.
// Traffic    logits in, dlogits out (evaluation: logits in). The gradient's sweep runs from the end of the row back, so
//            that it finds in the caches what was read last: of a row of bf16 all that two blocks per multiprocessor
//            leave in L1 (256 KiB), the rest in L2.
// Numerics   fp32. Each thread keeps its maximum so far and the sum relative to it; both are then combined over the
//            block. With bf16 gradients e^x is the fast one: relative error (2 + 1.2 |x|) ulp of fp32, times e^x at
//            most 3 ulp of the largest term. A NaN makes the row NaN.
// Padding    columns [V, P) count as -infinity; their gradient is zero.
#include <cfloat>

#include "kernels/cuda/reduce.cuh"
#include "kernels/ops.h"

namespace trifold::cuda {
namespace {

constexpr int most_threads = 1024, reads_ahead = 2;

// e^x for the gradient type G.
template <class G>
__device__ __forceinline__ float exponential(float x) {
    if constexpr (sizeof(G) == 4)
        return expf(x);
    else
        return __expf(x);
}

// The largest x so far (finite, so that no infinities are subtracted) and the sum of e^(x - largest).
template <class G>
struct OnlineSum {
    float largest = -FLT_MAX, sum = 0.0f;

    template <int W>
    __device__ __forceinline__ void add(const Floats<W>& x) {
        float peak = x[0];
#pragma unroll
        for (int j = 1; j < W; ++j) peak = fmaxf(peak, x[j]);
        if (peak > largest) {
            sum *= exponential<G>(largest - peak);
            largest = peak;
        }
#pragma unroll
        for (int j = 0; j < W; ++j) sum += exponential<G>(x[j] - largest);
    }
};

// Columns from V on replaced.
template <int W>
__device__ __forceinline__ void mask_padding(Floats<W>& x, int column, int V, float by) {
    if (column + W <= V) return;
#pragma unroll
    for (int j = 0; j < W; ++j) {
        if (column + j >= V) x[j] = by;
    }
}

template <class L, class G, int W>
__global__ void __launch_bounds__(most_threads, 2) rows(const CrossEntropy a) {
    const int V = static_cast<int>(a.V), P = static_cast<int>(a.P);
    const int first = static_cast<int>(threadIdx.x) * W, stride = static_cast<int>(blockDim.x) * W;
    const int64_t row = int64_t{blockIdx.x} * P;
    const L* const x = elements<const L>(a.logits_NP) + row;
    G* const gradient = elements<G>(a.dlogits_NP);
    const int target = elements<const int32_t>(a.target_N)[blockIdx.x];
    if (target < 0) {
        if (threadIdx.x == 0) elements<float>(a.loss_N)[blockIdx.x] = 0.0f;
        if (!gradient) return;
        for (int c = first; c < P; c += stride) store_streaming(gradient + row + c, Floats<W>{});
        return;
    }
    const float at_target = load<1>(x + target)[0];  // now: the gradient may overwrite it

    OnlineSum<G> online;
    for (int c = first; c < V; c += reads_ahead * stride) {
        Pack<L, W> packs[reads_ahead];
#pragma unroll
        for (int i = 0; i < reads_ahead; ++i)
            if (c + i * stride < V) packs[i] = load_pack<W>(x + c + i * stride);
#pragma unroll
        for (int i = 0; i < reads_ahead; ++i) {
            if (c + i * stride >= V) continue;
            Floats<W> values = to_floats(packs[i]);
            mask_padding(values, c + i * stride, V, -INFINITY);
            online.add(values);
        }
    }
    const float largest = block_max(online.largest);
    const float sum = block_sum(online.sum * exponential<G>(online.largest - largest));
    if (threadIdx.x == 0) elements<float>(a.loss_N)[blockIdx.x] = logf(sum) - (at_target - largest);
    if (!gradient) return;

    const float factor = a.grad_scale / sum;
    for (int c = first + (P - 1) / stride * stride; c >= 0; c -= stride) {
        if (c >= P) continue;
        Floats<W> values = load_streaming<W>(x + c);
#pragma unroll
        for (int j = 0; j < W; ++j) values[j] = exponential<G>(values[j] - largest) * factor;
        if (c <= target && target < c + W) {
#pragma unroll
            for (int j = 0; j < W; ++j) {
                if (c + j == target) values[j] -= a.grad_scale;
            }
        }
        mask_padding(values, c, V, 0.0f);
        store_streaming(gradient + row + c, values);
    }
}

template <class L, class G>
void launch_rows(cudaStream_t stream, const CrossEntropy& a) {
    constexpr int W = std::min(pack_elems<L>, pack_elems<G>);
    with_width<W>(packs_fit<W>(a.P, a.logits_NP, a.dlogits_NP), [&](auto width) {
        const int64_t packs = (a.P + width - 1) / width,
                      threads = std::min<int64_t>(most_threads, (packs + 31) / 32 * 32);
        launch(stream, {.blocks = dim3(static_cast<unsigned>(a.N)), .threads = dim3(static_cast<unsigned>(threads))},
               rows<L, G, width>, a);
    });
}

}  // namespace

void cross_entropy(cudaStream_t stream, const CrossEntropy& a) {
    TRIFOLD_ASSERT(a.V > 0 && a.V <= a.P && a.logits_NP.elems >= a.N * a.P && a.loss_N.elems >= a.N &&
                   a.target_N.elems >= a.N);
    TRIFOLD_ASSERT(a.N > 0 && (!a.dlogits_NP || a.dlogits_NP.elems >= a.N * a.P));
    const DType logits = a.logits_NP.dtype, gradient = a.dlogits_NP ? a.dlogits_NP.dtype : logits;
    if (logits == DType::bf16) {
        TRIFOLD_ASSERT(gradient == DType::bf16);
        launch_rows<__nv_bfloat16, __nv_bfloat16>(stream, a);
    } else {
        with_element(gradient, [&](auto element) { launch_rows<float, decltype(element)>(stream, a); });
    }
}

}  // namespace trifold::cuda
