// test/unit/test_pointwise_norm.cpp   LayerNorm, RMSNorm and the norm of heads of kernels/cpu/: values against formulas
// in double, gradients against central differences of these formulas, at odd sizes.
#include "test/catch.h"
#include "kernels/ops.h"
#include "test/unit/operands.h"

using namespace trifold;
using test::gradient;
using test::Operand;
using test::slice;
using test::Values;
using test::worst;

namespace {

constexpr DType f32 = DType::f32;
constexpr double sums = 4e-6;         // errors of fp32 sums over a row, relative to the largest value
constexpr double differences = 2e-5;  // the same for gradients; central differences add about 1e-9

struct Size {
    int64_t N, C;
};
const Size odd_sizes[] = {{1, 8}, {3, 33}, {17, 100}, {40, 64}};

Values norm(NormKind kind, const Values& x, const Values& weight, const Values& bias, double eps) {
    const double C = static_cast<double>(x.size());
    double mean = 0, square = 0;
    if (kind == NormKind::layernorm)
        for (const double v : x) mean += v / C;
    for (const double v : x) square += (v - mean) * (v - mean) / C;
    Values y;
    for (size_t c = 0; c < x.size(); ++c)
        y.push_back((x[c] - mean) / std::sqrt(square + eps) * weight[c] + (bias.empty() ? 0.0 : bias[c]));
    return y;
}

struct Norm {
    NormKind kind;
    DType act;
    Size s;
    bool delta, bias;
    int64_t elems = s.N * s.C;
    Operand x = Operand::random(act, elems, 1, 1.0, 0.5), add = Operand::random(act, elems, 2);
    Operand weight = Operand::random(act, s.C, 3, 0.5, 1.0), offset = Operand::random(act, s.C, 4);
    Operand total = Operand(act, elems), y = total, mean = Operand(f32, s.N), rstd = mean;
    float eps = 1e-5f;

    void run() {
        cpu::norm_forward({.x_NC = x.tensor(),
                           .delta_NC = delta ? add.tensor() : Tensor{},
                           .sum_NC = delta ? total.tensor() : Tensor{},
                           .weight_C = weight.tensor(),
                           .bias_C = bias ? offset.tensor() : Tensor{},
                           .y_NC = y.tensor(),
                           .mean_N = kind == NormKind::layernorm ? mean.tensor() : Tensor{},
                           .rstd_N = rstd.tensor(),
                           .kind = kind,
                           .eps = eps,
                           .N = s.N,
                           .C = s.C});
    }
    const Operand& input() const { return delta ? total : x; }
    Values row(int64_t n) const { return slice(input().values(), n * s.C, s.C); }
    Values bias_values() const { return bias ? offset.values() : Values{}; }
};

struct NormGradients {
    Operand dy, residual, dx, dweight, dbias;

    NormGradients(Norm& f, Accumulate mode, bool alias)
        : dy(Operand::random(f.act, f.s.N * f.s.C, 11)),
          residual(Operand::random(f.act, f.s.N * f.s.C, 12)),
          dx(alias ? residual : Operand::nans(f.act, f.s.N * f.s.C)),
          dweight(Operand::random(f32, f.s.C, 13)),
          dbias(Operand::random(f32, f.s.C, 14)) {
        Operand workspace(DType::u8, cpu::norm_backward_workspace(f.s.N, f.s.C)), input = f.input();
        cpu::norm_backward({.dy_NC = dy.tensor(),
                            .x_NC = input.tensor(),
                            .weight_C = f.weight.tensor(),
                            .mean_N = f.kind == NormKind::layernorm ? f.mean.tensor() : Tensor{},
                            .rstd_N = f.rstd.tensor(),
                            .dresidual_NC = alias ? dx.tensor() : residual.tensor(),
                            .dx_NC = dx.tensor(),
                            .dweight_C = dweight.tensor(),
                            .dbias_C = f.bias ? dbias.tensor() : Tensor{},
                            .workspace = workspace.tensor(),
                            .kind = f.kind,
                            .accumulate = mode,
                            .N = f.s.N,
                            .C = f.s.C});
    }
    // sum of dy * norm(x) over one row
    double dot(const Norm& f, int64_t n, const Values& x, const Values& weight, const Values& bias) const {
        const Values y = norm(f.kind, x, weight, bias, f.eps);
        double total = 0;
        for (int64_t c = 0; c < f.s.C; ++c) total += dy[n * f.s.C + c] * y[static_cast<size_t>(c)];
        return total;
    }
};

Values added(Values a, const Values& b) {
    for (size_t i = 0; i < a.size(); ++i) a[i] += b[i];
    return a;
}

void check_norm_backward(Norm& f, Accumulate mode, bool alias) {
    CAPTURE(static_cast<int>(f.kind), name_of(f.act), f.s.N, f.s.C, alias, f.bias);
    const bool add = mode == Accumulate::add;
    const NormGradients g(f, mode, alias);
    Values dx, dweight = add ? Operand::random(f32, f.s.C, 13).values() : Values(static_cast<size_t>(f.s.C));
    Values dbias = add ? Operand::random(f32, f.s.C, 14).values() : Values(static_cast<size_t>(f.s.C));
    for (int64_t n = 0; n < f.s.N; ++n) {
        const Values x = f.row(n), w = f.weight.values(), b = f.bias_values();
        const Values d = added(gradient([&](const Values& v) { return g.dot(f, n, v, w, b); }, x),
                               slice(g.residual.values(), n * f.s.C, f.s.C));
        dx.insert(dx.end(), d.begin(), d.end());
        dweight = added(dweight, gradient([&](const Values& v) { return g.dot(f, n, x, v, b); }, w));
        if (f.bias) dbias = added(dbias, gradient([&](const Values& v) { return g.dot(f, n, x, w, v); }, b));
    }
    CHECK(worst(g.dx, dx, f.act, differences) <= 1);
    CHECK(worst(g.dweight, dweight, f32, differences) <= 1);
    if (f.bias) CHECK(worst(g.dbias, dbias, f32, differences) <= 1);
}

}  // namespace

TEST_CASE("norm_forward: LayerNorm and RMSNorm, with and without a residual addition", "[pointwise]") {
    for (const NormKind kind : {NormKind::layernorm, NormKind::rmsnorm})
        for (const DType act : {f32, DType::bf16})
            for (const Size s : odd_sizes)
                for (const bool delta : {false, true})
                    for (const bool bias : {false, true}) {
                        CAPTURE(static_cast<int>(kind), name_of(act), s.N, s.C, delta, bias);
                        Norm f{kind, act, s, delta, bias};
                        f.run();
                        if (delta) CHECK(worst(f.total, added(f.x.values(), f.add.values()), act, 0) <= 1);
                        Values y;
                        for (int64_t n = 0; n < s.N; ++n) {
                            const Values row = norm(kind, f.row(n), f.weight.values(), f.bias_values(), f.eps);
                            y.insert(y.end(), row.begin(), row.end());
                        }
                        CHECK(worst(f.y, y, act, sums) <= 1);
                    }
}

TEST_CASE("norm_forward: a large mean costs no precision; sum may alias x", "[pointwise]") {
    Norm f{NormKind::layernorm, f32, {3, 100}, false, true};
    f.x = Operand::random(f32, 300, 1, 1.0, 1000.0);
    f.run();
    Values y;
    for (int64_t n = 0; n < 3; ++n)
        for (const double v : norm(f.kind, f.row(n), f.weight.values(), f.bias_values(), f.eps)) y.push_back(v);
    CHECK(worst(f.y, y, f32, 2e-4) <= 1);  // the inputs' spacing is 6e-5 of their spread

    Norm apart{NormKind::rmsnorm, DType::bf16, {17, 33}, true, false}, alias = apart;
    apart.run();
    cpu::norm_forward({.x_NC = alias.x.tensor(),
                       .delta_NC = alias.add.tensor(),
                       .sum_NC = alias.x.tensor(),
                       .weight_C = alias.weight.tensor(),
                       .bias_C = {},
                       .y_NC = alias.y.tensor(),
                       .mean_N = {},
                       .rstd_N = alias.rstd.tensor(),
                       .kind = alias.kind,
                       .eps = alias.eps,
                       .N = 17,
                       .C = 33});
    CHECK(alias.x.bytes() == apart.total.bytes());
    CHECK(alias.y.bytes() == apart.y.bytes());
}

TEST_CASE("norm_backward against central differences", "[pointwise]") {
    for (const NormKind kind : {NormKind::layernorm, NormKind::rmsnorm})
        for (const DType act : {f32, DType::bf16})
            for (const Size s : odd_sizes) {
                Norm plain{kind, act, s, false, false}, full{kind, act, s, true, true};
                plain.run();
                full.run();
                check_norm_backward(plain, Accumulate::add, true);
                check_norm_backward(full, Accumulate::overwrite, false);
            }
    CHECK(test::same_for_thread_counts([] {
        Norm f{NormKind::layernorm, f32, {300, 33}, false, true};
        f.run();
        const NormGradients g(f, Accumulate::overwrite, false);
        std::vector<std::byte> all = g.dweight.bytes();
        all.insert(all.end(), g.dbias.bytes().begin(), g.dbias.bytes().end());
        all.insert(all.end(), g.dx.bytes().begin(), g.dx.bytes().end());
        return all;
    }));
}

TEST_CASE("head_norm normalises the heads of a strided row and leaves the rest alone", "[pointwise]") {
    for (const DType act : {f32, DType::bf16})
        for (const int64_t D : {8, 33, 64}) {
            CAPTURE(name_of(act), D);
            const int64_t N = 19, heads = 3, stride = heads * D + 5;
            Operand x = Operand::random(act, N * stride, 1), before = x, saved = Operand::nans(act, N * heads * D);
            Operand dx = Operand::random(act, N * stride, 4), dy = dx, weight = Operand::random(act, D, 2, 0.5, 1.0);
            Operand dweight = Operand::random(f32, D, 3), rstd = Operand::nans(f32, N * heads);
            Operand workspace(DType::u8, cpu::norm_backward_workspace(N, D));
            cpu::head_norm_forward({.x_NS = x.tensor(),
                                    .saved_NHD = saved.tensor(),
                                    .rstd_NH = rstd.tensor(),
                                    .weight_D = weight.tensor(),
                                    .eps = 1e-6f,
                                    .N = N,
                                    .heads = heads,
                                    .D = D,
                                    .stride = stride});
            cpu::head_norm_backward({.dx_NS = dx.tensor(),
                                     .saved_NHD = saved.tensor(),
                                     .rstd_NH = rstd.tensor(),
                                     .weight_D = weight.tensor(),
                                     .dweight_D = dweight.tensor(),
                                     .workspace = workspace.tensor(),
                                     .accumulate = Accumulate::add,
                                     .N = N,
                                     .heads = heads,
                                     .D = D,
                                     .stride = stride});
            Values y = before.values(), want_dx = dy.values(), want_dw = Operand::random(f32, D, 3).values();
            const Values w = weight.values();
            for (int64_t n = 0; n < N; ++n)
                for (int64_t h = 0; h < heads; ++h) {
                    const int64_t at = n * stride + h * D;
                    const Values head = slice(before.values(), at, D), d = slice(dy.values(), at, D);
                    const auto dot = [&](const Values& v, const Values& scale) {
                        const Values out = norm(NormKind::rmsnorm, v, scale, {}, 1e-6);
                        double total = 0;
                        for (size_t i = 0; i < out.size(); ++i) total += d[i] * out[i];
                        return total;
                    };
                    const Values out = norm(NormKind::rmsnorm, head, w, {}, 1e-6);
                    const Values g = gradient([&](const Values& v) { return dot(v, w); }, head);
                    std::copy(out.begin(), out.end(), y.begin() + at);
                    std::copy(g.begin(), g.end(), want_dx.begin() + at);
                    want_dw = added(want_dw, gradient([&](const Values& v) { return dot(head, v); }, w));
                }
            CHECK(worst(x, y, act, sums) <= 1);
            CHECK(worst(dx, want_dx, act, differences) <= 1);
            CHECK(worst(dweight, want_dw, f32, differences) <= 1);
        }
}
