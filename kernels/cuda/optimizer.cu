// kernels/cuda/optimizer.cu   Gradient norm, clipping, AdamW and LAMB over the flat parameter buffer: each one launch
// for all tensors.
//
// Formulas   in kernels/ops.h. Bias corrections are computed in double on the host and multiplied in.
// Shapes     the flat buffer is cut into chunks of 16,384 elements, one block each. A block finds the first segment
//            that reaches into its chunk by binary search and walks over the segments there; padding between them is
//            not touched.
// Traffic    AdamW, one pass: reads w, m, v, g, writes w, m, v (and bf16 w): 28 (30) bytes per parameter. LAMB's
//            direction reads w, m, v, g, writes m, v, u: 28; its update reads w, u, writes w: 12 (14). The norm reads
//            4. All memory bound.
// Order      norms are summed in double: per thread, block and chunk, then chunk after chunk. The cuts depend on the
//            buffer alone.
#include <cmath>

#include "kernels/cuda/reduce.cuh"
#include "kernels/ops.h"

namespace trifold::cuda {
namespace {

constexpr int64_t chunk_elems = 16384;
constexpr int chunk_threads = 256, final_threads = 1024, width = 4;

int64_t chunks_of(int64_t flat_elems) { return (flat_elems + chunk_elems - 1) / chunk_elems; }

Grid chunk_grid(int64_t flat_elems) {
    return {.blocks = dim3(static_cast<unsigned>(chunks_of(flat_elems))), .threads = dim3(chunk_threads)};
}

// Elements [begin, end) of the flat buffer: what the block's chunk holds of one segment.
struct Piece {
    int64_t segment, begin, end;
};

// body(piece) for the pieces of this block's chunk, in order. All threads of the block walk together.
template <class Body>
__device__ __forceinline__ void for_pieces(const Segment* segments, int64_t count, const Body& body) {
    const int64_t begin = blockIdx.x * chunk_elems, end = begin + chunk_elems;
    int64_t first = 0, last = count;  // the first segment that ends behind `begin`
    while (first < last) {
        const int64_t middle = (first + last) / 2;
        if (segments[middle].offset + segments[middle].elems > begin)
            last = middle;
        else
            first = middle + 1;
    }
    for (int64_t s = first; s < count && segments[s].offset < end; ++s) {
        const Piece piece{s, max(begin, segments[s].offset), min(end, segments[s].offset + segments[s].elems)};
        if (piece.begin < piece.end) body(piece);
    }
}

// each(Width<n>, i) for elements [i, i + n) of this thread: aligned groups of V, and single ones at the ends of a
// piece.
template <int V, class Each>
__device__ __forceinline__ void for_elems(const Piece& p, const Each& each) {
    const int64_t thread = threadIdx.x;
    const int64_t groups_begin = min((p.begin + V - 1) / V * V, p.end), groups_end = max(p.end / V * V, groups_begin);
    for (int64_t i = groups_begin + thread * V; i < groups_end; i += chunk_threads * V) each(Width<V>{}, i);
    if constexpr (V > 1) {
        const int64_t ahead = groups_begin - p.begin, behind = p.end - groups_end;
        if (thread < ahead + behind) each(Width<1>{}, thread < ahead ? p.begin + thread : groups_end + thread - ahead);
    }
}

// ---------------------------------------------------------------- norm and clipping

template <int V>
__global__ void __launch_bounds__(chunk_threads) sum_squares(const SquaredNorm a) {
    const float* const grad = elements<const float>(a.grad);
    double sum = 0.0;
    for_pieces(a.segments, a.segment_count, [&](const Piece& piece) {
        for_elems<V>(piece, [&](auto n, int64_t i) {
            const Floats<n> g = load_streaming<n>(grad + i);
#pragma unroll
            for (int j = 0; j < n; ++j) sum += double{g[j]} * double{g[j]};
        });
    });
    sum = block_sum(sum);
    if (threadIdx.x == 0) elements<double>(a.workspace)[blockIdx.x] = sum;
}

__global__ void __launch_bounds__(final_threads) add_chunks(const double* partials, int64_t chunks, double* sums) {
    double sum = 0.0;
    for (int64_t c = threadIdx.x; c < chunks; c += final_threads) sum += partials[c];
    sum = block_sum(sum);
    if (threadIdx.x == 0) sums[0] += sum;
}

__global__ void control_of_norm(const ClipControl a) {
    const float norm = static_cast<float>(a.unit * sqrt(elements<const double>(a.squared_norm)[0]));
    const bool finite = isfinite(norm);
    const float shrink = a.clip > 0.0f && norm > a.clip ? a.clip / norm : 1.0f;
    elements<float>(a.norm)[0] = norm;
    elements<float>(a.control)[0] = finite ? a.unit * shrink : 0.0f;
    elements<float>(a.control)[1] = finite ? 1.0f : 0.0f;
}

// How clipping and the skipping of bad steps reach the update.
struct Control {
    float scale;
    bool applies;
    __device__ __forceinline__ explicit Control(const Tensor& t)
        : scale(elements<const float>(t)[0]), applies(elements<const float>(t)[1] != 0.0f) {}
};

// ---------------------------------------------------------------- moments, shared by AdamW and LAMB

struct Adam {
    float beta1, beta2, correction1, correction2, eps;

    template <class Op>
    explicit Adam(const Op& a)
        : beta1(a.beta1),
          beta2(a.beta2),
          correction1(correction(a.beta1, a.step)),
          correction2(correction(a.beta2, a.step)),
          eps(a.eps) {}
    static float correction(double beta, int64_t step) {
        return static_cast<float>(1.0 / (1.0 - std::pow(beta, static_cast<double>(step))));
    }
    // Updates m and v; returns m^ / (sqrt(v^) + eps).
    __device__ __forceinline__ float direction(float g, float& m, float& v) const {
        m = m * beta1 + g * (1.0f - beta1);
        v = v * beta2 + g * g * (1.0f - beta2);
        return m * correction1 / (sqrtf(v * correction2) + eps);
    }
};

template <int V>
__global__ void __launch_bounds__(chunk_threads) adamw_chunks(const AdamW a, const Adam adam) {
    const Control control(a.control);
    if (!control.applies) return;
    float *const master = elements<float>(a.master), *const m = elements<float>(a.m), *const v = elements<float>(a.v);
    const float* const grad = elements<const float>(a.grad);
    __nv_bfloat16* const param = elements<__nv_bfloat16>(a.param);
    for_pieces(a.segments, a.segment_count, [&](const Piece& piece) {
        const float decay = a.segments[piece.segment].weight_decay;
        for_elems<V>(piece, [&](auto n, int64_t i) {
            Floats<n> w = load_streaming<n>(master + i), mean = load_streaming<n>(m + i),
                      square = load_streaming<n>(v + i);
            const Floats<n> g = load_streaming<n>(grad + i);
#pragma unroll
            for (int j = 0; j < n; ++j)
                w[j] -= (adam.direction(g[j] * control.scale, mean[j], square[j]) + w[j] * decay) * a.lr;
            store_streaming(master + i, w);
            store_streaming(m + i, mean);
            store_streaming(v + i, square);
            if (param) store(param + i, w);
        });
    });
}

// ---------------------------------------------------------------- LAMB

// |w|^2 and |u|^2 of one piece. Chunk c and segment s share at most one piece, and its place in the workspace is c + s:
// along the pieces of the whole buffer, each next one has a larger c or a larger s.
struct PieceNorms {
    double w, u;
};

template <int V>
__global__ void __launch_bounds__(chunk_threads) direction_chunks(const LambDirection a, const Adam adam) {
    const Control control(a.control);
    if (!control.applies) return;
    float *const m = elements<float>(a.m), *const v = elements<float>(a.v), *const grad = elements<float>(a.grad);
    const float* const master = elements<const float>(a.master);
    for_pieces(a.segments, a.segment_count, [&](const Piece& piece) {
        const float decay = a.segments[piece.segment].weight_decay;
        double norms[2] = {0.0, 0.0};
        for_elems<V>(piece, [&](auto n, int64_t i) {
            const Floats<n> w = load_streaming<n>(master + i);
            Floats<n> mean = load_streaming<n>(m + i), square = load_streaming<n>(v + i),
                      u = load_streaming<n>(grad + i);
#pragma unroll
            for (int j = 0; j < n; ++j) {
                u[j] = adam.direction(u[j] * control.scale, mean[j], square[j]) + w[j] * decay;
                norms[0] += double{w[j]} * double{w[j]};
                norms[1] += double{u[j]} * double{u[j]};
            }
            store_streaming(m + i, mean);
            store_streaming(v + i, square);
            store_streaming(grad + i, u);
        });
        block_sums(norms);
        if (threadIdx.x == 0) elements<PieceNorms>(a.workspace)[blockIdx.x + piece.segment] = {norms[0], norms[1]};
    });
}

// One block a segment.
__global__ void __launch_bounds__(chunk_threads) add_pieces(const LambDirection a) {
    const int64_t s = blockIdx.x;
    const Segment segment = a.segments[s];
    double norms[2] = {0.0, 0.0};
    if (Control(a.control).applies && segment.elems > 0) {
        const int64_t first = segment.offset / chunk_elems, last = (segment.offset + segment.elems - 1) / chunk_elems;
        for (int64_t c = first + threadIdx.x; c <= last; c += chunk_threads) {
            const PieceNorms piece = elements<const PieceNorms>(a.workspace)[c + s];
            norms[0] += piece.w;
            norms[1] += piece.u;
        }
    }
    block_sums(norms);
    if (threadIdx.x != 0) return;
    elements<double>(a.norms)[2 * s] = norms[0];
    elements<double>(a.norms)[2 * s + 1] = norms[1];
}

template <int V>
__global__ void __launch_bounds__(chunk_threads) update_chunks(const LambUpdate a) {
    if (!Control(a.control).applies) return;
    float* const master = elements<float>(a.master);
    const float* const direction = elements<const float>(a.direction);
    __nv_bfloat16* const param = elements<__nv_bfloat16>(a.param);
    for_pieces(a.segments, a.segment_count, [&](const Piece& piece) {
        const double w_norm = sqrt(elements<const double>(a.norms)[2 * piece.segment]);
        const double u_norm = sqrt(elements<const double>(a.norms)[2 * piece.segment + 1]);
        const bool scaled = a.segments[piece.segment].trust_ratio && w_norm > 0.0 && u_norm > 0.0;
        const float rate = static_cast<float>(a.lr * (scaled ? w_norm / u_norm : 1.0));
        for_elems<V>(piece, [&](auto n, int64_t i) {
            Floats<n> w = load_streaming<n>(master + i);
            const Floats<n> u = load_streaming<n>(direction + i);
#pragma unroll
            for (int j = 0; j < n; ++j) w[j] -= u[j] * rate;
            store_streaming(master + i, w);
            if (param) store(param + i, w);
        });
    });
}

}  // namespace

// ---------------------------------------------------------------- launches

int64_t segment_sums_workspace(int64_t flat_elems, int64_t segments) {
    return (chunks_of(flat_elems) + segments) * static_cast<int64_t>(sizeof(PieceNorms));
}

// A rank may own nothing: no segments, or none with elements and no buffer.

void squared_norm(cudaStream_t stream, const SquaredNorm& a) {
    if (a.segment_count == 0 || !a.grad) return;
    TRIFOLD_ASSERT(a.workspace.bytes() >= segment_sums_workspace(a.grad.elems, a.segment_count));
    with_width<width>(packs_fit<width>(0, a.grad),
                      [&](auto V) { launch(stream, chunk_grid(a.grad.elems), sum_squares<V>, a); });
    launch(stream, {.blocks = dim3(1), .threads = dim3(final_threads)}, add_chunks, elements<const double>(a.workspace),
           chunks_of(a.grad.elems), elements<double>(a.sums));
}

void clip_control(cudaStream_t stream, const ClipControl& a) {
    launch(stream, {.blocks = dim3(1), .threads = dim3(1)}, control_of_norm, a);
}

void adamw(cudaStream_t stream, const AdamW& a) {
    if (a.segment_count == 0 || !a.master) return;
    with_width<width>(packs_fit<width>(0, a.master, a.m, a.v, a.grad, a.param),
                      [&](auto V) { launch(stream, chunk_grid(a.master.elems), adamw_chunks<V>, a, Adam(a)); });
}

void lamb_direction(cudaStream_t stream, const LambDirection& a) {
    if (a.segment_count == 0) return;
    TRIFOLD_ASSERT(a.workspace.bytes() >= segment_sums_workspace(a.master.elems, a.segment_count));
    if (a.master)
        with_width<width>(packs_fit<width>(0, a.master, a.m, a.v, a.grad),
                          [&](auto V) { launch(stream, chunk_grid(a.master.elems), direction_chunks<V>, a, Adam(a)); });
    launch(stream, {.blocks = dim3(static_cast<unsigned>(a.segment_count)), .threads = dim3(chunk_threads)}, add_pieces,
           a);
}

void lamb_update(cudaStream_t stream, const LambUpdate& a) {
    if (a.segment_count == 0 || !a.master) return;
    with_width<width>(packs_fit<width>(0, a.master, a.direction, a.param),
                      [&](auto V) { launch(stream, chunk_grid(a.master.elems), update_chunks<V>, a); });
}

}  // namespace trifold::cuda
