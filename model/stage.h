// model/stage.h   The part of the model that one rank computes: one or more chunks of layers, with embedding and head where they belong.
//
// A chunk works on micro-batches in *slots*: a slot keeps what a micro-batch needs between its forward and its last backward pass. The
// schedule says which micro-batch uses which slot.
#pragma once
#include <memory>
#include <utility>
#include <vector>

#include "model/block.h"
#include "model/head.h"
#include "model/sharding.h"

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

enum class WeightGradients : uint8_t { with_input_gradients, apart };  // apart: schedules with W actions

struct StageOptions {
    DType type = DType::f32;
    int64_t B = 1, T = 0;  // of a micro-batch
    Recompute recompute = Recompute::none;
    Passes passes = Passes::forward_and_backward;
    Documents documents = Documents::joined;
    WeightGradients weight_gradients = WeightGradients::with_input_gradients;
    std::vector<int> slots = {1};  // of each chunk
    AttentionChoice attention = {};
};

class Stage {
public:
    // `sharding` owns the weights' gathering and the gradients' reduction; null: all weights are here (no backward pass). Losses are added to
    // loss_sum (fp64 [1]) on the first tensor-parallel rank.
    Stage(const ModelConfig&, const ParameterTable&, const FlatBuffers&, const StageOptions&, TensorParallel, Sharding* sharding, const Tensor& loss_sum, Arena&);
    // Page-locked memory for `micros` micro-batches on their way to a GPU: copies from other memory would hold the host until the GPU has come
    // so far. To be used again when all of them are done.
    void reserve_uploads(int64_t micros, Arena& host);
    // Once, when the memory is real: constant tables.
    void fill_constants(Stream&) const;

    // Sets the loss sum to zero, and the first gradients that come overwrite those of the step before.
    void begin_step(Stream&);
    // The residual stream, [n, C], comes from `in` (empty: tokens are embedded) and goes to `out` (empty: final norm).
    void forward(Stream&, int chunk, int slot, const TokenBatch&, const Tensor& in_nC = {}, const Tensor& out_nC = {});
    // After forward of the same micro-batch. Its gradient comes from `in` (empty: of the loss, whose sum over tokens is multiplied by
    // grad_scale = 1 / nominal tokens of the global batch) and goes to `out` (empty: into the embedding). With weight gradients apart,
    // those of the blocks' matrices are left to backward_weights.
    void backward(Stream&, int chunk, int slot, float grad_scale, const Tensor& din_nC = {}, const Tensor& dout_nC = {});
    void backward_weights(Stream&, int chunk, int slot);
    // Evaluation: after forward of the last chunk.
    void loss(Stream&, int slot) const;
    // Sum of the losses of valid tokens since begin_step (nats), read by the host.
    double loss_sum(Stream&) const;

private:
    struct Slot {
        Tensor token_N, target_N;
        SequenceInfo sequence;
        std::vector<BlockActivations> layers;
        std::vector<DeferredGradients> deferred;
        HeadActivations head;
    };
    struct Chunk {
        Part part;
        std::vector<Block> blocks;
        std::vector<Slot> slots;
        int64_t backwards = 0, weight_backwards = 0;  // in this step
    };
    const Slot& at(int chunk, int slot) const { return chunks_[static_cast<size_t>(chunk)].slots[static_cast<size_t>(slot)]; }
    BlockShape block_shape() const { return {options_.B, options_.T, tp_.size(), options_.type, options_.attention}; }
    Slot make_slot(const Part&, const BlockActivations*& shared, Arena&) const;
    void load(Stream&, const Slot&, const Part&, const TokenBatch&);
    void embed(Stream&, const Slot&);
    void embed_backward(Stream&, const Slot&, Accumulate);
    void recompute(Stream&, const Chunk&, const Slot&, size_t layer);
    int layer_bucket(const Chunk&, size_t layer) const;
    // The sharding's hooks, for the buckets of a chunk that hold layer `layer`, or that `has` names.
    void acquire(Stream&, int bucket) const;
    template <class Hook> void for_buckets(int chunk, bool Bucket::*has, Hook hook) const;

    const ModelConfig& model_;
    const ParameterTable& table_;
    StageOptions options_;
    TensorParallel tp_;
    Sharding* sharding_;
    LinearParams token_embedding_;
    Tensor position_weight_, position_grad_;
    std::vector<Chunk> chunks_;
    std::vector<int> bucket_of_layer_;  // by global number; -1: elsewhere
    BlockWorkspace workspace_;
    std::unique_ptr<Head> head_;
    Tensor cos_TR_, sin_TR_, dresidual_nC_, embedding_workspace_, loss_sum_;
    Tensor uploads_;         // in host memory; empty: none is needed
    int64_t uploaded_ = 0;   // elements, from the beginning of uploads_
    std::pair<int, int> last_forward_ = {-1, -1};  // chunk and slot whose activations the shared parts hold
};

}  // namespace trifold
