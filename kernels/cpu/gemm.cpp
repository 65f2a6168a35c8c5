// kernels/cpu/gemm.cpp   Blocks, threads and memory of the matrix product (gemm.h).
#include "kernels/cpu/gemm.h"

#include <omp.h>
#include <sys/mman.h>

#include <algorithm>
#include <string>

namespace trifold::cpu {

extern const GemmKernels gemm_kernels_portable, gemm_kernels_avx2, gemm_kernels_avx512;

namespace {

// Elements. All tile sizes divide these.
#ifndef DB
#define DB 1024
#endif
#ifndef TC
#define TC 192
#endif
constexpr int64_t depth_block = DB, row_block = 1024, partial_cols = 3072, task_cols = TC;
constexpr int64_t packed_a_elems = row_block * depth_block, packed_b_elems = task_cols * depth_block;
constexpr int64_t partial_elems = row_block * partial_cols;
constexpr int64_t huge_page = 2 << 20;

int64_t ceil_div(int64_t n, int64_t by) { return (n + by - 1) / by; }
int64_t round_up(int64_t n, int64_t to) { return ceil_div(n, to) * to; }
Span part(int64_t first, int64_t size, int64_t total) { return {first, std::min(size, total - first)}; }

// Depths per block: as even as possible, a property of `depth` alone.
int64_t depth_step(int64_t depth) {
    const int64_t blocks = std::max<int64_t>(1, ceil_div(depth, depth_block));
    return std::max<int64_t>(16, round_up(ceil_div(depth, blocks), 16));
}

// Sums of a block of c between two blocks of depths, when c itself cannot keep them in fp32.
struct Partial {
    float* sums;
    int64_t stride;
};

// Where the sums of one block of depths come from and go to.
GemmSums sums_for(const Gemm& g, Partial partial, Span depth, Span rows, Span cols) {
    const auto at = [](const Tensor& t, int64_t i) { return static_cast<std::byte*>(t.data) + i * size_of(t.dtype); };
    const bool first = depth.first == 0, last = depth.first + depth.count >= g.depth, in_c = g.c_RC.dtype == DType::f32;
    GemmSums s;
    s.out = at(g.c_RC, rows.first * g.cols + cols.first);
    s.start = first && g.accumulate == Accumulate::overwrite ? nullptr : s.out;
    s.out_type = s.start_type = g.c_RC.dtype;
    s.out_stride = s.start_stride = g.cols;
    if (!first && !in_c) s.start = partial.sums, s.start_type = DType::f32, s.start_stride = partial.stride;
    if (!last && !in_c) s.out = partial.sums, s.out_type = DType::f32, s.out_stride = partial.stride;
    if (last && g.bias_C) s.bias = at(g.bias_C, cols.first), s.bias_type = g.bias_C.dtype;
    return s;
}

// The same sums for a part of the block.
GemmSums from(GemmSums s, int64_t row, int64_t col) {
    const auto move = [](const void* p, DType type, int64_t elems) { return static_cast<const std::byte*>(p) + elems * size_of(type); };
    if (s.start) s.start = move(s.start, s.start_type, row * s.start_stride + col);
    if (s.bias) s.bias = move(s.bias, s.bias_type, col);
    s.out = const_cast<std::byte*>(move(s.out, s.out_type, row * s.out_stride + col));
    return s;
}

// How the multiplication of a block is cut into tasks.
struct Tasks {
    int64_t rows, cols;    // of one task
    int64_t down, across;  // tasks
    Tasks(const GemmKernels& k, Span block_rows, Span block_cols) {
        const int64_t wanted = 2 * omp_get_num_threads();
        cols = std::clamp(round_up(ceil_div(block_cols.count, wanted), 2 * k.tile_cols), 2 * k.tile_cols, task_cols);
        across = ceil_div(block_cols.count, cols);
        down = std::min(ceil_div(wanted, across), ceil_div(block_rows.count, 512));
        rows = round_up(ceil_div(block_rows.count, down), 16);
    }
    int64_t count() const { return down * across; }
};

void multiply_blocks(const GemmKernels& kernels, const Gemm& g, const GemmScratch& scratch) {
    const int64_t step = depth_step(g.depth), panels = 32;
    const int64_t col_block = g.depth <= step || g.c_RC.dtype == DType::f32 ? g.cols : partial_cols;
    int64_t steps = 0;
    for (int64_t j0 = 0; j0 < g.cols; j0 += col_block)
        for (int64_t i0 = 0; i0 < g.rows; i0 += row_block)
            for (int64_t k0 = 0; k0 == 0 || k0 < g.depth; k0 += step) {
                const Span rows = part(i0, row_block, g.rows), cols = part(j0, col_block, g.cols), depth = part(k0, step, g.depth);
                float* const a = scratch.packed_a(steps++);
#pragma omp for schedule(dynamic) nowait
                for (int64_t i = 0; i < rows.count; i += panels)
                    kernels.pack_a(g.a, {rows.first + i, std::min(panels, rows.count - i)}, depth, a + i * depth.count);
#pragma omp barrier
                const Tasks tasks(kernels, rows, cols);
                const GemmSums sums = sums_for(g, {scratch.partial_sums(), partial_cols}, depth, rows, cols);
                float* const b = scratch.packed_b(omp_get_thread_num());
#pragma omp for schedule(dynamic) nowait
                for (int64_t t = 0; t < tasks.count(); ++t) {
                    const int64_t i = t % tasks.down * tasks.rows, j = t / tasks.down * tasks.cols;
                    const Span task_cols = part(j, tasks.cols, cols.count);
                    kernels.pack_b(g.b, {cols.first + j, task_cols.count}, depth, b);
                    kernels.multiply({.a = a + i * depth.count, .b = b, .rows = part(i, tasks.rows, rows.count).count, .cols = task_cols.count,
                                      .depth = depth.count, .sums = from(sums, i, j)});
                }
            }
}

}  // namespace

const GemmKernels* gemm_kernels(GemmIsa isa) {
#if defined(__x86_64__)
    if (isa == GemmIsa::avx512)
        return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
                       __builtin_cpu_supports("avx512vl")
                   ? &gemm_kernels_avx512
                   : nullptr;
    if (isa == GemmIsa::avx2) return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") ? &gemm_kernels_avx2 : nullptr;
#endif
    return isa == GemmIsa::portable ? &gemm_kernels_portable : nullptr;
}

const GemmKernels& best_gemm_kernels() {
    for (const GemmIsa isa : {GemmIsa::avx512, GemmIsa::avx2})
        if (const GemmKernels* kernels = gemm_kernels(isa)) return *kernels;
    return gemm_kernels_portable;
}

GemmScratch::GemmScratch(int threads) : threads_(threads) {
    const size_t size = static_cast<size_t>(bytes(threads) + huge_page);
    void* memory = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED)
        throw Problem(Exit::usage, "no memory for the matrix products (" + std::to_string(bytes(threads) >> 20) +
                                       " MiB): use fewer threads (--run.threads) or a smaller model");
    mapping_ = memory;
    base_ = reinterpret_cast<float*>(round_up(reinterpret_cast<int64_t>(memory), huge_page));
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
#pragma omp parallel
    multiply_blocks(kernels, g, scratch);
}

}  // namespace trifold::cpu
