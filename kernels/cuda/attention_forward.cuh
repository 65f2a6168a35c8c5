// kernels/cuda/attention_forward.cuh   What the forward kernels of both element types share: order of blocks, and
// parts.
//
// Order   The last queries of a sequence see most keys, so their blocks go first. Blocks that run at the same time
//         should share keys and values in the L2 cache: heads come in sections with at most `section_bytes` of them,
//         one section after another, heaviest tiles first inside each.
// Parts   Up to `split_queries` queries would leave most of the GPU idle: their keys are cut into parts, one block
//         each, and a second kernel merges the parts, in order, by their maxima and sums. The cut depends on the
//         number of keys alone.
#pragma once
#include "kernels/cuda/attention_operands.cuh"

namespace trifold::cuda::attention {

constexpr int split_queries = 16, max_parts = 16, shortest_part = 256, most_keys = 64;
constexpr int64_t section_bytes = 16 << 20;

// Results. Those of parts: partial_o [B, H, Tq, parts, D] relative to the maximum, partial_stats [B, H, Tq, parts].
template <class T>
struct Results {
    T* o;
    float* lse;  // null: not wanted
    float* partial_o;
    float2* partial_stats;  // maximum of the scaled scores, and sum
    int parts, part_keys, tiles, section;
};

// What one block does.
struct Item {
    int b, h, query, part;
};

template <class T>
__device__ __forceinline__ Item item_of_block(const Operands<T>& in, const Results<T>& out, int tile_queries) {
    const int per_section = out.section * out.tiles, block = static_cast<int>(blockIdx.x);
    const int first_head = block / per_section * out.section, within = block % per_section;
    const int heads = min(out.section, in.B * in.H - first_head), bh = first_head + within % heads;
    return {bh / in.H, bh % in.H, (out.tiles - 1 - within / heads) * tile_queries, static_cast<int>(blockIdx.y)};
}

struct KeyRange {
    int begin, end;  // begin is a multiple of every size of key tiles
};
template <class T>
__device__ __forceinline__ KeyRange keys_of(const Sight& sight, const Results<T>& out, const Item& item,
                                            int tile_queries) {
    int begin = sight.first(item.query), end = sight.last(item.query + tile_queries - 1) + 1;
    if (out.parts > 1) {
        begin = max(begin, item.part * out.part_keys);
        end = min(end, (item.part + 1) * out.part_keys);
    }
    return {begin / most_keys * most_keys, end};
}

// o of a row and its lse from the parts.
template <class T>
__global__ void __launch_bounds__(128) merge_parts(Results<T> out, int H, int Tq, int D) {
    const int row = static_cast<int>(blockIdx.x), d = static_cast<int>(threadIdx.x);
    const float2* const stats = out.partial_stats + static_cast<int64_t>(row) * out.parts;
    const float* const o = out.partial_o + static_cast<int64_t>(row) * out.parts * D;
    float highest = -INFINITY, sum = 0.0f, total = 0.0f;
    for (int p = 0; p < out.parts; ++p) highest = fmaxf(highest, stats[p].x);
    for (int p = 0; p < out.parts; ++p) {
        if (stats[p].y == 0.0f) continue;  // saw nothing
        const float shrink = expf(stats[p].x - highest);
        sum += stats[p].y * shrink;
        if (d < D) total += o[p * D + d] * shrink;
    }
    const int bh = row / Tq, t = row % Tq;
    const int64_t at = ((static_cast<int64_t>(bh / H) * Tq + t) * H + bh % H) * D + d;
    if (d < D) store<1>(out.o + at, Floats<1>{{sum == 0.0f ? 0.0f : total / sum}});
    if (d == 0 && out.lse) out.lse[row] = highest + logf(sum);
}

// ---------------------------------------------------------------- host

struct Parts {
    int64_t count = 1, keys = 0;
};
inline Parts parts_of(const AttentionForward& a) {
    const int64_t keys = std::max<int64_t>(shortest_part, round_up(ceil_div(a.Tk, max_parts), most_keys));
    if (a.Tq > split_queries || a.Tk <= keys) return {};
    return {ceil_div(a.Tk, keys), keys};
}

template <class T>
Results<T> results(const AttentionForward& a, int64_t tile_queries) {
    TRIFOLD_ASSERT(a.workspace.bytes() >= attention_workspace(a) && aligned_16(a.workspace));
    const Parts parts = parts_of(a);
    const int64_t rows = parts.count > 1 ? a.B * a.H * a.Tq * parts.count : 0;
    const int64_t head_bytes = 2 * a.Tk * a.D * static_cast<int64_t>(sizeof(T));
    Cutter cut(a.workspace.data);
    Results<T> out{};
    out.o = elements<T>(a.o_NHD);
    out.lse = a.lse_BHT ? elements<float>(a.lse_BHT) : nullptr;
    out.partial_o = cut.take<float>(rows * a.D);
    out.partial_stats = cut.take<float2>(rows);
    out.parts = narrow(parts.count);
    out.part_keys = narrow(parts.keys);
    out.tiles = narrow(ceil_div(a.Tq, tile_queries));
    out.section = narrow(std::clamp<int64_t>(section_bytes / head_bytes, 1, a.B * a.H));
    return out;
}

template <class T>
Grid grid(const AttentionForward& a, const Results<T>& out, int threads, int shared_bytes) {
    return {.blocks = dim3(static_cast<unsigned>(narrow(a.B * a.H * out.tiles)), static_cast<unsigned>(out.parts)),
            .threads = dim3(static_cast<unsigned>(threads)),
            .shared_bytes = static_cast<size_t>(shared_bytes)};
}

template <class T>
void merge(cudaStream_t stream, const AttentionForward& a, const Results<T>& out) {
    if (out.parts == 1) return;
    launch(stream, {.blocks = dim3(static_cast<unsigned>(narrow(a.B * a.H * a.Tq))), .threads = dim3(128)},
           merge_parts<T>, out, narrow(a.H), narrow(a.Tq), narrow(a.D));
}

void forward_fp32(cudaStream_t stream, const AttentionForward& a, int room);

}  // namespace trifold::cuda::attention
