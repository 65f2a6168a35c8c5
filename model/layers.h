// model/layers.h   The physical view of the parameter table: which slices of the flat buffers one layer works with.
//
// q, k, v (and gate, up) are adjacent in the flat buffer, so each fused matrix is one slice that starts at its first member.
#pragma once
#include "model/config.h"
#include "model/parameters.h"

namespace trifold {

// The flat buffers of this rank. `weight` has the type of the activations, `grad` is fp32; offsets agree.
struct FlatBuffers {
    Tensor weight, grad;
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

LayerParams layer_params(const ModelConfig& model, const ParameterTable& table, const FlatBuffers& flat, int layer);
NormParams norm_params(const ParameterTable& table, const FlatBuffers& flat, const std::string& name);
// A matrix with its padded rows: "embedding.token" or "head".
LinearParams padded_matrix(const ModelConfig& model, const ParameterTable& table, const FlatBuffers& flat, const std::string& name);

}  // namespace trifold
