// checkpoint/hf_tensors.cpp   See hf_tensors.h.
#include "checkpoint/hf_tensors.h"

#include <fmt/format.h>

#include <algorithm>

namespace trifold {
namespace {

struct FamilyNames {
    HfFamily family;
    const char *model_type, *architecture;
};
constexpr FamilyNames families[] = {{HfFamily::none, "", ""},
                                    {HfFamily::gpt2, "gpt2", "GPT2LMHeadModel"},
                                    {HfFamily::llama, "llama", "LlamaForCausalLM"},
                                    {HfFamily::mistral, "mistral", "MistralForCausalLM"},
                                    {HfFamily::qwen2, "qwen2", "Qwen2ForCausalLM"}};

// Names without ".weight" or ".bias". Inside a layer both stand behind the prefix of that layer.
struct Rename {
    const char *ours, *theirs;
    bool transposed = false;  // GPT-2's Conv1D keeps matrices as [inputs, outputs]
    int fused = 1;            // it and the next fused-1 rows of the parameter table are one tensor of theirs
};

constexpr Rename gpt2_global[] = {
    {"embedding.token", "transformer.wte"}, {"embedding.position", "transformer.wpe"}, {"final_norm", "transformer.ln_f"}, {"head", "lm_head"}};
constexpr Rename gpt2_layer[] = {{"norm1", "ln_1"},
                                 {"attention.q", "attn.c_attn", true, 3},
                                 {"attention.out", "attn.c_proj", true},
                                 {"norm2", "ln_2"},
                                 {"ffn.up", "mlp.c_fc", true},
                                 {"ffn.down", "mlp.c_proj", true}};
constexpr Rename llama_global[] = {{"embedding.token", "model.embed_tokens"}, {"final_norm", "model.norm"}, {"head", "lm_head"}};
constexpr Rename llama_layer[] = {{"norm1", "input_layernorm"},          {"attention.q", "self_attn.q_proj"},
                                  {"attention.k", "self_attn.k_proj"},   {"attention.v", "self_attn.v_proj"},
                                  {"attention.out", "self_attn.o_proj"}, {"norm2", "post_attention_layernorm"},
                                  {"ffn.gate", "mlp.gate_proj"},         {"ffn.up", "mlp.up_proj"},
                                  {"ffn.down", "mlp.down_proj"}};

const Rename* find_rename(HfFamily family, bool in_layer, const std::string& ours) {
    const auto search = [&](const auto& list) {
        const auto* it = std::ranges::find_if(list, [&](const Rename& r) { return ours == r.ours; });
        return it == std::end(list) ? nullptr : it;
    };
    if (family == HfFamily::gpt2) return in_layer ? search(gpt2_layer) : search(gpt2_global);
    if (family == HfFamily::none) return nullptr;
    return in_layer ? search(llama_layer) : search(llama_global);
}

// The tensor that starts with entry `at` of the table. One that the family does not have keeps our name.
HfTensor rename(HfFamily family, const std::vector<Parameter>& all, size_t at) {
    const Parameter& p = all[at];
    const bool in_layer = p.layer >= 0;
    const size_t dot = p.name.rfind('.');  // before weight or bias
    const std::string prefix = in_layer ? fmt::format("layers.{}.", p.layer) : "";
    const Rename* r = find_rename(family, in_layer, p.name.substr(prefix.size(), dot - prefix.size()));
    if (!r) return {p.name, p.shape, {&p}, false};
    const std::string their_prefix = in_layer ? fmt::format("{}.{}.", family == HfFamily::gpt2 ? "transformer.h" : "model.layers", p.layer) : "";
    HfTensor t{their_prefix + r->theirs + p.name.substr(dot), p.shape, {}, r->transposed && p.shape.size() == 2};
    t.shape[0] = 0;
    for (int i = 0; i < r->fused; ++i) {
        t.parts.push_back(&all[at + static_cast<size_t>(i)]);
        t.shape[0] += t.parts.back()->shape[0];
    }
    if (t.transposed) std::swap(t.shape[0], t.shape[1]);
    return t;
}

// Calls move(in_flat, in_rows, count) for every stretch of elements that is contiguous in both, the flat buffer and rows [first, last).
template <class Move>
void for_each_stretch(const HfTensor& t, int64_t first, int64_t last, Move move) {
    const int64_t width = t.columns();
    int64_t part_begin = 0;  // in rows of the file, or in columns when transposed
    for (const Parameter* p : t.parts) {
        const int64_t outputs = p->shape[0], from = std::max(first, part_begin), to = std::min(last, part_begin + outputs);
        if (t.transposed) {
            for (int64_t o = 0; o < outputs; ++o)
                for (int64_t i = first; i < last; ++i) move(p->offset + o * t.rows() + i, (i - first) * width + part_begin + o, 1);
        } else if (from < to) {
            move(p->offset + (from - part_begin) * width, (from - first) * width, (to - from) * width);
        }
        part_begin += outputs;
    }
}

}  // namespace

const char* model_type(HfFamily family) { return families[static_cast<int>(family)].model_type; }
const char* architecture(HfFamily family) { return families[static_cast<int>(family)].architecture; }

HfFamily family_of_type(const std::string& type) {
    const auto* found = std::ranges::find_if(families, [&](const FamilyNames& f) { return type == f.model_type; });
    return found == std::end(families) ? HfFamily::none : found->family;
}

HfFamily family_of(const ModelConfig& m, std::string* why) {
    const char* obstacle = nullptr;  // the first one
    const auto need = [&](bool good, const char* what) { obstacle = good || obstacle ? obstacle : what; };
    need(m.block == BlockKind::serial, "model.block=parallel");
    need(!m.qk_norm, "model.qk_norm=on");
    HfFamily family = HfFamily::gpt2;
    if (m.norm == NormKind::layernorm) {
        need(m.position == Position::learned, "layernorm without learned positions");
        need(!m.swiglu(), "layernorm with swiglu");
        need(m.bias == Bias::all, "layernorm without biases");
        need(m.window == 0, "learned positions with a window");
        need(m.kv_heads == m.heads && m.heads * m.head_dim == m.hidden, "layernorm with kv_heads or head_dim of its own");
    } else {
        need(m.position == Position::rope, "rmsnorm without rotary positions");
        need(m.swiglu(), "rmsnorm without swiglu");
        need(m.window == 0 || m.bias != Bias::all, "a window with biases everywhere");
        // Only Qwen2 says per layer which one has a window. Llama's config wants hidden to be a multiple of heads.
        const bool per_layer = m.window > 0 && m.full_attention_every > 0;
        need(!per_layer || m.bias == Bias::qkv, "model.full_attention_every without model.bias=qkv");
        family = m.bias == Bias::qkv ? HfFamily::qwen2 : m.window > 0 || m.hidden % m.heads != 0 ? HfFamily::mistral : HfFamily::llama;
        need(family != HfFamily::mistral || m.bias == Bias::none, "biases with hidden not a multiple of heads");
    }
    if (obstacle && why) *why = obstacle;
    return obstacle ? HfFamily::none : family;
}

std::vector<HfTensor> hf_tensors(HfFamily family, const ParameterTable& table) {
    std::vector<HfTensor> tensors;
    for (size_t i = 0; i < table.all().size(); i += tensors.back().parts.size()) tensors.push_back(rename(family, table.all(), i));
    return tensors;
}

int64_t rows_at_once(const HfTensor& t) {
    const int64_t rows = std::max<int64_t>(1, (int64_t{1} << 18) / std::max<int64_t>(1, t.columns()));
    return std::min(rows >= 16 ? rows / 16 * 16 : 16, std::max<int64_t>(1, t.rows()));
}

void gather_rows(const HfTensor& t, const float* flat, int64_t first, int64_t last, float* rows) {
    for_each_stretch(
        t, first, last, [&](int64_t ours, int64_t theirs, int64_t count) { std::copy_n(flat + ours, count, rows + theirs); });
}

void scatter_rows(const HfTensor& t, const float* rows, int64_t first, int64_t last, float* flat) {
    for_each_stretch(
        t, first, last, [&](int64_t ours, int64_t theirs, int64_t count) { std::copy_n(rows + theirs, count, flat + ours); });
}

}  // namespace trifold
