// kernels/cuda/attention_forward_fp32.cu   o = softmax(scale * q k^T + mask) v in fp32, as in attention_forward.cu.
//
// Block      64 queries of one head, 256 threads; a loop over tiles of 64 keys and values that some of the queries see.
// Shared     Q, K, V [64, D] and P^T [64, 64]: 116 KiB at D 128; where a block has less (room.h), 32 instead of 64.
// Numerics   fp32 throughout, sums in a fixed order.
#include "kernels/cuda/attention_forward.cuh"
#include "kernels/cuda/attention_fp32.cuh"

namespace trifold::cuda::attention {
namespace {

using namespace fp32;

constexpr int tiles = 3, squares = 1;

template <class S>
struct RowState {
    float max[S::side], sum[S::side];
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
template <class S>
__device__ __forceinline__ void softmax(typename S::Square& s, RowState<S>& state, typename S::Wide& o,
                                        const Sight& sight, int query, int key, float scale) {
#pragma unroll
    for (int i = 0; i < S::side; ++i) {
        const int row = query + S::side * thread_y() + i, first = sight.first(row), last = sight.last(row);
        float highest = state.max[i];
#pragma unroll
        for (int j = 0; j < S::side; ++j) {
            const int column = key + thread_x() + 16 * j;
            s[i][j] = column < first || column > last ? -INFINITY : s[i][j] * scale;
            highest = fmaxf(highest, s[i][j]);
        }
        highest = row_max(highest);
        const float base = highest == -INFINITY ? 0.0f : highest, shrink = expf(state.max[i] - base);
        float sum = 0.0f;
#pragma unroll
        for (int j = 0; j < S::side; ++j) sum += s[i][j] = expf(s[i][j] - base);
        state.max[i] = highest;
        state.sum[i] = fmaf(state.sum[i], shrink, row_sum(sum));
#pragma unroll
        for (int c = 0; c < S::D / 32; ++c) o[i][c][0] *= shrink, o[i][c][1] *= shrink;
    }
}

template <class S>
__device__ __forceinline__ void store_results(const typename S::Wide& o, const RowState<S>& state,
                                              const Operands<float>& in, const Results<float>& out, const Item& item) {
    constexpr int D = S::D;
    const int64_t head_row = (static_cast<int64_t>(item.b) * in.H + item.h) * in.Tq;
#pragma unroll
    for (int i = 0; i < S::side; ++i) {
        const int row = item.query + S::side * thread_y() + i;
        if (thread_x() > 0 || row >= in.Tq) continue;
        if (out.parts > 1)
            out.partial_stats[(head_row + row) * out.parts + item.part] = make_float2(state.max[i], state.sum[i]);
        else if (out.lse)
            out.lse[head_row + row] = state.max[i] + logf(state.sum[i]);
    }
    if (out.parts > 1) {
        const int64_t stride = static_cast<int64_t>(out.parts) * D;
        fp32::store_rows<S>(o, [](int) { return 1.0f; },
                            {out.partial_o + head_row * stride + static_cast<int64_t>(item.part) * D, stride},
                            item.query, in.Tq);
    } else {
        const auto inverse = [&](int i) { return state.sum[i] == 0.0f ? 0.0f : 1.0f / state.sum[i]; };
        fp32::store_rows<S>(o, inverse, in.o_rows(out.o, item.b, item.h, D), item.query, in.Tq);
    }
}

template <class S>
__global__ void __launch_bounds__(threads, 1) forward(Operands<float> in, Results<float> out) {
    constexpr int D = S::D, tile = S::tile;
    DYNAMIC_SHARED(float, q);
    float *const k = q + S::tile_elems, *const v = k + S::tile_elems, *const p = v + S::tile_elems;
    const Item item = item_of_block(in, out, tile);
    const Sight sight = in.sight(item.b);
    const KeyRange range = keys_of(sight, out, item, tile);
    const int kv = in.kv_head(item.h);
    typename S::Wide o;
    RowState<S> state;
    clear<S>(o);
#pragma unroll
    for (int i = 0; i < S::side; ++i) state.max[i] = -INFINITY, state.sum[i] = 0.0f;
    load_rows<S>(q, in.q_rows(in.q, item.b, item.h, D), item.query, in.Tq);
    for (int key = range.begin; key < range.end; key += tile) {
        __syncthreads();  // the last tile is no longer read
        load_rows<S>(k, in.kv_rows(in.k, item.b, kv, D), key, in.Tk);
        load_rows<S>(v, in.kv_rows(in.v, item.b, kv, D), key, in.Tk);
        __syncthreads();
        typename S::Square s;
        multiply_rows<S>(s, q, k);
        softmax<S>(s, state, o, sight, item.query, key, in.scale);
        store_transposed<S>(s, p);
        __syncthreads();
        add_product<S>(o, p, v);
    }
    store_results<S>(o, state, in, out, item);
}

}  // namespace

void forward_fp32(cudaStream_t stream, const AttentionForward& a, int room) {
    with_tiles(a.D, room, [&](auto D, auto size) {
        using S = ShapeFor<D, size, tiles, squares>;
        constexpr int bytes = (tiles * S::tile_elems + squares * S::square_elems) * 4;
        static_assert(bytes <= size);
        const auto in = operands<float>(a, a.Tq, a.Tk, a.q_offset);
        const auto out = results<float>(a, S::tile);
        launch(stream, grid(a, out, threads, bytes), forward<S>, in, out);
        merge(stream, a, out);
    });
}

}  // namespace trifold::cuda::attention
