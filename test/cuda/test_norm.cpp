// test/cuda/test_norm.cpp   LayerNorm, RMSNorm, the norm of heads and rotary embeddings on the device, at odd sizes.
#include "test/catch.h"
#include "test/cuda/parity.h"

using namespace trifold;
using test::Operand;
using test::parity;
using test::scratch;

namespace {

constexpr DType f32 = DType::f32;
constexpr double sums = 1e-6;      // of rows
constexpr double row_sums = 4e-6;  // over rows, which cancel

// Rows in one warp, in several, no whole packs, too wide for registers.
struct Size {
    int64_t N, C;
};
const Size sizes[] = {{1, 8}, {3, 33}, {17, 100}, {40, 64}, {9, 776}};
const Size wide_forward[] = {{2, 4104}, {2, 16392}, {3, 1031}}, wide_backward[] = {{1, 8200}, {9, 1031}};

struct Norm {
    NormKind kind;
    DType act;
    Size s;
    bool delta, bias;
    int64_t elems = s.N * s.C;
    Operand x = Operand::random(act, elems, 1, 1.0, 0.5), add = Operand::random(act, elems, 2);
    Operand weight = Operand::random(act, s.C, 3, 0.5, 1.0), offset = Operand::random(act, s.C, 4);
    Operand total = Operand::nans(act, elems), y = total, mean = Operand::nans(f32, s.N), rstd = mean;

    NormForward forward() {
        return {.x_NC = x.tensor(),
                .delta_NC = delta ? add.tensor() : Tensor{},
                .sum_NC = delta ? total.tensor() : Tensor{},
                .weight_C = weight.tensor(),
                .bias_C = bias ? offset.tensor() : Tensor{},
                .y_NC = y.tensor(),
                .mean_N = kind == NormKind::layernorm ? mean.tensor() : Tensor{},
                .rstd_N = rstd.tensor(),
                .kind = kind,
                .N = s.N,
                .C = s.C};
    }

    Operand dy = Operand::random(act, elems, 5), residual = Operand::random(act, elems, 6);
    Operand dx = Operand::nans(act, elems), dweight = Operand::nans(f32, s.C), dbias = dweight;
    Operand workspace = scratch(cpu::norm_backward_workspace(s.N, s.C), cuda::norm_backward_workspace(s.N, s.C));

    NormBackward backward(bool with_residual) {
        cpu::norm_forward(forward());
        return {.dy_NC = dy.tensor(),
                .x_NC = delta ? total.tensor() : x.tensor(),
                .weight_C = weight.tensor(),
                .mean_N = kind == NormKind::layernorm ? mean.tensor() : Tensor{},
                .rstd_N = rstd.tensor(),
                .dresidual_NC = with_residual ? residual.tensor() : Tensor{},
                .dx_NC = dx.tensor(),
                .dweight_C = dweight.tensor(),
                .dbias_C = bias ? dbias.tensor() : Tensor{},
                .workspace = workspace.tensor(),
                .kind = kind,
                .N = s.N,
                .C = s.C};
    }
};

template <class Wide, class Body>
void for_norms(const Wide& wide, const Body& body) {
    for (const DType act : {f32, DType::bf16})
        for (const NormKind kind : {NormKind::layernorm, NormKind::rmsnorm}) {
            for (const Size& s : sizes)
                for (const bool delta : {false, true})
                    for (const bool bias : {false, true}) body(Norm{kind, act, s, delta, bias});
            const bool layernorm = kind == NormKind::layernorm;
            for (const Size& s : wide) body(Norm{kind, act, s, !layernorm, layernorm});
        }
}

}  // namespace

TEST_CASE("norm_forward on the device", "[norm]") {
    for_norms(wide_forward, [](Norm f) {
        CAPTURE(name_of(f.act), static_cast<int>(f.kind), f.s.N, f.s.C, f.delta, f.bias);
        CHECK(parity(cpu::norm_forward, cuda::norm_forward, f.forward(), sums) <= 1);
        if (!f.delta) return;
        const Operand total = f.total;
        NormForward in_place = f.forward();
        in_place.sum_NC = f.x.tensor();
        CHECK(parity(cpu::norm_forward, cuda::norm_forward, in_place, sums) <= 1);
        CHECK(f.x.bytes() == total.bytes());
    });
}

TEST_CASE("norm_backward on the device", "[norm]") {
    for_norms(wide_backward, [](Norm f) {
        CAPTURE(name_of(f.act), static_cast<int>(f.kind), f.s.N, f.s.C, f.delta, f.bias);
        CHECK(parity(cpu::norm_backward, cuda::norm_backward, f.backward(f.delta), row_sums) <= 1);
        f.dweight = Operand::random(f32, f.s.C, 7), f.dbias = Operand::random(f32, f.s.C, 8);
        NormBackward in_place = f.backward(true);
        in_place.dx_NC = f.residual.tensor();
        in_place.accumulate = Accumulate::add;
        CHECK(parity(cpu::norm_backward, cuda::norm_backward, in_place, row_sums) <= 1);
    });
}

TEST_CASE("norms on the device take rows that are not aligned", "[norm]") {
    for (const DType act : {f32, DType::bf16}) {
        Norm f{NormKind::layernorm, act, {5, 72}, true, true};
        CHECK(parity(cpu::norm_forward, test::unaligned<cuda::norm_forward, NormForward>, f.forward(), sums) <= 1);
        CHECK(parity(cpu::norm_backward, test::unaligned<cuda::norm_backward, NormBackward>, f.backward(true),
                     row_sums) <= 1);
    }
}

TEST_CASE("norm_backward walks over many rows per block", "[norm]") {
    for (const DType act : {f32, DType::bf16}) {
        Norm few{NormKind::layernorm, act, {700, 40}, false, true};
        CHECK(parity(cpu::norm_backward, cuda::norm_backward, few.backward(true), row_sums) <= 1);
    }
}

// ---------------------------------------------------------------- heads

namespace {

struct Heads {
    int64_t N, heads, D, gap;  // gap: elements of a row before and behind the heads
    int64_t stride = heads * D + 2 * gap;
};
const Heads head_sizes[] = {{1, 1, 8, 0},  {5, 3, 64, 8}, {33, 4, 96, 16}, {3, 2, 128, 0},
                            {7, 5, 20, 4}, {4, 3, 30, 3}, {2, 2, 256, 8},  {130, 3, 16, 0}};

Tensor heads_of(Operand& rows, const Heads& s) { return rows.tensor().from(s.gap); }

}  // namespace

TEST_CASE("head norms on the device", "[norm]") {
    for (const DType act : {f32, DType::bf16})
        for (const Heads& s : head_sizes) {
            CAPTURE(name_of(act), s.N, s.heads, s.D, s.gap);
            Operand x = Operand::random(act, s.N * s.stride, 1), weight = Operand::random(act, s.D, 2, 0.5, 1.0);
            Operand saved = Operand::nans(act, s.N * s.heads * s.D), rstd = Operand::nans(f32, s.N * s.heads);
            CHECK(parity(cpu::head_norm_forward, cuda::head_norm_forward,
                         {.x_NS = heads_of(x, s),
                          .saved_NHD = saved.tensor(),
                          .rstd_NH = rstd.tensor(),
                          .weight_D = weight.tensor(),
                          .N = s.N,
                          .heads = s.heads,
                          .D = s.D,
                          .stride = s.stride},
                         sums) <= 1);
            for (const Accumulate accumulate : {Accumulate::overwrite, Accumulate::add}) {
                Operand dx = Operand::random(act, s.N * s.stride, 3), dweight = Operand::nans(f32, s.D);
                if (accumulate == Accumulate::add) dweight = Operand::random(f32, s.D, 4);
                Operand workspace =
                    scratch(cpu::norm_backward_workspace(s.N, s.D), cuda::norm_backward_workspace(s.N, s.D));
                CHECK(parity(cpu::head_norm_backward, cuda::head_norm_backward,
                             {.dx_NS = heads_of(dx, s),
                              .saved_NHD = saved.tensor(),
                              .rstd_NH = rstd.tensor(),
                              .weight_D = weight.tensor(),
                              .dweight_D = dweight.tensor(),
                              .workspace = workspace.tensor(),
                              .accumulate = accumulate,
                              .N = s.N,
                              .heads = s.heads,
                              .D = s.D,
                              .stride = s.stride},
                             row_sums) <= 1);
            }
        }
}

TEST_CASE("rotary on the device", "[norm]") {
    constexpr int64_t positions = 50;
    for (const DType act : {f32, DType::bf16})
        for (const Heads& s : head_sizes)
            for (const int direction : {1, -1}) {
                CAPTURE(name_of(act), s.N, s.heads, s.D, s.gap, direction);
                const int64_t half = s.D / 2;
                Operand x = Operand::random(act, s.N * s.stride, 1), cosine = Operand::random(f32, positions * half, 2);
                Operand sine = Operand::random(f32, positions * half, 3);
                std::vector<int32_t> where;
                for (int64_t n = 0; n < s.N; ++n) where.push_back(static_cast<int32_t>(n * 7 % positions));
                Operand position = Operand::integers(where);
                CHECK(parity(cpu::rotary, cuda::rotary,
                             {.x_NS = heads_of(x, s),
                              .position_N = position.tensor(),
                              .cos_TR = cosine.tensor(),
                              .sin_TR = sine.tensor(),
                              .direction = direction,
                              .N = s.N,
                              .heads = s.heads,
                              .D = s.D,
                              .stride = s.stride},
                             sums) <= 1);
            }
}
