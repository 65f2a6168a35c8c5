// kernels/cpu/gemm.cpp   Blocks, threads and memory of the matrix product (gemm.h).
#include "kernels/cpu/gemm.h"

#include <omp.h>
#include <sys/mman.h>

#include <algorithm>
#include <string>

namespace trifold::cpu {

extern const GemmKernels gemm_kernels_portable, gemm_kernels_avx2, gemm_kernels_avx512;

namespace {

// Block sizes in elements; panels of all widths divide them. The packed part of b (1024 x 192 floats, 768 KiB) stays in
// the second-level cache of its thread, the packed block of a (1024 x 1024, 4 MiB) in the third-level cache.
constexpr int64_t depth_block = 1024;  // decides the order of sums
constexpr int64_t row_block = 1024, task_cols = 192, least_task_rows = 512;
constexpr int64_t partial_cols = 1536;  // columns of a block whose sums cannot be kept in c
constexpr int64_t pack_rows = 32;
constexpr int64_t packed_a_elems = row_block * depth_block, packed_b_elems = task_cols * depth_block;
constexpr int64_t partial_elems = row_block * partial_cols;
constexpr int64_t huge_page = 2 << 20;  // bytes

int64_t ceil_div(int64_t n, int64_t by) { return (n + by - 1) / by; }
int64_t round_up(int64_t n, int64_t to) { return ceil_div(n, to) * to; }
Span part(int64_t first, int64_t most, int64_t total) { return {first, std::min(most, total - first)}; }

// Depths per block: as even as possible, and a property of `depth` alone.
int64_t depth_step(int64_t depth) {
    const int64_t blocks = std::max<int64_t>(1, ceil_div(depth, depth_block));
    return std::max<int64_t>(16, round_up(ceil_div(depth, blocks), 16));
}

bool keeps_sums_in_c(const Gemm& g) { return g.c_RC.dtype == DType::f32 || g.depth <= depth_step(g.depth); }

template <class Byte>
Byte* at(Byte* data, DType type, int64_t elems) {
    return data + elems * size_of(type);
}

// Where the sums of one block of depths come from and go to, for the block of c at (row, col).
GemmSums sums_for(const Gemm& g, float* partial, Span depth, int64_t row, int64_t col) {
    const bool first = depth.first == 0, last = depth.first + depth.count >= g.depth;
    GemmSums s;
    s.out = at(static_cast<std::byte*>(g.c_RC.data), g.c_RC.dtype, row * g.cols + col);
    s.out_type = s.start_type = g.c_RC.dtype;
    s.out_stride = s.start_stride = g.cols;
    s.start = first && g.accumulate == Accumulate::overwrite ? nullptr : s.out;
    if (!first && !keeps_sums_in_c(g)) s.start = partial, s.start_type = DType::f32, s.start_stride = partial_cols;
    if (!last && !keeps_sums_in_c(g)) s.out = partial, s.out_type = DType::f32, s.out_stride = partial_cols;
    if (last && g.bias_C)
        s.bias = at(static_cast<const std::byte*>(g.bias_C.data), g.bias_C.dtype, col), s.bias_type = g.bias_C.dtype;
    return s;
}

// The same for the part of that block which begins at (row, col).
GemmSums from(GemmSums s, int64_t row, int64_t col) {
    if (s.start) s.start = at(static_cast<const std::byte*>(s.start), s.start_type, row * s.start_stride + col);
    if (s.bias) s.bias = at(static_cast<const std::byte*>(s.bias), s.bias_type, col);
    s.out = at(static_cast<std::byte*>(s.out), s.out_type, row * s.out_stride + col);
    return s;
}

// How the multiplication of a block is cut into tasks: at least two for each thread, so that none waits long for
// another. Columns are cut first, because each task packs its part of b.
struct Tasks {
    int64_t rows, cols;    // of one task
    int64_t down, across;  // tasks
    Tasks(int64_t tile_cols, int64_t block_rows, int64_t block_cols) {
        const int64_t wanted = 2 * omp_get_num_threads(), least_cols = 2 * tile_cols;
        cols = std::clamp(round_up(ceil_div(block_cols, wanted), least_cols), least_cols, task_cols);
        across = ceil_div(block_cols, cols);
        down = std::min(ceil_div(wanted, across), ceil_div(block_rows, least_task_rows));
        rows = round_up(ceil_div(block_rows, down), pack_rows);
    }
    int64_t count() const { return down * across; }
    int64_t first_row(int64_t task) const { return task % down * rows; }
    int64_t first_col(int64_t task) const { return task / down * cols; }
};

// Called by all threads of a team, for one block of c and one block of depths. A barrier separates packing a from using
// it. Nobody has to wait after multiplying, because the two packed blocks are used in turn: packing for step s + 1
// overwrites what step s - 1 used, and every thread had finished that step when it came to the barrier of step s.
void multiply_block(const GemmKernels& kernels, const Gemm& g, const GemmScratch& scratch, int64_t step, Span rows,
                    Span cols, Span depth) {
    float* const a = scratch.packed_a(step);
#pragma omp for schedule(dynamic) nowait
    for (int64_t i = 0; i < rows.count; i += pack_rows)
        kernels.pack_a(g.a, {rows.first + i, std::min(pack_rows, rows.count - i)}, depth, a + i * depth.count);
#pragma omp barrier
    const Tasks tasks(kernels.tile_cols, rows.count, cols.count);
    const GemmSums sums = sums_for(g, scratch.partial_sums(), depth, rows.first, cols.first);
    float* const b = scratch.packed_b(omp_get_thread_num());
#pragma omp for schedule(dynamic) nowait
    for (int64_t t = 0; t < tasks.count(); ++t) {
        const Span down = part(tasks.first_row(t), tasks.rows, rows.count),
                   across = part(tasks.first_col(t), tasks.cols, cols.count);
        const GemmTask task{.a = a + down.first * depth.count,
                            .b = b,
                            .rows = down.count,
                            .cols = across.count,
                            .depth = depth.count,
                            .sums = from(sums, down.first, across.first)};
        if (rows.count <= kernels.tile_rows && g.b.along == Along::depth) {
            kernels.multiply_few(task, g.b, cols.first + across.first, depth.first);
        } else {
            kernels.pack_b(g.b, {cols.first + across.first, across.count}, depth, b);
            kernels.multiply(task);
        }
    }
}

void multiply_all(const GemmKernels& kernels, const Gemm& g, const GemmScratch& scratch) {
    const int64_t depth = depth_step(g.depth), col_block = keeps_sums_in_c(g) ? g.cols : partial_cols;
    int64_t step = 0;
    for (int64_t j = 0; j < g.cols; j += col_block)
        for (int64_t i = 0; i < g.rows; i += row_block)
            for (int64_t k = 0; k == 0 || k < g.depth; k += depth)
                multiply_block(kernels, g, scratch, step++, part(i, row_block, g.rows), part(j, col_block, g.cols),
                               part(k, depth, g.depth));
}

}  // namespace

const GemmKernels* gemm_kernels(GemmIsa isa) {
    switch (isa) {
        case GemmIsa::portable:
            return &gemm_kernels_portable;
#if defined(__x86_64__)
        case GemmIsa::avx2:
            return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") ? &gemm_kernels_avx2 : nullptr;
        case GemmIsa::avx512:
            return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                           __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl")
                       ? &gemm_kernels_avx512
                       : nullptr;
#endif
        default:
            return nullptr;
    }
}

const GemmKernels& best_gemm_kernels() {
    for (const GemmIsa isa : {GemmIsa::avx512, GemmIsa::avx2})
        if (const GemmKernels* kernels = gemm_kernels(isa)) return *kernels;
    return gemm_kernels_portable;
}

GemmScratch::GemmScratch(int threads) : threads_(threads) {
    const size_t size = static_cast<size_t>(bytes(threads) + huge_page);
    mapping_ = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (mapping_ == MAP_FAILED)
        throw Problem(Exit::usage, "no memory for the packed blocks of matrix products (" +
                                       std::to_string(bytes(threads) >> 20) +
                                       " MiB): use fewer threads (--run.threads) or a smaller model");
    base_ = reinterpret_cast<float*>(round_up(reinterpret_cast<int64_t>(mapping_), huge_page));
    madvise(base_, static_cast<size_t>(bytes(threads)), MADV_HUGEPAGE);
}
GemmScratch::~GemmScratch() { munmap(mapping_, static_cast<size_t>(bytes(threads_) + huge_page)); }

int64_t GemmScratch::bytes(int threads) {
    return static_cast<int64_t>(sizeof(float)) * (2 * packed_a_elems + partial_elems + threads * packed_b_elems);
}
float* GemmScratch::packed_a(int64_t step) const { return base_ + step % 2 * packed_a_elems; }
float* GemmScratch::partial_sums() const { return base_ + 2 * packed_a_elems; }
float* GemmScratch::packed_b(int thread) const { return partial_sums() + partial_elems + thread * packed_b_elems; }

void gemm(const GemmKernels& kernels, const Gemm& g, const GemmScratch& scratch) {
    TRIFOLD_ASSERT(omp_get_max_threads() <= scratch.threads());
    // Neither the arithmetic nor the reading of b is worth waking a team for tiny products.
    const bool large = (g.rows + 8) * g.cols * g.depth > (1 << 20);
#pragma omp parallel if (large)
    multiply_all(kernels, g, scratch);
}

}  // namespace trifold::cpu
