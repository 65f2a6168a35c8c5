// kernels/cuda/linear.cu   Linear layers: three products through cuBLASLt (matmul.h), and the gradient of the bias.
//
//   y[N,O] (+)= x[N,I] @ w[O,I]^T + bias[O]      dx[N,I] (+)= dy[N,O] @ w[O,I]      dw[O,I] (+)= dy[N,O]^T @ x[N,I]
//   dbias[O] (+)= sum_n dy[n,O]
//
// Bias       Sums of at most `row_blocks` blocks of rows go to the workspace and are added there (partials.cuh). The blocks depend
//            on N alone, so the result is the same on every GPU. Traffic: dy once, N*O elements.
// Numerics   fp32 sums; the gradients are fp32 in memory.
#include "kernels/cuda/matmul.h"
#include "kernels/cuda/pack.h"
#include "kernels/cuda/partials.cuh"
#include "kernels/cuda/runtime.h"

namespace trifold::cuda {
namespace {

constexpr int64_t row_blocks = 64, least_rows = 128;
constexpr int lanes = 32, row_lanes = 8;  // of a block: lanes side by side on columns, row lanes on every eighth row

int64_t rows_per_block(int64_t N) { return std::max(least_rows, (N + row_blocks - 1) / row_blocks); }
int64_t blocks_of(int64_t N) { return (N + rows_per_block(N) - 1) / rows_per_block(N); }

// partial[block of rows][o] = sum of dy over these rows. `width` neighbouring columns per lane.
template <class T, int width>
__global__ void __launch_bounds__(lanes * row_lanes) column_sums(const T* dy_NO, float* partial_RO, int64_t N, int64_t O, int64_t rows) {
    __shared__ float sums[row_lanes][lanes][width];
    const int lane = static_cast<int>(threadIdx.x) % lanes, row_lane = static_cast<int>(threadIdx.x) / lanes;
    const int64_t o = (static_cast<int64_t>(blockIdx.x) * lanes + lane) * width;
    const int64_t first = blockIdx.y * rows, end = first + rows < N ? first + rows : N;
    Floats<width> total{};
    if (o < O) {
#pragma unroll 4
        for (int64_t n = first + row_lane; n < end; n += row_lanes) {
            const Floats<width> x = load<width>(dy_NO + n * O + o);
#pragma unroll
            for (int i = 0; i < width; ++i) total[i] += x[i];
        }
    }
#pragma unroll
    for (int i = 0; i < width; ++i) sums[row_lane][lane][i] = total[i];
    __syncthreads();
    if (row_lane > 0 || o >= O) return;
#pragma unroll
    for (int i = 0; i < width; ++i) {
        float sum = 0;
        for (int r = 0; r < row_lanes; ++r) sum += sums[r][lane][i];
        partial_RO[blockIdx.y * O + o + i] = sum;
    }
}

void bias_gradient(cudaStream_t stream, const LinearBackwardWeight& a) {
    const int64_t rows = rows_per_block(a.N), blocks = blocks_of(a.N);
    float* partial = reinterpret_cast<float*>(static_cast<std::byte*>(a.workspace.data) + matmul_workspace);
    with_element(a.dy_NO.dtype, [&](auto element) {
        using T = decltype(element);
        if (blocks == 0) return;
        with_width<pack_elems<T>>(packs_fit<pack_elems<T>>(a.O, a.dy_NO), [&](auto width) {
            const int64_t columns = int64_t{lanes} * width;
            launch(stream, {.blocks = dim3(static_cast<unsigned>((a.O + columns - 1) / columns), static_cast<unsigned>(blocks)), .threads = lanes * row_lanes},
                   column_sums<T, width>, elements<const T>(a.dy_NO), partial, a.N, a.O, rows);
        });
    });
    add_partials(stream, {.partials = partial, .rows = blocks, .columns = a.O, .first = elements<float>(a.dbias_O), .second = nullptr, .accumulate = a.accumulate});
}

// y[n,o] = bias[o] (+ y[n,o])
template <class T>
__global__ void __launch_bounds__(256) spread_bias(const T* bias_O, T* y_NO, int64_t N, int64_t O, bool add) {
    for (int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < N * O; i += static_cast<int64_t>(gridDim.x) * blockDim.x) {
        Floats<1> y = load<1>(bias_O + i % O);
        if (add) y[0] += load<1>(y_NO + i)[0];
        store(y_NO + i, y);
    }
}

}  // namespace

bool has_code_for_this_gpu() {
    cudaFuncAttributes attributes;
    const bool found = cudaFuncGetAttributes(&attributes, reinterpret_cast<const void*>(spread_bias<float>)) == cudaSuccess;
    if (!found) cudaGetLastError();  // forgotten: the caller says so
    return found;
}

int64_t linear_workspace(int64_t N, int64_t O) { return matmul_workspace + blocks_of(N) * O * static_cast<int64_t>(sizeof(float)); }

void linear_forward(cudaStream_t stream, const LinearForward& a) {
    if (a.N == 0) return;
    Matmul product{.a = a.x_NI, .b = a.w_OI, .c = a.y_NO, .bias = a.bias_O, .accumulate = a.accumulate, .rows = a.N, .cols = a.O, .depth = a.I,
                   .workspace = a.workspace};
    if (matmul(stream, product)) return;
    // Sizes that the library's epilogue does not know (odd ones): the bias goes first, and the product is added to it. With
    // Accumulate::add and a bf16 y that rounds once more; no model of ours does this.
    with_element(a.y_NO.dtype, [&](auto element) {
        using T = decltype(element);
        const int64_t blocks = std::min<int64_t>((a.N * a.O + 255) / 256, 4096);
        launch(stream, {.blocks = static_cast<unsigned>(blocks), .threads = 256}, spread_bias<T>, elements<const T>(a.bias_O), elements<T>(a.y_NO), a.N, a.O,
               a.accumulate == Accumulate::add);
    });
    product.bias = {};
    product.accumulate = Accumulate::add;
    matmul(stream, product);
}

void linear_backward_input(cudaStream_t stream, const LinearBackwardInput& a) {
    if (a.N == 0) return;
    matmul(stream, {.a = a.dy_NO, .b = a.w_OI, .c = a.dx_NI, .bias = {}, .b_stored = Stored::depth_outer, .accumulate = a.accumulate,
                    .rows = a.N, .cols = a.I, .depth = a.O, .workspace = a.workspace});
}

void linear_backward_weight(cudaStream_t stream, const LinearBackwardWeight& a) {
    if (a.N == 0 && a.accumulate == Accumulate::overwrite) zero(stream, {.y = a.dw_OI});
    if (a.N > 0)
        matmul(stream, {.a = a.dy_NO, .b = a.x_NI, .c = a.dw_OI, .bias = {}, .a_stored = Stored::depth_outer, .b_stored = Stored::depth_outer,
                        .accumulate = a.accumulate, .tokens = Tokens::depth, .rows = a.O, .cols = a.I, .depth = a.N, .workspace = a.workspace});
    if (a.dbias_O) bias_gradient(stream, a);
}

}  // namespace trifold::cuda
