// kernels/cuda/norm.cu   LayerNorm and RMSNorm with the residual addition before them.
//
// forward    s = x (+ delta);  y = (s - mean) * rstd * w (+ b),  rstd = 1 / sqrt(mean((s - mean)^2) + eps)
// backward   g = dy * w,  h = (s - mean) * rstd:  dx = dresidual + rstd * (g - mean(g) - h * mean(g * h)),
//            dw = sum over rows of dy * h,  db = sum over rows of dy
// RMSNorm    the same without mean and mean(g)
// Shapes     N rows of C; one block works on a row, and a thread holds 16 elements of it in registers. Rows that are
//            wider than that, or are no whole packs of 16 bytes, take the `swept` kernels, which read a row again
//            instead.
// Traffic    forward x (and delta) in, y (and s) out; backward dy, s (and dresidual) in, dx out: each once. Memory
//            bound. The partial sums of dw and db stay in the second-level cache.
// Numerics   fp32; s is rounded to the activation type before its statistics; the variance is taken around the mean.
//            All orders depend on N and C alone.
// Saves      mean_N and rstd_N.
#include "kernels/cuda/partials.cuh"
#include "kernels/cuda/reduce.cuh"
#include "kernels/cuda/room.h"

namespace trifold::cuda {
namespace {

constexpr int kept_elems = 16;  // of a row in the registers of one thread
constexpr int forward_threads = 1024, backward_threads = 512;

unsigned threads_for(int64_t C, int64_t elems_per_thread, int64_t most) {
    const int64_t threads = (C + elems_per_thread - 1) / elems_per_thread;
    return static_cast<unsigned>(std::min(most, (threads + 31) / 32 * 32));
}

// ---------------------------------------------------------------- forward

struct Statistics {
    float mean = 0.0f, rstd = 0.0f;
};

// `each(f)` calls f(value) for all elements of this thread.
template <class Each>
__device__ __forceinline__ Statistics statistics(const NormForward& a, const Each& each) {
    const float count = static_cast<float>(a.C);
    float mean = 0.0f, square = 0.0f;
    if (a.kind == NormKind::layernorm) {
        float sum = 0.0f;
        each([&](float s) { sum += s; });
        mean = block_sum(sum) / count;
    }
    each([&](float s) { square += (s - mean) * (s - mean); });
    const float rstd = 1.0f / sqrtf(block_sum(square) / count + a.eps);
    if (threadIdx.x == 0) {
        if (a.kind == NormKind::layernorm) elements<float>(a.mean_N)[blockIdx.x] = mean;
        elements<float>(a.rstd_N)[blockIdx.x] = rstd;
    }
    return {mean, rstd};
}

template <class T, int V>
__device__ __forceinline__ void store_scaled(const NormForward& a, int64_t row, int c, const Floats<V>& s,
                                             Statistics of) {
    const Floats<V> weight = load<V>(elements<const T>(a.weight_C) + c);
    Floats<V> y;
#pragma unroll
    for (int j = 0; j < V; ++j) y[j] = (s[j] - of.mean) * of.rstd * weight[j];
    if (a.bias_C.data) y = y + load<V>(elements<const T>(a.bias_C) + c);
    store(elements<T>(a.y_NC) + row + c, y);
}

template <class T, int V>
__global__ void __launch_bounds__(forward_threads) forward_kept(const NormForward a) {
    constexpr int packs = kept_elems / V;
    const int C = static_cast<int>(a.C);
    const int64_t row = int64_t{blockIdx.x} * C;
    const auto column = [&](int i) { return static_cast<int>(i * blockDim.x + threadIdx.x) * V; };
    Pack<T, V> s[packs] = {};
#pragma unroll
    for (int i = 0; i < packs; ++i)
        if (column(i) < C) s[i] = load_pack_streaming<V>(elements<const T>(a.x_NC) + row + column(i));
    if (a.delta_NC.data) {
        Pack<T, V> delta[packs] = {};
#pragma unroll
        for (int i = 0; i < packs; ++i)
            if (column(i) < C) delta[i] = load_pack_streaming<V>(elements<const T>(a.delta_NC) + row + column(i));
#pragma unroll
        for (int i = 0; i < packs; ++i) {
            s[i] = to_pack<T>(to_floats(s[i]) + to_floats(delta[i]));
            if (column(i) < C) store_pack_streaming(elements<T>(a.sum_NC) + row + column(i), s[i]);
        }
    }
    const Statistics of = statistics(a, [&](const auto& f) {
#pragma unroll
        for (int i = 0; i < packs; ++i) {
            if (column(i) >= C) continue;
            const Floats<V> values = to_floats(s[i]);
#pragma unroll
            for (int j = 0; j < V; ++j) f(values[j]);
        }
    });
#pragma unroll
    for (int i = 0; i < packs; ++i)
        if (column(i) < C) store_scaled<T, V>(a, row, column(i), to_floats(s[i]), of);
}

// A thread reads again only what it wrote itself.
template <class T, int V>
__global__ void __launch_bounds__(forward_threads) forward_swept(const NormForward a) {
    const int C = static_cast<int>(a.C), first = static_cast<int>(threadIdx.x) * V,
              stride = static_cast<int>(blockDim.x) * V;
    const int64_t row = int64_t{blockIdx.x} * C;
    const T* s = elements<const T>(a.x_NC) + row;
    if (a.delta_NC.data) {
        T* const sum = elements<T>(a.sum_NC) + row;
        for (int c = first; c < C; c += stride)
            store(sum + c, load<V>(s + c) + load<V>(elements<const T>(a.delta_NC) + row + c));
        s = sum;
    }
    const Statistics of = statistics(a, [&](const auto& f) {
        for (int c = first; c < C; c += stride) {
            const Floats<V> values = load<V>(s + c);
#pragma unroll
            for (int j = 0; j < V; ++j) f(values[j]);
        }
    });
    for (int c = first; c < C; c += stride) store_scaled<T, V>(a, row, c, load<V>(s + c), of);
}

// ---------------------------------------------------------------- backward

// What a row's statistics say about its elements.
struct RowGradient {
    float mean = 0.0f, rstd = 0.0f;
    float mean_g = 0.0f, mean_gh = 0.0f;

    __device__ __forceinline__ RowGradient(const NormBackward& a, int64_t n)
        : mean(a.kind == NormKind::layernorm ? elements<const float>(a.mean_N)[n] : 0.0f),
          rstd(elements<const float>(a.rstd_N)[n]) {}
    RowGradient() = default;
    __device__ __forceinline__ float normed(float x) const { return (x - mean) * rstd; }
    __device__ __forceinline__ float dx(float dy, float x, float weight) const {
        return (dy * weight - mean_g - normed(x) * mean_gh) * rstd;
    }
    // From this thread's sums of g and g * h.
    __device__ __forceinline__ void reduce(const NormBackward& a, float g, float gh) {
        float sums[2] = {g, gh};
        block_sums(sums);
        mean_g = a.kind == NormKind::layernorm ? sums[0] / static_cast<float>(a.C) : 0.0f;
        mean_gh = sums[1] / static_cast<float>(a.C);
    }
};

template <class T, int V>
struct RowPacks {
    static constexpr int packs = kept_elems / V;
    Pack<T, V> dy[packs] = {}, x[packs] = {};
    RowGradient gradient;
};

template <class T, int V>
__device__ __forceinline__ RowPacks<T, V> load_row(const NormBackward& a, int64_t n) {
    RowPacks<T, V> row;
#pragma unroll
    for (int i = 0; i < row.packs; ++i) {
        const int c = static_cast<int>(i * blockDim.x + threadIdx.x) * V;
        if (c >= a.C) continue;
        row.dy[i] = load_pack_streaming<V>(elements<const T>(a.dy_NC) + n * a.C + c);
        row.x[i] = load_pack_streaming<V>(elements<const T>(a.x_NC) + n * a.C + c);
    }
    row.gradient = RowGradient(a, n);
    return row;
}

// Sums over the rows of a block: dw, then db.
__device__ __forceinline__ float* block_partials(const NormBackward& a) {
    return elements<float>(a.workspace) + blockIdx.x * (a.dbias_C.data ? 2 * a.C : a.C);
}

template <class T, int V>
__global__ void __launch_bounds__(backward_threads) backward_kept(const NormBackward a) {
    constexpr int packs = kept_elems / V;
    constexpr bool ahead = sizeof(T) == 2;  // the next row is on its way while this one is reduced
    const int C = static_cast<int>(a.C);
    const auto column = [&](int i) { return static_cast<int>(i * blockDim.x + threadIdx.x) * V; };
    Floats<V> dw[packs] = {}, db[packs] = {};
    Pack<T, V> weight[packs] = {};
#pragma unroll
    for (int i = 0; i < packs; ++i)
        if (column(i) < C) weight[i] = load_pack<V>(elements<const T>(a.weight_C) + column(i));

    RowPacks<T, V> row = load_row<T, V>(a, blockIdx.x);
    for (int64_t n = blockIdx.x; n < a.N; n += gridDim.x) {
        RowPacks<T, V> next;
        if (ahead && n + gridDim.x < a.N) next = load_row<T, V>(a, n + gridDim.x);
        Pack<T, V> residual[packs] = {};
        if (a.dresidual_NC.data) {
#pragma unroll
            for (int i = 0; i < packs; ++i)
                if (column(i) < C)
                    residual[i] = load_pack_streaming<V>(elements<const T>(a.dresidual_NC) + n * C + column(i));
        }
        RowGradient& gradient = row.gradient;
        float g = 0.0f, gh = 0.0f;
#pragma unroll
        for (int i = 0; i < packs; ++i) {
            const Floats<V> dy = to_floats(row.dy[i]), x = to_floats(row.x[i]), w = to_floats(weight[i]);
#pragma unroll
            for (int j = 0; j < V; ++j) {  // outside the row dy and w are zero
                const float h = gradient.normed(x[j]);
                g += dy[j] * w[j];
                gh += dy[j] * w[j] * h;
                dw[i][j] += dy[j] * h;
                db[i][j] += dy[j];
            }
        }
        gradient.reduce(a, g, gh);
#pragma unroll
        for (int i = 0; i < packs; ++i) {
            if (column(i) >= C) continue;
            const Floats<V> dy = to_floats(row.dy[i]), x = to_floats(row.x[i]), w = to_floats(weight[i]);
            Floats<V> dx = to_floats(residual[i]);
#pragma unroll
            for (int j = 0; j < V; ++j) dx[j] += gradient.dx(dy[j], x[j], w[j]);
            store(elements<T>(a.dx_NC) + n * C + column(i), dx);
        }
        if constexpr (ahead) {
            row = next;
        } else if (n + gridDim.x < a.N) {
            row = load_row<T, V>(a, n + gridDim.x);
        }
    }
    float* const partials = block_partials(a);
#pragma unroll
    for (int i = 0; i < packs; ++i) {
        if (column(i) >= C) continue;
        store(partials + column(i), dw[i]);
        if (a.dbias_C.data) store(partials + C + column(i), db[i]);
    }
}

// dw and db of a block wait in shared memory; each column belongs to one thread.
template <class T, int V>
__global__ void __launch_bounds__(backward_threads) backward_swept(const NormBackward a) {
    DYNAMIC_SHARED(float, sums);
    const int C = static_cast<int>(a.C), first = static_cast<int>(threadIdx.x) * V,
              stride = static_cast<int>(blockDim.x) * V;
    float *const dw = sums, *const db = sums + C;
    const T *const weight = elements<const T>(a.weight_C), *const residual = elements<const T>(a.dresidual_NC);
    for (int c = first; c < C; c += stride) {
        store(dw + c, Floats<V>{});
        store(db + c, Floats<V>{});
    }
    for (int64_t n = blockIdx.x; n < a.N; n += gridDim.x) {
        const T *const dy_row = elements<const T>(a.dy_NC) + n * C, *const x_row = elements<const T>(a.x_NC) + n * C;
        RowGradient gradient(a, n);
        float g = 0.0f, gh = 0.0f;
        for (int c = first; c < C; c += stride) {
            const Floats<V> dy = load<V>(dy_row + c), x = load<V>(x_row + c), w = load<V>(weight + c);
            Floats<V> dyh;
#pragma unroll
            for (int j = 0; j < V; ++j) {
                dyh[j] = dy[j] * gradient.normed(x[j]);
                g += dy[j] * w[j];
                gh += dyh[j] * w[j];
            }
            store(dw + c, load<V>(dw + c) + dyh);
            store(db + c, load<V>(db + c) + dy);
        }
        gradient.reduce(a, g, gh);
        for (int c = first; c < C; c += stride) {
            const Floats<V> dy = load<V>(dy_row + c), x = load<V>(x_row + c), w = load<V>(weight + c);
            Floats<V> dx;
#pragma unroll
            for (int j = 0; j < V; ++j) dx[j] = gradient.dx(dy[j], x[j], w[j]);
            store(elements<T>(a.dx_NC) + n * C + c, residual ? load<V>(residual + n * C + c) + dx : dx);
        }
    }
    float* const partials = block_partials(a);
    for (int c = first; c < C; c += stride) {
        store(partials + c, load<V>(dw + c));
        if (a.dbias_C.data) store(partials + C + c, load<V>(db + c));
    }
}

// Two floats for each column, in the shared memory of a block, which holds a few more for sums.
size_t swept_bytes(int64_t C) {
    const int most = (room_of_gpu() - 1024) / 8;
    if (C > most)
        throw Problem(Exit::usage, "the gradient of a norm over " + std::to_string(C) + " columns does not fit into the shared memory of this GPU's blocks, " +
                                       std::to_string(most) + " would: use a smaller --model.hidden, or --run.device=cpu");
    return static_cast<size_t>(2 * C) * sizeof(float);
}

}  // namespace

// ---------------------------------------------------------------- launches

void norm_forward(cudaStream_t stream, const NormForward& a) {
    TRIFOLD_ASSERT(a.x_NC.elems >= a.N * a.C && a.y_NC.elems >= a.N * a.C && a.rstd_N.elems >= a.N);
    TRIFOLD_ASSERT(!a.delta_NC || a.sum_NC.elems >= a.N * a.C);
    TRIFOLD_ASSERT(a.kind == NormKind::rmsnorm || a.mean_N.elems >= a.N);
    if (a.N == 0) return;
    with_element(a.x_NC.dtype, [&](auto element) {
        using T = decltype(element);
        constexpr int V = pack_elems<T>;
        const bool fit = packs_fit<V>(a.C, a.x_NC, a.delta_NC, a.sum_NC, a.weight_C, a.bias_C, a.y_NC);
        const dim3 blocks(static_cast<unsigned>(a.N));
        if (fit && a.C <= kept_elems * forward_threads) {
            launch(stream, {.blocks = blocks, .threads = dim3(threads_for(a.C, kept_elems, forward_threads))},
                   forward_kept<T, V>, a);
        } else {
            with_width<V>(fit, [&](auto width) {
                launch(stream, {.blocks = blocks, .threads = dim3(threads_for(a.C, width, forward_threads))},
                       forward_swept<T, width>, a);
            });
        }
    });
}

void norm_backward(cudaStream_t stream, const NormBackward& a) {
    TRIFOLD_ASSERT(a.dy_NC.elems >= a.N * a.C && a.x_NC.elems >= a.N * a.C && a.dx_NC.elems >= a.N * a.C);
    TRIFOLD_ASSERT(a.dweight_C.elems >= a.C && (!a.dbias_C || a.dbias_C.elems >= a.C));
    TRIFOLD_ASSERT(a.workspace.bytes() >= norm_backward_workspace(a.N, a.C));
    const int64_t rows = partial_rows(a.N, a.C);
    const dim3 blocks(static_cast<unsigned>(rows));
    with_element(a.x_NC.dtype, [&](auto element) {
        using T = decltype(element);
        if (rows == 0) return;
        constexpr int V = pack_elems<T>;
        const bool fit = packs_fit<V>(a.C, a.dy_NC, a.x_NC, a.weight_C, a.dresidual_NC, a.dx_NC, a.workspace);
        if (fit && a.C <= kept_elems * backward_threads) {
            launch(stream, {.blocks = blocks, .threads = dim3(threads_for(a.C, kept_elems, backward_threads))},
                   backward_kept<T, V>, a);
        } else {
            with_width<V>(fit, [&](auto width) {
                launch(stream,
                       {.blocks = blocks,
                        .threads = dim3(threads_for(a.C, width, backward_threads)),
                        .shared_bytes = swept_bytes(a.C)},
                       backward_swept<T, width>, a);
            });
        }
    });
    add_partials(stream, {.partials = elements<const float>(a.workspace),
                          .rows = rows,
                          .columns = a.C,
                          .first = elements<float>(a.dweight_C),
                          .second = elements<float>(a.dbias_C),
                          .accumulate = a.accumulate});
}

int64_t norm_backward_workspace(int64_t N, int64_t C) {
    return partial_rows(N, C) * 2 * C * static_cast<int64_t>(sizeof(float));
}

}  // namespace trifold::cuda
