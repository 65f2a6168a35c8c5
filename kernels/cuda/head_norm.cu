// kernels/cuda/head_norm.cu   RMSNorm of every head of q and k ("QK-norm"), in place in rows of a wider matrix.
//
// forward    y = x * rstd * w,  rstd = 1 / sqrt(mean over the head of x^2 + eps)
// backward   g = dy * w,  h = x * rstd:  dx = rstd * (g - h * mean(g * h)),  dw = sum over rows and heads of dy * h
// Shapes     N rows with `heads` heads of D <= 256. A head belongs to `team` neighbouring lanes (a power of two, 8
//            elements a lane), so a warp works on 32 / team heads.
// Traffic    forward reads x, writes y and the saved x; backward reads dy and the saved x, writes dx. Memory bound.
// Numerics   fp32; sums within a team in a butterfly; dw: every team adds its heads in order, then the teams of a
//            block, then blocks.
#include "kernels/cuda/partials.cuh"
#include "kernels/cuda/reduce.cuh"

namespace trifold::cuda {
namespace {

constexpr int lane_elems = 8, block_threads = 256;
constexpr int64_t most_elems = 32 * lane_elems;

unsigned team_for(int64_t D) {
    unsigned team = 1;
    while (team * lane_elems < D) team *= 2;
    return team;
}

// Every lane of the warp must call.
__device__ __forceinline__ float team_sum(float v, unsigned team) {
    for (unsigned distance = team / 2; distance > 0; distance /= 2)
        v += __shfl_xor_sync(0xffffffffu, v, static_cast<int>(distance));
    return v;
}

// One head in its team: which it is, and which columns of it this lane holds.
template <int V>
struct Head {
    static constexpr int packs = lane_elems / V;
    int64_t row, index;  // of all heads
    int D, lane, team;
    bool exists;

    template <class Op>
    __device__ __forceinline__ Head(const Op& a, int64_t index, unsigned team)
        : index(index),
          D(static_cast<int>(a.D)),
          lane(static_cast<int>(threadIdx.x % team)),
          team(static_cast<int>(team)),
          exists(index < a.N * a.heads) {
        row = static_cast<unsigned>(index) / static_cast<unsigned>(a.heads);  // heads are counted in 32 bits
    }
    // Consecutive lanes hold consecutive packs.
    __device__ __forceinline__ int column(int i) const { return (i * team + lane) * V; }
    __device__ __forceinline__ bool has(int i) const { return exists && column(i) < D; }
    template <class Op>
    __device__ __forceinline__ int64_t strided(const Op& a) const {
        return row * a.stride + (index - row * a.heads) * D;
    }
    __device__ __forceinline__ int64_t dense() const { return index * D; }

    template <class T>
    __device__ __forceinline__ void load(Floats<V> (&v)[packs], const T* from) const {
#pragma unroll
        for (int i = 0; i < packs; ++i) v[i] = has(i) ? cuda::load<V>(from + column(i)) : Floats<V>{};
    }
};

template <class T, int V>
__global__ void __launch_bounds__(block_threads) forward(const HeadNormForward a, unsigned team) {
    const Head<V> head(a, (int64_t{blockIdx.x} * block_threads + threadIdx.x) / team, team);
    T* const x = elements<T>(a.x_NS) + head.strided(a);
    T* const saved = elements<T>(a.saved_NHD) + head.dense();
    Floats<V> values[head.packs];
    head.load(values, x);
    float squares = 0.0f;
#pragma unroll
    for (int i = 0; i < head.packs; ++i) {
#pragma unroll
        for (int j = 0; j < V; ++j) squares += values[i][j] * values[i][j];
    }
    const float rstd = 1.0f / sqrtf(team_sum(squares, team) / static_cast<float>(head.D) + a.eps);
#pragma unroll
    for (int i = 0; i < head.packs; ++i) {
        if (!head.has(i)) continue;
        store_streaming(saved + head.column(i), values[i]);
        const Floats<V> weight = load<V>(elements<const T>(a.weight_D) + head.column(i));
        Floats<V> y;
#pragma unroll
        for (int j = 0; j < V; ++j) y[j] = values[i][j] * rstd * weight[j];
        store(x + head.column(i), y);
    }
    if (head.exists && head.lane == 0) elements<float>(a.rstd_NH)[head.index] = rstd;
}

// All teams of the grid walk over the heads together; at the end the teams of a block add their sums of dw.
template <class T, int V>
__global__ void __launch_bounds__(block_threads) backward(const HeadNormBackward a, unsigned team) {
    __shared__ float team_sums[block_threads * lane_elems];  // [teams, team * 8]
    const int64_t teams = block_threads / team;
    Floats<V> weight[Head<V>::packs], dw[Head<V>::packs] = {};
    Head<V>(a, 0, team).load(weight, elements<const T>(a.weight_D));
    // Teams of a warp stay together, so that every lane takes part in the shuffles.
    for (int64_t start = blockIdx.x * teams; start < a.N * a.heads; start += gridDim.x * teams) {
        const Head<V> head(a, start + threadIdx.x / team, team);
        T* const dx = elements<T>(a.dx_NS) + head.strided(a);
        Floats<V> dy[head.packs], h[head.packs];
        head.load(dy, dx);
        head.load(h, elements<const T>(a.saved_NHD) + head.dense());
        const float rstd = head.exists ? elements<const float>(a.rstd_NH)[head.index] : 0.0f;
        float gh = 0.0f;
#pragma unroll
        for (int i = 0; i < head.packs; ++i) {
#pragma unroll
            for (int j = 0; j < V; ++j) {
                h[i][j] *= rstd;
                gh += dy[i][j] * weight[i][j] * h[i][j];
                dw[i][j] += dy[i][j] * h[i][j];
            }
        }
        const float mean_gh = team_sum(gh, team) / static_cast<float>(head.D);
#pragma unroll
        for (int i = 0; i < head.packs; ++i) {
            if (!head.has(i)) continue;
            Floats<V> out;
#pragma unroll
            for (int j = 0; j < V; ++j) out[j] = (dy[i][j] * weight[i][j] - h[i][j] * mean_gh) * rstd;
            store(dx + head.column(i), out);
        }
    }
    const int width = static_cast<int>(team) * lane_elems, lane = static_cast<int>(threadIdx.x % team);
    float* const mine = team_sums + threadIdx.x / team * width;
#pragma unroll
    for (int i = 0; i < Head<V>::packs; ++i) {
#pragma unroll
        for (int j = 0; j < V; ++j) mine[(i * static_cast<int>(team) + lane) * V + j] = dw[i][j];
    }
    __syncthreads();
    for (int c = static_cast<int>(threadIdx.x); c < a.D; c += block_threads) {
        float total = 0.0f;
        for (int t = 0; t < teams; ++t) total += team_sums[t * width + c];
        elements<float>(a.workspace)[blockIdx.x * a.D + c] = total;
    }
}

}  // namespace

// ---------------------------------------------------------------- launches

void head_norm_forward(cudaStream_t stream, const HeadNormForward& a) {
    if (a.N == 0) return;
    TRIFOLD_ASSERT(a.x_NS.elems >= (a.N - 1) * a.stride + a.heads * a.D && a.D <= most_elems);
    TRIFOLD_ASSERT(a.saved_NHD.elems >= a.N * a.heads * a.D && a.rstd_NH.elems >= a.N * a.heads);
    with_element(a.x_NS.dtype, [&](auto element) {
        using T = decltype(element);
        constexpr int V = pack_elems<T>;
        const unsigned team = team_for(a.D);
        const int64_t teams = block_threads / team, blocks = (a.N * a.heads + teams - 1) / teams;
        with_width<V>(a.stride % V == 0 && packs_fit<V>(a.D, a.x_NS, a.saved_NHD, a.weight_D), [&](auto width) {
            launch(stream, {.blocks = dim3(static_cast<unsigned>(blocks)), .threads = dim3(block_threads)},
                   forward<T, width>, a, team);
        });
    });
}

void head_norm_backward(cudaStream_t stream, const HeadNormBackward& a) {
    TRIFOLD_ASSERT(a.N == 0 || a.dx_NS.elems >= (a.N - 1) * a.stride + a.heads * a.D);
    TRIFOLD_ASSERT(a.saved_NHD.elems >= a.N * a.heads * a.D && a.rstd_NH.elems >= a.N * a.heads &&
                   a.dweight_D.elems >= a.D && a.D <= most_elems);
    TRIFOLD_ASSERT(a.workspace.bytes() >= norm_backward_workspace(a.N, a.D));
    const int64_t rows = partial_rows(a.N, a.D);
    with_element(a.dx_NS.dtype, [&](auto element) {
        using T = decltype(element);
        constexpr int V = pack_elems<T>;
        if (rows == 0) return;
        with_width<V>(a.stride % V == 0 && packs_fit<V>(a.D, a.dx_NS, a.saved_NHD, a.weight_D), [&](auto width) {
            launch(stream, {.blocks = dim3(static_cast<unsigned>(rows)), .threads = dim3(block_threads)},
                   backward<T, width>, a, team_for(a.D));
        });
    });
    add_partials(stream, {.partials = elements<const float>(a.workspace),
                          .rows = rows,
                          .columns = a.D,
                          .first = elements<float>(a.dweight_D),
                          .second = nullptr,
                          .accumulate = a.accumulate});
}

}  // namespace trifold::cuda
