// kernels/cuda/attention_backward.cu   Gradients of flash attention (Dao, arXiv 2307.08691, algorithm 2), bf16.
//
// Block      128 keys of one query head, 8 warps; a loop over the tiles of queries that see some of them. K and V stay;
//            Q, dO and the queries' rows (attention_backward.cuh) arrive by cp.async one tile ahead.
// One step     S = Q K^T   P = exp(scale S - lse)   dP = dO V^T   dS = P (dP - delta)   P, dS to shared memory as bf16
//              dV += P^T dO   dK += dS^T Q (accumulators stay in registers)   dQ += dS K (in memory, see below)
// One kernel makes dK, dV and dQ with 5 products of tiles. One for dK, dV and another for dQ would make S and dP twice,
//            7 products for the same result, and the tensor cores are the limit here.
// Order      dQ of a query tile is a sum over the blocks of its keys, without float atomics: they take turns, highest
//            keys first. Each adds to an fp32 tile, the last one rounds the sum to dq. Starting on the diagonal, a
//            block comes to every query tile at least one step after its neighbour of higher keys, so nobody waits
//            while blocks advance alike, and the tile is still in the L2 cache. The heads that share keys take turns in
//            the same way for dK and dV.
// Turns      are safe in whatever order blocks start: what a block works on is decided by a ticket that it draws, and
//            it only ever waits for blocks of lower tickets, which run already or are done.
// Traffic    for 64 queries Q and dO (32 KiB at D 128) and dQ in and out (64 KiB), from L2; the rest once.
// Shared     K, V [128, D], Q, dO [queries, D] twice, P, dS [queries, 128]. The room of a block (room.h) decides how many
//            queries a tile has, and so how much is done between two barriers. Fewer keys instead would move dQ more
//            often through L2.
//                    227 KiB          163 KiB          99 KiB
//            D 64    128 (180 KiB)    64 (108 KiB)     32 (72 KiB)
//            D 96     64 (140 KiB)    64 (140 KiB)     32 (96 KiB)
//            D 128    64 (172 KiB)    32 (120 KiB)     16 (94 KiB)
// Numerics   fp32 accumulation in a fixed order, one rounding of each gradient. P and dS are rounded to bf16 for
//            products: |error of dv| <= 2^-8 (sum P |dO| + |dv|),  |error of dk| <= 2^-8 (scale sum |dS| |Q| + |dk|),
//            dq alike.
#include "kernels/cuda/attention_backward.cuh"
#include "kernels/cuda/attention_fragments.cuh"
#include "kernels/cuda/cudnn_attention.h"

namespace trifold::cuda {
namespace attention {
namespace {

constexpr int keys = 128, warps = 8, threads = 32 * warps;

// How the warps share out the tiles. Each has 32 rows of a result, or 16 where there are too few, and some of its columns.
template <int D_, int queries_>
struct Shape {
    static constexpr int D = D_, queries = queries_;
    static constexpr int score_rows = std::min(queries, 32), score_warps = queries / score_rows,
                         score_columns = keys * score_warps / warps;
    static constexpr int key_warps = keys / 32, key_columns = D * key_warps / warps;
    static constexpr int dq_rows = D == 96 || queries < 64 ? 16 : 32, dq_warps = queries / dq_rows,
                         dq_columns = D * dq_warps / warps;

    using Q = Tile<queries, D>;
    using K = Tile<keys, D>;
    using P = Tile<queries, keys>;
    using Scores = float[score_rows / 16][score_columns / 8][4];
    using KeyGradient = float[2][key_columns / 8][4];
    using QueryGradient = float[dq_rows / 16][dq_columns / 8][4];
};

template <class S>
struct Shared {
    static constexpr int bytes =
        2 * S::K::bytes + 4 * S::Q::bytes + 2 * S::P::bytes + 2 * S::queries * static_cast<int>(sizeof(QueryRow));
    Element *k, *v, *p, *ds, *q, *d_o;  // q, d_o and rows: two tiles each
    QueryRow* rows;

    explicit __device__ __forceinline__ Shared(Element* start)
        : k(start),
          v(k + S::K::elems),
          p(v + S::K::elems),
          ds(p + S::P::elems),
          q(ds + S::P::elems),
          d_o(q + 2 * S::Q::elems),
          rows(reinterpret_cast<QueryRow*>(d_o + 2 * S::Q::elems)) {}
};

// Sums in memory are kept as their fragments lie in registers: [tile][fragment][thread], 16 bytes each.
struct Gradients {
    const Element* d_o;
    Element *dq, *dk, *dv;
    const QueryRow* rows;  // [B, H, padded_T]
    float4 *dq_sums, *dk_sums, *dv_sums;
    int *ticket, *dq_turns, *key_turns;  // turns taken so far: [B, H, query tiles], [B, K, key tiles]
    int padded_T;
};

// One tile of keys of one query head, and where its queries' rows are. It lies in shared memory, so that no registers
// hold it through the loop over query tiles.
struct Item {
    int b, h, kv, key_block;
    Rows<const Element> q, d_o;
    Rows<Element> dq;
    const QueryRow* rows;
    int first_tile;  // of the head's queries, among those of all heads
    int end_query;   // no query from here on sees a key of the block

    __device__ __forceinline__ int key() const { return key_block * keys; }
    // Among those of all key/value heads.
    __device__ __forceinline__ int64_t key_tile(int K, int key_blocks) const {
        return (static_cast<int64_t>(b) * K + kv) * key_blocks + key_block;
    }
};

constexpr int least_queries = 16;

// The most queries whose tiles fit into the room of a block.
template <int D, int room, int queries = D == 64 ? 128 : 64>
constexpr int queries_for() {
    if constexpr (Shared<Shape<D, queries>>::bytes + static_cast<int>(sizeof(Item)) <= room)
        return queries;
    else
        return queries_for<D, room, queries / 2>();
}

template <class S>
__device__ __forceinline__ Item item_of(int ticket, const Operands<Element>& in, const Gradients& out, int key_blocks,
                                        int query_tiles) {
    constexpr int D = S::D;
    const int bh = ticket / key_blocks, b = bh / in.H, h = bh % in.H;
    return {.b = b,
            .h = h,
            .kv = in.kv_head(h),
            .key_block = key_blocks - 1 - ticket % key_blocks,
            .q = in.q_rows(in.q, b, h, D),
            .d_o = in.o_rows(out.d_o, b, h, D),
            .dq = in.q_rows(out.dq, b, h, D),
            .rows = out.rows + static_cast<int64_t>(bh) * out.padded_T,
            .first_tile = bh * query_tiles,
            .end_query = 0};
}

// ---------------------------------------------------------------- taking turns

// Called by one thread before a barrier, after which the block may read what the earlier turns wrote.
__device__ __forceinline__ void wait_for_turn(const int* turns, int turn) {
    while (ptx::load_acquire(turns) < turn) {
    }
}
// Called by one thread after a barrier, before which the block wrote its sums.
__device__ __forceinline__ void end_turn(int* turns, int turn) { ptx::store_release(turns, turn + 1); }

template <int row_tiles, int column_tiles>
__device__ __forceinline__ void load_sums(float (&acc)[row_tiles][column_tiles][4], const float4* sums) {
#pragma unroll
    for (int i = 0; i < row_tiles; ++i)
#pragma unroll
        for (int j = 0; j < column_tiles; ++j) {
            const float4 sum = __ldcg(sums + (i * column_tiles + j) * threads + static_cast<int>(threadIdx.x));
            acc[i][j][0] = sum.x, acc[i][j][1] = sum.y, acc[i][j][2] = sum.z, acc[i][j][3] = sum.w;
        }
}
template <int row_tiles, int column_tiles>
__device__ __forceinline__ void add_sums(float (&acc)[row_tiles][column_tiles][4], const float4* sums) {
#pragma unroll
    for (int i = 0; i < row_tiles; ++i)
#pragma unroll
        for (int j = 0; j < column_tiles; ++j) {
            const float4 sum = __ldcg(sums + (i * column_tiles + j) * threads + static_cast<int>(threadIdx.x));
            acc[i][j][0] += sum.x, acc[i][j][1] += sum.y, acc[i][j][2] += sum.z, acc[i][j][3] += sum.w;
        }
}
template <int row_tiles, int column_tiles>
__device__ __forceinline__ void store_sums(const float (&acc)[row_tiles][column_tiles][4], float4* sums) {
#pragma unroll
    for (int i = 0; i < row_tiles; ++i)
#pragma unroll
        for (int j = 0; j < column_tiles; ++j)
            __stcg(sums + (i * column_tiles + j) * threads + static_cast<int>(threadIdx.x),
                   make_float4(acc[i][j][0], acc[i][j][1], acc[i][j][2], acc[i][j][3]));
}

// ---------------------------------------------------------------- one step

// S becomes P and dP becomes dS, exactly zero where nothing is seen.
template <bool whole, int row_tiles, int column_tiles>
__device__ __forceinline__ void softmax_gradient(float (&s)[row_tiles][column_tiles][4],
                                                 float (&dp)[row_tiles][column_tiles][4], const QueryRow* rows,
                                                 int query, int key, float scale_log2) {
#pragma unroll
    for (int i = 0; i < row_tiles; ++i)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int r = 16 * i + 8 * half + lane_id() / 4;
            const QueryRow row = rows[r];
            const float base = row.lse * log2_e;
            const int own_key = key + lane_id() % 4 * 2, first = row.first_key - own_key, last = query + r - own_key;
#pragma unroll
            for (int j = 0; j < column_tiles; ++j)
#pragma unroll
                for (int e = 0; e < 2; ++e) {
                    float &p = s[i][j][2 * half + e], &d = dp[i][j][2 * half + e];
                    p = ptx::exp2_approx(fmaf(p, scale_log2, -base));
                    d = p * (d - row.delta);
                    if constexpr (!whole) {
                        const bool seen = 8 * j + e >= first && 8 * j + e <= last;
                        p = seen ? p : 0.0f;
                        d = seen ? d : 0.0f;
                    }
                }
        }
}

// P and dS of a query tile, to shared memory.
template <class S>
__device__ __forceinline__ void make_probabilities(const Shared<S>& shared, int stage, int query, int key,
                                                   float scale_log2) {
    const int row = warp_id() % S::score_warps * S::score_rows, column = warp_id() / S::score_warps * S::score_columns;
    const QueryRow* const rows = shared.rows + stage * S::queries + row;
    const int first_query = query + row, first_key = key + column, last_key = first_key + S::score_columns - 1;
    typename S::Scores s, dp;
    clear(s);
    clear(dp);
    if (first_key <= first_query + S::score_rows - 1 && last_key >= rows[0].first_key) {
        multiply<S::D>(s, Side<Along::rows, typename S::Q>{shared.q + stage * S::Q::elems, row},
                    Side<Along::rows, typename S::K>{shared.k, column});
        multiply<S::D>(dp, Side<Along::rows, typename S::Q>{shared.d_o + stage * S::Q::elems, row},
                    Side<Along::rows, typename S::K>{shared.v, column});
        if (last_key <= first_query && first_key >= rows[S::score_rows - 1].first_key)
            softmax_gradient<true>(s, dp, rows, first_query, first_key, scale_log2);
        else
            softmax_gradient<false>(s, dp, rows, first_query, first_key, scale_log2);
    }
    store_fragments<typename S::P>(s, 1.0f, shared.p, row, column);
    store_fragments<typename S::P>(dp, 1.0f, shared.ds, row, column);
}

template <class S>
__device__ __forceinline__ void add_key_gradients(typename S::KeyGradient& dk, typename S::KeyGradient& dv,
                                                  const Shared<S>& shared, int stage, int query, int key) {
    const int row = warp_id() % S::key_warps * 32, column = warp_id() / S::key_warps * S::key_columns;
    if (key + row > query + S::queries - 1) return;  // nobody sees these keys
    multiply<S::queries>(dv, Side<Along::columns, typename S::P>{shared.p, row},
                         Side<Along::columns, typename S::Q>{shared.d_o + stage * S::Q::elems, column});
    multiply<S::queries>(dk, Side<Along::columns, typename S::P>{shared.ds, row},
                         Side<Along::columns, typename S::Q>{shared.q + stage * S::Q::elems, column});
}

template <class S>
__device__ __forceinline__ void add_query_gradients(typename S::QueryGradient& dq, const Shared<S>& shared) {
    const int row = warp_id() % S::dq_warps * S::dq_rows, column = warp_id() / S::dq_warps * S::dq_columns;
    multiply<keys>(dq, Side<Along::rows, typename S::P>{shared.ds, row},
                   Side<Along::columns, typename S::K>{shared.k, column});
}

template <class S>
__device__ __forceinline__ void store_query_gradients(const typename S::QueryGradient& dq, float scale,
                                                      Rows<Element> to, int query, int T) {
    const int first_row = query + warp_id() % S::dq_warps * S::dq_rows + lane_id() / 4;
    const int column = warp_id() / S::dq_warps * S::dq_columns + lane_id() % 4 * 2;
#pragma unroll
    for (int i = 0; i < S::dq_rows / 16; ++i)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int row = first_row + 16 * i + 8 * half;
            if (row >= T) continue;
#pragma unroll
            for (int j = 0; j < S::dq_columns / 8; ++j)
                store_pair(to[row] + column + 8 * j, dq[i][j][2 * half] * scale, dq[i][j][2 * half + 1] * scale);
        }
}

// ---------------------------------------------------------------- the block

// Tiles from `first_tile` on whose first query sees a key before `end_key`.
__device__ __forceinline__ int count_tiles(const QueryRow* rows, int first_tile, int tiles, int tile_queries,
                                           int end_key) {
    int count = 0;
    for (int base = first_tile; base < tiles; base += threads) {
        const int m = base + static_cast<int>(threadIdx.x);
        count += __syncthreads_count(m < tiles && rows[m * tile_queries].first_key < end_key);
    }
    return count;
}

template <class S>
__device__ __forceinline__ void copy_queries(const Shared<S>& shared, int stage, const Item& item, int query, int T) {
    copy_rows<typename S::Q, threads>(shared.q + stage * S::Q::elems, item.q, query, T);
    copy_rows<typename S::Q, threads>(shared.d_o + stage * S::Q::elems, item.d_o, query, T);
    const int t = static_cast<int>(threadIdx.x);
    if (t < S::queries) ptx::cp_async_16(shared.rows + stage * S::queries + t, item.rows + query + t);
}

// What the heads before it in the group left in `sums` is added to a gradient of the block's keys; the result goes there, or
// if this is the last head into a tile.
template <class S>
__device__ __forceinline__ void finish_gradient(typename S::KeyGradient& gradient, float4* sums, bool first, bool last,
                                                float scale, Element* tile) {
    if (!first) add_sums(gradient, sums);
    if (last)
        store_fragments<typename S::K>(gradient, scale, tile, warp_id() % S::key_warps * 32,
                                       warp_id() / S::key_warps * S::key_columns);
    else
        store_sums(gradient, sums);
}

// One after the other: there are no registers for loads of both at once.
template <class S>
__device__ __forceinline__ void finish_keys(typename S::KeyGradient& dk, typename S::KeyGradient& dv,
                                            const Shared<S>& shared, const Operands<Element>& in, const Gradients& out,
                                            const Item& item, int key_blocks) {
    constexpr int D = S::D;
    const int group = in.H / in.K, turn = item.h % group;
    const int64_t tile = item.key_tile(in.K, key_blocks), at = tile * (keys * D / 4);
    const bool last = turn == group - 1;
    if (threadIdx.x == 0 && turn > 0) wait_for_turn(out.key_turns + tile, turn);
    __syncthreads();
    finish_gradient<S>(dk, out.dk_sums + at, turn == 0, last, in.scale, shared.k);
    finish_gradient<S>(dv, out.dv_sums + at, turn == 0, last, 1.0f, shared.v);
    __syncthreads();
    const int t = static_cast<int>(threadIdx.x);
    if (!last) {
        if (t == 0) end_turn(out.key_turns + tile, turn);
        return;
    }
    store_rows<typename S::K, keys, threads>(shared.k, in.kv_rows(out.dk, item.b, item.kv, D), item.key(), in.Tk, t);
    store_rows<typename S::K, keys, threads>(shared.v, in.kv_rows(out.dv, item.b, item.kv, D), item.key(), in.Tk, t);
}

template <class S>
__global__ void __launch_bounds__(threads, 1) backward(Operands<Element> in, Gradients out) {
    constexpr int D = S::D;
    DYNAMIC_SHARED(Element, dynamic);
    const Shared<S> shared(dynamic);
    const int T = in.Tk, key_blocks = (T + keys - 1) / keys, query_tiles = (T + S::queries - 1) / S::queries;
    __shared__ Item item;
    if (threadIdx.x == 0) item = item_of<S>(atomicAdd(out.ticket, 1), in, out, key_blocks, query_tiles);
    __syncthreads();
    copy_rows<typename S::K, threads>(shared.k, in.kv_rows(in.k, item.b, item.kv, D), item.key(), T);
    copy_rows<typename S::K, threads>(shared.v, in.kv_rows(in.v, item.b, item.kv, D), item.key(), T);
    copy_queries(shared, 0, item, item.key(), T);
    ptx::cp_async_commit();
    const int first_tile = item.key() / S::queries;
    const int tiles = count_tiles(item.rows, first_tile, query_tiles, S::queries, item.key() + keys);
    if (threadIdx.x == 0) item.end_query = (first_tile + tiles) * S::queries;
    __syncthreads();

    typename S::KeyGradient dk, dv;
    clear(dk);
    clear(dv);
    bool stored = false;  // sums of the tile before, which others get once all threads are known to be done
    const auto turns_at = [&](int query) { return out.dq_turns + item.first_tile + query / S::queries; };
    const auto turn_at = [&](int query) { return (min(query + S::queries, T) - 1) / keys - item.key_block; };
    int query = item.key();
    for (int stage = 0; query < item.end_query; query += S::queries, stage ^= 1) {
        ptx::cp_async_wait<0>();
        __syncthreads();  // this tile is complete; nobody reads the other one, P or dS any more
        if (threadIdx.x == 0 && stored) end_turn(turns_at(query - S::queries), turn_at(query - S::queries));
        if (query + S::queries < item.end_query) copy_queries(shared, stage ^ 1, item, query + S::queries, T);
        ptx::cp_async_commit();

        make_probabilities(shared, stage, query, item.key(), in.scale_log2);
        const int turn = turn_at(query);
        const bool last_turn = shared.rows[stage * S::queries].first_key >= item.key();
        if (threadIdx.x == 0 && turn > 0) wait_for_turn(turns_at(query), turn);
        __syncthreads();  // P and dS are complete, and so are the sums of the turns before

        float4* const sums =
            out.dq_sums + static_cast<int64_t>(item.first_tile + query / S::queries) * (S::queries * D / 4);
        typename S::QueryGradient dq;
        clear(dq);
        if (turn > 0) load_sums(dq, sums);
        add_key_gradients(dk, dv, shared, stage, query, item.key());
        add_query_gradients(dq, shared);
        if (last_turn)
            store_query_gradients<S>(dq, in.scale, item.dq, query, T);
        else
            store_sums(dq, sums);
        stored = !last_turn;
    }
    __syncthreads();
    if (threadIdx.x == 0 && stored) end_turn(turns_at(query - S::queries), turn_at(query - S::queries));
    finish_keys<S>(dk, dv, shared, in, out, item, key_blocks);
}

// ---------------------------------------------------------------- host

struct Workspace {
    Gradients arrays{};
    Counters counters;
    int64_t bytes = 0;
};

// Enough for the tiles of every room.
Workspace cut_workspace(const AttentionBackward& a, void* start) {
    const int64_t padded_T = round_up(a.T, row_padding), shared_keys = a.H > a.K ? a.B * a.K * padded_T * a.D / 4 : 0;
    const int64_t dq_turns = a.B * a.H * padded_T / least_queries, key_turns = a.B * a.K * padded_T / keys;
    Cutter cut(start);
    Workspace w;
    w.arrays.rows = take_rows(cut, a);
    w.arrays.dq_sums = cut.take<float4>(a.B * a.H * padded_T * a.D / 4);
    w.arrays.dk_sums = cut.take<float4>(shared_keys);
    w.arrays.dv_sums = cut.take<float4>(shared_keys);
    w.counters = {cut.take<int>(1 + dq_turns + key_turns), 1 + dq_turns + key_turns};
    w.bytes = cut.bytes();
    if (!start) return w;
    w.arrays.ticket = w.counters.first;
    w.arrays.dq_turns = w.arrays.ticket + 1;
    w.arrays.key_turns = w.arrays.dq_turns + dq_turns;
    w.arrays.padded_T = narrow(padded_T);
    return w;
}

void backward_bf16(cudaStream_t stream, const AttentionBackward& a, int room) {
    with_tiles(a.D, room, [&](auto D, auto size) {
        using S = Shape<D, queries_for<D, size>()>;
        static_assert(S::queries >= least_queries);
        TRIFOLD_ASSERT(aligned_16(a.workspace) && aligned_16(a.dq_NHD) && aligned_16(a.dk_NKD) && aligned_16(a.dv_NKD));
        Workspace w = cut_workspace(a, a.workspace.data);
        TRIFOLD_ASSERT(a.workspace.bytes() >= w.bytes);
        w.arrays.d_o = elements<const Element>(a.do_NHD);
        w.arrays.dq = elements<Element>(a.dq_NHD);
        w.arrays.dk = elements<Element>(a.dk_NKD);
        w.arrays.dv = elements<Element>(a.dv_NKD);
        const auto in = operands<Element>(a, a.T, a.T, 0);
        launch_prepare(stream, a, in, const_cast<QueryRow*>(w.arrays.rows), w.counters);
        launch(stream,
               {.blocks = dim3(static_cast<unsigned>(narrow(a.B * a.H * ceil_div(a.T, keys)))),
                .threads = dim3(threads),
                .shared_bytes = Shared<S>::bytes},
               backward<S>, in, w.arrays);
    });
}

}  // namespace
}  // namespace attention

void attention_backward(cudaStream_t stream, const AttentionBackward& a) {
    if (is_for_cudnn(a) && a.B * a.T > 0) return cudnn_attention_backward(stream, a);
    attention_backward(stream, a, room_of_gpu());
}
void attention_backward(cudaStream_t stream, const AttentionBackward& a, int room) {
    if (a.B * a.T * a.H * a.D == 0) return;
    a.q_NHD.dtype == DType::bf16 ? attention::backward_bf16(stream, a, room) : attention::backward_fp32(stream, a, room);
}

int64_t attention_workspace(const AttentionBackward& a) {
    if (is_for_cudnn(a)) return cudnn_attention_workspace(a);
    return a.q_NHD.dtype == DType::bf16 ? attention::cut_workspace(a, nullptr).bytes
                                        : attention::backward_fp32_workspace(a);
}

}  // namespace trifold::cuda
