// kernels/cuda/attention_backward.cuh   What the backward kernels of both element types share: a row for each query.
//
// prepare()   delta = sum over d of dO * O, in one row of 16 bytes per query and head with everything else that the
//             other kernels ask about it. Rows from T on, which fill the last tile, have lse = infinity: their
//             probabilities are zero without a mask.
// Traffic     o and do once.
#pragma once
#include "kernels/cuda/attention_operands.cuh"

namespace trifold::cuda::attention {

constexpr int row_padding = 128;  // the rows of a head are a multiple of this

struct alignas(16) QueryRow {
    float lse, delta;
    int first_key, unused;
};

constexpr int prepare_threads = 256, threads_per_row = 16;

// rows [B, H, padded_T]; also clears the counters of the kernel that follows.
template <class T>
__global__ void __launch_bounds__(prepare_threads)
    prepare(Operands<T> in, const T* o, const T* d_o, const float* lse, QueryRow* rows, int padded_T, int* counters,
            int counter_count) {
    for (int i = static_cast<int>(blockIdx.x * prepare_threads + threadIdx.x); i < counter_count;
         i += static_cast<int>(gridDim.x) * prepare_threads)
        counters[i] = 0;
    const int64_t row = (static_cast<int64_t>(blockIdx.x) * prepare_threads + threadIdx.x) / threads_per_row;
    const int lane = static_cast<int>(threadIdx.x % threads_per_row);
    const int h = static_cast<int>(row % in.H), t = static_cast<int>(row / in.H % padded_T),
              b = static_cast<int>(row / in.H / padded_T);
    const bool exists = t < in.Tq && b < in.B;
    const int64_t at = ((static_cast<int64_t>(b) * in.Tq + t) * in.H + h) * in.D;
    float delta = 0.0f;
    for (int d = lane * 8; exists && d < in.D; d += threads_per_row * 8) {
        const Floats<8> x = load<8>(o + at + d), y = load<8>(d_o + at + d);
#pragma unroll
        for (int i = 0; i < 8; ++i) delta = fmaf(x[i], y[i], delta);
    }
#pragma unroll
    for (int distance = threads_per_row / 2; distance > 0; distance /= 2)
        delta += __shfl_xor_sync(0xffffffffu, delta, distance);
    if (lane > 0 || b >= in.B) return;
    const int64_t head = static_cast<int64_t>(b) * in.H + h;
    rows[head * padded_T + t] = {exists ? lse[head * in.Tq + t] : INFINITY, delta, in.sight(b).first(t), 0};
}

// ---------------------------------------------------------------- host

struct Counters {
    int* first = nullptr;
    int64_t count = 0;
};

template <class T>
void launch_prepare(cudaStream_t stream, const AttentionBackward& a, const Operands<T>& in, QueryRow* rows,
                    Counters counters) {
    TRIFOLD_ASSERT(aligned_16(a.do_NHD) && a.lse_BHT.elems == a.B * a.H * a.T);
    const int64_t padded_T = round_up(a.T, row_padding),
                  blocks = ceil_div(a.B * a.H * padded_T * threads_per_row, prepare_threads);
    launch(stream, {.blocks = dim3(static_cast<unsigned>(narrow(blocks))), .threads = dim3(prepare_threads)},
           prepare<T>, in, elements<const T>(a.o_NHD), elements<const T>(a.do_NHD), elements<const float>(a.lse_BHT),
           rows, narrow(padded_T), counters.first, narrow(counters.count));
}

inline QueryRow* take_rows(Cutter& cut, const AttentionBackward& a) {
    return cut.take<QueryRow>(a.B * a.H * round_up(a.T, row_padding));
}

void backward_fp32(cudaStream_t stream, const AttentionBackward& a, int room);
int64_t backward_fp32_workspace(const AttentionBackward& a);

}  // namespace trifold::cuda::attention
