#include "kernels/gpu_rate.h"

#include <algorithm>
#include <vector>

#include "kernels/arena.h"
#include "kernels/ops.h"

namespace trifold {
namespace {

constexpr int64_t size = 4096;
constexpr int products_per_try = 8, tries = 5;

struct Operands {
    Tensor x, w, y, workspace, seed;
    Operands(Arena& arena, DType type) {
        const auto reserve = [&](DType t, int64_t elems) { return arena.reserve(MemoryClass::workspace, t, elems); };
        x = reserve(type, size * size);
        w = reserve(type, size * size);
        y = reserve(type, size * size);
        seed = reserve(DType::f32, size * size);
        workspace = reserve(DType::u8, linear_workspace(arena.device(), size, size));
    }
};

// Values in [-1, 1): products of zeros take less power, and so are faster than real ones.
std::vector<float> random_values() {
    std::vector<float> values(static_cast<size_t>(size * size));
    uint32_t state = 1;
    for (float& v : values) {
        state = state * 1664525u + 1013904223u;
        v = static_cast<float>(static_cast<int32_t>(state)) * 0x1p-31f;
    }
    return values;
}

}  // namespace

double measure_gpu_rate(Stream& s, DType type) {
    using Clock = std::chrono::steady_clock;
    Arena plan(s.device());
    Operands(plan, type);
    Arena arena(plan, "measuring the GPU");
    const Operands o(arena, type);
    std::vector<float> values = random_values();
    copy(s, {.x = Tensor{values.data(), DType::f32, size * size}, .y = o.seed});
    for (const Tensor& t : {o.x, o.w}) add_into(s, {.x = o.seed, .y = t, .accumulate = Accumulate::overwrite});
    double best = 0;
    for (int i = 0; i <= tries; ++i) {
        const auto begin = Clock::now();
        for (int p = 0; p < products_per_try; ++p)
            linear_forward(s, {.x_NI = o.x, .w_OI = o.w, .y_NO = o.y, .workspace = o.workspace, .N = size, .I = size, .O = size});
        s.engine().wait(s.last());
        const double seconds = std::chrono::duration<double>(Clock::now() - begin).count();
        if (i > 0) best = std::max(best, products_per_try * 2.0 * size * size * size / seconds);  // the first try warms up
    }
    return best;
}

}  // namespace trifold
