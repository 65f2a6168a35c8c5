// model/head.h   Final norm, output projection and loss.
//
// The logits of all tokens never exist at once: rows are taken in chunks of at most head_chunk_bytes of logits, each chunk
// goes through projection, fused cross-entropy and (in training) both gradients of the projection, so the backward pass of
// the head happens while the chunk is in cache. Gradients are seeded with 1 / nominal tokens of the global batch; the
// optimizer multiplies by nominal / valid.
//
// Under tensor parallelism every rank has the logits of its own ids for all N rows: maximum and sum of exponentials of each row are
// exchanged chunk by chunk, the losses are the same on all ranks, and the first one counts them.
#pragma once
#include "model/block.h"

namespace trifold {

constexpr int64_t head_chunk_bytes = int64_t{256} << 20;

// What one micro-batch keeps between forward and backward.
struct HeadActivations {
    Tensor x_nC, y_nC, mean_n, rstd_n;
};
HeadActivations reserve_head_activations(const ModelConfig&, const BlockShape&, Arena&);

class Head {
public:
    Head(const ModelConfig&, const ParameterTable&, const FlatBuffers&, DType, int64_t N, Passes, const TensorParallel&, Arena&);

    // Residual stream (x + delta) -> final norm. Keeps what backward needs.
    void norm_forward(Stream&, const Tensor& x_nC, const Tensor& delta_nC, const HeadActivations&, int64_t n) const;
    // Adds the losses of N tokens to loss_sum (fp64 [1]); targets of -1 count nothing.
    void loss(Stream&, const Tensor& target_N, const HeadActivations&, int64_t N, const TensorParallel&, const Tensor& loss_sum) const;
    // The same, and: dresidual = gradient of the residual stream before the final norm, gradients of head and norm.
    void loss_and_backward(Stream&, const Tensor& target_N, const HeadActivations&, int64_t N, float grad_scale, TensorParallel&, const Tensor& loss_sum,
                           const Tensor& dresidual_nC, Accumulate accumulate) const;
    // fp32 logits [1, P] of row n of the last norm_forward (sampling).
    Tensor logits_of(Stream&, const HeadActivations&, int64_t n) const;

private:
    void chunk_loss(Stream&, const Tensor& y_NC, const Tensor& target_N, int64_t first, int64_t rows, float grad_scale, const TensorParallel&, const Tensor& dlogits) const;

    const ModelConfig& model_;
    NormParams norm_;
    LinearParams head_;
    int64_t rows_, first_row_;           // of the vocabulary on this rank
    int64_t chunk_;                      // rows of logits held at a time
    Tensor loss_N_, logits_, stats_, all_stats_, dy_nC_, workspace_, linear_workspace_;
};

}  // namespace trifold
