// model/layers.h   The physical view of the parameter table: which slices of the flat buffers one layer works with.
//
// q, k, v (and gate, up) are adjacent in the flat buffer, so each fused matrix is one slice that starts at its first member.
// Sizes are those of this rank: under tensor parallelism a slice of the heads, of the FFN, of the vocabulary.
#pragma once
#include "model/config.h"
#include "model/parameters.h"

namespace trifold {

// The flat buffers of this rank: weights in the type of the activations, and the fp32 gradients of each bucket (none: no backward pass).
struct FlatBuffers {
    Tensor weight;
    std::vector<Tensor> grads = {};

    Tensor weight_of(const Parameter& p, int64_t elems) const { return weight.slice(p.offset, elems); }
    Tensor grad_of(const ParameterTable& table, const Parameter& p, int64_t elems) const;
};

struct LinearParams {
    Tensor w, b, dw, db;  // b, db empty without bias
    int64_t I = 0, O = 0;
};
struct NormParams {
    Tensor w, b, dw, db;
};

struct LayerParams {
    NormParams norm1, norm2;  // norm2 empty in the parallel block
    LinearParams qkv, out, up, down;  // up: gate and up fused for SwiGLU
    NormParams q_norm, k_norm;        // empty without QK-norm
};

// The part of every layer that one tensor-parallel rank computes.
struct LocalSizes {
    int64_t heads = 0, kv_heads = 0, head_dim = 0, ffn_hidden = 0;
    LocalSizes(const ModelConfig& m, int tp) : heads(m.heads / tp), kv_heads(m.kv_heads / tp), head_dim(m.head_dim), ffn_hidden(m.ffn_hidden / tp), up_factor(m.swiglu() ? 2 : 1) {}
    int64_t q_width() const { return heads * head_dim; }
    int64_t kv_width() const { return kv_heads * head_dim; }
    int64_t qkv_width() const { return q_width() + 2 * kv_width(); }
    int64_t up_width() const { return up_factor * ffn_hidden; }

private:
    int64_t up_factor;
};

LayerParams layer_params(const ModelConfig& model, const ParameterTable& table, const FlatBuffers& flat, int layer);
NormParams norm_params(const ParameterTable& table, const FlatBuffers& flat, const std::string& name);
// A matrix with its padded rows: "embedding.token" or "head".
LinearParams padded_matrix(const ModelConfig& model, const ParameterTable& table, const FlatBuffers& flat, const std::string& name);

}  // namespace trifold
