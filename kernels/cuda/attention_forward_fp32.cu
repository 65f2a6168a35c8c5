// kernels/cuda/attention_forward_fp32.cu   o = softmax(scale * q k^T + mask) v in fp32, as in attention_forward.cu.
//
// Block      64 queries of one head, 256 threads; a loop over tiles of 64 keys and values that some of the queries see.
// Shared     Q, K, V [64, D] and P^T [64, 64]: 116 KiB at D 128.
// Numerics   fp32 throughout, sums in a fixed order.
#include "kernels/cuda/attention_forward.cuh"
#include "kernels/cuda/attention_fp32.cuh"

namespace trifold::cuda::attention {
namespace {

using namespace fp32;

template <int D>
constexpr int shared_floats = 3 * tile_elems<D> + square_elems;

struct RowState {
    float max[4], sum[4];
};

// The sixteen threads that share a row are neighbours.
__device__ __forceinline__ float row_max(float v) {
#pragma unroll
    for (int distance = 8; distance > 0; distance /= 2) v = fmaxf(v, __shfl_xor_sync(0xffffffffu, v, distance));
    return v;
}
__device__ __forceinline__ float row_sum(float v) {
#pragma unroll
    for (int distance = 8; distance > 0; distance /= 2) v += __shfl_xor_sync(0xffffffffu, v, distance);
    return v;
}

// Scores become probabilities relative to the new maximum; what was summed so far shrinks to it.
template <int D>
__device__ __forceinline__ void softmax(Square& s, RowState& state, Wide<D>& o, const Sight& sight, int query, int key,
                                        float scale) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const int row = query + 4 * thread_y() + i, first = sight.first(row), last = sight.last(row);
        float highest = state.max[i];
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            const int column = key + thread_x() + 16 * j;
            s[i][j] = column < first || column > last ? -INFINITY : s[i][j] * scale;
            highest = fmaxf(highest, s[i][j]);
        }
        highest = row_max(highest);
        const float base = highest == -INFINITY ? 0.0f : highest, shrink = expf(state.max[i] - base);
        float sum = 0.0f;
#pragma unroll
        for (int j = 0; j < 4; ++j) sum += s[i][j] = expf(s[i][j] - base);
        state.max[i] = highest;
        state.sum[i] = fmaf(state.sum[i], shrink, row_sum(sum));
#pragma unroll
        for (int c = 0; c < D / 32; ++c) o[i][c][0] *= shrink, o[i][c][1] *= shrink;
    }
}

template <int D>
__device__ __forceinline__ void store_results(const Wide<D>& o, const RowState& state, const Operands<float>& in,
                                              const Results<float>& out, const Item& item) {
    const int64_t head_row = (static_cast<int64_t>(item.b) * in.H + item.h) * in.Tq;
    const float unscaled[4] = {1.0f, 1.0f, 1.0f, 1.0f};
    float inverse[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const int row = item.query + 4 * thread_y() + i;
        inverse[i] = state.sum[i] == 0.0f ? 0.0f : 1.0f / state.sum[i];
        if (thread_x() > 0 || row >= in.Tq) continue;
        if (out.parts > 1)
            out.partial_stats[(head_row + row) * out.parts + item.part] = make_float2(state.max[i], state.sum[i]);
        else if (out.lse)
            out.lse[head_row + row] = state.max[i] + logf(state.sum[i]);
    }
    if (out.parts > 1) {
        const int64_t stride = static_cast<int64_t>(out.parts) * D;
        fp32::store_rows<D>(o, unscaled,
                            {out.partial_o + head_row * stride + static_cast<int64_t>(item.part) * D, stride},
                            item.query, in.Tq);
    } else {
        fp32::store_rows<D>(o, inverse, in.o_rows(out.o, item.b, item.h, D), item.query, in.Tq);
    }
}

template <int D>
__global__ void __launch_bounds__(threads, 1) forward(Operands<float> in, Results<float> out) {
    DYNAMIC_SHARED(float, q);
    float *const k = q + tile_elems<D>, *const v = k + tile_elems<D>, *const p = v + tile_elems<D>;
    const Item item = item_of_block(in, out, tile);
    const Sight sight = in.sight(item.b);
    const KeyRange range = keys_of(sight, out, item, tile);
    const int kv = in.kv_head(item.h);
    Wide<D> o;
    RowState state;
    clear<D>(o);
#pragma unroll
    for (int i = 0; i < 4; ++i) state.max[i] = -INFINITY, state.sum[i] = 0.0f;
    load_rows<D>(q, in.q_rows(in.q, item.b, item.h, D), item.query, in.Tq);
    for (int key = range.begin; key < range.end; key += tile) {
        __syncthreads();  // the last tile is no longer read
        load_rows<D>(k, in.kv_rows(in.k, item.b, kv, D), key, in.Tk);
        load_rows<D>(v, in.kv_rows(in.v, item.b, kv, D), key, in.Tk);
        __syncthreads();
        Square s;
        multiply_rows<D>(s, q, k);
        softmax<D>(s, state, o, sight, item.query, key, in.scale);
        store_transposed(s, p);
        __syncthreads();
        add_product<D>(o, p, v);
    }
    store_results<D>(o, state, in, out, item);
}

}  // namespace

void forward_fp32(cudaStream_t stream, const AttentionForward& a) {
    with_head_size(a.D, [&](auto head_size) {
        constexpr int D = head_size;
        const auto in = operands<float>(a, a.Tq, a.Tk, a.q_offset);
        const auto out = results<float>(a, tile);
        launch(stream, grid(a, out, threads, shared_floats<D> * 4), forward<D>, in, out);
        merge(stream, a, out);
    });
}

}  // namespace trifold::cuda::attention
