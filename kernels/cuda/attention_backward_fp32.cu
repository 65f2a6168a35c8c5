// kernels/cuda/attention_backward_fp32.cu   Gradients of flash attention in fp32, as in attention_backward.cu.
//
// Kernels    one for dk and dv: a block has 64 keys of a key/value head and goes through the heads of its group and the
//            query tiles that see them; one for dq: a block has 64 queries and goes through their keys. S and dP are
//            made in both: 7 products instead of 5, and no block depends on another.
// Shared     K, V, Q, dO [64, D] and two squares [64, 64]: 166 KiB at D 128.
// Numerics   fp32 throughout, sums in a fixed order.
#include "kernels/cuda/attention_backward.cuh"
#include "kernels/cuda/attention_fp32.cuh"

namespace trifold::cuda::attention {
namespace {

using namespace fp32;

template <int D>
constexpr int shared_floats = 4 * tile_elems<D> + 2 * square_elems;

template <int D>
struct Shared {
    float *q, *d_o, *k, *v, *p, *ds;
    explicit __device__ __forceinline__ Shared(float* start)
        : q(start),
          d_o(q + tile_elems<D>),
          k(d_o + tile_elems<D>),
          v(k + tile_elems<D>),
          p(v + tile_elems<D>),
          ds(p + square_elems) {}
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
template <int D>
__device__ __forceinline__ void make_probabilities(Square& p, Square& ds, const Shared<D>& shared, const QueryRow* rows,
                                                   int query, int key, float scale) {
    multiply_rows<D>(p, shared.q, shared.k);
    multiply_rows<D>(ds, shared.d_o, shared.v);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const int r = 4 * thread_y() + i;
        const QueryRow row = rows[r];
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            const int column = key + thread_x() + 16 * j;
            const bool seen = column >= row.first_key && column <= query + r;
            p[i][j] = seen ? expf(p[i][j] * scale - row.lse) : 0.0f;
            ds[i][j] = seen ? p[i][j] * (ds[i][j] - row.delta) : 0.0f;
        }
    }
}

template <int D>
__global__ void __launch_bounds__(threads, 1) key_gradients(Operands<float> in, Gradients out) {
    DYNAMIC_SHARED(float, dynamic);
    const Shared<D> shared(dynamic);
    const int T = in.Tk, key = static_cast<int>(blockIdx.x) * tile, kv = static_cast<int>(blockIdx.y) % in.K;
    const int b = static_cast<int>(blockIdx.y) / in.K, group = in.H / in.K;
    const float scales[4] = {in.scale, in.scale, in.scale, in.scale}, ones[4] = {1.0f, 1.0f, 1.0f, 1.0f};
    Wide<D> dk, dv;
    clear<D>(dk);
    clear<D>(dv);
    load_rows<D>(shared.k, in.kv_rows(in.k, b, kv, D), key, T);
    load_rows<D>(shared.v, in.kv_rows(in.v, b, kv, D), key, T);
    for (int h = kv * group; h < (kv + 1) * group; ++h) {
        const QueryRow* const rows = out.rows_of(b * in.H + h);
        for (int query = key; query < T && rows[query].first_key < key + tile; query += tile) {
            __syncthreads();  // the last tile is no longer read
            load_rows<D>(shared.q, in.q_rows(in.q, b, h, D), query, T);
            load_rows<D>(shared.d_o, in.o_rows(out.d_o, b, h, D), query, T);
            __syncthreads();
            Square p, ds;
            make_probabilities<D>(p, ds, shared, rows + query, query, key, in.scale);
            store_square(p, shared.p);
            store_square(ds, shared.ds);
            __syncthreads();
            add_product<D>(dv, shared.p, shared.d_o);
            add_product<D>(dk, shared.ds, shared.q);
        }
    }
    store_rows<D>(dk, scales, in.kv_rows(out.dk, b, kv, D), key, T);
    store_rows<D>(dv, ones, in.kv_rows(out.dv, b, kv, D), key, T);
}

template <int D>
__global__ void __launch_bounds__(threads, 1) query_gradients(Operands<float> in, Gradients out) {
    DYNAMIC_SHARED(float, dynamic);
    const Shared<D> shared(dynamic);
    const int T = in.Tk, query = static_cast<int>(gridDim.x - 1 - blockIdx.x) * tile;  // those that see most keys first
    const int h = static_cast<int>(blockIdx.y) % in.H, b = static_cast<int>(blockIdx.y) / in.H, kv = in.kv_head(h);
    const QueryRow* const rows = out.rows_of(b * in.H + h) + query;
    const float scales[4] = {in.scale, in.scale, in.scale, in.scale};
    Wide<D> dq;
    clear<D>(dq);
    load_rows<D>(shared.q, in.q_rows(in.q, b, h, D), query, T);
    load_rows<D>(shared.d_o, in.o_rows(out.d_o, b, h, D), query, T);
    for (int key = rows[0].first_key / tile * tile; key < min(query + tile, T); key += tile) {
        __syncthreads();  // the last tile is no longer read
        load_rows<D>(shared.k, in.kv_rows(in.k, b, kv, D), key, T);
        load_rows<D>(shared.v, in.kv_rows(in.v, b, kv, D), key, T);
        __syncthreads();
        Square p, ds;
        make_probabilities<D>(p, ds, shared, rows, query, key, in.scale);
        store_transposed(ds, shared.ds);
        __syncthreads();
        add_product<D>(dq, shared.ds, shared.k);
    }
    store_rows<D>(dq, scales, in.q_rows(out.dq, b, h, D), query, T);
}

}  // namespace

int64_t backward_fp32_workspace(const AttentionBackward& a) {
    Cutter cut;
    take_rows(cut, a);
    return cut.bytes();
}

void backward_fp32(cudaStream_t stream, const AttentionBackward& a) {
    with_head_size(a.D, [&](auto head_size) {
        constexpr int D = head_size;
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
        Grid grid{.blocks = dim3(static_cast<unsigned>(ceil_div(a.T, tile)), static_cast<unsigned>(a.B * a.K)),
                  .threads = dim3(threads),
                  .shared_bytes = shared_floats<D> * 4};
        launch(stream, grid, key_gradients<D>, in, out);
        grid.blocks.y = static_cast<unsigned>(a.B * a.H);
        launch(stream, grid, query_gradients<D>, in, out);
    });
}

}  // namespace trifold::cuda::attention
