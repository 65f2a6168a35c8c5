#include "model/layers.h"

namespace trifold {
namespace {

LinearParams linear_params(const ParameterTable& table, const FlatBuffers& flat, const std::string& first, int64_t O, int64_t I) {
    LinearParams p{.I = I, .O = O};
    if (const Parameter* w = table.find(first + ".weight")) p.w = flat.weight_of(*w, O * I), p.dw = flat.grad_of(table, *w, O * I);
    if (const Parameter* b = table.find(first + ".bias")) p.b = flat.weight_of(*b, O), p.db = flat.grad_of(table, *b, O);
    return p;
}

}  // namespace

Tensor FlatBuffers::grad_of(const ParameterTable& table, const Parameter& p, int64_t elems) const {
    if (grads.empty()) return {};
    const auto bucket = static_cast<size_t>(p.bucket);
    return grads[bucket].slice(p.offset - table.buckets()[bucket].begin, elems);
}

NormParams norm_params(const ParameterTable& table, const FlatBuffers& flat, const std::string& name) {
    NormParams p;
    if (const Parameter* w = table.find(name + ".weight")) p.w = flat.weight_of(*w, w->elems), p.dw = flat.grad_of(table, *w, w->elems);
    if (const Parameter* b = table.find(name + ".bias")) p.b = flat.weight_of(*b, b->elems), p.db = flat.grad_of(table, *b, b->elems);
    return p;
}

LinearParams padded_matrix(const ModelConfig& m, const ParameterTable& table, const FlatBuffers& flat, const std::string& name) {
    return linear_params(table, flat, name, table.padded_rows(), m.hidden);
}

LayerParams layer_params(const ModelConfig& m, const ParameterTable& table, const FlatBuffers& flat, int l) {
    const std::string layer = "layers." + std::to_string(l) + ".", attention = layer + "attention.", ffn = layer + "ffn.";
    const LocalSizes local(m, table.placement().tp);
    const int64_t C = m.hidden;
    LayerParams p;
    p.norm1 = norm_params(table, flat, layer + "norm1");
    p.norm2 = norm_params(table, flat, layer + "norm2");
    p.qkv = linear_params(table, flat, attention + "q", local.qkv_width(), C);
    p.q_norm = norm_params(table, flat, attention + "q_norm");
    p.k_norm = norm_params(table, flat, attention + "k_norm");
    p.out = linear_params(table, flat, attention + "out", C, local.q_width());
    p.up = linear_params(table, flat, ffn + (m.swiglu() ? "gate" : "up"), local.up_width(), C);
    p.down = linear_params(table, flat, ffn + "down", C, local.ffn_hidden);
    return p;
}

}  // namespace trifold
