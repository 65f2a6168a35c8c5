// kernels/cuda/attention_forward.cu   o = softmax(scale * q k^T + mask) v in the flash form (Dao, arXiv 2307.08691),
// bf16.
//
// Block      128 queries of one head, 4 warps of 32; a loop over tiles of 64 or 32 keys and values that some of the
//            queries see. The next tile is on its way by cp.async while one is worked on: one barrier per tile.
// One step   32 keys, so that S, P and O fit into registers. A warp passes over steps of which none of its own queries
//            sees anything, and masks only where one of them does not see all.
//            S = Q K^T;  m' = max(m, rowmax S);  P = exp(scale (S - m'));  l = l exp(scale (m - m')) + rowsum P;
//            O = O exp(scale (m - m')) + P V.  The accumulators of S, rounded to bf16, are the left operand of P V.
// Shared     Q [128, D], then K, V [keys, D] twice: with 64 keys 55, 79, 103 KiB at D 64, 96, 128, with 32 keys 37, 53, 69.
//            Tiles have 64 keys where two blocks of them fit on an SM: while one does its softmax another keeps the
//            tensor cores busy. With 227 KiB for a block (room.h) that is always, with 163 up to D 96, with 99 never;
//            there 32 keys let two blocks fit at D 64.
// Traffic    q, o once; k, v once per 128 queries and head, from L2 (attention_forward.cuh).
// Numerics   fp32 scores, statistics and sums in a fixed order; exponentials in base 2 (2^-22 relative). P is rounded
//            to bf16 before P V, the sum l is of the unrounded P: |error of o| <= 2^-8 (sum_j P_j |v_j| / l + |o|).
// Saves      lse = m + log(l), from which the backward pass makes P again.
// A query that sees no key gets o = 0 and lse = -infinity.
#include "kernels/cuda/attention_forward.cuh"
#include "kernels/cuda/attention_fragments.cuh"
#include "kernels/cuda/cudnn_attention.h"

namespace trifold::cuda {
namespace attention {
namespace {

constexpr int queries = 128, threads = 128, warp_rows = 32, row_tiles = warp_rows / 16;

template <int D>
using QueryTile = Tile<queries, D>;

template <int D, int keys>
struct Shared {
    using Q = QueryTile<D>;
    using K = Tile<keys, D>;
    static constexpr int bytes = Q::bytes + 4 * K::bytes + queries * 4;
    Element *q, *k, *v;  // k and v: two tiles each
    int* first_key;      // of each query

    explicit __device__ __forceinline__ Shared(Element* start)
        : q(start), k(q + Q::elems), v(k + 2 * K::elems), first_key(reinterpret_cast<int*>(v + 2 * K::elems)) {}
};

// An SM has 1 KiB more than the room of one block, and keeps 1 KiB for itself in each.
template <int D, int room>
constexpr int keys_for = 2 * (Shared<D, most_keys>::bytes + 1024) <= room + 1024 ? most_keys : most_keys / 2;

template <int D>
constexpr int step_keys = 32;
template <int D>
using Scores = float[row_tiles][step_keys<D> / 8][4];
template <int D>
using Probabilities = uint32_t[row_tiles][step_keys<D> / 8]
                              [2];  // two neighbours of a row each: the upper and the lower half of a fragment
template <int D>
using Output = float[row_tiles][D / 8][4];

// The running maximum and sum of the lane's rows: 16 i + lane / 4 + 8 half. The sum is the lane's own until the end.
struct RowState {
    float max[row_tiles][2], sum[row_tiles][2];
};

// What the queries of a warp see: first_key of each, the position of the first of them, and that of the last one that
// exists.
struct WarpSight {
    const int* first_key;
    int first_position, last_position;

    __device__ __forceinline__ bool nothing(int key, int keys) const {
        return key > last_position || key + keys <= first_key[0];
    }
    __device__ __forceinline__ bool everything(int key, int keys) const {
        return key + keys - 1 <= first_position && key >= first_key[warp_rows - 1];
    }
};

template <int column_tiles>
__device__ __forceinline__ void mask(float (&s)[row_tiles][column_tiles][4], const WarpSight& seen, int key) {
    const int own_key = key + lane_id() % 4 * 2;
#pragma unroll
    for (int i = 0; i < row_tiles; ++i)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int row = 16 * i + 8 * half + lane_id() / 4;
            const int first = seen.first_key[row] - own_key, last = seen.first_position + row - own_key;
#pragma unroll
            for (int j = 0; j < column_tiles; ++j)
#pragma unroll
                for (int e = 0; e < 2; ++e) {
                    const int at = 8 * j + e;
                    if (at < first || at > last) s[i][j][2 * half + e] = -INFINITY;
                }
        }
}

__device__ __forceinline__ float quad_max(float v) {
    v = fmaxf(v, __shfl_xor_sync(0xffffffffu, v, 1));
    return fmaxf(v, __shfl_xor_sync(0xffffffffu, v, 2));
}
__device__ __forceinline__ float quad_sum(float v) {
    v += __shfl_xor_sync(0xffffffffu, v, 1);
    return v + __shfl_xor_sync(0xffffffffu, v, 2);
}

// Probabilities relative to the new maximum; what was summed so far shrinks to it.
template <int D>
__device__ __forceinline__ void softmax(const Scores<D>& s, Probabilities<D>& p, RowState& state, Output<D>& o,
                                        float scale_log2) {
#pragma unroll
    for (int i = 0; i < row_tiles; ++i)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            float& max = state.max[i][half];
            float highest = max;
#pragma unroll
            for (int j = 0; j < step_keys<D> / 8; ++j)
                highest = fmaxf(highest, fmaxf(s[i][j][2 * half], s[i][j][2 * half + 1]));
            highest = quad_max(highest);
            const float base = highest == -INFINITY ? 0.0f : highest * scale_log2;
            const float shrink = ptx::exp2_approx(fmaf(max, scale_log2, -base));
            max = highest;
            float sum = state.sum[i][half] * shrink;
#pragma unroll
            for (int j = 0; j < step_keys<D> / 8; ++j) {
                const float low = ptx::exp2_approx(fmaf(s[i][j][2 * half], scale_log2, -base));
                const float high = ptx::exp2_approx(fmaf(s[i][j][2 * half + 1], scale_log2, -base));
                sum += low + high;
                p[i][j][half] = pair(low, high);
            }
            state.sum[i][half] = sum;
#pragma unroll
            for (int j = 0; j < D / 8; ++j) {
                o[i][j][2 * half] *= shrink;
                o[i][j][2 * half + 1] *= shrink;
            }
        }
}

template <int D>
__device__ __forceinline__ void add_values(Output<D>& o, const Probabilities<D>& p, const Element* v) {
#pragma unroll
    for (int k = 0; k < step_keys<D> / 16; ++k) {
        uint32_t a[row_tiles][4];
#pragma unroll
        for (int i = 0; i < row_tiles; ++i)
#pragma unroll
            for (int r = 0; r < 4; ++r) a[i][r] = p[i][2 * k + r / 2][r % 2];
        multiply_step<Along::columns>(o, a, v, QueryTile<D>::stride, 0, 16 * k);  // all rows of D are alike
    }
}

// The warp's rows as results, through its rows of the Q tile, which nobody else reads.
template <int D>
__device__ __forceinline__ void store_results(const Output<D>& o, const RowState& state, Element* own_q,
                                              const Operands<Element>& in, const Results<Element>& out,
                                              const Item& item, int query) {
    using Q = QueryTile<D>;
    Element* const own = own_q + lane_id() / 4 * Q::stride + lane_id() % 4 * 2;
    const int64_t lse_row = (static_cast<int64_t>(item.b) * in.H + item.h) * in.Tq;
    __syncwarp();
#pragma unroll
    for (int i = 0; i < row_tiles; ++i)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const float sum = quad_sum(state.sum[i][half]), inverse = sum == 0.0f ? 0.0f : 1.0f / sum;
            const int row = query + 16 * i + 8 * half + lane_id() / 4;
            if (out.lse && lane_id() % 4 == 0 && row < in.Tq)
                out.lse[lse_row + row] = fmaf(state.max[i][half], in.scale, logf(sum));
#pragma unroll
            for (int j = 0; j < D / 8; ++j)
                store_pair(own + (16 * i + 8 * half) * Q::stride + 8 * j, o[i][j][2 * half] * inverse,
                           o[i][j][2 * half + 1] * inverse);
        }
    __syncwarp();
    store_rows<Q, warp_rows, 32>(own_q, in.o_rows(out.o, item.b, item.h, D), query, in.Tq, lane_id());
}

// The same for one part of the keys: not divided, and with the maximum and the sum.
template <int D>
__device__ __forceinline__ void store_part(const Output<D>& o, const RowState& state, const Operands<Element>& in,
                                           const Results<Element>& out, const Item& item, int query) {
#pragma unroll
    for (int i = 0; i < row_tiles; ++i)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const float sum = quad_sum(state.sum[i][half]);
            const int row = query + 16 * i + 8 * half + lane_id() / 4;
            if (row >= in.Tq) continue;
            const int64_t at = ((static_cast<int64_t>(item.b) * in.H + item.h) * in.Tq + row) * out.parts + item.part;
            if (lane_id() % 4 == 0) out.partial_stats[at] = make_float2(state.max[i][half] * in.scale, sum);
#pragma unroll
            for (int j = 0; j < D / 8; ++j)
                *reinterpret_cast<float2*>(out.partial_o + at * D + 8 * j + lane_id() % 4 * 2) =
                    make_float2(o[i][j][2 * half], o[i][j][2 * half + 1]);
        }
}

template <int D, int keys>
__global__ void __launch_bounds__(threads, D == 64 ? 3 : 2) forward(Operands<Element> in, Results<Element> out) {
    using K = typename Shared<D, keys>::K;
    using Q = QueryTile<D>;
    DYNAMIC_SHARED(Element, dynamic);
    const Shared<D, keys> shared(dynamic);
    const Item item = item_of_block(in, out, queries);
    const Sight sight = in.sight(item.b);
    const KeyRange range = keys_of(sight, out, item, queries);
    const int query = item.query + warp_id() * warp_rows;  // of this warp
    const WarpSight seen{shared.first_key + warp_id() * warp_rows, query + in.q_offset,
                         query < in.Tq ? sight.last(query + warp_rows - 1) : -1};
    const Rows<const Element> k = in.kv_rows(in.k, item.b, in.kv_head(item.h), D),
                              v = in.kv_rows(in.v, item.b, in.kv_head(item.h), D);
    Element* const own_q = shared.q + warp_id() * warp_rows * Q::stride;

    shared.first_key[threadIdx.x] = sight.first(item.query + static_cast<int>(threadIdx.x));
    if (range.begin < range.end) {
        copy_rows<Q, threads>(shared.q, in.q_rows(in.q, item.b, item.h, D), item.query, in.Tq);
        copy_rows<K, threads>(shared.k, k, range.begin, in.Tk);
        copy_rows<K, threads>(shared.v, v, range.begin, in.Tk);
    }
    ptx::cp_async_commit();

    Output<D> o;
    RowState state;
    clear(o);
#pragma unroll
    for (int i = 0; i < row_tiles; ++i)
#pragma unroll
        for (int half = 0; half < 2; ++half) state.max[i][half] = -INFINITY, state.sum[i][half] = 0.0f;

    for (int key = range.begin, stage = 0; key < range.end; key += keys, stage ^= 1) {
        ptx::cp_async_wait<0>();
        __syncthreads();  // this tile is complete, and nobody reads the other one any more
        if (key + keys < range.end) {
            copy_rows<K, threads>(shared.k + (stage ^ 1) * K::elems, k, key + keys, in.Tk);
            copy_rows<K, threads>(shared.v + (stage ^ 1) * K::elems, v, key + keys, in.Tk);
        }
        ptx::cp_async_commit();
#pragma unroll 1
        for (int at = 0; at < keys; at += step_keys<D>) {
            if (seen.nothing(key + at, step_keys<D>)) continue;
            Scores<D> s;
            clear(s);
            multiply<D>(s, Side<Along::rows, Q>{own_q, 0}, Side<Along::rows, K>{shared.k + stage * K::elems, at});
            if (!seen.everything(key + at, step_keys<D>)) mask(s, seen, key + at);
            Probabilities<D> p;
            softmax<D>(s, p, state, o, in.scale_log2);
            add_values<D>(o, p, shared.v + stage * K::elems + at * K::stride);
        }
    }
    if (out.parts > 1) return store_part<D>(o, state, in, out, item, query);
    store_results<D>(o, state, own_q, in, out, item, query);
}

void forward_bf16(cudaStream_t stream, const AttentionForward& a, int room) {
    with_tiles(a.D, room, [&](auto D, auto size) {
        constexpr int keys = keys_for<D, size>, bytes = Shared<D, keys>::bytes;
        static_assert(bytes <= size);
        const auto in = operands<Element>(a, a.Tq, a.Tk, a.q_offset);
        const auto out = results<Element>(a, queries);
        launch(stream, grid(a, out, threads, bytes), forward<D, keys>, in, out);
        merge(stream, a, out);
    });
}

}  // namespace
}  // namespace attention

void attention_forward(cudaStream_t stream, const AttentionForward& a) {
    if (is_for_cudnn(a) && a.B * a.Tq > 0) return cudnn_attention_forward(stream, a);
    attention_forward(stream, a, room_of_gpu());
}
void attention_forward(cudaStream_t stream, const AttentionForward& a, int room) {
    if (a.B * a.Tq * a.H * a.D == 0) return;
    a.q_NHD.dtype == DType::bf16 ? attention::forward_bf16(stream, a, room) : attention::forward_fp32(stream, a, room);
}

// Enough for fewer queries and for any number of keys as well.
int64_t attention_workspace(const AttentionForward& a) {
    if (is_for_cudnn(a)) return cudnn_attention_workspace(a);
    const int64_t rows = a.B * a.H * attention::split_queries * attention::max_parts;
    attention::Cutter cut;
    cut.take<float>(rows * a.D);
    cut.take<float2>(rows);
    return cut.bytes();
}

}  // namespace trifold::cuda
