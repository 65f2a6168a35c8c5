// test/cuda/test_cudnn_attention.cpp   cuDNN's attention against double precision, which calls are its own, and the trial that chooses.
#include "test/catch.h"

#include <cmath>
#include <vector>

#include "kernels/attention_trial.h"
#include "test/cuda/attention_reference.h"
#include "test/cuda/on_device.h"
#include "test/cuda/with_cudnn.h"
#if defined(TRIFOLD_EMULATION)
#include "test/emulation/cuda_runtime.h"
#endif

using namespace trifold;
using namespace trifold::test;

namespace {

// It rounds where our kernels do, but in an order and by instructions of its own.
constexpr double fp32_sums = 1e-5, allowed_units = 2.0;

template <class Args> void run(AttentionOperands& x, Args a, AttentionChoice by) {
    a.by = by;
    a.workspace = x.workspace_of(cuda::attention_workspace(a));
    if constexpr (requires { a.Tq; })
        on_device([](CUstream_st* stream, const AttentionForward& args) { cuda::attention_forward(stream, args); }, a);
    else
        on_device([](CUstream_st* stream, const AttentionBackward& args) { cuda::attention_backward(stream, args); }, a);
}
constexpr AttentionChoice cudnn_repeatable{AttentionProvider::cudnn, true}, cudnn_fastest{AttentionProvider::cudnn, false};

double worst_lse(const AttentionOperands& x, const AttentionReference& reference) {
    double worst = 0;
    for (size_t i = 0; i < reference.lse.size(); ++i) {
        const double error = std::abs(x.lse[static_cast<int64_t>(i)] - reference.lse[i]) / (1 + std::abs(reference.lse[i]));
        worst = error <= worst ? worst : std::isnan(error) ? INFINITY : error;
    }
    return worst;
}

// Lengths that fill no tile, one, and several; every head size; groups; windows, which are wrong by one key when they are wrong.
const std::vector<AttentionShape> shapes = {{.B = 2, .Tq = 8, .H = 2, .K = 1, .D = 64},
                                            {.B = 3, .Tq = 17, .H = 4, .K = 2, .D = 64, .window = 1},
                                            {.B = 1, .Tq = 65, .H = 4, .K = 1, .D = 64, .window = 5},
                                            {.B = 1, .Tq = 257, .H = 1, .K = 1, .D = 64},
                                            {.B = 1, .Tq = 200, .H = 2, .K = 2, .D = 96, .window = 63},
                                            {.B = 2, .Tq = 130, .H = 2, .K = 1, .D = 128, .window = 2},
                                            {.B = 1, .Tq = 300, .H = 1, .K = 1, .D = 128}};

}  // namespace

TEST_CASE("cuDNN's attention agrees with double precision", "[cuda][attention][cudnn]") {
    const WithCudnn cudnn;
    if (!cudnn.here()) return;
    for (const AttentionShape& s : shapes)
        for (const AttentionChoice by : {cudnn_repeatable, cudnn_fastest}) {
            CAPTURE(s.name(), by.repeatable);
            AttentionOperands x(s, DType::bf16);
            AttentionReference reference(x);
            run(x, x.forward(), by);
            CHECK(worst_error(x.o, reference.o, Rounds::operands, fp32_sums) <= allowed_units);
            CHECK(worst_lse(x, reference) <= fp32_sums);
            reference.add_gradients(x);
            run(x, x.backward(), by);
            CHECK(worst_error(x.dqkv, reference.dqkv, Rounds::operands, fp32_sums) <= allowed_units);
            if (!by.repeatable) continue;
            AttentionOperands again(x);
            again.dqkv = Operand::nans(DType::bf16, x.dqkv.elems());
            run(again, again.backward(), by);
            CHECK(x.dqkv.bytes() == again.dqkv.bytes());
        }
}

TEST_CASE("calls that are not cuDNN's are computed by our own attention", "[cuda][attention][cudnn]") {
    const WithCudnn cudnn;
    const auto same = [](const AttentionShape& s, DType type) {
        AttentionOperands asked(s, type), own(s, type);
        run(asked, asked.forward(), cudnn_repeatable);
        run(own, own.forward(), {});
        CHECK(asked.o.bytes() == own.o.bytes());
        CHECK(asked.lse.bytes() == own.lse.bytes());
        if (s.cached > 0) return;
        run(asked, asked.backward(), cudnn_repeatable);
        run(own, own.backward(), {});
        CHECK(asked.dqkv.bytes() == own.dqkv.bytes());
    };
    same({.B = 1, .Tq = 33, .H = 2, .K = 1, .D = 64}, DType::f32);
    same({.B = 1, .Tq = 40, .H = 2, .K = 1, .D = 64, .documents = {13}}, DType::bf16);
    same({.B = 1, .Tq = 3, .cached = 20, .H = 2, .K = 1, .D = 64}, DType::bf16);
#if defined(TRIFOLD_EMULATION)
    CHECK(emulation::cudnn().forward_calls == 0);
    CHECK(emulation::cudnn().backward_calls == 0);
#endif
}

TEST_CASE("who computes attention follows from agreement and speed", "[cuda][attention][cudnn]") {
    const auto chosen = [](double own, double cudnn, double difference) { return judge({own, cudnn, difference}).provider; };
    CHECK(chosen(2.0, 1.0, 0.003) == AttentionProvider::cudnn);
    CHECK(chosen(1.06, 1.0, 0.0078) == AttentionProvider::cudnn);
    CHECK(chosen(1.04, 1.0, 0.003) == AttentionProvider::own);
    CHECK(chosen(1.0, 2.0, 0.003) == AttentionProvider::own);
    CHECK(chosen(2.0, 1.0, 0.008) == AttentionProvider::own);
    CHECK(chosen(2.0, 1.0, NAN) == AttentionProvider::own);
    CHECK(chosen(0.0, 0.0, 0.003) == AttentionProvider::own);
    CHECK(judge({1.5, 1.0, 0.002}).reason == "1.50 times as fast as our own, results agree to 0.002");
    CHECK(judge({1.0, 1.0, 0.002}).reason == "cuDNN's is 1.00 times as fast");
    CHECK(judge({2.0, 1.0, 0.25}).reason == "cuDNN's differs by 0.25, and rounding explains 0.0078");
}

#if defined(TRIFOLD_EMULATION)
TEST_CASE("the trial of cuDNN's attention finds what is wrong with it", "[cuda][attention][cudnn]") {
    const std::vector<AttentionCase> cases = {{.B = 2, .T = 24, .H = 2, .K = 1, .D = 64, .window = 0, .layers = 3}, {.B = 1, .T = 24, .H = 1, .K = 1, .D = 64, .window = 7, .layers = 1}};
    const int64_t held = emulation::device_bytes();
    const WithCudnn cudnn;
    emulation::cudnn().present = false;
    CHECK(try_attention(cases).reason == cuda::cudnn_problem());
    emulation::cudnn().present = true;
    CHECK(try_attention(cases).reason.find(" times as fast") != std::string::npos);  // whichever of them is
    using emulation::CudnnFault;
    for (const CudnnFault fault : {CudnnFault::window, CudnnFault::scale, CudnnFault::key_gradient, CudnnFault::refuses}) {
        CAPTURE(static_cast<int>(fault));
        emulation::cudnn().fault = fault;
        const AttentionVerdict verdict = try_attention(cases);
        CHECK(verdict.provider == AttentionProvider::own);
        CHECK(verdict.reason.find(fault == CudnnFault::refuses ? "no engine for this" : "cuDNN's differs by ") != std::string::npos);
    }
    CHECK(emulation::device_bytes() == held);
}
#endif
