// kernels/cuda/embedding.cu   Rows of the token and position tables: gathered in forward, added to in backward.
//
// forward    x[n] = wte[token[n] - first] (+ wpe[position[n]])
// backward   dwte[token[n] - first] += dx[n],  dwpe[position[n]] += dx[n]: the tokens are sorted by destination row
//            (stable), so those of one row form a run, which one warp adds in token order. A run longer than `long_run`
//            that is the last of its block is cut into 16 parts, one per warp, whose sums are added in their order. No
//            atomics on floats.
// Split      a table of rows [first, first + V) of the vocabulary: other tokens are rows of zeros in forward, and in
//            backward a run of their own behind all others, which nobody adds
// Traffic    forward: N rows in and out. backward: N rows of dx and the rows they go to; with `overwrite` the whole
//            table is set to zero before. The sort moves 16 bytes per token and digit.
// Numerics   fp32 sums, in the order of kernels/cpu/embedding.cpp but for long runs.
#include <algorithm>

#include "kernels/cuda/strips.cuh"
#include "kernels/ops.h"

namespace trifold::cuda {
namespace {

// ---------------------------------------------------------------- forward

template <class T, int V>
__global__ void __launch_bounds__(32 * strip_warps) gather(const EmbeddingForward a) {
    const Strip<V> strip(Matrix{a.N, a.C});
    if (strip.row >= a.N) return;
    const int64_t row = elements<const int32_t>(a.token_N)[strip.row] - a.first;
    T* const x = elements<T>(a.x_NC) + strip.row * a.C;
    Pack<T, V> packs[strip_packs] = {};
    if (row >= 0 && row < a.V) load_strip(packs, elements<const T>(a.wte_VC) + row * a.C, strip);
    if (a.wpe_TC.data) {
        Pack<T, V> position[strip_packs];
        load_strip(position, elements<const T>(a.wpe_TC) + elements<const int32_t>(a.position_N)[strip.row] * a.C,
                   strip);
#pragma unroll
        for (int i = 0; i < strip_packs; ++i) packs[i] = to_pack<T>(to_floats(packs[i]) + to_floats(position[i]));
    }
#pragma unroll
    for (int i = 0; i < strip_packs; ++i)
        if (strip.has(i)) store_pack(x + strip.column(i), packs[i]);
}

// ---------------------------------------------------------------- backward: a stable radix sort

// 9 bits at a time: two rounds up to 262,144 rows. A tile is what one block sorts; thread d of it looks after digit d.
constexpr int digit_bits = 9, digits = 1 << digit_bits, tile_threads = digits, tile_warps = tile_threads / 32;
constexpr int thread_items = 4, tile_items = tile_threads * thread_items;

int64_t tiles_of(int64_t N) { return (N + tile_items - 1) / tile_items; }

// One round: `row` and `token` go to `row_out` and `token_out`, ordered by digit (row >> shift) % digits.
struct SortRound {
    const int32_t *row, *token;  // token null: 0, 1, 2, ...
    int32_t *row_out, *token_out;
    int32_t* places;  // [digits, tiles]: how many there are in the tile; after the scan, where they begin
    int32_t N, tiles, shift;
    int32_t first, rows;  // the first round still has to make rows of the table: [first, first + rows)
};

// Counted from the table's first row; `rows` for all that are not in the table.
__device__ __forceinline__ int32_t row_of(const SortRound& a, int32_t n) {
    const uint32_t row = static_cast<uint32_t>(a.row[n]) - static_cast<uint32_t>(a.first);
    return static_cast<int32_t>(min(row, static_cast<uint32_t>(a.rows)));
}
__device__ __forceinline__ int digit_of(int32_t row, const SortRound& a) { return (row >> a.shift) % digits; }

__global__ void __launch_bounds__(tile_threads) count_digits(const SortRound a) {
    __shared__ int32_t counts[digits];
    counts[threadIdx.x] = 0;
    __syncthreads();
    for (int i = 0; i < thread_items; ++i) {
        const int32_t n = static_cast<int32_t>(blockIdx.x * tile_items + i * tile_threads + threadIdx.x);
        if (n < a.N) atomicAdd(&counts[digit_of(row_of(a, n), a)], 1);  // integers: any order gives the same
    }
    __syncthreads();
    a.places[static_cast<int>(threadIdx.x) * a.tiles + static_cast<int>(blockIdx.x)] = counts[threadIdx.x];
}

// Exclusive prefix sums in place, by one block; a thread takes neighbouring entries.
constexpr int scan_threads = 1024;
__global__ void __launch_bounds__(scan_threads) scan(int32_t* places, int32_t count) {
    __shared__ int32_t of_warp[32];
    const int lane = static_cast<int>(threadIdx.x % 32), warp = static_cast<int>(threadIdx.x / 32);
    const int per_thread = (count + scan_threads - 1) / scan_threads;
    const int begin = min(static_cast<int>(threadIdx.x) * per_thread, count), end = min(begin + per_thread, count);
    int32_t sum = 0;
    for (int i = begin; i < end; ++i) sum += places[i];
    // Sums over the threads up to this one, then over the warps before.
    const auto up_to = [lane](int32_t v) {
        for (int distance = 1; distance < 32; distance *= 2) {
            const int32_t below = __shfl_up_sync(0xffffffffu, v, distance);
            if (lane >= distance) v += below;
        }
        return v;
    };
    const int32_t in_warp = up_to(sum);
    if (lane == 31) of_warp[warp] = in_warp;
    __syncthreads();
    if (warp == 0) of_warp[lane] = up_to(of_warp[lane]);
    __syncthreads();
    int32_t running = in_warp - sum + (warp > 0 ? of_warp[warp - 1] : 0);
    for (int i = begin; i < end; ++i) {
        const int32_t here = places[i];
        places[i] = running;
        running += here;
    }
}

// The lanes of the warp whose items have the same digit.
__device__ __forceinline__ unsigned same_digit(int digit, bool exists) {
    unsigned same = __ballot_sync(0xffffffffu, exists);
    for (int bit = 0; bit < digit_bits; ++bit) {
        const bool set = digit >> bit & 1;
        const unsigned all_set = __ballot_sync(0xffffffffu, set);
        same &= set ? all_set : ~all_set;
    }
    return same;
}

// A warp's items are neighbours; an item's place is that of its digit in the tile, plus those of warps before, plus its
// rank.
__global__ void __launch_bounds__(tile_threads) place_items(const SortRound a) {
    __shared__ int32_t place[tile_warps][digits];  // first how many items of a warp have the digit
    const int lane = static_cast<int>(threadIdx.x % 32), warp = static_cast<int>(threadIdx.x / 32);
    for (int w = 0; w < tile_warps; ++w) place[w][threadIdx.x] = 0;
    __syncthreads();
    const int32_t first = static_cast<int32_t>(blockIdx.x * tile_items) + warp * 32 * thread_items + lane;
    int32_t row[thread_items], rank[thread_items];
#pragma unroll
    for (int i = 0; i < thread_items; ++i) {
        const bool exists = first + i * 32 < a.N;
        row[i] = exists ? row_of(a, first + i * 32) : 0;
        const int digit = digit_of(row[i], a);
        const unsigned same = same_digit(digit, exists);
        rank[i] = place[warp][digit] + __popc(same & ((1u << lane) - 1));
        __syncwarp();  // all have read
        if (exists && same >> lane == 1) place[warp][digit] = rank[i] + 1;
        __syncwarp();
    }
    __syncthreads();
    int32_t running = a.places[static_cast<int>(threadIdx.x) * a.tiles + static_cast<int>(blockIdx.x)];
    for (int w = 0; w < tile_warps; ++w) {
        const int32_t count = place[w][threadIdx.x];
        place[w][threadIdx.x] = running;
        running += count;
    }
    __syncthreads();
#pragma unroll
    for (int i = 0; i < thread_items; ++i) {
        const int32_t n = first + i * 32;
        if (n >= a.N) continue;
        const int32_t to = place[warp][digit_of(row[i], a)] + rank[i];
        a.row_out[to] = row[i];
        a.token_out[to] = a.token ? a.token[n] : n;
    }
}

// ---------------------------------------------------------------- backward: the runs

constexpr int run_warps = 16, run_threads = 32 * run_warps, block_places = 128, long_run = 64;

struct Runs {
    const int32_t *row, *token;  // sorted by row
    const void* dx;              // [N, C]
    float* table;
    int32_t N, rows;  // a row of `rows` or more is not in the table
    int64_t C;
    Accumulate accumulate;
};

// Where the run of `row` ends, given that it reaches at least to `from`.
__device__ __forceinline__ int32_t end_of_run(const Runs& a, int32_t row, int32_t from) {
    if (from >= a.N || a.row[from] != row) return from;
    int32_t inside = from, outside = a.N;
    while (outside - inside > 1) {
        const int32_t middle = inside + (outside - inside) / 2;
        (a.row[middle] == row ? inside : outside) = middle;
    }
    return outside;
}

// `total` plus rows dx[token[i]], begin <= i < end, in this order. Several rows are on the way at once, in short runs
// too.
template <class T, int V>
__device__ __forceinline__ Floats<V> add_run(const Runs& a, int32_t begin, int32_t end, int64_t column,
                                             Floats<V> total) {
    constexpr int batch = pack_elems<T>;
    const T* const dx = static_cast<const T*>(a.dx) + column;
    for (int32_t i = begin; i < end; i += batch) {
        Pack<T, V> rows[batch];
#pragma unroll
        for (int j = 0; j < batch; ++j)
            if (i + j < end) rows[j] = load_pack_streaming<V>(dx + a.token[i + j] * a.C);
#pragma unroll
        for (int j = 0; j < batch; ++j)
            if (i + j < end) total = total + to_floats(rows[j]);
    }
    return total;
}

// The runs that begin at the places of this block, in the columns of blockIdx.y.
template <class T, int V>
__global__ void __launch_bounds__(run_threads, 2) add_runs(const Runs a) {
    __shared__ int32_t starts[block_places + 1];
    __shared__ int32_t of_warp[block_places / 32];
    __shared__ float parts[run_warps][32 * V];
    const int lane = static_cast<int>(threadIdx.x % 32), warp = static_cast<int>(threadIdx.x / 32);
    const int32_t first_place = static_cast<int32_t>(blockIdx.x) * block_places,
                  here = first_place + static_cast<int32_t>(threadIdx.x);

    bool starts_here = false;
    unsigned starting = 0;
    if (warp < block_places / 32) {
        starts_here = here < a.N && a.row[here] < a.rows && (here == 0 || a.row[here - 1] != a.row[here]);
        starting = __ballot_sync(0xffffffffu, starts_here);
        if (lane == 0) of_warp[warp] = __popc(starting);
    }
    __syncthreads();
    int32_t before = 0, runs = 0;
    for (int w = 0; w < block_places / 32; ++w) {
        before += w < warp ? of_warp[w] : 0;
        runs += of_warp[w];
    }
    if (runs == 0) return;
    if (starts_here) {
        const int32_t index = before + __popc(starting & ((1u << lane) - 1));
        starts[index] = here;
        if (index == runs - 1) starts[runs] = end_of_run(a, a.row[here], here + 1);
    }
    __syncthreads();

    const bool last_is_long = starts[runs] - starts[runs - 1] > long_run;
    const int64_t column = int64_t{blockIdx.y} * 32 * V + lane * V;
    const bool exists = column < a.C, adds = a.accumulate == Accumulate::add;
    for (int32_t run = warp; run < runs - last_is_long && exists; run += run_warps) {
        float* const to = a.table + a.row[starts[run]] * a.C + column;
        store(to, add_run<T, V>(a, starts[run], starts[run + 1], column, adds ? load<V>(to) : Floats<V>{}));
    }
    if (!last_is_long) return;
    const int32_t begin = starts[runs - 1], per_warp = (starts[runs] - begin + run_warps - 1) / run_warps;
    const int32_t from = begin + warp * per_warp, until = min(from + per_warp, starts[runs]);
    if (exists) store(&parts[warp][lane * V], add_run<T, V>(a, from, until, column, Floats<V>{}));
    __syncthreads();
    if (warp != 0 || !exists) return;
    float* const to = a.table + a.row[begin] * a.C + column;
    Floats<V> total = adds ? load<V>(to) : Floats<V>{};
    for (int w = 0; w < run_warps; ++w) total = total + load<V>(&parts[w][lane * V]);
    store(to, total);
}

// ---------------------------------------------------------------- backward: launches

// A table of rows [first, first + count), and where in it each token (or position) belongs.
struct Rows {
    const int32_t* index_N;
    int64_t first, count;
    bool all_inside;  // no index is outside of the table
};

// The tokens sorted by row, in round.row and round.token.
SortRound sorted(cudaStream_t stream, const Rows& rows, int64_t N, int32_t* workspace) {
    SortRound round{.row = rows.index_N,
                    .token = nullptr,
                    .row_out = workspace,
                    .token_out = workspace + N,
                    .places = workspace + 4 * N,
                    .N = static_cast<int32_t>(N),
                    .tiles = static_cast<int32_t>(tiles_of(N)),
                    .shift = 0,
                    .first = static_cast<int32_t>(rows.first),
                    .rows = static_cast<int32_t>(rows.count)};
    const int64_t largest = rows.all_inside ? rows.count - 1 : rows.count;
    const Grid grid{.blocks = dim3(static_cast<unsigned>(round.tiles)), .threads = dim3(tile_threads)};
    do {
        launch(stream, grid, count_digits, round);
        launch(stream, {.blocks = dim3(1), .threads = dim3(scan_threads)}, scan, round.places, round.tiles * digits);
        launch(stream, grid, place_items, round);
        round.row = round.row_out;
        round.token = round.token_out;
        round.row_out = workspace + (round.row == workspace ? 2 * N : 0);
        round.token_out = round.row_out + N;
        round.shift += digit_bits;
        round.first = 0;
    } while (largest >> round.shift > 0);
    return round;
}

// table[row of n] += dx[n] for all n that belong into it.
void scatter(cudaStream_t stream, const Rows& rows, const EmbeddingBackward& a, const Tensor& table,
             Accumulate accumulate) {
    if (rows.count == 0) return;
    if (accumulate == Accumulate::overwrite)
        CUDA_CHECK(cudaMemsetAsync(table.data, 0, static_cast<size_t>(rows.count * a.C) * sizeof(float), stream));
    if (a.N == 0) return;
    const SortRound order = sorted(stream, rows, a.N, elements<int32_t>(a.workspace));
    const Runs runs{.row = order.row,
                    .token = order.token,
                    .dx = a.dx_NC.data,
                    .table = elements<float>(table),
                    .N = order.N,
                    .rows = order.rows,
                    .C = a.C,
                    .accumulate = accumulate};
    with_element(a.dx_NC.dtype, [&](auto element) {
        using T = decltype(element);
        with_width<4>(packs_fit<4>(a.C, a.dx_NC, table), [&](auto V) {
            const dim3 blocks(static_cast<unsigned>((a.N + block_places - 1) / block_places),
                              static_cast<unsigned>((a.C + 32 * V - 1) / (32 * V)));
            launch(stream, {.blocks = blocks, .threads = dim3(run_threads)}, add_runs<T, V>, runs);
        });
    });
}

}  // namespace

void embedding_forward(cudaStream_t stream, const EmbeddingForward& a) {
    TRIFOLD_ASSERT(a.token_N.elems >= a.N && a.x_NC.elems >= a.N * a.C && (!a.wpe_TC || a.position_N.elems >= a.N));
    TRIFOLD_ASSERT(a.first >= 0 && a.V >= 0 && a.wte_VC.elems >= a.V * a.C);
    if (a.N == 0) return;
    with_element(a.x_NC.dtype, [&](auto element) {
        using T = decltype(element);
        with_width<pack_elems<T>>(packs_fit<pack_elems<T>>(a.C, a.wte_VC, a.wpe_TC, a.x_NC), [&](auto V) {
            launch(stream, strip_grid<V>({a.N, a.C}), gather<T, V>, a);
        });
    });
}

void embedding_backward(cudaStream_t stream, const EmbeddingBackward& a) {
    TRIFOLD_ASSERT(a.token_N.elems >= a.N && a.dx_NC.elems >= a.N * a.C && a.dwte_VC.elems >= a.V * a.C);
    TRIFOLD_ASSERT(!a.dwpe_TC || (a.position_N.elems >= a.N && a.dwpe_TC.elems >= a.positions * a.C));
    TRIFOLD_ASSERT(a.first >= 0 && a.V >= 0 && a.workspace.bytes() >= embedding_backward_workspace(a.N, a.V));
    const Rows tokens{elements<const int32_t>(a.token_N), a.first, a.V, false},
        positions{elements<const int32_t>(a.position_N), 0, a.positions, true};
    scatter(stream, tokens, a, a.dwte_VC, a.accumulate_wte);
    if (a.dwpe_TC) scatter(stream, positions, a, a.dwpe_TC, a.accumulate_wpe);
}

int64_t embedding_backward_workspace(int64_t N, int64_t) {
    return (4 * N + digits * tiles_of(N)) * static_cast<int64_t>(sizeof(int32_t));
}

}  // namespace trifold::cuda
