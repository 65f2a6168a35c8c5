// kernels/ops.h   Every operation of the trainer, in forward order, then backward, then the optimizer.
//
// This table is the contents page of kernels/: operation `foo` is `Ticket foo(Stream&, const Foo&)`, and each device has its
// own version in kernels/<device>/. The CPU version is the oracle of the CUDA one.
//
// Letters     N tokens on this rank (B sequences of T), C hidden, H query heads, K key/value heads, D head size,
//             F FFN hidden, V vocabulary, P padded vocabulary, I/O inputs and outputs of a linear layer
// Types       activations and weights are fp32 or bf16 ("act"); sums, statistics, gradients of weights are fp32
// Layout      row-major, last letter contiguous; weights are [outputs, inputs]
// Accumulate  gradients of weights are overwritten by the first micro-batch of a step and added to by the others
// Workspace   scratch memory planned before step 0; `*_workspace` functions give its bytes
#pragma once
#include <cstdint>
#include <tuple>
#include <vector>

#include "kernels/device.h"
#include "kernels/stream.h"
#include "kernels/tensor.h"

namespace trifold {

enum class Accumulate : uint8_t { overwrite, add };
enum class NormKind : uint8_t { layernorm, rmsnorm };
enum class ActivationKind : uint8_t { gelu_tanh, gelu_erf, swiglu };

// Whose attention a GPU computes with (kernels/cuda/cudnn_attention.h); CPUs have their own only. `automatic` is for those who choose:
// operations take it for `own`.
enum class AttentionProvider : uint8_t { automatic, own, cudnn };
struct AttentionChoice {
    AttentionProvider provider = AttentionProvider::own;
    bool repeatable = true;  // the same bits every time; ours always are, cuDNN's cost time and memory then
};

// Each argument struct lists its views once; the stream engine reads the accesses from them.
#define TRIFOLD_VIEWS(...) \
    auto views() const { return std::tie(__VA_ARGS__); }

// ---------------------------------------------------------------- forward

// x[n] = wte[token[n] - first] (+ wpe[position[n]])
// wte is rows [first, first + V) of the table: all of it, or what this rank has of a table that is split over ranks. A token of
// another rank's rows counts as a row of zeros, so that the sum over ranks is the whole lookup (one of them adds wpe).
struct EmbeddingForward {
    In token_N, position_N;  // int32
    In wte_VC, wpe_TC;       // act; wpe empty: rotary positions; V may be 0
    Out x_NC;                // act
    int64_t N = 0, C = 0, first = 0, V = 0;
    TRIFOLD_VIEWS(token_N, position_N, wte_VC, wpe_TC, x_NC)
};

// sum = x (+ delta);  y = norm(sum) * weight (+ bias)
// LayerNorm: (sum - mean) * rstd with the biased variance; RMSNorm: sum * rstd, rstd = 1/sqrt(mean(sum^2) + eps).
struct NormForward {
    In x_NC, delta_NC;     // act; delta empty: nothing is added
    Out sum_NC;            // act; empty when delta is empty; may alias x
    In weight_C, bias_C;   // act; bias may be empty
    Out y_NC;              // act
    Out mean_N, rstd_N;    // fp32; mean empty for RMSNorm
    NormKind kind = NormKind::layernorm;
    float eps = 1e-5f;
    int64_t N = 0, C = 0;
    TRIFOLD_VIEWS(x_NC, delta_NC, sum_NC, weight_C, bias_C, y_NC, mean_N, rstd_N)
};

// y = x @ w^T (+ bias), fp32 accumulation; with Accumulate::add the product is added to y (bias then must be empty or is added too).
struct LinearForward {
    In x_NI, w_OI, bias_O;  // act; bias may be empty
    InOut y_NO;             // act, or fp32 with bf16 inputs
    InOut workspace;        // linear_workspace() bytes, as in the two backward operations
    Accumulate accumulate = Accumulate::overwrite;
    int64_t N = 0, I = 0, O = 0;
    TRIFOLD_VIEWS(x_NI, w_OI, bias_O, y_NO, workspace)
};

// RMSNorm of every head of q and k in place ("QK-norm"), before the rotary embedding. Heads [0, heads) of each row of x
// are normalised with the same weight_D. The input is kept for backward.
struct HeadNormForward {
    InOut x_NS;            // act; row n starts at n * stride, its heads are adjacent
    Out saved_NHD;         // act; the input, [N, heads, D]
    Out rstd_NH;           // fp32
    In weight_D;           // act
    float eps = 1e-6f;
    int64_t N = 0, heads = 0, D = 0, stride = 0;
    TRIFOLD_VIEWS(x_NS, saved_NHD, rstd_NH, weight_D)
};

// Rotary position embedding in place on heads [0, heads) of each row ("rotate half": pairs (i, i + D/2), as in Hugging Face's Llama).
// direction +1 in forward; -1 rotates back, which is the backward pass.
struct Rotary {
    InOut x_NS;            // act; row n starts at n * stride
    In position_N;         // int32
    In cos_TR, sin_TR;     // fp32 [positions, D/2]
    int direction = 1;
    int64_t N = 0, heads = 0, D = 0, stride = 0;
    TRIFOLD_VIEWS(x_NS, position_N, cos_TR, sin_TR)
};

// Keys and values of T new tokens in each of B sequences go behind the `length` that are in the cache already.
struct ExtendCache {
    In kv_NS;              // act; row n starts at n * stride: keys, then values, `width` elements each
    InOut k_BLW, v_BLW;    // act [B, capacity, width]
    int64_t B = 0, T = 0, length = 0, capacity = 0, width = 0, stride = 0;
    TRIFOLD_VIEWS(kv_NS, k_BLW, v_BLW)
};

// o = softmax(scale * q k^T + mask) v in the flash form: O(T) memory, lse = log(sum(exp(scores))) is all that is kept.
// Query i of a sequence stands at position q_offset + i among Tk keys (training: Tq = Tk, q_offset = 0; with a KV cache
// Tq is the number of new tokens). It sees key j iff  0 <= i + q_offset - j < window (window 0: no limit)  and
// j >= doc_start (isolated documents). Query head h uses key/value head h / (H / K).
struct AttentionForward {
    In q_NHD, k_NKD, v_NKD;        // act; row strides below, heads adjacent inside a row
    In doc_start_N;                // int32 [B, Tq]: first position of the query's own document; empty: joined
    Out o_NHD;                     // act, dense [B*Tq, H, D]
    Out lse_BHT;                   // fp32 [B, H, Tq]; empty when no backward follows
    InOut workspace;               // attention_workspace() bytes
    int64_t B = 0, Tq = 0, Tk = 0, q_offset = 0, H = 0, K = 0, D = 0;
    int64_t q_stride = 0, kv_stride = 0;             // elements between consecutive tokens
    int64_t q_batch_stride = 0, kv_batch_stride = 0; // elements between consecutive sequences
    int64_t window = 0;
    float scale = 1.0f;
    AttentionChoice by = {};
    TRIFOLD_VIEWS(q_NHD, k_NKD, v_NKD, doc_start_N, o_NHD, lse_BHT, workspace)
};

// GELU: y = act(x) on [N, F].  SwiGLU: y = silu(x[:, :F]) * x[:, F:], x is [N, 2F] (gate, then up).
struct ActivationForward {
    In x_NF;
    Out y_NF;
    ActivationKind kind = ActivationKind::gelu_tanh;
    int64_t N = 0, F = 0;
    TRIFOLD_VIEWS(x_NF, y_NF)
};

// loss[n] = logsumexp(logits[n, :V]) - logits[n, target];  dlogits = grad_scale * (softmax - onehot), zero in columns [V, P).
// A target of -1 is masked: loss 0, gradient 0. Probabilities are never stored.
struct CrossEntropy {
    In logits_NP;                  // fp32 or act
    In target_N;                   // int32
    Out loss_N;                    // fp32
    Out dlogits_NP;                // act; empty: evaluation; may alias logits_NP when the types agree
    float grad_scale = 1.0f;
    int64_t N = 0, V = 0, P = 0;
    TRIFOLD_VIEWS(logits_NP, target_N, loss_N, dlogits_NP)
};

// The same with the vocabulary split over ranks: each holds the logits of tokens [first, first + V), padding excluded, and passes
// on three numbers a token. Between the two operations the statistics of all ranks are gathered.
//   stats[n] = {max over the own columns l, sum of exp(l - max), logit of the target if it is an own column, else 0}
// A rank without columns (V = 0) gives {-infinity, 0, 0}; so does one whose logits are all -infinity.
struct CrossEntropyStats {
    In logits_NP;                  // fp32 or act
    In target_N;                   // int32, of the whole vocabulary; -1: masked
    Out stats_N3;                  // fp32
    int64_t N = 0, V = 0, P = 0, first = 0;
    TRIFOLD_VIEWS(logits_NP, target_N, stats_N3)
};

// loss[n] = logsumexp over all ranks - target's logit;  dlogits = grad_scale * (softmax - onehot) in the own columns, zero in
// [V, P). The statistics are combined in rank order, so that the losses are the same bits on all ranks of one kind of device.
struct CrossEntropyCombine {
    In logits_NP;                  // fp32 or act; not read in evaluation
    In target_N;                   // int32, as above: masked ones have loss 0 and gradient 0
    In stats_RN3;                  // fp32 [ranks, N, 3]
    Out loss_N;                    // fp32
    Out dlogits_NP;                // act; empty: evaluation; may alias logits_NP when the types agree
    float grad_scale = 1.0f;
    int64_t N = 0, V = 0, P = 0, first = 0, ranks = 1;
    TRIFOLD_VIEWS(logits_NP, target_N, stats_RN3, loss_N, dlogits_NP)
};

// ---------------------------------------------------------------- backward

// dx = dy @ w
struct LinearBackwardInput {
    In dy_NO, w_OI;
    InOut dx_NI, workspace;
    Accumulate accumulate = Accumulate::overwrite;
    int64_t N = 0, I = 0, O = 0;
    TRIFOLD_VIEWS(dy_NO, w_OI, dx_NI, workspace)
};

// dw (+)= dy^T @ x,  dbias (+)= column sums of dy
struct LinearBackwardWeight {
    In dy_NO, x_NI;
    InOut dw_OI, dbias_O;  // fp32; dbias may be empty
    InOut workspace;
    Accumulate accumulate = Accumulate::overwrite;
    int64_t N = 0, I = 0, O = 0;
    TRIFOLD_VIEWS(dy_NO, x_NI, dw_OI, dbias_O, workspace)
};

struct ActivationBackward {
    In x_NF, dy_NF;
    Out dx_NF;  // shaped like x; may alias x; for GELU may alias dy instead
    ActivationKind kind = ActivationKind::gelu_tanh;
    int64_t N = 0, F = 0;
    TRIFOLD_VIEWS(x_NF, dy_NF, dx_NF)
};

// Deterministic: no atomics, fixed order of sums. dq, dk, dv have the strides of q, k, v.
struct AttentionBackward {
    In q_NHD, k_NKD, v_NKD, o_NHD, do_NHD, lse_BHT, doc_start_N;
    Out dq_NHD, dk_NKD, dv_NKD;
    InOut workspace;
    int64_t B = 0, T = 0, H = 0, K = 0, D = 0;
    int64_t q_stride = 0, kv_stride = 0, q_batch_stride = 0, kv_batch_stride = 0;
    int64_t window = 0;
    float scale = 1.0f;
    AttentionChoice by = {};  // as in the forward pass
    TRIFOLD_VIEWS(q_NHD, k_NKD, v_NKD, o_NHD, do_NHD, lse_BHT, doc_start_N, dq_NHD, dk_NKD, dv_NKD, workspace)
};

struct HeadNormBackward {
    InOut dx_NS;           // in: gradient of the output; out: gradient of the input
    In saved_NHD, rstd_NH, weight_D;
    InOut dweight_D;       // fp32
    InOut workspace;       // norm_backward_workspace() bytes
    Accumulate accumulate = Accumulate::overwrite;
    int64_t N = 0, heads = 0, D = 0, stride = 0;
    TRIFOLD_VIEWS(dx_NS, saved_NHD, rstd_NH, weight_D, dweight_D, workspace)
};

// dx = dresidual + d(norm)/dx applied to dy;  dweight (+)= ..., dbias (+)= ...
struct NormBackward {
    In dy_NC, x_NC, weight_C, mean_N, rstd_N;
    In dresidual_NC;              // gradient that reaches the norm's input along the residual path; may be empty; may alias dx
    Out dx_NC;
    InOut dweight_C, dbias_C;     // fp32; dbias may be empty
    InOut workspace;              // norm_backward_workspace() bytes
    NormKind kind = NormKind::layernorm;
    Accumulate accumulate = Accumulate::overwrite;
    int64_t N = 0, C = 0;
    TRIFOLD_VIEWS(dy_NC, x_NC, weight_C, mean_N, rstd_N, dresidual_NC, dx_NC, dweight_C, dbias_C, workspace)
};

// dwte[token[n] - first] += dx[n],  dwpe[position[n]] += dx[n]; each row summed in token order, so the result is repeatable.
// dwte is rows [first, first + V) of the table, as in forward; V counts all rows given, those of padding too. Tokens of other
// rows are skipped for dwte. With Accumulate::overwrite the whole of dwte (all `V` rows) and dwpe is set.
struct EmbeddingBackward {
    In token_N, position_N, dx_NC;
    InOut dwte_VC, dwpe_TC;        // fp32; dwpe may be empty; V may be 0
    InOut workspace;               // embedding_backward_workspace() bytes
    Accumulate accumulate_wte = Accumulate::overwrite, accumulate_wpe = Accumulate::overwrite;
    int64_t N = 0, C = 0, first = 0, V = 0, positions = 0;
    TRIFOLD_VIEWS(token_N, position_N, dx_NC, dwte_VC, dwpe_TC, workspace)
};

// y (+)= x between any two of fp32 and bf16
struct AddInto {
    In x;
    InOut y;
    Accumulate accumulate = Accumulate::add;
    TRIFOLD_VIEWS(x, y)
};

// y[i] = part 0 [i] + part 1 [i] + ... in rank order, in fp32, rounded once: the sum of what all ranks of a group have, the same
// bits on each of them. Part `rank` is `own`; the others lie one after the other in rank order, own left out. All of one type.
struct SumParts {
    In own;     // act, n elements
    In others;  // act, (ranks - 1) * n
    Out y;      // act, n; may alias own
    int64_t rank = 0, ranks = 1;
    TRIFOLD_VIEWS(own, others, y)
};

// y = x, byte for byte, between host and device or within one. The host side must stay as it is until the ticket is done.
struct Copy {
    In x;
    Out y;
    TRIFOLD_VIEWS(x, y)
};

// y = 0
struct Zero {
    Out y;
    TRIFOLD_VIEWS(y)
};

// sum (+)= x[0] + x[1] + ... in double, in a fixed order; x may be empty
struct Sum {
    In x;       // fp32
    InOut sum;  // fp64 [1]
    Accumulate accumulate = Accumulate::add;
    TRIFOLD_VIEWS(x, sum)
};

// ---------------------------------------------------------------- optimizer

// One logical tensor (or the part of it that this rank owns) inside the flat parameter buffer. A table of segments is ordered by
// offset, and its segments do not overlap; it lies in the memory of the device that runs the operation, and stays constant.
// A rank may own nothing: segments may be empty (in their place in the order), and so may the table and the flat buffers.
struct Segment {
    int64_t offset = 0, elems = 0;
    float weight_decay = 0.0f;
    bool trust_ratio = true;  // LAMB: off for one-dimensional tensors
};

// sums[0] += sum of squares over all segments, in double and in a fixed order that does not depend on threads.
struct SquaredNorm {
    In grad;               // fp32, flat
    InOut sums;            // fp64 [1]
    InOut workspace;       // segment_sums_workspace() bytes
    const Segment* segments = nullptr;
    int64_t segment_count = 0;
    TRIFOLD_VIEWS(grad, sums, workspace)
};

// control = {scale, apply}: from the squared norm of the unscaled gradients,
//   norm = unit * sqrt(squared_norm);  scale = unit * min(1, clip / norm) (clip 0: no clipping);  apply = norm is finite.
// Stays on the device, so that the host need not wait between backward and update. norm_out is for the log.
struct ClipControl {
    In squared_norm;       // fp64 [1]
    Out control;           // fp32 [2]
    Out norm;              // fp32 [1]
    float unit = 1.0f;     // nominal / valid tokens
    float clip = 0.0f;
    TRIFOLD_VIEWS(squared_norm, control, norm)
};

// AdamW (Loshchilov & Hutter, arXiv 1711.05101), decoupled decay, bias-corrected:
//   g = scale * grad;  m = b1 m + (1-b1) g;  v = b2 v + (1-b2) g^2
//   w -= lr * (m / (1-b1^step) / (sqrt(v / (1-b2^step)) + eps) + decay * w);   param = bf16(w) in bf16 mode
// Nothing is changed when control.apply is 0.
struct AdamW {
    InOut master, m, v;    // fp32, flat
    In grad, control;
    Out param;             // bf16, flat; empty when the master weights are the parameters
    const Segment* segments = nullptr;
    int64_t segment_count = 0;
    float lr = 0, beta1 = 0.9f, beta2 = 0.95f, eps = 1e-8f;
    int64_t step = 1;      // number of this update, 1 for the first
    TRIFOLD_VIEWS(master, m, v, grad, control, param)
};

// LAMB (You et al., arXiv 1904.00962) in two passes, so that norms can be summed over ranks in between.
//   lamb_direction: moments as in AdamW; u = m^ / (sqrt(v^) + eps) + decay * w overwrites grad; norms[2s] = |w|^2, norms[2s+1] = |u|^2
//                   (0 for an empty segment, and for all when control.apply is 0)
//   lamb_update:    w -= lr * ratio * u with ratio = |w| / |u|, or 1 where either is zero; segments without trust_ratio use 1
struct LambDirection {
    In master, control;
    InOut m, v, grad;
    Out norms;             // fp64 [2 * segment_count]
    InOut workspace;       // segment_sums_workspace() bytes
    const Segment* segments = nullptr;
    int64_t segment_count = 0;
    float beta1 = 0.9f, beta2 = 0.95f, eps = 1e-8f;
    int64_t step = 1;
    TRIFOLD_VIEWS(master, control, m, v, grad, norms, workspace)
};
struct LambUpdate {
    InOut master;
    In direction, norms, control;
    Out param;
    const Segment* segments = nullptr;
    int64_t segment_count = 0;
    float lr = 0;
    TRIFOLD_VIEWS(master, direction, norms, control, param)
};

// ---------------------------------------------------------------- the table

#define TRIFOLD_OPS(X)                              \
    X(embedding_forward, EmbeddingForward)          \
    X(norm_forward, NormForward)                    \
    X(linear_forward, LinearForward)                \
    X(head_norm_forward, HeadNormForward)           \
    X(rotary, Rotary)                               \
    X(extend_cache, ExtendCache)                    \
    X(attention_forward, AttentionForward)          \
    X(activation_forward, ActivationForward)        \
    X(cross_entropy, CrossEntropy)                  \
    X(cross_entropy_stats, CrossEntropyStats)       \
    X(cross_entropy_combine, CrossEntropyCombine)   \
    X(linear_backward_input, LinearBackwardInput)   \
    X(linear_backward_weight, LinearBackwardWeight) \
    X(activation_backward, ActivationBackward)      \
    X(attention_backward, AttentionBackward)        \
    X(head_norm_backward, HeadNormBackward)         \
    X(norm_backward, NormBackward)                  \
    X(embedding_backward, EmbeddingBackward)        \
    X(add_into, AddInto)                            \
    X(sum_parts, SumParts)                          \
    X(copy, Copy)                                   \
    X(zero, Zero)                                   \
    X(sum, Sum)                                     \
    X(squared_norm, SquaredNorm)                    \
    X(clip_control, ClipControl)                    \
    X(adamw, AdamW)                                 \
    X(lamb_direction, LambDirection)                \
    X(lamb_update, LambUpdate)

// Bytes of workspace an operation needs at these sizes (0 where none).
#define TRIFOLD_WORKSPACES                                             \
    int64_t attention_workspace(const AttentionForward&);              \
    int64_t attention_workspace(const AttentionBackward&);             \
    int64_t linear_workspace(int64_t N, int64_t O);                    \
    int64_t norm_backward_workspace(int64_t N, int64_t C);             \
    int64_t embedding_backward_workspace(int64_t N, int64_t V);        \
    int64_t segment_sums_workspace(int64_t flat_elems, int64_t segments);

// kernels/cpu/: the native versions. They run on the calling thread's OpenMP team and return when done.
namespace cpu {
#define X(op, Args) void op(const Args&);
TRIFOLD_OPS(X)
#undef X
TRIFOLD_WORKSPACES
}  // namespace cpu

// kernels/cuda/: the CUDA versions. They put their kernels on the stream and return; all memory is the device's.
namespace cuda {
#define X(op, Args) void op(CUstream_st*, const Args&);
TRIFOLD_OPS(X)
#undef X
TRIFOLD_WORKSPACES
}  // namespace cuda

// The same for the device that an arena is on.
#define TRIFOLD_ON_EITHER(workspace)                                                          \
    template <class... Sizes> int64_t workspace(Device device, const Sizes&... sizes) {       \
        return device == Device::cuda ? cuda::workspace(sizes...) : cpu::workspace(sizes...); \
    }
TRIFOLD_ON_EITHER(attention_workspace)
TRIFOLD_ON_EITHER(linear_workspace)
TRIFOLD_ON_EITHER(norm_backward_workspace)
TRIFOLD_ON_EITHER(embedding_backward_workspace)
TRIFOLD_ON_EITHER(segment_sums_workspace)
#undef TRIFOLD_ON_EITHER

// What models call: puts the operation on the stream, with its reads and writes declared.
#define X(op, Args) Ticket op(Stream&, const Args&);
TRIFOLD_OPS(X)
#undef X

// Copies results into host memory (y) and waits for them. `what` names the reader for the checker (a literal).
void read_back(Stream&, const std::vector<Copy>& copies, const char* what);

}  // namespace trifold
