// The linear operations against products in double, and the promises of kernels/cpu/gemm.h about bits.
#include "test/catch.h"

#include <omp.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <string>
#include <thread>
#include <vector>

#include "kernels/cpu/gemm.h"
#include "kernels/cpu/linear.h"
#include "kernels/cpu/linear_rate.h"
#include "kernels/cpu/onednn.h"
#include "kernels/ops.h"

using namespace trifold;

namespace {

// A tensor with its memory. Random values in [-1, 1) depend on the seed only.
struct Array {
    std::vector<float> memory;
    Tensor t;
    Array(DType type, int64_t elems) : memory(static_cast<size_t>(elems) + 1), t{memory.data(), type, elems} {}
    Array(Array&&) = default;
    static Array random(DType type, int64_t elems, uint32_t seed) {
        Array a(type, elems);
        uint64_t state = seed * 0x9e3779b97f4a7c15u + 1;
        for (int64_t i = 0; i < elems; ++i) {
            state = state * 6364136223846793005u + 1442695040888963407u;
            a.set(i, static_cast<float>(static_cast<int32_t>(state >> 32)) * 0x1p-31f);
        }
        return a;
    }
    Array copy() const {
        Array a(t.dtype, t.elems);
        a.memory = memory;
        a.t.data = a.memory.data();
        return a;
    }
    void set(int64_t i, float v) {
        if (t.dtype == DType::f32)
            t.as<float>()[i] = v;
        else
            t.as<bf16>()[i] = bf16(v);
    }
    double at(int64_t i) const {
        return t.dtype == DType::f32 ? t.as<float>()[i] : static_cast<double>(static_cast<float>(t.as<bf16>()[i]));
    }
    bool operator==(const Array& o) const {
        return t.elems == o.t.elems && std::memcmp(t.data, o.t.data, static_cast<size_t>(t.bytes())) == 0;
    }
};

// What stands in an operand at (outer, k), and the sum of products and of their absolute values.
double element(const cpu::GemmOperand& m, int64_t i, int64_t k) {
    const int64_t at = m.along == cpu::Along::depth ? i * m.stride + k : k * m.stride + i;
    return m.data.dtype == DType::f32 ? m.data.as<float>()[at]
                                      : static_cast<double>(static_cast<float>(m.data.as<bf16>()[at]));
}
struct Exact {
    double value, absolute;
};
Exact exact(const cpu::Gemm& g, int64_t i, int64_t j) {
    Exact e{0, 0};
    for (int64_t k = 0; k < g.depth; ++k) {
        const double product = element(g.a, i, k) * element(g.b, j, k);
        e.value += product;
        e.absolute += std::abs(product);
    }
    return e;
}

// A chain of n additions in fp32 is within n * 2^-24 of the sum of the absolute values; bf16 results are rounded once,
// to 2^-8.
double bound(double value, double absolute, int64_t additions, DType result) {
    return static_cast<double>(additions) * 0x1p-24 * absolute +
           (result == DType::bf16 ? 0x1p-8 : 0x1p-24) * std::abs(value);
}

// Every element (or each `stride`-th) of c against start + a b^T + bias.
void check(const cpu::Gemm& g, const Array& c, const Array* start, const Array* bias, int64_t stride = 1) {
    double worst = 0, largest = 0;
    for (int64_t at = 0; at < g.rows * g.cols; at += stride) {
        Exact e = exact(g, at / g.cols, at % g.cols);
        for (const double more : {start ? start->at(at) : 0.0, bias ? bias->at(at % g.cols) : 0.0})
            e.value += more, e.absolute += std::abs(more);
        worst = std::max(worst, std::abs(c.at(at) - e.value) / bound(e.value, e.absolute, g.depth + 4, g.c_RC.dtype));
        largest = std::max(largest, std::abs(e.value));
    }
    INFO(g.rows << " x " << g.cols << " x " << g.depth << ", " << name_of(g.a.data.dtype) << " to "
                << name_of(g.c_RC.dtype));
    CHECK(largest > 0.01);  // a product of zeros passes everything
    CHECK(worst <= 1.0);
}

struct Layer {
    int64_t N, I, O;
    Array x, w, b, dy;
    Layer(int64_t N, int64_t I, int64_t O, DType type)
        : N(N),
          I(I),
          O(O),
          x(Array::random(type, N * I, 1)),
          w(Array::random(type, O * I, 2)),
          b(Array::random(type, O, 3)),
          dy(Array::random(type, N * O, 4)) {}
    cpu::Gemm forward(const Array& y) const {
        return {.a = {x.t, I, cpu::Along::depth},
                .b = {w.t, I, cpu::Along::depth},
                .c_RC = y.t,
                .rows = N,
                .cols = O,
                .depth = I};
    }
    cpu::Gemm backward_input(const Array& dx) const {
        return {.a = {dy.t, O, cpu::Along::depth},
                .b = {w.t, I, cpu::Along::outer},
                .c_RC = dx.t,
                .rows = N,
                .cols = I,
                .depth = O};
    }
    cpu::Gemm backward_weight(const Array& dw) const {
        return {.a = {dy.t, O, cpu::Along::outer},
                .b = {x.t, I, cpu::Along::outer},
                .c_RC = dw.t,
                .rows = O,
                .cols = I,
                .depth = N};
    }
};

// Runs with that many threads, then with as many as before.
template <class F>
void with_threads(int threads, const F& f) {
    const int before = omp_get_max_threads();
    omp_set_num_threads(threads);
    f();
    omp_set_num_threads(before);
}

// Where products of these inputs keep the promises of gemm.h, not only those of oneDNN.
bool own_kernels(DType type) { return type == DType::f32 || !cpu::onednn_has_amx(); }

void check_forward(const Layer& l, DType result, bool bias, Accumulate accumulate) {
    Array y = Array::random(result, l.N * l.O, 5);
    const Array start = y.copy();
    cpu::linear_forward({.x_NI = l.x.t,
                         .w_OI = l.w.t,
                         .bias_O = bias ? In(l.b.t) : In(),
                         .y_NO = y.t,
                         .accumulate = accumulate,
                         .N = l.N,
                         .I = l.I,
                         .O = l.O});
    check(l.forward(y), y, accumulate == Accumulate::add ? &start : nullptr, bias ? &l.b : nullptr);
}

void check_backward(const Layer& l, DType result, Accumulate accumulate) {
    const bool add = accumulate == Accumulate::add;
    Array dx = Array::random(result, l.N * l.I, 6), dw = Array::random(DType::f32, l.O * l.I, 7),
          db = Array::random(DType::f32, l.O, 8);
    const Array dx0 = dx.copy(), dw0 = dw.copy(), db0 = db.copy();
    cpu::linear_backward_input(
        {.dy_NO = l.dy.t, .w_OI = l.w.t, .dx_NI = dx.t, .accumulate = accumulate, .N = l.N, .I = l.I, .O = l.O});
    cpu::linear_backward_weight({.dy_NO = l.dy.t,
                                 .x_NI = l.x.t,
                                 .dw_OI = dw.t,
                                 .dbias_O = db.t,
                                 .accumulate = accumulate,
                                 .N = l.N,
                                 .I = l.I,
                                 .O = l.O});
    check(l.backward_input(dx), dx, add ? &dx0 : nullptr, nullptr);
    check(l.backward_weight(dw), dw, add ? &dw0 : nullptr, nullptr);
    Array ones(DType::f32, l.N);
    for (int64_t n = 0; n < l.N; ++n) ones.set(n, 1.0f);
    check({.a = {ones.t, l.N, cpu::Along::depth},
           .b = {l.dy.t, l.O, cpu::Along::outer},
           .c_RC = db.t,
           .rows = 1,
           .cols = l.O,
           .depth = l.N},
          db, add ? &db0 : nullptr, nullptr);
}

// The results of all three operations at once.
struct Results {
    Array y, dx, dw, db;
    bool operator==(const Results&) const = default;
};
Results run_all(const Layer& l, int64_t chunk) {
    const DType type = l.x.t.dtype;
    Results r{Array(type, l.N * l.O), Array(type, l.N * l.I), Array(DType::f32, l.O * l.I), Array(DType::f32, l.O)};
    for (int64_t first = 0; first < l.N; first += chunk) {
        const int64_t rows = std::min(chunk, l.N - first);
        const Tensor x = l.x.t.slice(first * l.I, rows * l.I), dy = l.dy.t.slice(first * l.O, rows * l.O);
        cpu::linear_forward({.x_NI = x,
                             .w_OI = l.w.t,
                             .bias_O = l.b.t,
                             .y_NO = r.y.t.slice(first * l.O, rows * l.O),
                             .N = rows,
                             .I = l.I,
                             .O = l.O});
        cpu::linear_backward_input({.dy_NO = dy,
                                    .w_OI = l.w.t,
                                    .dx_NI = r.dx.t.slice(first * l.I, rows * l.I),
                                    .N = rows,
                                    .I = l.I,
                                    .O = l.O});
        cpu::linear_backward_weight({.dy_NO = dy,
                                     .x_NI = x,
                                     .dw_OI = r.dw.t,
                                     .dbias_O = r.db.t,
                                     .accumulate = first == 0 ? Accumulate::overwrite : Accumulate::add,
                                     .N = rows,
                                     .I = l.I,
                                     .O = l.O});
    }
    return r;
}

// c of one product with given kernels.
Array product(const cpu::GemmKernels& kernels, cpu::Gemm g, DType result) {
    Array c(result, g.rows * g.cols);
    g.c_RC = c.t;
    cpu::gemm(kernels, g, cpu::GemmScratch(omp_get_max_threads()));
    return c;
}

}  // namespace

TEST_CASE("linear: forward equals the product in double") {
    for (const DType type : {DType::f32, DType::bf16})
        for (const int64_t N : {1, 2, 3, 7, 17, 65})
            for (const int64_t I : {8, 33, 96})
                for (const int64_t O : {1, 5, 128}) {
                    const Layer l(N, I, O, type);
                    check_forward(l, type, false, Accumulate::overwrite);
                    check_forward(l, type, true, Accumulate::overwrite);
                    check_forward(l, type, true, Accumulate::add);
                    check_forward(l, DType::f32, true, Accumulate::overwrite);
                    check_forward(l, DType::f32, false, Accumulate::add);
                }
}

TEST_CASE("linear: gradients equal the products in double") {
    for (const DType type : {DType::f32, DType::bf16})
        for (const int64_t N : {1, 2, 3, 7, 17, 65})
            for (const int64_t I : {8, 33, 96})
                for (const int64_t O : {1, 5, 128}) {
                    const Layer l(N, I, O, type);
                    check_backward(l, type, Accumulate::overwrite);
                    check_backward(l, type, Accumulate::add);
                    check_backward(l, DType::f32, Accumulate::overwrite);
                }
}

TEST_CASE("linear: several blocks in every dimension, with partial sums outside a bf16 result") {
    const Layer l(1037, 1030, 1553, DType::bf16);
    Array y = Array::random(DType::bf16, l.N * l.O, 5);
    const Array start = y.copy();
    cpu::linear_forward({.x_NI = l.x.t,
                         .w_OI = l.w.t,
                         .bias_O = l.b.t,
                         .y_NO = y.t,
                         .accumulate = Accumulate::add,
                         .N = l.N,
                         .I = l.I,
                         .O = l.O});
    check(l.forward(y), y, &start, &l.b, 997);
    const Results r = run_all(l, l.N);
    check(l.backward_input(r.dx), r.dx, nullptr, nullptr, 997);
    check(l.backward_weight(r.dw), r.dw, nullptr, nullptr, 997);
}

TEST_CASE("linear: the checker sees a wrong element") {
    const Layer l(3, 33, 5, DType::f32);
    Array y(DType::f32, l.N * l.O);
    cpu::linear_forward({.x_NI = l.x.t, .w_OI = l.w.t, .y_NO = y.t, .N = l.N, .I = l.I, .O = l.O});
    const Exact e = exact(l.forward(y), 2, 4);
    CHECK(std::abs(y.at(14) - e.value) <= bound(e.value, e.absolute, l.I, DType::f32));
    CHECK(std::abs(y.at(14) * (1 + 1e-4) - e.value) > bound(e.value, e.absolute, l.I, DType::f32));
}

TEST_CASE("linear: the same call gives the same bits") {
    for (const DType type : {DType::f32, DType::bf16}) {
        const Layer l(65, 96, 128, type);
        CHECK(run_all(l, l.N) == run_all(l, l.N));
    }
}

TEST_CASE("linear: the number of threads does not change a bit") {
    for (const DType type : {DType::f32, DType::bf16}) {
        if (!own_kernels(type)) continue;
        const Layer l(300, 200, 1100, type);
        std::vector<Results> results;
        for (const int threads : {1, 2}) with_threads(threads, [&] { results.push_back(run_all(l, l.N)); });
        CHECK(results[0] == results[1]);
    }
}

TEST_CASE("linear: rows in chunks of 64 give the bits of the whole product") {
    for (const DType type : {DType::f32, DType::bf16}) {
        if (!own_kernels(type)) continue;
        const Layer l(195, 96, 1100, type);
        const Results whole = run_all(l, l.N), chunks = run_all(l, 64), few = run_all(l, 5);
        CHECK(chunks.y == whole.y);
        CHECK(chunks.dx == whole.dx);
        CHECK(few.y == whole.y);
        CHECK(few.dx == whole.dx);
        // Sums over rows are cut by the chunks, so these agree within rounding only.
        check(l.backward_weight(chunks.dw), chunks.dw, nullptr, nullptr);
    }
}

TEST_CASE("linear: no rows leave gradients of weights at zero, or as they were") {
    const Layer l(0, 33, 5, DType::f32);
    Array dw = Array::random(DType::f32, l.O * l.I, 7), db = Array::random(DType::f32, l.O, 8);
    const Array dw0 = dw.copy(), db0 = db.copy();
    const auto backward = [&](Accumulate accumulate) {
        cpu::linear_backward_weight({.dy_NO = l.dy.t,
                                     .x_NI = l.x.t,
                                     .dw_OI = dw.t,
                                     .dbias_O = db.t,
                                     .accumulate = accumulate,
                                     .N = 0,
                                     .I = l.I,
                                     .O = l.O});
    };
    backward(Accumulate::add);
    CHECK(dw == dw0);
    CHECK(db == db0);
    backward(Accumulate::overwrite);
    CHECK(dw == Array(DType::f32, l.O * l.I));
    CHECK(db == Array(DType::f32, l.O));
}

TEST_CASE("linear: two threads of the program may multiply at the same time") {
    const Layer l(65, 96, 128, DType::f32);
    const Results expected = run_all(l, l.N);
    bool equal[2] = {false, false};
    std::vector<std::thread> threads;
    for (bool& e : equal) threads.emplace_back([&] { e = run_all(l, l.N) == expected; });
    for (std::thread& t : threads) t.join();
    CHECK(equal[0]);
    CHECK(equal[1]);
}

TEST_CASE("gemm: AVX2 and AVX-512 agree to the bit, the portable version within rounding") {
    for (const DType type : {DType::f32, DType::bf16})
        for (const int64_t I : {7, 100, 1100}) {
            const Layer l(61, I, 203, type);
            Array none(DType::f32, 0);
            for (const cpu::Gemm& g : {l.forward(none), l.backward_input(none), l.backward_weight(none)}) {
                const Array portable = product(*cpu::gemm_kernels(cpu::GemmIsa::portable), g, DType::f32);
                check(g, portable, nullptr, nullptr, 41);
                std::vector<Array> wide;
                for (const cpu::GemmIsa isa : {cpu::GemmIsa::avx2, cpu::GemmIsa::avx512})
                    if (const cpu::GemmKernels* kernels = cpu::gemm_kernels(isa))
                        wide.push_back(product(*kernels, g, type));
                if (wide.size() == 2) CHECK(wide[0] == wide[1]);
            }
        }
}

TEST_CASE("onednn: the adapter computes the same products") {
    cpu::OnednnProducts products;
    for (const DType type : {DType::f32, DType::bf16}) {
        const Layer l(65, 96, 128, type);
        Array c = Array::random(type, 128 * 128, 5);
        Array none(DType::f32, 0);
        for (cpu::Gemm g : {l.forward(none), l.backward_input(none), l.backward_weight(none)})
            for (const Accumulate accumulate : {Accumulate::overwrite, Accumulate::add}) {
                const Array start = c.copy();
                g.c_RC = c.t.slice(0, g.rows * g.cols);
                g.bias_C = g.cols == l.O ? l.b.t : Tensor{};
                g.accumulate = accumulate;
                if (!products.run(g)) continue;  // bf16 on old processors
                check(g, c, accumulate == Accumulate::add ? &start : nullptr, g.bias_C ? &l.b : nullptr);
            }
    }
}

TEST_CASE("linear: memory and rate are told") {
    const int64_t one = cpu::GemmScratch::bytes(1);
    CHECK(one > 0);
    CHECK(cpu::GemmScratch::bytes(3) - cpu::GemmScratch::bytes(2) == cpu::GemmScratch::bytes(2) - one);
    with_threads(2, [] { CHECK(linear_scratch_bytes() == cpu::GemmScratch::bytes(2)); });
    linear_prepare();
    CHECK(measure_matmul_rate(DType::f32) > 1e8);
}
