// kernels/cpu/linear.cpp   y = x w^T (+ b),   dx = dy w,   dw = dy^T x,   db = column sums of dy
//
// Products   gemm.h for every type; oneDNN for bf16 where it has AMX. Measured on GPT-2 124M's shapes
// (bench/linear.cpp): in fp32
//            gemm.h keeps up with oneDNN's and MKL's best layout within a few percent, in bf16 without AMX it is about
//            twice as fast, and it gives the same bits for any number of threads and any division of the rows.
// Bias       db: rows in blocks of 64, summed in order, the blocks added in order, so it does not depend on the
// threads.
#include "kernels/cpu/linear.h"

#include <omp.h>

#include <algorithm>
#include <mutex>
#include <optional>

#include "kernels/cpu/gemm.h"
#include "kernels/cpu/onednn.h"
#include "kernels/cpu/parallel.h"

namespace trifold {
namespace cpu {
namespace {

// What products keep between calls. One product runs at a time: it uses all threads anyway.
class Products {
public:
    void run(const Gemm& g) {
        if (g.rows == 0 || g.cols == 0) return;
        const std::lock_guard lock(mutex_);
        const bool both_bf16 = g.a.data.dtype == DType::bf16 && g.b.data.dtype == DType::bf16;
        if (amx_ && both_bf16 && g.depth > 0 && onednn_.run(g)) return;
        prepare();
        gemm(kernels_, g, *scratch_);
    }
    void allocate() {
        const std::lock_guard lock(mutex_);
        prepare();
    }

private:
    void prepare() {
        const int threads = omp_get_max_threads();
        if (!scratch_ || scratch_->threads() < threads) scratch_.emplace(threads);
    }
    std::mutex mutex_;
    const bool amx_ = onednn_has_amx();
    const GemmKernels& kernels_ = best_gemm_kernels();
    std::optional<GemmScratch> scratch_;
    OnednnProducts onednn_;
};

// The operations are free functions, so what they keep cannot belong to a caller: scratch memory and primitives, no
// results.
Products& products() {
    static Products all;
    return all;
}

template <class T>
void sum_columns(const T* dy, int64_t N, int64_t O, float* sums, int64_t width, Accumulate accumulate) {
    constexpr int64_t most = 128;
    float total[most] = {};
    for (int64_t first = 0; first < N; first += 64) {
        float block[most] = {};
        for (int64_t n = first; n < std::min(N, first + 64); ++n)
            for (int64_t j = 0; j < width; ++j) block[j] += static_cast<float>(dy[n * O + j]);
        for (int64_t j = 0; j < width; ++j) total[j] += block[j];
    }
    for (int64_t j = 0; j < width; ++j) sums[j] = accumulate == Accumulate::add ? sums[j] + total[j] : total[j];
}

void bias_gradient(const LinearBackwardWeight& a) {
    const Blocks columns{a.O, 128};
    with_act(a.dy_NO.dtype, [&](auto tag) {
        using T = decltype(tag);
        parallel_for(columns.count(), [&](int64_t c) {
            const int64_t first = columns.begin(c);
            sum_columns(a.dy_NO.as<T>() + first, a.N, a.O, a.dbias_O.as<float>() + first, columns.end(c) - first,
                        a.accumulate);
        });
    });
}

bool holds(const Tensor& t, int64_t elems) {
    return t.elems >= elems && (t.dtype == DType::f32 || t.dtype == DType::bf16);
}

}  // namespace

void linear_forward(const LinearForward& a) {
    TRIFOLD_ASSERT(holds(a.x_NI, a.N * a.I) && holds(a.w_OI, a.O * a.I) && holds(a.y_NO, a.N * a.O));
    TRIFOLD_ASSERT(!a.bias_O || holds(a.bias_O, a.O));
    products().run({.a = {a.x_NI, a.I, Along::depth},
                    .b = {a.w_OI, a.I, Along::depth},
                    .bias_C = a.bias_O,
                    .c_RC = a.y_NO,
                    .accumulate = a.accumulate,
                    .rows = a.N,
                    .cols = a.O,
                    .depth = a.I});
}

void linear_backward_input(const LinearBackwardInput& a) {
    TRIFOLD_ASSERT(holds(a.dy_NO, a.N * a.O) && holds(a.w_OI, a.O * a.I) && holds(a.dx_NI, a.N * a.I));
    products().run({.a = {a.dy_NO, a.O, Along::depth},
                    .b = {a.w_OI, a.I, Along::outer},
                    .c_RC = a.dx_NI,
                    .accumulate = a.accumulate,
                    .rows = a.N,
                    .cols = a.I,
                    .depth = a.O});
}

void linear_backward_weight(const LinearBackwardWeight& a) {
    TRIFOLD_ASSERT(holds(a.dy_NO, a.N * a.O) && holds(a.x_NI, a.N * a.I) && a.dw_OI.dtype == DType::f32 &&
                   a.dw_OI.elems >= a.O * a.I);
    products().run({.a = {a.dy_NO, a.O, Along::outer},
                    .b = {a.x_NI, a.I, Along::outer},
                    .c_RC = a.dw_OI,
                    .accumulate = a.accumulate,
                    .rows = a.O,
                    .cols = a.I,
                    .depth = a.N});
    if (a.dbias_O) bias_gradient(a);
}

int64_t linear_workspace(int64_t, int64_t) { return 0; }  // packed blocks lie outside the arena

}  // namespace cpu

int64_t linear_scratch_bytes() { return cpu::GemmScratch::bytes(omp_get_max_threads()); }
void linear_prepare() { cpu::products().allocate(); }

}  // namespace trifold
