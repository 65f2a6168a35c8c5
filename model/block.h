// model/block.h   One transformer block, forward and backward, as calls into the table of kernels.
//
//   serial    x -> x + attention(norm1(x)) =: mid -> mid + ffn(norm2(mid))
//   parallel  x -> x + attention(norm1(x)) + ffn(norm1(x))                       (MegaScale 3.1; one norm, one residual sum)
//
// The residual sum is done by the next norm: a block takes the residual stream x and the pending `delta`, and leaves the
// stream it ended with and its own delta. B sequences of T tokens, N = B*T; letters as in kernels/ops.h, S = (H + 2K) * D.
#pragma once
#include "kernels/arena.h"
#include "model/layers.h"

namespace trifold {

// What forward keeps for backward. With recomputation several layers share the parts that are redone.
struct BlockActivations {
    Tensor x_NC;                              // residual stream at the block's input, delta already added
    Tensor mean1_N, rstd1_N, y1_NC;           // norm1
    Tensor qkv_NS, qk_saved_NHD, q_rstd_NH, k_rstd_NH;
    Tensor o_NHD, lse_BHT;
    Tensor mid_NC, mean2_N, rstd2_N, y2_NC;   // serial block only
    Tensor up_NF, act_NF;                     // input and output of the activation; up is [N, 2F] for SwiGLU
};

// Scratch shared by all blocks.
struct BlockWorkspace {
    Tensor delta_NC;                          // what the next norm adds to the residual stream
    Tensor dy_NC, do_NHD, dqkv_NS, dact_NF;   // backward
    Tensor attention, norm, linear;           // scratch of these operations
};

// Which positions the tokens have, and which documents.
struct SequenceInfo {
    int64_t B = 0, T = 0;
    Tensor position_N, doc_start_N;           // int32; doc_start empty: documents joined
    Tensor cos_TR, sin_TR;                    // fp32 tables of the rotary embedding; empty: learned positions
    int64_t tokens() const { return B * T; }
};

// Keys and values of earlier tokens (sampling): [B, capacity, K, D] each; `length` tokens are there already.
struct KvCache {
    Tensor k, v;
    int64_t capacity = 0, length = 0;
};

// Reserves the activations of one layer. What `recompute` redoes is taken from `shared` (another layer's activations) when given:
// selective redoes the outputs of norms and of the FFN's activation, full redoes everything but x.
BlockActivations reserve_activations(const ModelConfig&, DType, int64_t B, int64_t T, Recompute, const BlockActivations* shared, Arena&);
enum class Passes : uint8_t { forward_only, forward_and_backward };
BlockWorkspace reserve_workspace(const ModelConfig&, DType, int64_t B, int64_t T, Passes, Arena&);

class Block {
public:
    Block(const ModelConfig& model, const ParameterTable& table, const FlatBuffers& flat, int layer);

    // x is the residual stream; `delta` (may be empty) is added to it first. Leaves its own delta in w.delta_NC and
    // returns the residual stream that it belongs to (a.mid_NC or a.x_NC).
    Tensor forward(Stream&, const Tensor& x_NC, const Tensor& delta_NC, const SequenceInfo&, const BlockActivations& a,
                   const BlockWorkspace& w, KvCache* cache = nullptr) const;
    // Redoes what `selective` recomputation dropped (norm outputs, activation of the FFN). Bitwise what forward computed.
    void recompute(Stream&, const SequenceInfo&, const BlockActivations& a) const;
    // dresidual: gradient of the residual stream behind the block, overwritten by that in front of it.
    void backward(Stream&, const Tensor& dresidual_NC, const SequenceInfo&, const BlockActivations& a, const BlockWorkspace& w,
                  Accumulate accumulate) const;

private:
    void attention_forward(Stream&, const Tensor& y_NC, const SequenceInfo&, const BlockActivations&, const BlockWorkspace&, KvCache*) const;
    void attention_backward(Stream&, const Tensor& ddelta_NC, const Tensor& y_NC, const SequenceInfo&, const BlockActivations&,
                            const BlockWorkspace&, Accumulate) const;
    void ffn_forward(Stream&, const Tensor& y_NC, int64_t N, const BlockActivations&, const BlockWorkspace&, Accumulate into_delta) const;
    void ffn_backward(Stream&, const Tensor& ddelta_NC, const Tensor& y_NC, int64_t N, const BlockActivations&, const BlockWorkspace&,
                      Accumulate into_dy, Accumulate) const;
    void norm(Stream&, const NormParams&, const Tensor& x, const Tensor& delta, const Tensor& sum, const Tensor& y, const Tensor& mean,
              const Tensor& rstd, int64_t N) const;
    void norm_backward(Stream&, const NormParams&, const Tensor& dy, const Tensor& x, const Tensor& mean, const Tensor& rstd,
                       const Tensor& dresidual, const Tensor& workspace, int64_t N, Accumulate) const;
    bool serial() const { return model_.block == BlockKind::serial; }

    const ModelConfig& model_;
    LayerParams p_;
    int64_t window_;
    std::string forward_name_, backward_name_;  // for profilers
};

}  // namespace trifold
