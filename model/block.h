// model/block.h   One transformer block, forward and backward, as calls into the table of kernels.
//
//   serial    x -> x + attention(norm1(x)) =: mid -> mid + ffn(norm2(mid))
//   parallel  x -> x + attention(norm1(x)) + ffn(norm1(x))                       (MegaScale 3.1; one norm, one residual sum)
//
// The residual sum is done by the next norm: a block takes the residual stream x and the pending `delta`, and leaves the
// stream it ended with and its own delta. B sequences of T tokens, N = B*T; letters as in kernels/ops.h, S = (H + 2K) * D.
//
// Under tensor parallelism (parallel/tensor_parallel.h) a rank holds n = N / R rows of the residual stream and the norms, and H, K, F are
// its share of the heads and of the FFN. Each way a serial block gathers rows twice and scatters sums twice, a parallel block once;
// backward gathers the norms' outputs again, for the weight gradients.
#pragma once
#include "kernels/arena.h"
#include "model/layers.h"
#include "parallel/tensor_parallel.h"

namespace trifold {

// What forward keeps for backward. With recomputation several layers share the parts that are redone.
struct BlockActivations {
    Tensor x_nC;                              // residual stream at the block's input, delta already added
    Tensor mean1_n, rstd1_n, y1_nC;           // norm1
    Tensor qkv_NS, qk_saved_NHD, q_rstd_NH, k_rstd_NH;
    Tensor o_NHD, lse_BHT;
    Tensor mid_nC, mean2_n, rstd2_n, y2_nC;   // serial block only
    Tensor up_NF, act_NF;                     // input and output of the activation; up is [N, 2F] for SwiGLU
};

// Scratch shared by all blocks.
struct BlockWorkspace {
    Tensor delta_nC;                          // what the next norm adds to the residual stream
    Tensor dy_nC, do_NHD, dqkv_NS, dact_NF;   // backward
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

// Gradients that a schedule with separate weight gradients keeps between B and W.
struct DeferredGradients {
    Tensor out_nC, mid_nC;    // of what the block and (serial) its attention add to the residual stream
    Tensor dqkv_NS, dup_NF;
};

enum class Passes : uint8_t { forward_only, forward_and_backward };
// How much of everything one block works on.
struct BlockShape {
    int64_t B = 0, T = 0;
    int tp = 1;
    DType type = DType::f32;
    AttentionChoice attention = {};
    int64_t N() const { return B * T; }
    int64_t n() const { return N() / tp; }
};

// Reserves the activations of one layer. What `recompute` redoes is taken from `shared` (another layer's activations) when given:
// selective redoes the outputs of norms and of the FFN's activation, full redoes everything but x.
BlockActivations reserve_activations(const ModelConfig&, const BlockShape&, Recompute, const BlockActivations* shared, Arena&);
DeferredGradients reserve_deferred(const ModelConfig&, const BlockShape&, Arena&);
BlockWorkspace reserve_workspace(const ModelConfig&, const BlockShape&, Passes, Arena&);

class Block {
public:
    Block(const ModelConfig& model, const ParameterTable& table, const FlatBuffers& flat, int layer, AttentionChoice attention = {});

    // x is the residual stream; `delta` (may be empty) is added to it first. Leaves its own delta in w.delta_nC and
    // returns the residual stream that it belongs to (a.mid_nC or a.x_nC).
    Tensor forward(Stream&, const Tensor& x_nC, const Tensor& delta_nC, const SequenceInfo&, const BlockActivations& a,
                   const BlockWorkspace& w, TensorParallel&, KvCache* cache = nullptr) const;
    // Redoes what `selective` recomputation dropped (norm outputs, activation of the FFN). Bitwise what forward computed.
    void recompute(Stream&, const SequenceInfo&, const BlockActivations& a) const;
    // dresidual: gradient of the residual stream behind the block, overwritten by that in front of it. With `deferred` the weight
    // gradients of the four matrices are left to backward_weights.
    void backward(Stream&, const Tensor& dresidual_nC, const SequenceInfo&, const BlockActivations& a, const BlockWorkspace& w, TensorParallel&,
                  Accumulate accumulate, const DeferredGradients* deferred = nullptr) const;
    void backward_weights(Stream&, const SequenceInfo&, const BlockActivations& a, const BlockWorkspace& w, const TensorParallel&, Accumulate accumulate,
                          const DeferredGradients& deferred) const;

private:
    using Gathered = TensorParallel::Gathered;
    void attention_forward(Stream&, const Gathered& y, const SequenceInfo&, const BlockActivations&, const BlockWorkspace&, const TensorParallel&, KvCache*) const;
    // From the gradient of attention's output, rows of all ranks, to dqkv.
    void attention_backward(Stream&, const Gathered& ddelta, const SequenceInfo&, const BlockActivations&, const BlockWorkspace&, const Tensor& dqkv,
                            const TensorParallel&, Accumulate) const;
    void ffn_up(Stream&, const Gathered& y, const BlockActivations&, const BlockWorkspace&, const TensorParallel&, int64_t N) const;
    void ffn_backward(Stream&, const Gathered& ddelta, const BlockActivations&, const BlockWorkspace&, const Tensor& dup, const TensorParallel&, int64_t N) const;
    void norm(Stream&, const NormParams&, const Tensor& x, const Tensor& delta, const Tensor& sum, const Tensor& y, const Tensor& mean,
              const Tensor& rstd, int64_t n) const;
    void norm_backward(Stream&, const NormParams&, const Tensor& dy, const Tensor& x, const Tensor& mean, const Tensor& rstd,
                       const Tensor& dresidual, const Tensor& workspace, int64_t n, Accumulate) const;
    bool serial() const { return model_.block == BlockKind::serial; }
    Tensor dup_of(const BlockActivations&, const BlockWorkspace&, const DeferredGradients*) const;

    const ModelConfig& model_;
    LocalSizes local_;
    LayerParams p_;
    int64_t window_;
    AttentionChoice attention_;
    std::string forward_name_, backward_name_;  // for profilers
};

}  // namespace trifold
