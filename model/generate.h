// model/generate.h   Text generation with a KV cache, built from the same blocks and kernels as training.
#pragma once
#include <vector>

#include "model/stage.h"

namespace trifold {

struct SamplingOptions {
    double temperature = 1.0;  // 0: greedy
    int64_t top_k = 0;         // 0: no limit
    double top_p = 1.0;        // 1: no limit
    uint64_t seed = 1234;
};

// Chooses a token from logits [0, vocab). Draw number `index` of a seed is always the same, whatever was drawn before.
// Ties keep the lower id first.
int32_t choose_token(const float* logits, int64_t vocab, const SamplingOptions&, uint64_t index);

// One sequence at a time. Weights are those of a training run (fp32 or bf16) and are not changed.
class Generator {
public:
    // prompt_chunk: tokens that one forward pass takes at most; longer prompts go through in pieces.
    Generator(const ModelConfig&, const ParameterTable&, const Tensor& flat_weights, int64_t max_tokens, int64_t prompt_chunk, Arena&);
    void fill_constants(Stream&) const;
    // Drops everything in the cache.
    void reset();
    // Feeds tokens behind those fed before; afterwards next_logits() are those of the next token.
    void feed(Stream&, const std::vector<int32_t>& tokens);
    const float* next_logits(Stream&);
    int64_t length() const { return length_; }
    int64_t max_tokens() const { return max_tokens_; }

private:
    void forward(Stream&, const int32_t* tokens, int64_t count);

    const ModelConfig& model_;
    DType type_;
    int64_t max_tokens_, chunk_, length_ = 0, last_row_ = 0;
    LinearParams token_embedding_;
    Tensor position_weight_;
    std::vector<Block> blocks_;
    std::vector<KvCache> caches_;
    BlockActivations activations_;
    BlockWorkspace workspace_;
    TensorParallel alone_;
    Head head_;
    HeadActivations head_activations_;
    Tensor token_N_, position_N_, cos_TR_, sin_TR_;
    std::vector<float> logits_;
    std::vector<int32_t> host_positions_;
};

}  // namespace trifold
