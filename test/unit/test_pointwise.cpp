// test/unit/test_pointwise.cpp   Embedding, rotary, activations and cross-entropy of kernels/cpu/: values against
// formulas in double, gradients against central differences of these formulas (or an analytic one), at odd sizes.
#include "test/catch.h"
#include "kernels/cpu/parallel.h"
#include "test/unit/operands.h"

using namespace trifold;
using test::gradient;
using test::Operand;
using test::slice;
using test::Values;
using test::worst;

namespace {

constexpr DType f32 = DType::f32;
constexpr double differences = 2e-5;  // errors of gradients, relative to the largest; central differences add 1e-9

struct Size {
    int64_t N, C;
};
const Size odd_sizes[] = {{1, 8}, {3, 33}, {17, 100}, {40, 64}};

// ---------------------------------------------------------------- embedding

std::vector<int32_t> some_integers(int64_t count, int64_t below, uint64_t seed) {
    test::Numbers numbers(seed);
    std::vector<int32_t> v;
    for (int64_t i = 0; i < count; ++i)
        v.push_back(static_cast<int32_t>((numbers.next() + 1) / 2 * static_cast<double>(below)));
    return v;
}

// Of a table of rows [first, first + V), with tokens below `vocab` (0: V).
struct EmbeddingGradients {
    Operand dwte, dwpe;
    EmbeddingGradients(DType act, Size s, int64_t V, int64_t T, Accumulate mode, int64_t first = 0, int64_t vocab = 0)
        : dwte(Operand::random(f32, V * s.C, 5)), dwpe(Operand::random(f32, T * s.C, 6)) {
        Operand token = Operand::integers(some_integers(s.N, vocab ? vocab : V, 1));
        Operand position = Operand::integers(some_integers(s.N, T, 2));
        Operand dx = Operand::random(act, s.N * s.C, 3), workspace(DType::u8, cpu::embedding_backward_workspace(s.N, V));
        cpu::embedding_backward({.token_N = token.tensor(),
                                 .position_N = position.tensor(),
                                 .dx_NC = dx.tensor(),
                                 .dwte_VC = dwte.tensor(),
                                 .dwpe_TC = dwpe.tensor(),
                                 .workspace = workspace.tensor(),
                                 .accumulate_wte = mode,
                                 .accumulate_wpe = mode,
                                 .N = s.N,
                                 .C = s.C,
                                 .first = first,
                                 .V = V,
                                 .positions = T});
    }
};

Values scattered(const std::vector<int32_t>& rows, const Operand& dx, Values table, int64_t C) {
    for (size_t n = 0; n < rows.size(); ++n)
        for (int64_t c = 0; c < C; ++c)
            table[static_cast<size_t>(rows[n] * C + c)] += dx[static_cast<int64_t>(n) * C + c];
    return table;
}

// ---------------------------------------------------------------- activations

double gelu_tanh(double x) { return 0.5 * x * (1 + std::tanh(std::sqrt(2 / M_PI) * (x + 0.044715 * x * x * x))); }
double gelu_erf(double x) { return 0.5 * x * std::erfc(-x / std::sqrt(2.0)); }
double silu(double x) { return x / (1 + std::exp(-x)); }
double activate(ActivationKind kind, double x) {
    return kind == ActivationKind::gelu_tanh ? gelu_tanh(x) : gelu_erf(x);
}

const ActivationKind gelus[] = {ActivationKind::gelu_tanh, ActivationKind::gelu_erf};

// ---------------------------------------------------------------- cross-entropy

struct Loss {
    Operand logits, target, loss, dlogits;
    int64_t N, V, P;

    Loss(DType logit, DType grad, int64_t N, int64_t V, int64_t P, double spread)
        : logits(Operand::random(logit, N * P, 21, spread)),
          target(Operand::integers(some_integers(N, V, 22))),
          loss(Operand::nans(f32, N)),
          dlogits(Operand::nans(grad, N * P)),
          N(N),
          V(V),
          P(P) {
        for (int64_t n = 0; n < N; ++n)
            for (int64_t v = V; v < P; ++v) logits.set(n * P + v, v % 2 ? NAN : 1e30);
    }
    void run(Tensor to, float scale) {
        cpu::cross_entropy({.logits_NP = logits.tensor(),
                            .target_N = target.tensor(),
                            .loss_N = loss.tensor(),
                            .dlogits_NP = to,
                            .grad_scale = scale,
                            .N = N,
                            .V = V,
                            .P = P});
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
            Operand wte = Operand::random(act, 37 * s.C, 3), wpe = Operand::random(act, 19 * s.C, 4);
            Operand x = Operand::nans(act, s.N * s.C);
            Values gathered, both;
            for (size_t i = 0; i < token.size() * static_cast<size_t>(s.C); ++i) {
                const int64_t n = static_cast<int64_t>(i) / s.C, c = static_cast<int64_t>(i) % s.C;
                gathered.push_back(wte[token[static_cast<size_t>(n)] * s.C + c]);
                both.push_back(gathered.back() + wpe[position[static_cast<size_t>(n)] * s.C + c]);
            }
            EmbeddingForward a{.token_N = tokens.tensor(),
                               .position_N = positions.tensor(),
                               .wte_VC = wte.tensor(),
                               .wpe_TC = wpe.tensor(),
                               .x_NC = x.tensor(),
                               .N = s.N,
                               .C = s.C,
                               .V = 37};
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
                const Values wte =
                    add ? Operand::random(f32, V * s.C, 5).values() : Values(static_cast<size_t>(V * s.C));
                const Values wpe =
                    add ? Operand::random(f32, T * s.C, 6).values() : Values(static_cast<size_t>(T * s.C));
                CHECK(worst(g.dwte, scattered(some_integers(s.N, V, 1), dx, wte, s.C), f32, 1e-6) <= 1);
                CHECK(worst(g.dwpe, scattered(some_integers(s.N, T, 2), dx, wpe, s.C), f32, 1e-6) <= 1);
            }
    // The order of the tokens is the order of the sum: fp32 additions one after another give the same bits.
    const Size s{500, 33};
    const Operand dx = Operand::random(f32, s.N * s.C, 3);
    Operand in_order = Operand::random(f32, 61 * s.C, 5);
    const auto rows = some_integers(s.N, 61, 1);
    for (int64_t n = 0; n < s.N; ++n)
        for (int64_t c = 0; c < s.C; ++c) {
            const int64_t to = rows[static_cast<size_t>(n)] * s.C + c;
            in_order.set(to, in_order[to] + dx[n * s.C + c]);
        }
    CHECK(EmbeddingGradients(f32, s, 61, 5, Accumulate::add).dwte.bytes() == in_order.bytes());
    CHECK(test::same_for_thread_counts([] {
        return EmbeddingGradients(f32, {500, 33}, 61, 5, Accumulate::add).dwte.bytes();
    }));
}

// The cuts of `total` rows into ranks; with 4, one rank has none.
std::vector<int64_t> cuts(int64_t total, int64_t ranks) {
    std::vector<int64_t> c{0, total};
    if (ranks > 1) c.insert(c.begin() + 1, total / 3);
    if (ranks > 2) c.insert(c.begin() + 2, total / 3 + 1);
    if (ranks > 3) c.insert(c.begin() + 3, total / 3 + 1);
    return c;
}

TEST_CASE("a table split over ranks: rows of others are zero in forward and skipped in backward", "[pointwise]") {
    const int64_t vocab = 37, T = 19;
    for (const DType act : {f32, DType::bf16})
        for (const Size s : odd_sizes)
            for (const int64_t ranks : {1, 2, 3, 4}) {
                CAPTURE(name_of(act), s.N, s.C, ranks);
                const auto cut = cuts(vocab, ranks);
                const auto token = some_integers(s.N, vocab, 1), position = some_integers(s.N, T, 2);
                Operand tokens = Operand::integers(token), positions = Operand::integers(position);
                Operand wte = Operand::random(act, vocab * s.C, 3), wpe = Operand::random(act, T * s.C, 4);
                const EmbeddingGradients whole(act, s, vocab, T, Accumulate::overwrite);
                for (int64_t q = 0; q < ranks; ++q) {
                    const int64_t first = cut[static_cast<size_t>(q)], V = cut[static_cast<size_t>(q) + 1] - first;
                    Operand x = Operand::nans(act, s.N * s.C), with_positions = x;
                    EmbeddingForward a{.token_N = tokens.tensor(),
                                       .wte_VC = wte.tensor().slice(first * s.C, V * s.C),
                                       .x_NC = x.tensor(),
                                       .N = s.N,
                                       .C = s.C,
                                       .first = first,
                                       .V = V};
                    cpu::embedding_forward(a);
                    a.position_N = positions.tensor(), a.wpe_TC = wpe.tensor(), a.x_NC = with_positions.tensor();
                    cpu::embedding_forward(a);
                    Values want, both;
                    for (int64_t i = 0; i < s.N * s.C; ++i) {
                        const int32_t t = token[static_cast<size_t>(i / s.C)], p = position[static_cast<size_t>(i / s.C)];
                        want.push_back(t >= first && t < first + V ? wte[t * s.C + i % s.C] : 0.0);
                        both.push_back(want.back() + wpe[p * s.C + i % s.C]);
                    }
                    CHECK(x.values() == want);
                    CHECK(worst(with_positions, both, act, 0) <= 1);

                    for (const Accumulate mode : {Accumulate::overwrite, Accumulate::add}) {
                        const EmbeddingGradients part(act, s, V, T, mode, first, vocab);
                        Values added = slice(whole.dwte.values(), first * s.C, V * s.C);
                        if (mode == Accumulate::overwrite) {
                            CHECK(part.dwte.values() == added);
                            CHECK(part.dwpe.bytes() == whole.dwpe.bytes());
                            continue;
                        }
                        const Operand before = Operand::random(f32, V * s.C, 5);
                        for (int64_t i = 0; i < V * s.C; ++i) added[static_cast<size_t>(i)] += before[i];
                        CHECK(worst(part.dwte, added, f32, 1e-6) <= 1);
                    }
                }
            }
}

TEST_CASE("rotary turns pairs by the angle of their position, and back", "[pointwise]") {
    for (const DType act : {f32, DType::bf16})
        for (const int64_t D : {2, 8, 34, 64}) {
            CAPTURE(name_of(act), D);
            const int64_t N = 17, heads = 3, stride = heads * D + 7, half = D / 2, T = 11;
            Operand cosines(f32, T * half), sines(f32, T * half), x = Operand::random(act, N * stride, 1), before = x;
            for (int64_t i = 0; i < T * half; ++i) {
                const double angle = static_cast<double>(i / half) *
                                     std::pow(10000.0, -static_cast<double>(i % half) / static_cast<double>(half));
                cosines.set(i, std::cos(angle));
                sines.set(i, std::sin(angle));
            }
            const auto position = some_integers(N, T, 2);
            Operand positions = Operand::integers(position);
            Values want = x.values();
            for (int64_t n = 0; n < N; ++n)
                for (int64_t i = 0; i < heads * half; ++i) {
                    const int64_t first = n * stride + i / half * D + i % half;
                    const int64_t angle = position[static_cast<size_t>(n)] * half + i % half;
                    want[static_cast<size_t>(first)] =
                        before[first] * cosines[angle] - before[first + half] * sines[angle];
                    want[static_cast<size_t>(first + half)] =
                        before[first + half] * cosines[angle] + before[first] * sines[angle];
                }
            Rotary a{.x_NS = x.tensor(),
                     .position_N = positions.tensor(),
                     .cos_TR = cosines.tensor(),
                     .sin_TR = sines.tensor(),
                     .N = N,
                     .heads = heads,
                     .D = D,
                     .stride = stride};
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
                Operand x = Operand::random(act, N * F, 1, spread), y = x, dy = Operand::random(act, N * F, 2), dx = dy;
                cpu::activation_forward({.x_NF = x.tensor(), .y_NF = y.tensor(), .kind = kind, .N = N, .F = F});
                cpu::activation_backward(
                    {.x_NF = x.tensor(), .dy_NF = dx.tensor(), .dx_NF = dx.tensor(), .kind = kind, .N = N, .F = F});
                Values want, slope;
                for (int64_t i = 0; i < N * F; ++i) {
                    want.push_back(activate(kind, x[i]));
                    slope.push_back(dy[i] * gradient([&](const Values& v) { return activate(kind, v[0]); }, {x[i]})[0]);
                }
                CHECK(worst(y, want, act, 1e-6) <= 1);
                CHECK(worst(dx, slope, act, differences) <= 1);
            }
    for (const DType act : {f32, DType::bf16})
        for (const ActivationKind kind : gelus) {  // dx may lie where dy or where x is
            Operand x = Operand::random(act, 3 * 33, 1, 4.0), dy = Operand::random(act, 3 * 33, 2), dx = dy;
            ActivationBackward a{
                .x_NF = x.tensor(), .dy_NF = dy.tensor(), .dx_NF = dx.tensor(), .kind = kind, .N = 3, .F = 33};
            cpu::activation_backward(a);
            a.dx_NF = x.tensor();
            cpu::activation_backward(a);
            CHECK(x.bytes() == dx.bytes());
        }
    Operand x = Operand::random(f32, 5, 1), y(f32, 5), dx(f32, 5), one = Operand::filled(f32, 5, 1.0);
    const double extreme[] = {-1e30, 1e30, -1e4, 1e4, NAN};
    for (int64_t i = 0; i < 5; ++i) x.set(i, extreme[i]);
    for (const ActivationKind kind : gelus) {
        cpu::activation_forward({.x_NF = x.tensor(), .y_NF = y.tensor(), .kind = kind, .N = 1, .F = 5});
        cpu::activation_backward(
            {.x_NF = x.tensor(), .dy_NF = one.tensor(), .dx_NF = dx.tensor(), .kind = kind, .N = 1, .F = 5});
        CHECK((std::abs(y[0]) < 1e-3 && y[1] == x[1] && std::abs(y[2]) < 1e-24 && y[3] == 1e4 && std::isnan(y[4])));
        CHECK((std::abs(dx[0]) < 1e-24 && dx[1] == 1 && std::abs(dx[2]) < 1e-24 && dx[3] == 1 && std::isnan(dx[4])));
    }
}

TEST_CASE("SwiGLU and its gradient, in place", "[pointwise]") {
    for (const DType act : {f32, DType::bf16})
        for (const Size s : odd_sizes)
            for (const double spread : {1.0, 60.0}) {
                CAPTURE(name_of(act), s.N, s.C, spread);
                Operand x = Operand::random(act, s.N * 2 * s.C, 1, spread);
                Operand dy = Operand::random(act, s.N * s.C, 2), y = dy;
                Values want, want_dx(static_cast<size_t>(s.N * 2 * s.C));
                for (int64_t i = 0; i < s.N * s.C; ++i) {
                    const int64_t gate = i / s.C * 2 * s.C + i % s.C, up = gate + s.C;
                    const auto swiglu = [](const Values& v) { return silu(v[0]) * v[1]; };
                    const Values slopes = gradient(swiglu, {x[gate], x[up]});
                    want.push_back(swiglu({x[gate], x[up]}));
                    want_dx[static_cast<size_t>(gate)] = dy[i] * slopes[0];
                    want_dx[static_cast<size_t>(up)] = dy[i] * slopes[1];
                }
                cpu::activation_forward(
                    {.x_NF = x.tensor(), .y_NF = y.tensor(), .kind = ActivationKind::swiglu, .N = s.N, .F = s.C});
                CHECK(worst(y, want, act, 1e-6) <= 1);
                cpu::activation_backward({.x_NF = x.tensor(),
                                          .dy_NF = dy.tensor(),
                                          .dx_NF = x.tensor(),
                                          .kind = ActivationKind::swiglu,
                                          .N = s.N,
                                          .F = s.C});
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

namespace {

// The loss of `whole` with its vocabulary split: every rank has its columns in rows of its own, behind which padding holds
// garbage. `run` fills whole.dlogits and the losses of all ranks.
struct SplitLoss {
    Loss& whole;
    std::vector<int64_t> cut;
    int64_t ranks = static_cast<int64_t>(cut.size()) - 1;
    Operand stats = Operand::nans(f32, ranks * whole.N * 3);
    std::vector<Operand> losses;

    int64_t first(int64_t q) const { return cut[static_cast<size_t>(q)]; }
    int64_t columns(int64_t q) const { return cut[static_cast<size_t>(q) + 1] - first(q); }
    int64_t row(int64_t q) const { return columns(q) + 3; }
    Operand logits(int64_t q) const {
        Operand own = Operand::nans(whole.logits.tensor().dtype, whole.N * row(q));
        for (int64_t n = 0; n < whole.N; ++n)
            for (int64_t v = 0; v < columns(q); ++v) own.set(n * row(q) + v, whole.logits[n * whole.P + first(q) + v]);
        return own;
    }
    Tensor stats_of(int64_t q) { return stats.tensor().slice(q * whole.N * 3, whole.N * 3); }
    enum class Gradient { apart, in_place, none };
    void run(float scale, Gradient gradient) {
        Tensor target = whole.target.tensor();
        for (int64_t q = 0; q < ranks; ++q) {
            Operand own = logits(q);
            cpu::cross_entropy_stats({.logits_NP = own.tensor(),
                                      .target_N = target,
                                      .stats_N3 = stats_of(q),
                                      .N = whole.N,
                                      .V = columns(q),
                                      .P = row(q),
                                      .first = first(q)});
        }
        for (int64_t q = 0; q < ranks; ++q) {
            Operand own = logits(q), apart = Operand::nans(whole.dlogits.tensor().dtype, whole.N * row(q));
            Operand& dlogits = gradient == Gradient::in_place ? own : apart;
            losses.push_back(Operand::nans(f32, whole.N));
            cpu::cross_entropy_combine({.logits_NP = gradient == Gradient::none ? Tensor{} : own.tensor(),
                                        .target_N = target,
                                        .stats_RN3 = stats.tensor(),
                                        .loss_N = losses.back().tensor(),
                                        .dlogits_NP = gradient == Gradient::none ? Tensor{} : dlogits.tensor(),
                                        .grad_scale = scale,
                                        .N = whole.N,
                                        .V = columns(q),
                                        .P = row(q),
                                        .first = first(q),
                                        .ranks = ranks});
            if (gradient == Gradient::none) continue;
            for (int64_t n = 0; n < whole.N; ++n) {
                for (int64_t v = 0; v < columns(q); ++v)
                    whole.dlogits.set(n * whole.P + first(q) + v, dlogits[n * row(q) + v]);
                for (int64_t v = columns(q); v < row(q); ++v)
                    if (dlogits[n * row(q) + v] != 0) FAIL("the gradient of padding is not zero");
            }
        }
    }
};

}  // namespace

TEST_CASE("cross_entropy split over 1 to 4 ranks is that of the whole vocabulary", "[pointwise]") {
    using Gradient = SplitLoss::Gradient;
    const std::pair<DType, DType> types[] = {{f32, f32}, {f32, DType::bf16}, {DType::bf16, DType::bf16}};
    const int64_t N = 5, V = 3001;
    for (const auto& [logit, grad] : types)
        for (const double spread : {1.0, 30.0, 1e4})
            for (const int64_t ranks : {1, 2, 3, 4}) {
                CAPTURE(name_of(logit), name_of(grad), spread, ranks);
                Loss whole(logit, grad, N, V, V, spread);
                whole.target = Operand::integers({0, 3000, -1, 1000, 1001});
                whole.run(whole.dlogits.tensor(), 0.25f);
                Loss split = whole;
                split.dlogits = Operand::filled(grad, N * V, 7.0);
                SplitLoss s{.whole = split, .cut = cuts(V, ranks), .losses = {}};
                s.run(0.25f, logit == grad ? Gradient::in_place : Gradient::apart);
                CHECK(worst(s.losses[0], whole.loss.values(), f32, 3e-7) <= 1);
                CHECK((s.losses[0][2] == 0 && split.dlogits[2 * V] == 0 && split.dlogits[3 * V - 1] == 0));
                CHECK(worst(split.dlogits, whole.dlogits.values(), grad, 3e-7) <= (grad == f32 ? 1 : 2));
                SplitLoss evaluation{.whole = split, .cut = cuts(V, ranks), .losses = {}};
                evaluation.run(0.25f, Gradient::none);
                for (size_t q = 0; q < static_cast<size_t>(ranks); ++q)
                    CHECK((s.losses[q].bytes() == s.losses[0].bytes() &&
                           evaluation.losses[q].bytes() == s.losses[0].bytes()));
            }
}

TEST_CASE("statistics of cross_entropy: exact cases, uniform logits, no columns, infinite and missing ones", "[pointwise]") {
    using Gradient = SplitLoss::Gradient;
    const double infinity = std::numeric_limits<double>::infinity();
    // ln V for every split: all exponentials are 1, and their sums are exact.
    for (const double level : {0.0, -3.5, 1e4})
        for (const int64_t ranks : {1, 2, 3, 4}) {
            Loss uniform(f32, f32, 3, 1000, 1000, 1.0);
            uniform.logits = Operand::filled(f32, 3 * 1000, level);
            uniform.target = Operand::integers({0, 333, 999});
            SplitLoss s{.whole = uniform, .cut = cuts(1000, ranks), .losses = {}};
            s.run(1.0f, Gradient::apart);
            CAPTURE(level, ranks);
            for (int64_t n = 0; n < 3; ++n) CHECK(s.losses[0][n] == static_cast<float>(std::log(1000.0f)));
            for (int64_t q = 0; q < ranks; ++q)
                CHECK((s.stats[q * 9] == (s.columns(q) > 0 ? level : -infinity) &&
                       s.stats[q * 9 + 1] == static_cast<double>(s.columns(q))));
            CHECK(s.stats[2] == level);
        }
    // A largest logit in the middle of a row: the reference was another until then.
    Loss far(f32, f32, 1, 4000, 4000, 1.0);
    far.logits.set(2500, 15.0);
    far.target = Operand::integers({17});
    SplitLoss s{.whole = far, .cut = {0, 4000}, .losses = {}};
    s.run(1.0f, Gradient::none);
    double sum = 0;
    for (int64_t v = 0; v < 4000; ++v) sum += std::exp(far.logits[v] - 15.0);
    CHECK((s.stats[0] == 15 && std::abs(s.stats[1] - sum) < 1e-6 * sum && s.stats[2] == far.logits[17]));

    // One rank sees -infinity alone: the others decide. All ranks: a NaN, as without a split. And a NaN spoils its row.
    for (const int64_t ranks : {1, 2, 3, 4}) {
        Loss l(f32, f32, 3, 3000, 3000, 1.0);
        for (int64_t v = 0; v < 2000; ++v) l.logits.set(v, -infinity);
        for (int64_t v = 0; v < 3000; ++v) l.logits.set(3000 + v, -infinity);
        l.logits.set(2 * 3000 + 1000, NAN);
        l.target = Operand::integers({2500, 2500, 0});
        l.run(l.dlogits.tensor(), 1.0f);
        Loss split = l;
        SplitLoss t{.whole = split, .cut = cuts(3000, ranks), .losses = {}};
        t.run(1.0f, Gradient::apart);
        CAPTURE(ranks);
        for (const Operand* loss : {&l.loss, &t.losses[0], &t.losses.back()})
            CHECK((std::isfinite((*loss)[0]) && std::isnan((*loss)[1]) && std::isnan((*loss)[2])));
        CHECK(std::abs(t.losses[0][0] - l.loss[0]) <= 1e-6 * l.loss[0]);
        CHECK((split.dlogits[0] == 0 && std::isnan(split.dlogits[3000]) && std::isnan(split.dlogits[2 * 3000 + 2999])));
    }
    CHECK(test::same_for_thread_counts([] {
        Loss l(DType::bf16, DType::bf16, 17, 3001, 3001, 5.0);
        SplitLoss split{.whole = l, .cut = cuts(3001, 3), .losses = {}};
        split.run(0.5f, Gradient::in_place);
        return l.dlogits.bytes();
    }));
}
