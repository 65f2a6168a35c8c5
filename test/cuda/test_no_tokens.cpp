// test/cuda/test_no_tokens.cpp   Operations on tokens take none at all, as on the CPU: gradients of weights become zero, or stay what
// they were.
#include "test/catch.h"
#include "test/cuda/parity.h"

using namespace trifold;
using test::Operand;
using test::parity;

namespace {

constexpr int64_t C = 64, V = 40;

// Nothing of each type, weights, and gradients of weights that were NaN or something before.
struct NoTokens {
    DType act;
    Accumulate accumulate;
    Operand rows{act, 0}, floats{DType::f32, 0}, integers{DType::i32, 0};
    Operand w = Operand::random(act, V * C, 1), workspace = Operand::filled(DType::u8, 1 << 16, 255);
    Operand dw = accumulate == Accumulate::add ? Operand::random(DType::f32, V * C, 2) : Operand::nans(DType::f32, V * C), dbias = dw;
    Tensor none = rows.tensor(), fp32 = floats.tensor(), int32 = integers.tensor(), scratch = workspace.tensor();

    Tensor weight(int64_t elems) { return w.tensor().slice(0, elems); }
    Tensor gradient(int64_t elems) { return dw.tensor().slice(0, elems); }
    Tensor bias_gradient(int64_t elems) { return dbias.tensor().slice(0, elems); }

    template <class Args>
    void check(void (*on_cpu)(const Args&), void (*on_gpu)(CUstream_st*, const Args&), const Args& args) {
        CHECK(parity(on_cpu, on_gpu, args, 0.0) == 0.0);
    }
};

}  // namespace

TEST_CASE("operations on the device take no tokens", "[no_tokens]") {
    for (const DType act : {DType::f32, DType::bf16})
        for (const Accumulate accumulate : {Accumulate::overwrite, Accumulate::add}) {
            CAPTURE(name_of(act), static_cast<int>(accumulate));
            NoTokens n{act, accumulate};
            const Tensor none = n.none, fp32 = n.fp32, int32 = n.int32;
            n.check<EmbeddingForward>(cpu::embedding_forward, cuda::embedding_forward,
                                      {.token_N = int32, .wte_VC = n.weight(V * C), .x_NC = none, .C = C, .V = V});
            n.check<NormForward>(cpu::norm_forward, cuda::norm_forward,
                                 {.x_NC = none, .weight_C = n.weight(C), .y_NC = none, .mean_N = fp32, .rstd_N = fp32, .C = C});
            n.check<LinearForward>(cpu::linear_forward, cuda::linear_forward,
                                   {.x_NI = none, .w_OI = n.weight(V * C), .y_NO = none, .workspace = n.scratch, .accumulate = accumulate, .I = C, .O = V});
            n.check<HeadNormForward>(cpu::head_norm_forward, cuda::head_norm_forward,
                                     {.x_NS = none, .saved_NHD = none, .rstd_NH = fp32, .weight_D = n.weight(C), .heads = 2, .D = C, .stride = 3 * C});
            n.check<Rotary>(cpu::rotary, cuda::rotary, {.x_NS = none, .position_N = int32, .heads = 2, .D = C, .stride = 3 * C});
            n.check<ActivationForward>(cpu::activation_forward, cuda::activation_forward, {.x_NF = none, .y_NF = none, .F = C});
            n.check<CrossEntropy>(cpu::cross_entropy, cuda::cross_entropy,
                                  {.logits_NP = none, .target_N = int32, .loss_N = fp32, .dlogits_NP = none, .V = V, .P = C});
            n.check<CrossEntropyStats>(cpu::cross_entropy_stats, cuda::cross_entropy_stats,
                                       {.logits_NP = none, .target_N = int32, .stats_N3 = fp32, .V = V, .P = C});
            n.check<CrossEntropyCombine>(cpu::cross_entropy_combine, cuda::cross_entropy_combine,
                                         {.logits_NP = none, .target_N = int32, .stats_RN3 = fp32, .loss_N = fp32, .dlogits_NP = none, .V = V, .P = C, .ranks = 2});
            n.check<LinearBackwardInput>(cpu::linear_backward_input, cuda::linear_backward_input,
                                         {.dy_NO = none, .w_OI = n.weight(V * C), .dx_NI = none, .workspace = n.scratch, .accumulate = accumulate, .I = C, .O = V});
            n.check<LinearBackwardWeight>(cpu::linear_backward_weight, cuda::linear_backward_weight,
                                          {.dy_NO = none, .x_NI = none, .dw_OI = n.gradient(V * C), .dbias_O = n.bias_gradient(V), .workspace = n.scratch,
                                           .accumulate = accumulate, .I = C, .O = V});
            n.check<ActivationBackward>(cpu::activation_backward, cuda::activation_backward,
                                        {.x_NF = none, .dy_NF = none, .dx_NF = none, .kind = ActivationKind::swiglu, .F = C});
            n.check<HeadNormBackward>(cpu::head_norm_backward, cuda::head_norm_backward,
                                      {.dx_NS = none, .saved_NHD = none, .rstd_NH = fp32, .weight_D = n.weight(C), .dweight_D = n.gradient(C), .workspace = n.scratch,
                                       .accumulate = accumulate, .heads = 2, .D = C, .stride = 3 * C});
            n.check<NormBackward>(cpu::norm_backward, cuda::norm_backward,
                                  {.dy_NC = none, .x_NC = none, .weight_C = n.weight(C), .mean_N = fp32, .rstd_N = fp32, .dx_NC = none, .dweight_C = n.gradient(C),
                                   .dbias_C = n.bias_gradient(C), .workspace = n.scratch, .accumulate = accumulate, .C = C});
            n.check<EmbeddingBackward>(cpu::embedding_backward, cuda::embedding_backward,
                                       {.token_N = int32, .dx_NC = none, .dwte_VC = n.gradient(V * C), .workspace = n.scratch, .accumulate_wte = accumulate, .C = C, .V = V});
            n.check<AddInto>(cpu::add_into, cuda::add_into, {.x = none, .y = none, .accumulate = accumulate});
            n.check<Sum>(cpu::sum, cuda::sum, {.x = fp32, .sum = Operand::filled(DType::f64, 1, 3.0).tensor(), .accumulate = accumulate});
        }
}
