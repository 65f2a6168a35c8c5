// test/cuda/test_linear.cpp   Linear layers on the device against those of the CPU, at odd sizes.
//
// Bounds   fp32: both sides sum in fp32, in another order: 2e-6 of the largest value covers up to a few hundred terms. bf16
//          results are rounded once from such a sum on both sides, so they differ by at most one rounding step of bf16
//          (2^-8 relative) besides. Gradients of weights are fp32 sums of bf16 products.
#include "test/catch.h"
#include "kernels/cuda/matmul.h"
#include "test/cuda/on_device.h"
#include "test/unit/operands.h"

using namespace trifold;
using test::on_device;
using test::Operand;
using test::worst;

namespace {

constexpr double sums = 4e-6;

struct Size {
    int64_t N, I, O;
};
const Size sizes[] = {{1, 8, 16}, {3, 5, 7}, {33, 24, 40}, {70, 64, 9}, {300, 16, 264}};

Operand workspace(const Size& s) { return Operand(DType::u8, cuda::linear_workspace(s.N, s.O)); }

// Both results start as NaN, or as the same numbers when they are added to.
Operand result(DType type, int64_t elems, Accumulate accumulate) {
    return accumulate == Accumulate::add ? Operand::random(type, elems, 9) : Operand::nans(type, elems);
}

}  // namespace

TEST_CASE("linear_forward on the device", "[linear]") {
    for (const DType act : {DType::f32, DType::bf16})
        for (const DType out : {act, DType::f32})
            for (const Size& s : sizes)
                for (const Accumulate accumulate : {Accumulate::overwrite, Accumulate::add})
                    for (const bool bias : {false, true}) {
                        if (bias && out != act) continue;
                        CAPTURE(name_of(act), name_of(out), s.N, s.I, s.O, static_cast<int>(accumulate), bias);
                        Operand x = Operand::random(act, s.N * s.I, 1), w = Operand::random(act, s.O * s.I, 2), b = Operand::random(act, s.O, 3);
                        Operand y = result(out, s.N * s.O, accumulate), want = y, scratch = workspace(s);
                        LinearForward a{.x_NI = x.tensor(), .w_OI = w.tensor(), .bias_O = bias ? b.tensor() : Tensor{}, .y_NO = want.tensor(), .workspace = scratch.tensor(),
                                        .accumulate = accumulate, .N = s.N, .I = s.I, .O = s.O};
                        cpu::linear_forward(a);
                        a.y_NO = y.tensor();
                        on_device(cuda::linear_forward, a);
                        // Where the library cannot add the bias (here: odd sizes) it is added to y before the product is, and
                        // that sum is rounded once more, by half a step of a value that may be larger than the result.
                        const bool twice = bias && accumulate == Accumulate::add && out == DType::bf16 && s.O % 2 != 0;
                        CHECK(worst(y, want.values(), out, twice ? 0x1p-8 : sums) <= 1);
                    }
}

TEST_CASE("linear_backward_input on the device", "[linear]") {
    for (const DType act : {DType::f32, DType::bf16})
        for (const Size& s : sizes)
            for (const Accumulate accumulate : {Accumulate::overwrite, Accumulate::add}) {
                CAPTURE(name_of(act), s.N, s.I, s.O, static_cast<int>(accumulate));
                Operand dy = Operand::random(act, s.N * s.O, 1), w = Operand::random(act, s.O * s.I, 2);
                Operand dx = result(act, s.N * s.I, accumulate), want = dx, scratch = workspace(s);
                LinearBackwardInput a{.dy_NO = dy.tensor(), .w_OI = w.tensor(), .dx_NI = want.tensor(), .workspace = scratch.tensor(), .accumulate = accumulate,
                                      .N = s.N, .I = s.I, .O = s.O};
                cpu::linear_backward_input(a);
                a.dx_NI = dx.tensor();
                on_device(cuda::linear_backward_input, a);
                CHECK(worst(dx, want.values(), act, sums) <= 1);
            }
}

TEST_CASE("linear_backward_weight on the device", "[linear]") {
    for (const DType act : {DType::f32, DType::bf16})
        for (const Size& s : sizes)
            for (const Accumulate accumulate : {Accumulate::overwrite, Accumulate::add})
                for (const bool bias : {false, true}) {
                    CAPTURE(name_of(act), s.N, s.I, s.O, static_cast<int>(accumulate), bias);
                    Operand dy = Operand::random(act, s.N * s.O, 1), x = Operand::random(act, s.N * s.I, 2);
                    Operand dw = result(DType::f32, s.O * s.I, accumulate), want_dw = dw, db = result(DType::f32, s.O, accumulate), want_db = db, scratch = workspace(s);
                    LinearBackwardWeight a{.dy_NO = dy.tensor(), .x_NI = x.tensor(), .dw_OI = want_dw.tensor(), .dbias_O = bias ? want_db.tensor() : Tensor{},
                                           .workspace = scratch.tensor(), .accumulate = accumulate, .N = s.N, .I = s.I, .O = s.O};
                    cpu::linear_backward_weight(a);
                    a.dw_OI = dw.tensor();
                    if (bias) a.dbias_O = db.tensor();
                    on_device(cuda::linear_backward_weight, a);
                    CHECK(worst(dw, want_dw.values(), DType::f32, sums) <= 1);
                    if (!bias) continue;
                    CHECK(worst(db, want_db.values(), DType::f32, sums) <= 1);
                    Operand again = accumulate == Accumulate::add ? result(DType::f32, s.O, accumulate) : db, dw_again = dw;
                    a.dbias_O = again.tensor();
                    a.dw_OI = dw_again.tensor();
                    on_device(cuda::linear_backward_weight, a);
                    CHECK(again.bytes() == db.bytes());
                }
}

TEST_CASE("the choice of algorithms does not depend on the number of tokens", "[linear]") {
    const auto run = [](int64_t N) {
        const Size s{N, 32, 48};
        Operand x = Operand::random(DType::bf16, N * s.I, 1), w = Operand::random(DType::bf16, s.O * s.I, 2), y(DType::bf16, N * s.O), scratch = workspace(s);
        on_device(cuda::linear_forward, LinearForward{.x_NI = x.tensor(), .w_OI = w.tensor(), .bias_O = {}, .y_NO = y.tensor(), .workspace = scratch.tensor(),
                                                      .N = N, .I = s.I, .O = s.O});
        return y;
    };
    const Operand whole = run(64);
    const size_t kinds = cuda::matmul_choices().size();
    const Operand part = run(24);
    CHECK(cuda::matmul_choices().size() == kinds);
    CHECK(std::equal(part.bytes().begin(), part.bytes().end(), whole.bytes().begin()));
}
