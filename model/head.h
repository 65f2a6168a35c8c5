// model/head.h   Final norm, output projection and loss.
//
// The logits of all tokens never exist at once: rows are taken in chunks of at most head_chunk_bytes of logits, each chunk
// goes through projection, fused cross-entropy and (in training) both gradients of the projection, so the backward pass of
// the head happens while the chunk is in cache. Gradients are seeded with 1 / nominal tokens of the global batch; the
// optimizer multiplies by nominal / valid.
#pragma once
#include "kernels/arena.h"
#include "model/layers.h"

namespace trifold {

constexpr int64_t head_chunk_bytes = int64_t{256} << 20;

class Head {
public:
    Head(const ModelConfig&, const ParameterTable&, const FlatBuffers&, DType, int64_t tokens, bool with_backward, Arena&);

    // Residual stream (x + delta) -> final norm. Keeps what backward needs.
    void norm_forward(Stream&, const Tensor& x_NC, const Tensor& delta_NC, int64_t N) const;
    // Adds the losses of N tokens to loss_sum (fp64 [1]); targets of -1 count nothing.
    void loss(Stream&, const Tensor& target_N, int64_t N, const Tensor& loss_sum) const;
    // The same, and: dresidual = gradient of the residual stream before the final norm, gradients of head and norm.
    void loss_and_backward(Stream&, const Tensor& target_N, int64_t N, float grad_scale, const Tensor& loss_sum, const Tensor& dresidual_NC,
                           Accumulate accumulate) const;
    // fp32 logits [1, P] of row n of the last norm_forward (sampling).
    Tensor logits_of(Stream&, int64_t n) const;

private:
    void chunk_loss(Stream&, const Tensor& target_N, int64_t first, int64_t rows, float grad_scale, const Tensor& dlogits) const;

    const ModelConfig& model_;
    NormParams norm_;
    LinearParams head_;
    int64_t chunk_;                      // rows of logits held at a time
    Tensor x_NC_, y_NC_, mean_N_, rstd_N_, loss_N_, logits_, dy_NC_, workspace_, linear_workspace_;
};

}  // namespace trifold
