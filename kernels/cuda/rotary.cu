// kernels/cuda/rotary.cu   Rotary position embedding in place (Su et al., arXiv 2104.09864), "rotate half" form.
//
// (x[i], x[i + D/2]) is turned by the angle of frequency i at the row's position; direction -1 turns back.
// Shapes     N rows with `heads` heads of D; a thread turns one pack of pairs in up to 4 neighbouring heads with the
//            same cosines and sines.
// Traffic    x in and out; the tables come from the caches. Memory bound.
// Numerics   fp32, rounded once.
#include "kernels/cuda/pack.h"
#include "kernels/ops.h"

namespace trifold::cuda {
namespace {

constexpr int block_threads = 256, thread_heads = 4;

// Threads of one row: the packs of half a head, for each group of heads.
template <int V>
__host__ __device__ __forceinline__ int64_t row_threads(const Rotary& a) {
    return a.D / 2 / V * ((a.heads + thread_heads - 1) / thread_heads);
}

// The number of threads must be below 2^32.
template <class T, int V>
__global__ void __launch_bounds__(block_threads) turn(const Rotary a) {
    const unsigned thread = blockIdx.x * block_threads + threadIdx.x, in_row = static_cast<unsigned>(row_threads<V>(a));
    const int64_t n = thread / in_row;
    if (n >= a.N) return;
    const unsigned half = static_cast<unsigned>(a.D / 2), packs = half / V, at = thread % in_row;
    const unsigned c = at % packs * V, first_head = at / packs * thread_heads;
    T* const x = elements<T>(a.x_NS) + n * a.stride + first_head * a.D + c;
    Pack<T, V> low[thread_heads], high[thread_heads];
#pragma unroll
    for (unsigned h = 0; h < thread_heads; ++h) {
        if (first_head + h >= a.heads) continue;
        low[h] = load_pack<V>(x + h * a.D);
        high[h] = load_pack<V>(x + h * a.D + half);
    }
    const int64_t angles = elements<const int32_t>(a.position_N)[n] * int64_t{half} + c;
    const Floats<V> cosine = load<V>(elements<const float>(a.cos_TR) + angles),
                    sine = load<V>(elements<const float>(a.sin_TR) + angles);
    const float direction = static_cast<float>(a.direction);
#pragma unroll
    for (unsigned h = 0; h < thread_heads; ++h) {
        if (first_head + h >= a.heads) continue;
        const Floats<V> first = to_floats(low[h]), second = to_floats(high[h]);
        Floats<V> new_first, new_second;
#pragma unroll
        for (int j = 0; j < V; ++j) {
            const float s = sine[j] * direction;
            new_first[j] = first[j] * cosine[j] - second[j] * s;
            new_second[j] = second[j] * cosine[j] + first[j] * s;
        }
        store(x + h * a.D, new_first);
        store(x + h * a.D + half, new_second);
    }
}

}  // namespace

void rotary(cudaStream_t stream, const Rotary& a) {
    TRIFOLD_ASSERT(a.D % 2 == 0 && (a.direction == 1 || a.direction == -1) && a.position_N.elems >= a.N);
    if (a.N == 0) return;
    TRIFOLD_ASSERT(a.x_NS.elems >= (a.N - 1) * a.stride + a.heads * a.D);
    with_element(a.x_NS.dtype, [&](auto element) {
        using T = decltype(element);
        constexpr int V = pack_elems<T>;
        with_width<V>(a.stride % V == 0 && packs_fit<V>(a.D / 2, a.x_NS, a.cos_TR, a.sin_TR), [&](auto width) {
            const int64_t blocks = (a.N * row_threads<width>(a) + block_threads - 1) / block_threads;
            launch(stream, {.blocks = dim3(static_cast<unsigned>(blocks)), .threads = dim3(block_threads)},
                   turn<T, width>, a);
        });
    });
}

}  // namespace trifold::cuda
