// test/unit/test_pointwise.cpp   Embedding, rotary and activations of kernels/cpu/: values against
// formulas in double, gradients against central differences of these formulas (or an analytic one), at odd sizes.
#include "test/catch.h"
#include "kernels/cpu/parallel.h"
#include "test/unit/operands.h"

using namespace trifold;
using test::gradient;
using test::cuts;
using test::Operand;
using test::slice;
using test::some_integers;
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
