// model/stage.h   The part of the model that one rank computes: embedding, blocks, head. With one process that is all of it.
#pragma once
#include <vector>

#include "model/block.h"
#include "model/head.h"

namespace trifold {

// One micro-batch as the data loader gives it: B*T entries each. The memory must stay until its step is done.
struct TokenBatch {
    const int32_t* tokens = nullptr;
    const int32_t* targets = nullptr;    // -1: masked
    const int32_t* positions = nullptr;
    const int32_t* doc_start = nullptr;  // null: documents joined
};

// cos and sin of the rotary embedding for positions [0, max_seq), fp32 [max_seq, D/2], computed in double.
// Scaling as in Hugging Face: linear divides positions; llama3 rescales each frequency by its wavelength (Llama 3.1 report).
void fill_rotary_tables(Stream&, const ModelConfig&, const Tensor& cos_TR, const Tensor& sin_TR);

class Stage {
public:
    Stage(const ModelConfig&, const ParameterTable&, const FlatBuffers&, DType, int64_t B, int64_t T, Recompute, Passes, bool isolated_documents, Arena&);
    // Once, when the memory is real: constant tables.
    void fill_constants(Stream&) const;

    // Sets the loss sum to zero. Losses of all micro-batches since are added up.
    void reset_loss(Stream&) const;
    void forward(Stream&, const TokenBatch&) const;
    // After forward of the same micro-batch. grad_scale = 1 / nominal tokens of the global batch.
    void backward(Stream&, float grad_scale, Accumulate accumulate) const;
    void loss(Stream&) const;
    // Sum of the losses of valid tokens since reset_loss (nats), read by the host.
    double loss_sum(Stream&) const;

private:
    void load(Stream&, const TokenBatch&) const;
    void recompute(Stream&, size_t layer) const;

    const ModelConfig& model_;
    Recompute recompute_;
    LinearParams token_embedding_;
    Tensor position_weight_, position_grad_;
    std::vector<Block> blocks_;
    std::vector<BlockActivations> activations_;
    BlockWorkspace workspace_;
    Head head_;
    SequenceInfo sequence_;
    Tensor token_N_, target_N_, dresidual_NC_, embedding_workspace_, loss_sum_;
};

}  // namespace trifold
