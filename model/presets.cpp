// model/presets.cpp   Named architectures, each as its difference from the defaults (GPT-2's kind of model).
#include "model/presets.h"

#include "base/error.h"
#include "base/text.h"

namespace trifold {
namespace {

// Llama: RMSNorm, rotary positions, SwiGLU, no biases, a head of its own.
ModelConfig llama(ModelConfig sizes) {
    sizes.norm = NormKind::rmsnorm;
    sizes.position = Position::rope;
    sizes.activation = ActivationKind::swiglu;
    sizes.bias = Bias::none;
    sizes.tied = false;
    return sizes;
}

ModelConfig llama3(ModelConfig sizes) {
    sizes.kv_heads = 8;
    sizes.vocab = 128256;
    sizes.max_seq = 8192;
    sizes.rope_base = 500000;
    return llama(sizes);
}

// Qwen2: Llama with biases on query, key and value.
ModelConfig qwen2(ModelConfig sizes) {
    sizes = llama(sizes);
    sizes.bias = Bias::qkv;
    sizes.norm_eps = 1e-6;
    sizes.rope_base = 1000000;
    return sizes;
}

ModelConfig tied(ModelConfig model) {
    model.tied = true;
    return model;
}

// Attention and FFN side by side. The paper gives neither a window nor the kind of positions: full attention, learned.
ModelConfig megascale(ModelConfig sizes) {
    sizes.vocab = 64000;
    sizes.max_seq = 2048;
    sizes.block = BlockKind::parallel;
    return sizes;
}

// Sizes for tests: two layers, heads of 64 so that CUDA kernels take them, two query heads per key head, bytes.
ModelConfig tiny(ModelConfig kind) {
    kind.layers = 2;
    kind.hidden = 256;
    kind.heads = 4;
    kind.kv_heads = 2;
    kind.vocab = 257;
    kind.max_seq = 128;
    return kind;
}

std::vector<Preset> make_presets() {
    const char* gpt2 = "GPT-2 (Radford et al. 2019)";
    const char* gpt3 = "GPT-3 (arXiv 2005.14165), dense attention, GPT-2's vocabulary";
    const char* mega = "MegaScale (arXiv 2402.15627)";
    const char* llama3_report = "Llama 3 (arXiv 2407.21783), pre-training at 8192 tokens";
    const char* qwen = "Qwen2.5 (arXiv 2412.15115)";
    const char* test = "for tests";
    return {
        {"gpt2-124m", gpt2, {.layers = 12, .hidden = 768, .heads = 12, .vocab = 50257, .max_seq = 1024}},
        {"gpt2-355m", gpt2, {.layers = 24, .hidden = 1024, .heads = 16, .vocab = 50257, .max_seq = 1024}},
        {"gpt2-774m", gpt2, {.layers = 36, .hidden = 1280, .heads = 20, .vocab = 50257, .max_seq = 1024}},
        {"gpt2-1558m", gpt2, {.layers = 48, .hidden = 1600, .heads = 25, .vocab = 50257, .max_seq = 1024}},
        {"gpt3-1.3b", gpt3, {.layers = 24, .hidden = 2048, .heads = 16, .vocab = 50257, .max_seq = 2048}},
        {"gpt3-13b", gpt3, {.layers = 40, .hidden = 5120, .heads = 40, .vocab = 50257, .max_seq = 2048}},
        {"gpt3-175b", gpt3, {.layers = 96, .hidden = 12288, .heads = 96, .vocab = 50257, .max_seq = 2048}},
        {"megascale-175b", mega, megascale({.layers = 96, .hidden = 12288, .heads = 128})},
        {"megascale-530b", mega, megascale({.layers = 105, .hidden = 20480, .heads = 160})},
        {"llama2-7b", "Llama 2 (arXiv 2307.09288)",
         llama({.layers = 32, .hidden = 4096, .heads = 32, .ffn_hidden = 11008, .vocab = 32000, .max_seq = 4096})},
        {"llama3-8b", llama3_report, llama3({.layers = 32, .hidden = 4096, .heads = 32, .ffn_hidden = 14336})},
        {"llama3-70b", llama3_report, llama3({.layers = 80, .hidden = 8192, .heads = 64, .ffn_hidden = 28672})},
        {"llama3-405b", llama3_report, llama3({.layers = 126, .hidden = 16384, .heads = 128, .ffn_hidden = 53248})},
        {"mistral-7b", "Mistral 7B (arXiv 2310.06825)",
         llama({.layers = 32,
                .hidden = 4096,
                .heads = 32,
                .kv_heads = 8,
                .ffn_hidden = 14336,
                .vocab = 32000,
                .max_seq = 32768,
                .window = 4096})},
        {"qwen2.5-0.5b", qwen,
         tied(qwen2({.layers = 24,
                     .hidden = 896,
                     .heads = 14,
                     .kv_heads = 2,
                     .ffn_hidden = 4864,
                     .vocab = 151936,
                     .max_seq = 32768}))},
        {"qwen2.5-7b", qwen,
         qwen2({.layers = 28,
                .hidden = 3584,
                .heads = 28,
                .kv_heads = 4,
                .ffn_hidden = 18944,
                .vocab = 152064,
                .max_seq = 32768})},
        {"qwen2.5-32b", qwen,
         qwen2({.layers = 64,
                .hidden = 5120,
                .heads = 40,
                .kv_heads = 8,
                .ffn_hidden = 27648,
                .vocab = 152064,
                .max_seq = 32768})},
        {"quickstart", "bytes, two CPU cores, minutes",
         tied(llama({.layers = 4, .hidden = 192, .heads = 3, .vocab = 257, .max_seq = 256}))},
        {"tiny-gpt2", test, tiny({})},
        {"tiny-llama", test, tiny(llama({}))},
        {"tiny-mistral", test, tiny(llama({.window = 48}))},
        {"tiny-qwen2", test, tiny(tied(qwen2({})))},
        {"tiny-megascale", test, tiny({.block = BlockKind::parallel, .window = 48, .full_attention_every = 2})},
    };
}

}  // namespace

const std::vector<Preset>& presets() {
    static const std::vector<Preset> table = make_presets();
    return table;
}

const Preset& preset(const std::string& name) {
    std::vector<std::string> names;
    for (const Preset& p : presets()) {
        if (p.name == name) return p;
        names.push_back(p.name);
    }
    const std::vector<std::string> near = near_misses(name, names);
    throw Problem(Exit::usage, "unknown preset \"" + name + "\": " +
                                   (near.empty() ? "the presets are " + join_words(names)
                                                 : "did you mean " + join_words(near, " or ") + "?"));
}

}  // namespace trifold
