#if __has_include(<catch2/catch_all.hpp>)
#include <catch2/catch_all.hpp>
#else
#include <catch2/catch.hpp>
#endif
// test/unit/test_pointwise.cpp   Row operations of kernels/cpu/: values against formulas in double, gradients against central
// differences of these formulas (or an analytic one), at odd sizes, in fp32 and bf16.
#include "kernels/cpu/parallel.h"
#include "test/unit/operands.h"

using namespace trifold;
using test::gradient;
using test::Operand;
using test::worst;

namespace {

using Values = std::vector<double>;
constexpr DType f32 = DType::f32;
constexpr double sums = 4e-6;         // fp32 sums over a row, relative to the largest value
constexpr double differences = 2e-5;  // the same for gradients; central differences add about 1e-9

Values slice(const Values& v, int64_t begin, int64_t count) { return Values(v.begin() + begin, v.begin() + begin + count); }

struct Size {
    int64_t N, C;
};
const Size odd_sizes[] = {{1, 8}, {3, 33}, {17, 100}, {40, 64}};

// ---------------------------------------------------------------- embedding

std::vector<int32_t> some_integers(int64_t count, int64_t below, uint64_t seed) {
    test::Numbers numbers(seed);
    std::vector<int32_t> v;
    for (int64_t i = 0; i < count; ++i) v.push_back(static_cast<int32_t>((numbers.next() + 1) / 2 * static_cast<double>(below)));
    return v;
}

struct EmbeddingGradients {
    Operand dwte, dwpe;
    EmbeddingGradients(DType act, Size s, int64_t V, int64_t T, Accumulate mode)
        : dwte(Operand::random(f32, V * s.C, 5)), dwpe(Operand::random(f32, T * s.C, 6)) {
        Operand token = Operand::integers(some_integers(s.N, V, 1)), position = Operand::integers(some_integers(s.N, T, 2));
        Operand dx = Operand::random(act, s.N * s.C, 3), workspace(DType::u8, embedding_backward_workspace(s.N, V));
        cpu::embedding_backward({.token_N = token.tensor(), .position_N = position.tensor(), .dx_NC = dx.tensor(),
                                 .dwte_VC = dwte.tensor(), .dwpe_TC = dwpe.tensor(), .workspace = workspace.tensor(),
                                 .accumulate_wte = mode, .accumulate_wpe = mode, .N = s.N, .C = s.C, .V = V, .positions = T});
    }
};

Values scattered(const std::vector<int32_t>& rows, const Operand& dx, Values table, int64_t C) {
    for (size_t n = 0; n < rows.size(); ++n)
        for (int64_t c = 0; c < C; ++c) table[static_cast<size_t>(rows[n] * C + c)] += dx[static_cast<int64_t>(n) * C + c];
    return table;
}

// ---------------------------------------------------------------- norms

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
    Operand x = Operand::random(act, s.N * s.C, 1, 1.0, 0.5), add = Operand::random(act, s.N * s.C, 2);
    Operand weight = Operand::random(act, s.C, 3, 0.5, 1.0), offset = Operand::random(act, s.C, 4);
    Operand total = Operand(act, s.N * s.C), y = Operand(act, s.N * s.C), mean = Operand(f32, s.N), rstd = Operand(f32, s.N);
    float eps = 1e-5f;

    void run() {
        cpu::norm_forward({.x_NC = x.tensor(), .delta_NC = delta ? add.tensor() : Tensor{}, .sum_NC = delta ? total.tensor() : Tensor{},
                           .weight_C = weight.tensor(), .bias_C = bias ? offset.tensor() : Tensor{}, .y_NC = y.tensor(),
                           .mean_N = kind == NormKind::layernorm ? mean.tensor() : Tensor{}, .rstd_N = rstd.tensor(), .kind = kind,
                           .eps = eps, .N = s.N, .C = s.C});
    }
    const Operand& input() const { return delta ? total : x; }
    Values row(int64_t n) const { return slice(input().values(), n * s.C, s.C); }
    Values bias_values() const { return bias ? offset.values() : Values{}; }
};

struct NormGradients {
    Operand dy, residual, dx, dweight, dbias;

    NormGradients(Norm& f, Accumulate mode, bool alias)
        : dy(Operand::random(f.act, f.s.N * f.s.C, 11)), residual(Operand::random(f.act, f.s.N * f.s.C, 12)),
          dx(alias ? residual : Operand::nans(f.act, f.s.N * f.s.C)), dweight(Operand::random(f32, f.s.C, 13)),
          dbias(Operand::random(f32, f.s.C, 14)) {
        Operand workspace(DType::u8, norm_backward_workspace(f.s.N, f.s.C)), input = f.input();
        cpu::norm_backward({.dy_NC = dy.tensor(), .x_NC = input.tensor(), .weight_C = f.weight.tensor(),
                            .mean_N = f.kind == NormKind::layernorm ? f.mean.tensor() : Tensor{}, .rstd_N = f.rstd.tensor(),
                            .dresidual_NC = alias ? dx.tensor() : residual.tensor(), .dx_NC = dx.tensor(), .dweight_C = dweight.tensor(),
                            .dbias_C = f.bias ? dbias.tensor() : Tensor{}, .workspace = workspace.tensor(), .kind = f.kind,
                            .accumulate = mode, .N = f.s.N, .C = f.s.C});
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
        const Values d = added(gradient([&](const Values& v) { return g.dot(f, n, v, w, b); }, x), slice(g.residual.values(), n * f.s.C, f.s.C));
        dx.insert(dx.end(), d.begin(), d.end());
        dweight = added(dweight, gradient([&](const Values& v) { return g.dot(f, n, x, v, b); }, w));
        if (f.bias) dbias = added(dbias, gradient([&](const Values& v) { return g.dot(f, n, x, w, v); }, b));
    }
    CHECK(worst(g.dx, dx, f.act, differences) <= 1);
    CHECK(worst(g.dweight, dweight, f32, differences) <= 1);
    if (f.bias) CHECK(worst(g.dbias, dbias, f32, differences) <= 1);
}

// ---------------------------------------------------------------- activations

double gelu_tanh(double x) { return 0.5 * x * (1 + std::tanh(std::sqrt(2 / M_PI) * (x + 0.044715 * x * x * x))); }
double gelu_erf(double x) { return 0.5 * x * std::erfc(-x / std::sqrt(2.0)); }
double silu(double x) { return x / (1 + std::exp(-x)); }
double activate(ActivationKind kind, double x) { return kind == ActivationKind::gelu_tanh ? gelu_tanh(x) : gelu_erf(x); }

const ActivationKind gelus[] = {ActivationKind::gelu_tanh, ActivationKind::gelu_erf};

// ---------------------------------------------------------------- cross-entropy

struct Loss {
    Operand logits, target, loss, dlogits;
    int64_t N, V, P;

    Loss(DType logit, DType grad, int64_t N, int64_t V, int64_t P, double spread)
        : logits(Operand::random(logit, N * P, 21, spread)), target(Operand::integers(some_integers(N, V, 22))),
          loss(Operand::nans(f32, N)), dlogits(Operand::nans(grad, N * P)), N(N), V(V), P(P) {
        for (int64_t n = 0; n < N; ++n)
            for (int64_t v = V; v < P; ++v) logits.set(n * P + v, v % 2 ? NAN : 1e30);
    }
    void run(Tensor to, float scale) {
        cpu::cross_entropy({.logits_NP = logits.tensor(), .target_N = target.tensor(), .loss_N = loss.tensor(), .dlogits_NP = to,
                            .grad_scale = scale, .N = N, .V = V, .P = P});
    }
};

double loss_of(const Values& logits, int64_t target) {
    const double top = *std::max_element(logits.begin(), logits.end());
    double total = 0;
    for (const double x : logits) total += std::exp(x - top);
    return std::log(total) + top - logits[static_cast<size_t>(target)];
}

// Analytic: central differences would drown at logits of 10^4.
Values loss_gradient(const Values& logits, int64_t target, double scale) {
    Values g;
    const double log_sum = loss_of(logits, target) + logits[static_cast<size_t>(target)];
    for (const double x : logits) g.push_back(scale * std::exp(x - log_sum));
    g[static_cast<size_t>(target)] -= scale;
    return g;
}

void check_loss(Loss& f, const std::vector<int32_t>& target, float scale) {
    f.target = Operand::integers(target);
    const Values logits = f.logits.values();
    f.run(f.dlogits.tensor(), scale);
    for (int64_t n = 0; n < f.N; ++n) {
        const Values row = slice(logits, n * f.P, f.V);
        const int32_t t = target[static_cast<size_t>(n)];
        const double want = t < 0 ? 0.0 : loss_of(row, t);
        CHECK(std::abs(f.loss[n] - want) <= 1e-6 * (1 + std::abs(want)));
        Values gradient = t < 0 ? Values(row.size()) : loss_gradient(row, t, scale);
        gradient.resize(static_cast<size_t>(f.P), 0.0);
        Operand got(f.dlogits.tensor().dtype, f.P);
        for (int64_t v = 0; v < f.P; ++v) got.set(v, f.dlogits[n * f.P + v]);
        CHECK(worst(got, gradient, got.tensor().dtype, 2e-6) <= 1);
    }
}

}  // namespace

TEST_CASE("embedding_forward adds token and position rows", "[pointwise]") {
    for (const DType act : {f32, DType::bf16})
        for (const Size s : odd_sizes) {
            const auto token = some_integers(s.N, 37, 1), position = some_integers(s.N, 19, 2);
            Operand tokens = Operand::integers(token), positions = Operand::integers(position);
            Operand wte = Operand::random(act, 37 * s.C, 3), wpe = Operand::random(act, 19 * s.C, 4), x = Operand::nans(act, s.N * s.C);
            Values gathered, both;
            for (size_t i = 0; i < token.size() * static_cast<size_t>(s.C); ++i) {
                const int64_t n = static_cast<int64_t>(i) / s.C, c = static_cast<int64_t>(i) % s.C;
                gathered.push_back(wte[token[static_cast<size_t>(n)] * s.C + c]);
                both.push_back(gathered.back() + wpe[position[static_cast<size_t>(n)] * s.C + c]);
            }
            EmbeddingForward a{.token_N = tokens.tensor(), .position_N = positions.tensor(), .wte_VC = wte.tensor(),
                               .wpe_TC = wpe.tensor(), .x_NC = x.tensor(), .N = s.N, .C = s.C};
            cpu::embedding_forward(a);
            CHECK(worst(x, both, act, 0) <= 1);
            a.wpe_TC = Tensor{};
            cpu::embedding_forward(a);
            CHECK(x.values() == gathered);
        }
}

TEST_CASE("embedding_backward adds every token's gradient to its row", "[pointwise]") {
    for (const DType act : {f32, DType::bf16})
        for (const Size s : {Size{1, 8}, Size{17, 100}, Size{300, 33}})
            for (const Accumulate mode : {Accumulate::overwrite, Accumulate::add}) {
                const int64_t V = 3000, T = 19;
                CAPTURE(name_of(act), s.N, s.C, static_cast<int>(mode));
                const EmbeddingGradients g(act, s, V, T, mode);
                const Operand dx = Operand::random(act, s.N * s.C, 3);
                const bool add = mode == Accumulate::add;
                const Values wte = add ? Operand::random(f32, V * s.C, 5).values() : Values(static_cast<size_t>(V * s.C));
                const Values wpe = add ? Operand::random(f32, T * s.C, 6).values() : Values(static_cast<size_t>(T * s.C));
                CHECK(worst(g.dwte, scattered(some_integers(s.N, V, 1), dx, wte, s.C), f32, 1e-6) <= 1);
                CHECK(worst(g.dwpe, scattered(some_integers(s.N, T, 2), dx, wpe, s.C), f32, 1e-6) <= 1);
            }
    CHECK(test::same_for_thread_counts([] { return EmbeddingGradients(f32, {500, 33}, 61, 5, Accumulate::add).dwte.bytes(); }));
}

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
    cpu::norm_forward({.x_NC = alias.x.tensor(), .delta_NC = alias.add.tensor(), .sum_NC = alias.x.tensor(),
                       .weight_C = alias.weight.tensor(), .bias_C = {}, .y_NC = alias.y.tensor(), .mean_N = {},
                       .rstd_N = alias.rstd.tensor(), .kind = alias.kind, .eps = alias.eps, .N = 17, .C = 33});
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
            Operand rstd(f32, N * heads), weight = Operand::random(act, D, 2, 0.5, 1.0), dweight = Operand::random(f32, D, 3);
            Operand workspace(DType::u8, norm_backward_workspace(N, D)), dx = Operand::random(act, N * stride, 4), dy = dx;
            cpu::head_norm_forward({.x_NS = x.tensor(), .saved_NHD = saved.tensor(), .rstd_NH = rstd.tensor(), .weight_D = weight.tensor(),
                                    .eps = 1e-6f, .N = N, .heads = heads, .D = D, .stride = stride});
            cpu::head_norm_backward({.dx_NS = dx.tensor(), .saved_NHD = saved.tensor(), .rstd_NH = rstd.tensor(),
                                     .weight_D = weight.tensor(), .dweight_D = dweight.tensor(), .workspace = workspace.tensor(),
                                     .accumulate = Accumulate::add, .N = N, .heads = heads, .D = D, .stride = stride});
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

TEST_CASE("rotary turns pairs by the angle of their position, and back", "[pointwise]") {
    for (const DType act : {f32, DType::bf16})
        for (const int64_t D : {2, 8, 34, 64}) {
            CAPTURE(name_of(act), D);
            const int64_t N = 17, heads = 3, stride = heads * D + 7, half = D / 2, T = 11;
            Operand cosines(f32, T * half), sines(f32, T * half), x = Operand::random(act, N * stride, 1), before = x;
            for (int64_t i = 0; i < T * half; ++i) {
                const double angle = static_cast<double>(i / half) * std::pow(10000.0, -static_cast<double>(i % half) / static_cast<double>(half));
                cosines.set(i, std::cos(angle));
                sines.set(i, std::sin(angle));
            }
            const auto position = some_integers(N, T, 2);
            Operand positions = Operand::integers(position);
            Values want = x.values();
            for (int64_t n = 0; n < N; ++n)
                for (int64_t i = 0; i < heads * half; ++i) {
                    const int64_t first = n * stride + i / half * D + i % half, angle = position[static_cast<size_t>(n)] * half + i % half;
                    want[static_cast<size_t>(first)] = before[first] * cosines[angle] - before[first + half] * sines[angle];
                    want[static_cast<size_t>(first + half)] = before[first + half] * cosines[angle] + before[first] * sines[angle];
                }
            Rotary a{.x_NS = x.tensor(), .position_N = positions.tensor(), .cos_TR = cosines.tensor(), .sin_TR = sines.tensor(), .N = N,
                     .heads = heads, .D = D, .stride = stride};
            cpu::rotary(a);
            CHECK(worst(x, want, act, 2e-7) <= 1);
            a.direction = -1;
            cpu::rotary(a);
            CHECK(worst(x, before.values(), act, act == f32 ? 1e-6 : 0x1p-7) <= 1);
        }
}

TEST_CASE("GELU and its slope, on small and extreme inputs", "[pointwise]") {
    for (const DType act : {f32, DType::bf16})
        for (const ActivationKind kind : gelus)
            for (const double spread : {0.1, 4.0, 30.0}) {
                CAPTURE(name_of(act), static_cast<int>(kind), spread);
                const int64_t N = 3, F = 100;
                Operand x = Operand::random(act, N * F, 1, spread), dy = Operand::random(act, N * F, 2), dx = dy, y(act, N * F);
                cpu::activation_forward({.x_NF = x.tensor(), .y_NF = y.tensor(), .kind = kind, .N = N, .F = F});
                cpu::activation_backward({.x_NF = x.tensor(), .dy_NF = dx.tensor(), .dx_NF = dx.tensor(), .kind = kind, .N = N, .F = F});
                Values want, slope;
                for (int64_t i = 0; i < N * F; ++i) {
                    want.push_back(activate(kind, x[i]));
                    slope.push_back(dy[i] * gradient([&](const Values& v) { return activate(kind, v[0]); }, {x[i]})[0]);
                }
                CHECK(worst(y, want, act, 1e-6) <= 1);
                CHECK(worst(dx, slope, act, differences) <= 1);
            }
    Operand x = Operand::random(f32, 5, 1), y(f32, 5), dx(f32, 5), one = Operand::filled(f32, 5, 1.0);
    const double extreme[] = {-1e30, 1e30, -1e4, 1e4, NAN};
    for (int64_t i = 0; i < 5; ++i) x.set(i, extreme[i]);
    for (const ActivationKind kind : gelus) {
        cpu::activation_forward({.x_NF = x.tensor(), .y_NF = y.tensor(), .kind = kind, .N = 1, .F = 5});
        cpu::activation_backward({.x_NF = x.tensor(), .dy_NF = one.tensor(), .dx_NF = dx.tensor(), .kind = kind, .N = 1, .F = 5});
        CHECK((std::abs(y[0]) < 20 && y[1] == x[1] && std::abs(y[2]) < 1e-24 && y[3] == 1e4 && std::isnan(y[4])));
        CHECK((std::abs(dx[0]) < 1e-24 && dx[1] == 1 && std::abs(dx[2]) < 1e-24 && dx[3] == 1 && std::isnan(dx[4])));
    }
}

TEST_CASE("SwiGLU and its gradient, in place", "[pointwise]") {
    for (const DType act : {f32, DType::bf16})
        for (const Size s : odd_sizes)
            for (const double spread : {1.0, 60.0}) {
                CAPTURE(name_of(act), s.N, s.C, spread);
                Operand x = Operand::random(act, s.N * 2 * s.C, 1, spread), dy = Operand::random(act, s.N * s.C, 2), y(act, s.N * s.C);
                Values want, want_dx(static_cast<size_t>(s.N * 2 * s.C));
                for (int64_t i = 0; i < s.N * s.C; ++i) {
                    const int64_t gate = i / s.C * 2 * s.C + i % s.C, up = gate + s.C;
                    const auto swiglu = [](const Values& v) { return silu(v[0]) * v[1]; };
                    const Values slopes = gradient(swiglu, {x[gate], x[up]});
                    want.push_back(swiglu({x[gate], x[up]}));
                    want_dx[static_cast<size_t>(gate)] = dy[i] * slopes[0];
                    want_dx[static_cast<size_t>(up)] = dy[i] * slopes[1];
                }
                cpu::activation_forward({.x_NF = x.tensor(), .y_NF = y.tensor(), .kind = ActivationKind::swiglu, .N = s.N, .F = s.C});
                CHECK(worst(y, want, act, 1e-6) <= 1);
                cpu::activation_backward({.x_NF = x.tensor(), .dy_NF = dy.tensor(), .dx_NF = x.tensor(), .kind = ActivationKind::swiglu,
                                          .N = s.N, .F = s.C});
                CHECK(worst(x, want_dx, act, differences) <= 1);
            }
}

TEST_CASE("cross_entropy: masked targets, padding that holds garbage, extreme logits", "[pointwise]") {
    const std::pair<DType, DType> types[] = {{f32, f32}, {f32, DType::bf16}, {DType::bf16, DType::bf16}};
    for (const auto& [logit, grad] : types)
        for (const double spread : {1.0, 30.0, 1e4}) {
            CAPTURE(name_of(logit), name_of(grad), spread);
            Loss small(logit, grad, 3, 37, 128, spread), large(logit, grad, 5, 3001, 3072, spread);
            check_loss(small, {36, -1, 0}, 0.25f);
            check_loss(large, {0, 3000, -1, 1500, 7}, 1.0f / 5);
        }
}

TEST_CASE("cross_entropy: in place, evaluation, NaN, thread counts", "[pointwise]") {
    Loss apart(f32, f32, 17, 3001, 3072, 5.0), in_place = apart, evaluation = apart;
    apart.run(apart.dlogits.tensor(), 0.5f);
    in_place.run(in_place.logits.tensor(), 0.5f);
    evaluation.run({}, 0.5f);
    CHECK(in_place.logits.bytes() == apart.dlogits.bytes());
    CHECK(evaluation.loss.bytes() == apart.loss.bytes());
    CHECK(test::same_for_thread_counts([] {
        Loss f(DType::bf16, DType::bf16, 17, 3001, 3072, 5.0);
        f.run(f.dlogits.tensor(), 0.5f);
        return f.dlogits.bytes();
    }));
    for (const int64_t where : {0, 37, 2999, 3000}) {
        Loss bad(f32, f32, 1, 3001, 3072, 5.0);
        bad.logits.set(where, NAN);
        bad.run(bad.dlogits.tensor(), 0.5f);
        CHECK((std::isnan(bad.loss[0]) && std::isnan(bad.dlogits[5]) && bad.dlogits[3001] == 0));
    }
}
