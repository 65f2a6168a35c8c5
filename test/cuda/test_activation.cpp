// test/cuda/test_activation.cpp   GELU and SwiGLU on the device, at odd sizes.
#include "test/catch.h"
#include "test/cuda/parity.h"

using namespace trifold;
using test::Operand;
using test::parity;

namespace {

constexpr DType f32 = DType::f32;
constexpr double functions = 1e-6;  // a few ulp of exp and division, of the largest value

// Rows of whole packs and others; strips that end inside a row, several of them.
struct Size {
    int64_t N, F;
};
const Size sizes[] = {{1, 8}, {3, 33}, {17, 100}, {40, 64}, {2, 1416}, {9, 1003}};
const ActivationKind kinds[] = {ActivationKind::gelu_tanh, ActivationKind::gelu_erf, ActivationKind::swiglu};

int64_t columns(ActivationKind kind, int64_t F) { return kind == ActivationKind::swiglu ? 2 * F : F; }

template <class Body>
void for_activations(const Body& body) {
    for (const DType act : {f32, DType::bf16})
        for (const ActivationKind kind : kinds)
            for (const Size& s : sizes) {
                CAPTURE(name_of(act), static_cast<int>(kind), s.N, s.F);
                body(act, kind, s);
            }
}

}  // namespace

TEST_CASE("activation_forward on the device", "[activation]") {
    for_activations([](DType act, ActivationKind kind, Size s) {
        Operand x = Operand::random(act, s.N * columns(kind, s.F), 1, 6.0), y = Operand::nans(act, s.N * s.F);
        CHECK(parity(cpu::activation_forward, cuda::activation_forward,
                     {.x_NF = x.tensor(), .y_NF = y.tensor(), .kind = kind, .N = s.N, .F = s.F}, functions) <= 1);
    });
}

TEST_CASE("activations on the device take matrices that are not aligned", "[activation]") {
    for (const DType act : {f32, DType::bf16})
        for (const ActivationKind kind : kinds) {
            Operand x = Operand::random(act, 3 * columns(kind, 40), 1, 6.0), y = Operand::nans(act, 3 * 40),
                    dx = Operand::nans(act, x.elems());
            CAPTURE(name_of(act), static_cast<int>(kind));
            CHECK(parity(cpu::activation_forward, test::unaligned<cuda::activation_forward, ActivationForward>,
                         {.x_NF = x.tensor(), .y_NF = y.tensor(), .kind = kind, .N = 3, .F = 40}, functions) <= 1);
            CHECK(parity(cpu::activation_backward, test::unaligned<cuda::activation_backward, ActivationBackward>,
                         {.x_NF = x.tensor(), .dy_NF = y.tensor(), .dx_NF = dx.tensor(), .kind = kind, .N = 3, .F = 40},
                         functions) <= 1);
        }
}

TEST_CASE("activation_backward on the device", "[activation]") {
    for_activations([](DType act, ActivationKind kind, Size s) {
        Operand x = Operand::random(act, s.N * columns(kind, s.F), 1, 6.0), dy = Operand::random(act, s.N * s.F, 2);
        Operand dx = Operand::nans(act, x.elems());
        ActivationBackward a{
            .x_NF = x.tensor(), .dy_NF = dy.tensor(), .dx_NF = dx.tensor(), .kind = kind, .N = s.N, .F = s.F};
        CHECK(parity(cpu::activation_backward, cuda::activation_backward, a, functions) <= 1);
        for (Operand* in_place : {&dy, &x}) {
            if (in_place == &dy && kind == ActivationKind::swiglu) continue;
            const Operand before = *in_place;
            a.dx_NF = in_place->tensor();
            CHECK(parity(cpu::activation_backward, cuda::activation_backward, a, functions) <= 1);
            CHECK(in_place->bytes() == dx.bytes());
            *in_place = before;
            a.x_NF = x.tensor(), a.dy_NF = dy.tensor();  // the memory may be another now
        }
    });
}

TEST_CASE("activations of huge and infinite numbers on the device", "[activation]") {
    for (const ActivationKind kind : kinds) {
        const std::vector<double> extremes = {0.0, -0.0, 9.6, -9.6, 13.5, -13.5, 88.0, -88.0, 1e6, -1e6, 1e30, -1e30};
        const auto n = static_cast<int64_t>(extremes.size());
        Operand x = Operand::filled(f32, columns(kind, n), 0.5), dy = Operand::filled(f32, n, 1.0);
        for (int64_t i = 0; i < n; ++i) x.set(i, extremes[static_cast<size_t>(i)]);
        Operand y = Operand::nans(f32, n), dx = Operand::nans(f32, x.elems()), want_y = y, want_dx = dx;
        CAPTURE(static_cast<int>(kind));
        cpu::activation_forward({.x_NF = x.tensor(), .y_NF = want_y.tensor(), .kind = kind, .N = 1, .F = n});
        cpu::activation_backward(
            {.x_NF = x.tensor(), .dy_NF = dy.tensor(), .dx_NF = want_dx.tensor(), .kind = kind, .N = 1, .F = n});
        test::on_device(cuda::activation_forward,
                        ActivationForward{.x_NF = x.tensor(), .y_NF = y.tensor(), .kind = kind, .N = 1, .F = n});
        test::on_device(
            cuda::activation_backward,
            ActivationBackward{
                .x_NF = x.tensor(), .dy_NF = dy.tensor(), .dx_NF = dx.tensor(), .kind = kind, .N = 1, .F = n});
        // Relative to each value, since the largest would hide the others.
        for (int64_t i = 0; i < n; ++i) CHECK(std::abs(y[i] - want_y[i]) <= 1e-5 * std::abs(want_y[i]));
        for (int64_t i = 0; i < x.elems(); ++i)
            CHECK(std::abs(dx[i] - want_dx[i]) <= 1e-5 * std::abs(want_dx[i]) + 1e-35);
    }
}

TEST_CASE("a NaN stays a NaN in activations on the device", "[activation]") {
    for (const ActivationKind kind : kinds) {
        Operand x = Operand::nans(f32, columns(kind, 4)), dy = Operand::filled(f32, 4, 1.0),
                y = Operand::filled(f32, 4, 0.0);
        Operand dx = Operand::filled(f32, x.elems(), 0.0);
        test::on_device(cuda::activation_forward,
                        ActivationForward{.x_NF = x.tensor(), .y_NF = y.tensor(), .kind = kind, .N = 1, .F = 4});
        test::on_device(
            cuda::activation_backward,
            ActivationBackward{
                .x_NF = x.tensor(), .dy_NF = dy.tensor(), .dx_NF = dx.tensor(), .kind = kind, .N = 1, .F = 4});
        CAPTURE(static_cast<int>(kind));
        CHECK((std::isnan(y[1]) && std::isnan(dx[1])));
    }
}
