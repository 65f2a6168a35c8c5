// kernels/cuda/cross_entropy.cu   Softmax and cross-entropy without stored probabilities.
//
// loss = log(sum) - (x_target - r),  dx_v = scale * (e^(x_v - r) / sum - [v == target]),  sum = sum_v e^(x_v - r),
// r = max x
// Split      over ranks, r is the largest of their maxima and sum = sum_q sum_q e^(r_q - r) in rank order.
// Shapes     N rows of P columns, V of them real; one block works on a row.
// Traffic    logits in, dlogits out (evaluation: logits in). The gradient's sweep runs from the end of the row back, so
//            that it finds in the caches what was read last: of a row of bf16 all that two blocks per multiprocessor
//            leave in L1 (256 KiB), the rest in L2. Split: logits in; logits in, dlogits out.
// Numerics   fp32. Each thread keeps its maximum so far and the sum relative to it; both are then combined over the
//            block. With bf16 gradients e^x is the fast one: relative error (2 + 1.2 |x|) ulp of fp32, times e^x at
//            most 3 ulp of the largest term; in the statistics, with bf16 logits. A NaN makes the row NaN; so do logits
//            that are all -infinity.
// Padding    columns [V, P) count as -infinity; their gradient is zero.
#include <cfloat>

#include "kernels/cuda/reduce.cuh"
#include "kernels/ops.h"

namespace trifold::cuda {
namespace {

constexpr int most_threads = 1024, reads_ahead = 2;
#if defined(__CUDA_ARCH__) && (__CUDA_ARCH__ >= 1200 || (__CUDA_ARCH__ > 800 && __CUDA_ARCH__ < 900))
[[maybe_unused]] constexpr int blocks_at_once = 1;  // a multiprocessor of these has 1536 threads
#else
[[maybe_unused]] constexpr int blocks_at_once = 2;
#endif

// e^x for the type G of the gradient (of the logits in statistics).
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

// What a thread has of a row: accesses of W columns, `stride` apart.
template <int W>
struct Columns {
    int first = static_cast<int>(threadIdx.x) * W, stride = static_cast<int>(blockDim.x) * W, V, P;
    __device__ __forceinline__ Columns(int64_t V, int64_t P) : V(static_cast<int>(V)), P(static_cast<int>(P)) {}
};

struct Softmax {
    float largest, sum;  // probability of x: e^(x - largest) / sum
};

// Over the V columns of the block's row.
template <class G, int W, class L>
__device__ __forceinline__ Softmax reduce(const L* x, const Columns<W>& columns) {
    const int V = columns.V, stride = columns.stride;
    OnlineSum<G> online;
    for (int c = columns.first; c < V; c += reads_ahead * stride) {
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
    return {largest, block_sum(online.sum * exponential<G>(online.largest - largest))};
}

// The row's gradient, from its end back; x may be the same memory. The target counts from the row's first column, and
// need not be one of its columns.
template <class L, class G, int W>
__device__ __forceinline__ void write_gradient(const L* x, G* gradient, const Columns<W>& columns,
                                               const Softmax& softmax, int target, float grad_scale) {
    const int P = columns.P, stride = columns.stride;
    const float factor = grad_scale / softmax.sum;
    for (int c = columns.first + (P - 1) / stride * stride; c >= 0; c -= stride) {
        if (c >= P) continue;
        Floats<W> values = load_streaming<W>(x + c);
#pragma unroll
        for (int j = 0; j < W; ++j) values[j] = exponential<G>(values[j] - softmax.largest) * factor;
        if (c <= target && target < c + W) {
#pragma unroll
            for (int j = 0; j < W; ++j) {
                if (c + j == target) values[j] -= grad_scale;
            }
        }
        mask_padding(values, c, columns.V, 0.0f);
        store_streaming(gradient + c, values);
    }
}

// A masked row: no loss, no gradient (null in evaluation).
template <class G, int W>
__device__ __forceinline__ void write_zeros(float* loss, G* gradient, const Columns<W>& columns) {
    if (threadIdx.x == 0) *loss = 0.0f;
    if (!gradient) return;
    for (int c = columns.first; c < columns.P; c += columns.stride) store_streaming(gradient + c, Floats<W>{});
}

template <class L, class G, int W>
__global__ void __launch_bounds__(most_threads, blocks_at_once) rows(const CrossEntropy a) {
    const Columns<W> columns(a.V, a.P);
    const int64_t row = blockIdx.x * a.P;
    const L* const x = elements<const L>(a.logits_NP) + row;
    G* const gradient = a.dlogits_NP.data ? elements<G>(a.dlogits_NP) + row : nullptr;
    float* const loss = elements<float>(a.loss_N) + blockIdx.x;
    const int target = elements<const int32_t>(a.target_N)[blockIdx.x];
    if (target < 0) return write_zeros(loss, gradient, columns);
    const float at_target = load<1>(x + target)[0];  // now: the gradient may overwrite it
    const Softmax softmax = reduce<G>(x, columns);
    if (threadIdx.x == 0) *loss = logf(softmax.sum) - (at_target - softmax.largest);
    if (gradient) write_gradient(x, gradient, columns, softmax, target, a.grad_scale);
}

// ---------------------------------------------------------------- the vocabulary split over ranks

template <class L, int W>
__global__ void __launch_bounds__(most_threads, blocks_at_once) stats_rows(const CrossEntropyStats a) {
    const Columns<W> columns(a.V, a.P);
    const L* const x = elements<const L>(a.logits_NP) + blockIdx.x * a.P;
    const Softmax softmax = reduce<L>(x, columns);
    if (threadIdx.x != 0) return;
    const int64_t target = elements<const int32_t>(a.target_N)[blockIdx.x] - a.first;
    float* const stats = elements<float>(a.stats_N3) + 3 * int64_t{blockIdx.x};
    stats[0] = softmax.largest > -FLT_MAX ? softmax.largest : -INFINITY;
    stats[1] = softmax.sum;
    stats[2] = target >= 0 && target < a.V ? load<1>(x + target)[0] : 0.0f;
}

template <class L, class G, int W>
__global__ void __launch_bounds__(most_threads, blocks_at_once) combine_rows(const CrossEntropyCombine a) {
    const Columns<W> columns(a.V, a.P);
    const int64_t n = blockIdx.x, row = n * a.P;
    G* const gradient = a.dlogits_NP.data ? elements<G>(a.dlogits_NP) + row : nullptr;
    float* const loss = elements<float>(a.loss_N) + n;
    const int target = elements<const int32_t>(a.target_N)[n];
    if (target < 0) return write_zeros(loss, gradient, columns);
    // Every thread for itself: three numbers from each rank.
    const float* const stats = elements<const float>(a.stats_RN3) + 3 * n;
    Softmax softmax{-INFINITY, 0.0f};
    for (int64_t q = 0; q < a.ranks; ++q) softmax.largest = fmaxf(softmax.largest, stats[3 * q * a.N]);
    float at_target = 0.0f;
    for (int64_t q = 0; q < a.ranks; ++q) {
        const float* const of_rank = stats + 3 * q * a.N;
        softmax.sum += of_rank[1] * expf(of_rank[0] - softmax.largest);
        at_target += of_rank[2];
    }
    if (threadIdx.x == 0) *loss = logf(softmax.sum) - (at_target - softmax.largest);
    if (!gradient) return;
    write_gradient(elements<const L>(a.logits_NP) + row, gradient, columns, softmax,
                   target - static_cast<int>(a.first), a.grad_scale);
}

// ---------------------------------------------------------------- launches

// One block a row of P columns, in accesses of `width`.
Grid row_grid(int64_t N, int64_t P, int width) {
    const int64_t warps = std::max<int64_t>(1, (P + 32 * width - 1) / (32 * width));
    return {.blocks = dim3(static_cast<unsigned>(N)),
            .threads = dim3(static_cast<unsigned>(std::min<int64_t>(most_threads, 32 * warps)))};
}

// Calls body with the element types of logits and gradient (empty: evaluation), and the width of the accesses to rows.
template <class Body>
void with_row_types(int64_t P, const Tensor& logits, const Tensor& dlogits, const Body& body) {
    const auto with_types = [&](auto logit, auto gradient) {
        constexpr int W = std::min(pack_elems<decltype(logit)>, pack_elems<decltype(gradient)>);
        with_width<W>(packs_fit<W>(P, logits, dlogits), [&](auto width) { body(logit, gradient, width); });
    };
    const DType gradient = dlogits ? dlogits.dtype : logits.dtype;
    if (logits.dtype == DType::bf16) {
        TRIFOLD_ASSERT(gradient == DType::bf16);
        with_types(__nv_bfloat16{}, __nv_bfloat16{});
    } else {
        with_element(gradient, [&](auto element) { with_types(float{}, element); });
    }
}

}  // namespace

void cross_entropy(cudaStream_t stream, const CrossEntropy& a) {
    TRIFOLD_ASSERT(a.V > 0 && a.V <= a.P && a.logits_NP.elems >= a.N * a.P && a.loss_N.elems >= a.N &&
                   a.target_N.elems >= a.N);
    TRIFOLD_ASSERT(!a.dlogits_NP || a.dlogits_NP.elems >= a.N * a.P);
    if (a.N == 0) return;
    with_row_types(a.P, a.logits_NP, a.dlogits_NP, [&](auto logit, auto gradient, auto width) {
        launch(stream, row_grid(a.N, a.P, width), rows<decltype(logit), decltype(gradient), width>, a);
    });
}

void cross_entropy_stats(cudaStream_t stream, const CrossEntropyStats& a) {
    TRIFOLD_ASSERT(a.V >= 0 && a.V <= a.P && a.first >= 0 && a.logits_NP.elems >= a.N * a.P &&
                   a.stats_N3.elems >= a.N * 3 && a.target_N.elems >= a.N);
    if (a.N == 0) return;
    with_element(a.logits_NP.dtype, [&](auto logit) {
        using L = decltype(logit);
        with_width<pack_elems<L>>(packs_fit<pack_elems<L>>(a.P, a.logits_NP), [&](auto width) {
            launch(stream, row_grid(a.N, a.P, width), stats_rows<L, width>, a);
        });
    });
}

void cross_entropy_combine(cudaStream_t stream, const CrossEntropyCombine& a) {
    TRIFOLD_ASSERT(a.V >= 0 && a.V <= a.P && a.first >= 0 && a.ranks > 0 &&
                   a.stats_RN3.elems >= a.ranks * a.N * 3 && a.loss_N.elems >= a.N && a.target_N.elems >= a.N);
    TRIFOLD_ASSERT(!a.dlogits_NP || (a.dlogits_NP.elems >= a.N * a.P && a.logits_NP.elems >= a.N * a.P));
    if (a.N == 0) return;
    if (!a.dlogits_NP) {  // one warp a row: there are three numbers from each rank to read
        launch(stream, row_grid(a.N, 1, 1), combine_rows<float, float, 1>, a);
        return;
    }
    with_row_types(a.P, a.logits_NP, a.dlogits_NP, [&](auto logit, auto gradient, auto width) {
        launch(stream, row_grid(a.N, a.P, width), combine_rows<decltype(logit), decltype(gradient), width>, a);
    });
}

}  // namespace trifold::cuda
