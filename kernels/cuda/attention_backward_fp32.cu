// kernels/cuda/attention_backward_fp32.cu   Gradients of flash attention in fp32, as in attention_backward.cu.
//
// Kernels    one for dk and dv: a block has 64 keys of a key/value head and goes through the heads of its group and the
//            query tiles that see them; one for dq: a block has 64 queries and goes through their keys. S and dP are
//            made in both: 7 products instead of 5, and no block depends on another.
// Shared     K, V, Q, dO [64, D] and two squares [64, 64]: 102, 134, 166 KiB at D 64, 96, 128; where a block has less
//            (room.h), 32 instead of 64: at most 75 KiB.
// Numerics   fp32 throughout, sums in a fixed order.
#include "kernels/cuda/attention_backward.cuh"
#include "kernels/cuda/attention_fp32.cuh"

namespace trifold::cuda::attention {
namespace {

using namespace fp32;

constexpr int tiles = 4, squares = 2;

template <class S>
struct Shared {
    float *q, *d_o, *k, *v, *p, *ds;
    explicit __device__ __forceinline__ Shared(float* start)
        : q(start),
          d_o(q + S::tile_elems),
          k(d_o + S::tile_elems),
          v(k + S::tile_elems),
          p(v + S::tile_elems),
          ds(p + S::square_elems) {}
};

struct Gradients {
    const float* d_o;
    float *dq, *dk, *dv;
    const QueryRow* rows;  // [B, H, padded_T]
    int padded_T;

    __device__ __forceinline__ const QueryRow* rows_of(int bh) const {
        return rows + static_cast<int64_t>(bh) * padded_T;
    }
};

// P and dS of the tiles in shared memory, zero where nothing is seen. `rows` begin at `query`.
template <class S>
__device__ __forceinline__ void make_probabilities(typename S::Square& p, typename S::Square& ds,
                                                   const Shared<S>& shared, const QueryRow* rows, int query, int key,
                                                   float scale) {
    multiply_rows<S>(p, shared.q, shared.k);
    multiply_rows<S>(ds, shared.d_o, shared.v);
#pragma unroll
    for (int i = 0; i < S::side; ++i) {
        const int r = S::side * thread_y() + i;
        const QueryRow row = rows[r];
#pragma unroll
        for (int j = 0; j < S::side; ++j) {
            const int column = key + thread_x() + 16 * j;
            const bool seen = column >= row.first_key && column <= query + r;
            p[i][j] = seen ? expf(p[i][j] * scale - row.lse) : 0.0f;
            ds[i][j] = seen ? p[i][j] * (ds[i][j] - row.delta) : 0.0f;
        }
    }
}

template <class S>
__global__ void __launch_bounds__(threads, 1) key_gradients(Operands<float> in, Gradients out) {
    constexpr int D = S::D, tile = S::tile;
    DYNAMIC_SHARED(float, dynamic);
    const Shared<S> shared(dynamic);
    const int T = in.Tk, key = static_cast<int>(blockIdx.x) * tile, kv = static_cast<int>(blockIdx.y) % in.K;
    const int b = static_cast<int>(blockIdx.y) / in.K, group = in.H / in.K;
    typename S::Wide dk, dv;
    clear<S>(dk);
    clear<S>(dv);
    load_rows<S>(shared.k, in.kv_rows(in.k, b, kv, D), key, T);
    load_rows<S>(shared.v, in.kv_rows(in.v, b, kv, D), key, T);
    for (int h = kv * group; h < (kv + 1) * group; ++h) {
        const QueryRow* const rows = out.rows_of(b * in.H + h);
        for (int query = key; query < T && rows[query].first_key < key + tile; query += tile) {
            __syncthreads();  // the last tile is no longer read
            load_rows<S>(shared.q, in.q_rows(in.q, b, h, D), query, T);
            load_rows<S>(shared.d_o, in.o_rows(out.d_o, b, h, D), query, T);
            __syncthreads();
            typename S::Square p, ds;
            make_probabilities<S>(p, ds, shared, rows + query, query, key, in.scale);
            store_square<S>(p, shared.p);
            store_square<S>(ds, shared.ds);
            __syncthreads();
            add_product<S>(dv, shared.p, shared.d_o);
            add_product<S>(dk, shared.ds, shared.q);
        }
    }
    store_rows<S>(dk, [&](int) { return in.scale; }, in.kv_rows(out.dk, b, kv, D), key, T);
    store_rows<S>(dv, [](int) { return 1.0f; }, in.kv_rows(out.dv, b, kv, D), key, T);
}

template <class S>
__global__ void __launch_bounds__(threads, 1) query_gradients(Operands<float> in, Gradients out) {
    constexpr int D = S::D, tile = S::tile;
    DYNAMIC_SHARED(float, dynamic);
    const Shared<S> shared(dynamic);
    const int T = in.Tk, query = static_cast<int>(gridDim.x - 1 - blockIdx.x) * tile;  // those that see most keys first
    const int h = static_cast<int>(blockIdx.y) % in.H, b = static_cast<int>(blockIdx.y) / in.H, kv = in.kv_head(h);
    const QueryRow* const rows = out.rows_of(b * in.H + h) + query;
    typename S::Wide dq;
    clear<S>(dq);
    load_rows<S>(shared.q, in.q_rows(in.q, b, h, D), query, T);
    load_rows<S>(shared.d_o, in.o_rows(out.d_o, b, h, D), query, T);
    for (int key = rows[0].first_key / tile * tile; key < min(query + tile, T); key += tile) {
        __syncthreads();  // the last tile is no longer read
        load_rows<S>(shared.k, in.kv_rows(in.k, b, kv, D), key, T);
        load_rows<S>(shared.v, in.kv_rows(in.v, b, kv, D), key, T);
        __syncthreads();
        typename S::Square p, ds;
        make_probabilities<S>(p, ds, shared, rows, query, key, in.scale);
        store_transposed<S>(ds, shared.ds);
        __syncthreads();
        add_product<S>(dq, shared.ds, shared.k);
    }
    store_rows<S>(dq, [&](int) { return in.scale; }, in.q_rows(out.dq, b, h, D), query, T);
}

}  // namespace

int64_t backward_fp32_workspace(const AttentionBackward& a) {
    Cutter cut;
    take_rows(cut, a);
    return cut.bytes();
}

void backward_fp32(cudaStream_t stream, const AttentionBackward& a, int room) {
    with_tiles(a.D, room, [&](auto D, auto size) {
        using S = ShapeFor<D, size, tiles, squares>;
        constexpr int bytes = (tiles * S::tile_elems + squares * S::square_elems) * 4;
        static_assert(bytes <= size);
        TRIFOLD_ASSERT(aligned_16(a.workspace) && a.workspace.bytes() >= backward_fp32_workspace(a));
        TRIFOLD_ASSERT(aligned_16(a.dq_NHD) && aligned_16(a.dk_NKD) && aligned_16(a.dv_NKD));
        Cutter cut(a.workspace.data);
        QueryRow* const rows = take_rows(cut, a);
        const auto in = operands<float>(a, a.T, a.T, 0);
        const Gradients out{.d_o = elements<const float>(a.do_NHD),
                            .dq = elements<float>(a.dq_NHD),
                            .dk = elements<float>(a.dk_NKD),
                            .dv = elements<float>(a.dv_NKD),
                            .rows = rows,
                            .padded_T = narrow(round_up(a.T, row_padding))};
        if (a.B * a.H > 65535)  // blocks in the second dimension of a grid
            throw Problem(Exit::usage, "attention in fp32 on a GPU takes at most 65535 heads in all sequences of a micro-batch: use a smaller --train.micro_batch");
        launch_prepare(stream, a, in, rows, {});
        Grid grid{.blocks = dim3(static_cast<unsigned>(ceil_div(a.T, S::tile)), static_cast<unsigned>(a.B * a.K)),
                  .threads = dim3(threads),
                  .shared_bytes = bytes};
        launch(stream, grid, key_gradients<S>, in, out);
        grid.blocks.y = static_cast<unsigned>(a.B * a.H);
        launch(stream, grid, query_gradients<S>, in, out);
    });
}

}  // namespace trifold::cuda::attention
