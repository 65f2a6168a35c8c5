// test/cuda/test_cross_entropy.cpp   Softmax and cross-entropy on the device, at odd sizes.
#include "test/catch.h"
#include "test/cuda/parity.h"

using namespace trifold;
using test::Operand;
using test::parity;

namespace {

constexpr DType f32 = DType::f32, bf16_type = DType::bf16;

// Both sides sum up to 10^4 exponentials in fp32; those for bf16 gradients are within a few ulp of the largest.
constexpr double sums = 2e-6;

struct Size {
    int64_t N, V, P;
};
// No padding, padding inside a pack, rows that are not aligned, several sweeps of a block, one column.
const Size sizes[] = {{5, 64, 64}, {3, 33, 40}, {2, 101, 101}, {4, 1003, 1024}, {1, 1, 8}, {2, 20011, 20032}};

struct Types {
    DType logits, gradient;
};
const Types types[] = {{f32, f32}, {f32, bf16_type}, {bf16_type, bf16_type}};

struct Loss {
    Types type;
    Size s;
    Operand logits, target, loss = Operand::nans(f32, s.N), gradient = Operand::nans(type.gradient, s.N*s.P);

    Loss(Types type, Size s, double spread, double centre)
        : type(type), s(s), logits(Operand::random(type.logits, s.N * s.P, 1, spread, centre)) {
        std::vector<int32_t> targets;
        for (int64_t n = 0; n < s.N; ++n)
            targets.push_back(static_cast<int32_t>(n == 1 ? -1 : n == 0 ? s.V - 1 : n * 7919 % s.V));
        target = Operand::integers(targets);
        for (int64_t n = 0; n < s.N; ++n)
            for (int64_t p = s.V; p < s.P; ++p)
                logits.set(n * s.P + p, std::numeric_limits<double>::quiet_NaN());  // must not be used
    }
    CrossEntropy args(const Tensor& dlogits) {
        return {.logits_NP = logits.tensor(),
                .target_N = target.tensor(),
                .loss_N = loss.tensor(),
                .dlogits_NP = dlogits,
                .grad_scale = 0.125f,
                .N = s.N,
                .V = s.V,
                .P = s.P};
    }
};

}  // namespace

TEST_CASE("cross_entropy on the device", "[cross_entropy]") {
    for (const Types& type : types)
        for (const Size& s : sizes)
            for (const double centre : {0.0, 300.0}) {
                CAPTURE(name_of(type.logits), name_of(type.gradient), s.N, s.V, s.P, centre);
                Loss l(type, s, 8.0, centre);
                CHECK(parity(cpu::cross_entropy, cuda::cross_entropy, l.args(l.gradient.tensor()), sums) <= 1);
                for (int64_t n = 0; n < s.N; ++n)
                    for (int64_t p = n == 1 ? 0 : s.V; p < s.P; ++p)
                        if (l.gradient[n * s.P + p] != 0.0) FAIL("padding or masked row without zero gradient");
                if (s.N > 1) CHECK(l.loss[1] == 0.0);
                const Operand loss = l.loss;
                l.loss = Operand::nans(f32, s.N);
                CHECK(parity(cpu::cross_entropy, cuda::cross_entropy, l.args({}), sums) <= 1);
                // An evaluation takes the exponential of the logits' type.
                if (type.logits == type.gradient) CHECK(l.loss.bytes() == loss.bytes());
                if (type.logits != type.gradient) continue;
                CHECK(parity(cpu::cross_entropy, cuda::cross_entropy, l.args(l.logits.tensor()), sums) <= 1);
                CHECK(l.logits.bytes() == l.gradient.bytes());
            }
}

TEST_CASE("cross_entropy on the device takes rows that are not aligned", "[cross_entropy]") {
    for (const Types& type : types) {
        Loss l(type, {3, 70, 72}, 8.0, 0.0);
        CHECK(parity(cpu::cross_entropy, test::unaligned<cuda::cross_entropy, CrossEntropy>,
                     l.args(l.gradient.tensor()), sums) <= 1);
    }
}

TEST_CASE("cross_entropy on the device with infinite and missing logits", "[cross_entropy]") {
    Loss l({f32, f32}, {3, 70, 72}, 1.0, 0.0);
    const double infinity = std::numeric_limits<double>::infinity();
    for (int64_t v = 0; v < 64; ++v) l.logits.set(v, -infinity);
    for (int64_t v = 0; v < 10; ++v) l.logits.set(2 * 72 + v, -infinity);
    CHECK(parity(cpu::cross_entropy, cuda::cross_entropy, l.args(l.gradient.tensor()), sums) <= 1);
    l.logits.set(2 * 72 + 40, std::numeric_limits<double>::quiet_NaN());
    test::on_device(cuda::cross_entropy, l.args(l.gradient.tensor()));
    CHECK((std::isnan(l.loss[2]) && std::isnan(l.gradient[2 * 72]) && !std::isnan(l.loss[0])));
}

namespace {

// The columns of one rank of a split vocabulary, in rows of P.
struct Part {
    int64_t first, V, P;
};
// Even parts, one whose rows are not whole packs, one without columns, one longer than a sweep of a block.
const std::vector<std::vector<Part>> splits = {{{0, 64, 64}},
                                               {{0, 40, 40}, {40, 33, 40}},
                                               {{0, 29, 31}, {29, 1, 8}, {30, 0, 8}, {30, 47, 48}},
                                               {{0, 20011, 20032}, {20011, 9, 16}}};

int64_t columns_of(const std::vector<Part>& split) { return split.back().first + split.back().V; }

struct RankLoss {
    Part p;
    int64_t N, ranks;
    Operand logits, target, stats = Operand::nans(f32, ranks * N * 3), loss = Operand::nans(f32, N), gradient;

    CrossEntropyStats stats_args(int64_t rank) {
        return {.logits_NP = logits.tensor(),
                .target_N = target.tensor(),
                .stats_N3 = stats.tensor().slice(rank * N * 3, N * 3),
                .N = N,
                .V = p.V,
                .P = p.P,
                .first = p.first};
    }
    CrossEntropyCombine combine_args(const Tensor& dlogits) {
        return {.logits_NP = logits.tensor(),
                .target_N = target.tensor(),
                .stats_RN3 = stats.tensor(),
                .loss_N = loss.tensor(),
                .dlogits_NP = dlogits,
                .grad_scale = 0.125f,
                .N = N,
                .V = p.V,
                .P = p.P,
                .first = p.first,
                .ranks = ranks};
    }
};

RankLoss rank_loss(const Types& type, const Loss& whole, const std::vector<Part>& split, size_t rank) {
    const Part p = split[rank];
    const int64_t N = whole.s.N;
    RankLoss r{.p = p,
               .N = N,
               .ranks = static_cast<int64_t>(split.size()),
               .logits = Operand::nans(type.logits, N * p.P),
               .target = whole.target,
               .gradient = Operand::nans(type.gradient, N * p.P)};
    for (int64_t n = 0; n < N; ++n)
        for (int64_t v = 0; v < p.V; ++v) r.logits.set(n * p.P + v, whole.logits[n * whole.s.P + p.first + v]);
    return r;
}

}  // namespace

TEST_CASE("cross_entropy on the device, split over ranks", "[cross_entropy]") {
    for (const Types& type : types)
        for (const auto& split : splits)
            for (const double centre : {0.0, 300.0}) {
                const int64_t V = columns_of(split);
                CAPTURE(name_of(type.logits), name_of(type.gradient), V, split.size(), centre);
                Loss whole(type, {3, V, V}, 8.0, centre);
                test::on_device(cuda::cross_entropy, whole.args(whole.gradient.tensor()));
                // Every rank's statistics, in the memory of the first one.
                std::vector<RankLoss> of_rank;
                for (size_t q = 0; q < split.size(); ++q) of_rank.push_back(rank_loss(type, whole, split, q));
                Operand& stats = of_rank[0].stats;
                for (size_t q = 0; q < split.size(); ++q) {
                    CrossEntropyStats a = of_rank[q].stats_args(static_cast<int64_t>(q));
                    a.stats_N3 = stats.tensor().slice(static_cast<int64_t>(q) * 9, 9);
                    if (split[q].V > 0) {
                        CHECK(parity(cpu::cross_entropy_stats, cuda::cross_entropy_stats, a, sums) <= 1);
                        continue;
                    }
                    test::on_device(cuda::cross_entropy_stats, a);
                    for (int64_t n = 0; n < 3; ++n) {
                        const int64_t at = static_cast<int64_t>(q) * 9 + 3 * n;
                        CHECK((stats[at] == -std::numeric_limits<double>::infinity() && stats[at + 1] == 0 && stats[at + 2] == 0));
                    }
                }
                for (size_t q = 0; q < split.size(); ++q) {
                    RankLoss& r = of_rank[q];
                    r.stats = Operand(stats);
                    CHECK(parity(cpu::cross_entropy_combine, cuda::cross_entropy_combine,
                                 r.combine_args(r.gradient.tensor()), sums) <= 1);
                    CHECK(r.loss.bytes() == of_rank[0].loss.bytes());
                    CHECK(r.loss[1] == 0.0);
                    for (int64_t n = 0; n < 3; ++n) {
                        CHECK(std::abs(r.loss[n] - whole.loss[n]) <= 1e-6 * std::abs(whole.loss[n]) + centre * 0x1p-23);
                        const int64_t row = n * r.p.P;
                        for (int64_t v = 0; v < r.p.V; ++v) {
                            const double want = whole.gradient[n * V + r.p.first + v];
                            const double step = type.gradient == f32 ? 2e-6 : 0x1p-7;
                            if (std::abs(r.gradient[row + v] - want) > step * std::abs(want) + 2e-7) FAIL("a gradient differs");
                        }
                        for (int64_t v = n == 1 ? 0 : r.p.V; v < r.p.P; ++v)
                            if (r.gradient[row + v] != 0.0) FAIL("padding or masked row without zero gradient");
                    }
                    const Operand loss = r.loss;
                    r.loss = Operand::nans(f32, 3);
                    CHECK(parity(cpu::cross_entropy_combine, cuda::cross_entropy_combine, r.combine_args({}), sums) <= 1);
                    CHECK(r.loss.bytes() == loss.bytes());
                    if (type.logits != type.gradient) continue;
                    CHECK(parity(cpu::cross_entropy_combine, cuda::cross_entropy_combine,
                                 r.combine_args(r.logits.tensor()), sums) <= 1);
                    CHECK(r.logits.bytes() == r.gradient.bytes());
                }
            }
}

TEST_CASE("a split cross_entropy on the device: rows that are not aligned, infinite and missing logits", "[cross_entropy]") {
    const std::vector<Part> split = {{0, 70, 72}};
    for (const Types& type : types) {
        RankLoss r = rank_loss(type, Loss(type, {3, 70, 70}, 8.0, 0.0), split, 0);
        CHECK(parity(cpu::cross_entropy_stats, test::unaligned<cuda::cross_entropy_stats, CrossEntropyStats>,
                     r.stats_args(0), sums) <= 1);
        CHECK(parity(cpu::cross_entropy_combine, test::unaligned<cuda::cross_entropy_combine, CrossEntropyCombine>,
                     r.combine_args(r.gradient.tensor()), sums) <= 1);
    }
    const double infinity = std::numeric_limits<double>::infinity();
    Loss whole({f32, f32}, {3, 70, 70}, 1.0, 0.0);
    for (int64_t v = 0; v < 69; ++v) whole.logits.set(v, -infinity);
    for (int64_t v = 0; v < 70; ++v) whole.logits.set(70 + v, -infinity);
    whole.logits.set(2 * 70 + 40, std::numeric_limits<double>::quiet_NaN());
    whole.target = Operand::integers({69, 0, 0});
    RankLoss r = rank_loss({f32, f32}, whole, split, 0);
    test::on_device(cuda::cross_entropy_stats, r.stats_args(0));
    CHECK((r.stats[0] == whole.logits[69] && r.stats[1] == 1 && r.stats[3] == -infinity && r.stats[4] == 0 && std::isnan(r.stats[7])));
    test::on_device(cuda::cross_entropy_combine, r.combine_args(r.gradient.tensor()));
    CHECK((r.loss[0] == 0 && r.gradient[0] == 0 && r.gradient[69] == 0));
    CHECK((std::isnan(r.loss[1]) && std::isnan(r.gradient[72]) && std::isnan(r.loss[2]) && std::isnan(r.gradient[2 * 72])));
}
