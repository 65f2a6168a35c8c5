// kernels/cpu/gemm.h   c (+)= a * b^T (+ bias) in fp32 arithmetic, for the CPU's linear layers.
//
// Shapes     c [rows, cols] row-major, a [rows, depth], b [cols, depth]; a and b lie in memory along the depth or along
//            the other dimension, which covers all three products of a linear layer without transposing anything
//            beforehand.
// Types      a, b, c and bias are fp32 or bf16. bf16 is widened, exactly, while it is packed: without AMX an fp32
//            multiply-add does more work per second than the bf16 dot product of AVX-512 (Sapphire Rapids: twice as
//            much).
// Numerics   An element of c is one chain of fused multiply-adds over each block of at most 768 depths, the blocks
//            added in order, then the bias, then one rounding to c's type. Nothing else enters: the same bits for any
//            number of threads, however the rows are cut into calls, and with AVX2 or AVX-512.
// Structure  After Goto & van de Geijn, "Anatomy of high-performance matrix multiplication" (ACM TOMS 34, 2008), and
// BLIS: a block
//            of b is packed by all threads and shared; tasks of rows are taken by whichever thread is free, which packs
//            its part of a into its own memory (second-level cache) and multiplies tile by tile.
#pragma once
#include <cstdint>

#include "kernels/ops.h"
#include "kernels/tensor.h"

namespace trifold::cpu {

enum class Along : uint8_t { depth, outer };

// Element (i, k) is data[i * stride + k] when the matrix lies along the depth, data[k * stride + i] when along the
// other dimension.
struct GemmOperand {
    Tensor data;
    int64_t stride = 0;
    Along along = Along::depth;
};

struct Gemm {
    GemmOperand a, b;
    Tensor bias_C;  // one per column; may be empty
    Tensor c_RC;
    Accumulate accumulate = Accumulate::overwrite;
    int64_t rows = 0, cols = 0, depth = 0;
};

// A part of one dimension.
struct Span {
    int64_t first = 0, count = 0;
};

// What a task does with the sums of one depth block: out = start + sums + bias. `start` is null for zero, and may be
// `out`.
struct GemmSums {
    const void* start = nullptr;
    const void* bias = nullptr;
    void* out = nullptr;
    DType start_type = DType::f32, bias_type = DType::f32, out_type = DType::f32;
    int64_t start_stride = 0, out_stride = 0;  // elements between rows
};

// A task: `rows` x `cols` sums over `depth`, from packed panels.
struct GemmTask {
    const float* a;  // panels of tile_rows rows: [panel][depth][tile_rows]
    const float* b;  // panels of tile_cols columns: [panel][depth][tile_cols]
    int64_t rows, cols, depth;
    GemmSums sums;
};

// The parts that depend on the instruction set (gemm_panels.h).
struct GemmKernels {
    const char* name;
    int64_t tile_rows, tile_cols;
    // Packs outer x depth of an operand into panels; what is missing to a whole panel becomes zero.
    void (*pack_a)(const GemmOperand&, Span outer, Span depth, float* panels);
    void (*pack_b)(const GemmOperand&, Span outer, Span depth, float* panels);
    void (*multiply)(const GemmTask&);
    // The same for at most tile_rows rows, from b itself, which must lie along the depth.
    void (*multiply_few)(const GemmTask&, const GemmOperand& b, int64_t first_col, int64_t first_depth);
};

enum class GemmIsa : uint8_t { portable, avx2, avx512 };
// Null when this processor, or this build, cannot run them.
const GemmKernels* gemm_kernels(GemmIsa);
// The widest that this processor can run.
const GemmKernels& best_gemm_kernels();

// Packed blocks and partial sums for one product at a time, on at most `threads` threads. Allocated once.
class GemmScratch {
public:
    explicit GemmScratch(int threads);
    ~GemmScratch();
    GemmScratch(const GemmScratch&) = delete;
    static int64_t bytes(int threads);

    int threads() const { return threads_; }
    float* packed_a(int64_t step) const;  // two, used in turn
    float* partial_sums() const;          // a block of c in fp32, for bf16 results of several depth blocks
    float* packed_b(int thread) const;

private:
    int threads_;
    void* mapping_;
    float* base_;  // in the mapping, at the start of a huge page
};

// Runs on the calling thread's OpenMP team, which must not be larger than the scratch memory allows.
void gemm(const GemmKernels&, const Gemm&, const GemmScratch&);

}  // namespace trifold::cpu
