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
