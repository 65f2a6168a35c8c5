// test/unit/test_cross_entropy.cpp   Loss and its gradient of kernels/cpu/ against formulas in double: whole vocabularies, and split over ranks.
#include "test/catch.h"
#include "kernels/cpu/parallel.h"
#include "test/unit/operands.h"

using namespace trifold;
using test::cuts;
using test::Operand;
using test::slice;
using test::some_integers;
using test::Values;
using test::worst;

namespace {

constexpr DType f32 = DType::f32;

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
