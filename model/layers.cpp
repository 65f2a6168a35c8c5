#include "model/layers.h"

namespace trifold {
namespace {

// The slice of `elems` elements that starts at the named tensor; empty when the model has no such tensor.
Tensor slice_of(const ParameterTable& table, const Tensor& flat, const std::string& first, int64_t elems) {
    const Parameter* p = table.find(first);
    return p && flat ? flat.slice(p->offset, elems) : Tensor{};
}

LinearParams linear_params(const ParameterTable& table, const FlatBuffers& flat, const std::string& first, int64_t O, int64_t I) {
    const std::string w = first + ".weight", b = first + ".bias";
    return {slice_of(table, flat.weight, w, O * I), slice_of(table, flat.weight, b, O), slice_of(table, flat.grad, w, O * I),
            slice_of(table, flat.grad, b, O), I, O};
}

}  // namespace

NormParams norm_params(const ParameterTable& table, const FlatBuffers& flat, const std::string& name) {
    const Parameter* p = table.find(name + ".weight");
    if (!p) return {};
    const std::string w = name + ".weight", b = name + ".bias";
    return {slice_of(table, flat.weight, w, p->elems), slice_of(table, flat.weight, b, p->elems),
            slice_of(table, flat.grad, w, p->elems), slice_of(table, flat.grad, b, p->elems)};
}

LinearParams padded_matrix(const ModelConfig& m, const ParameterTable& table, const FlatBuffers& flat, const std::string& name) {
    return linear_params(table, flat, name, m.padded_vocab(), m.hidden);
}

LayerParams layer_params(const ModelConfig& m, const ParameterTable& table, const FlatBuffers& flat, int l) {
    const std::string layer = "layers." + std::to_string(l) + ".", attention = layer + "attention.", ffn = layer + "ffn.";
    const int64_t C = m.hidden, HD = m.heads * m.head_dim, KD = m.kv_heads * m.head_dim, F = m.ffn_hidden;
    LayerParams p;
    p.norm1 = norm_params(table, flat, layer + "norm1");
    p.norm2 = norm_params(table, flat, layer + "norm2");
    p.qkv = linear_params(table, flat, attention + "q", HD + 2 * KD, C);
    p.q_norm = norm_params(table, flat, attention + "q_norm");
    p.k_norm = norm_params(table, flat, attention + "k_norm");
    p.out = linear_params(table, flat, attention + "out", C, HD);
    p.up = m.swiglu() ? linear_params(table, flat, ffn + "gate", 2 * F, C) : linear_params(table, flat, ffn + "up", F, C);
    p.down = linear_params(table, flat, ffn + "down", C, F);
    return p;
}

}  // namespace trifold
