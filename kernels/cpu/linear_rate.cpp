#include "kernels/cpu/linear_rate.h"

#include <omp.h>

#include <algorithm>
#include <chrono>
#include <vector>

#include "kernels/cpu/gemm.h"
#include "kernels/cpu/onednn.h"

namespace trifold {
namespace {

constexpr int64_t rows = 2048, cols = 1024, depth = 1024;
constexpr double budget_s = 0.08;  // for each way, after one product to warm up

// Values in [-1, 1): products of zeros would be faster than real ones.
Tensor filled(std::vector<float>& memory, DType type, int64_t elems) {
    memory.resize(static_cast<size_t>(elems));
    const Tensor t{memory.data(), type, elems};
    uint32_t state = 1;
    for (int64_t i = 0; i < elems; ++i) {
        state = state * 1664525u + 1013904223u;
        const float value = static_cast<float>(static_cast<int32_t>(state)) * 0x1p-31f;
        if (type == DType::f32)
            t.as<float>()[i] = value;
        else
            t.as<bf16>()[i] = bf16(value);
    }
    return t;
}

template <class Product>
double best_rate(const Product& product) {
    using Clock = std::chrono::steady_clock;
    const auto seconds = [](Clock::time_point since) {
        return std::chrono::duration<double>(Clock::now() - since).count();
    };
    product();
    double best_s = 1e9;
    for (const auto start = Clock::now(); best_s > 1e8 || seconds(start) < budget_s;) {
        const auto begin = Clock::now();
        product();
        best_s = std::min(best_s, seconds(begin));
    }
    return 2.0 * rows * cols * depth / best_s;
}

}  // namespace

MatmulRates measure_matmul_rates(DType type) {
    std::vector<float> a, b, c(static_cast<size_t>(rows * cols));
    cpu::Gemm g{.a = {filled(a, type, rows * depth), depth, cpu::Along::depth},
                .b = {filled(b, type, cols * depth), cols, cpu::Along::outer},
                .c_RC = {c.data(), DType::f32, rows * cols},
                .rows = rows,
                .cols = cols,
                .depth = depth};
    cpu::OnednnProducts onednn;
    const cpu::GemmScratch scratch(omp_get_max_threads());
    return {.onednn = onednn.run(g) ? best_rate([&] { onednn.run(g); }) : 0,
            .own = best_rate([&] { cpu::gemm(cpu::best_gemm_kernels(), g, scratch); })};
}

double measure_matmul_rate(DType type) {
    const MatmulRates rates = measure_matmul_rates(type);
    return std::max(rates.onednn, rates.own);
}

}  // namespace trifold
