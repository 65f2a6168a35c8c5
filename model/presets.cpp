// model/presets.cpp   Named architectures, each as its difference from the defaults (GPT-2's kind of model).
#include "model/presets.h"

#include "base/error.h"
#include "base/text.h"

namespace trifold {
namespace {

using Kind = void (*)(ModelConfig&);

void gpt2(ModelConfig&) {}

// Llama: RMSNorm, rotary positions, SwiGLU, no biases, a head of its own.
void llama(ModelConfig& m) {
    m.norm = NormKind::rmsnorm;
    m.position = Position::rope;
    m.activation = ActivationKind::swiglu;
    m.bias = Bias::none;
    m.tied = false;
}

void llama3(ModelConfig& m) {
    llama(m);
    m.rope_base = 500000;
}

// Qwen2: Llama with biases on query, key and value.
void qwen2(ModelConfig& m) {
    llama(m);
    m.bias = Bias::qkv;
    m.norm_eps = 1e-6;
    m.rope_base = 1000000;
}

template <Kind kind>
void tied(ModelConfig& m) {
    kind(m);
    m.tied = true;
}

template <int64_t window>
void mistral(ModelConfig& m) {
    llama(m);
    m.window = window;
}

// Attention and FFN side by side. The paper gives neither a window nor the kind of positions: full attention, learned.
void megascale(ModelConfig& m) { m.block = BlockKind::parallel; }

void windowed_megascale(ModelConfig& m) {
    megascale(m);
    m.window = 48;
    m.full_attention_every = 2;
}

constexpr const char* radford = "GPT-2 (Radford et al. 2019)";
constexpr const char* brown = "GPT-3 (arXiv 2005.14165), dense attention, GPT-2's vocabulary";
constexpr const char* mega = "MegaScale (arXiv 2402.15627)";
constexpr const char* llama3_report = "Llama 3 (arXiv 2407.21783), pre-training at 8192 tokens";
constexpr const char* qwen = "Qwen2.5 (arXiv 2412.15115)";
constexpr const char* test = "for tests";  // heads of 64 so that CUDA kernels take them, two query heads per key head, bytes

struct Row {
    const char *name, *source;
    Kind kind;
    int64_t layers, hidden, heads, kv_heads, ffn_hidden, vocab, max_seq;  // 0: derived
};
constexpr Row rows[] = {
    {"gpt2-124m", radford, gpt2, 12, 768, 12, 0, 0, 50257, 1024},
    {"gpt2-355m", radford, gpt2, 24, 1024, 16, 0, 0, 50257, 1024},
    {"gpt2-774m", radford, gpt2, 36, 1280, 20, 0, 0, 50257, 1024},
    {"gpt2-1558m", radford, gpt2, 48, 1600, 25, 0, 0, 50257, 1024},
    {"gpt3-1.3b", brown, gpt2, 24, 2048, 16, 0, 0, 50257, 2048},
    {"gpt3-13b", brown, gpt2, 40, 5120, 40, 0, 0, 50257, 2048},
    {"gpt3-175b", brown, gpt2, 96, 12288, 96, 0, 0, 50257, 2048},
    {"megascale-175b", mega, megascale, 96, 12288, 128, 0, 0, 64000, 2048},
    {"megascale-530b", mega, megascale, 105, 20480, 160, 0, 0, 64000, 2048},
    {"llama2-7b", "Llama 2 (arXiv 2307.09288)", llama, 32, 4096, 32, 0, 11008, 32000, 4096},
    {"llama3-8b", llama3_report, llama3, 32, 4096, 32, 8, 14336, 128256, 8192},
    {"llama3-70b", llama3_report, llama3, 80, 8192, 64, 8, 28672, 128256, 8192},
    {"llama3-405b", llama3_report, llama3, 126, 16384, 128, 8, 53248, 128256, 8192},
    {"mistral-7b", "Mistral 7B (arXiv 2310.06825)", mistral<4096>, 32, 4096, 32, 8, 14336, 32000, 32768},
    {"qwen2.5-0.5b", qwen, tied<qwen2>, 24, 896, 14, 2, 4864, 151936, 32768},
    {"qwen2.5-7b", qwen, qwen2, 28, 3584, 28, 4, 18944, 152064, 32768},
    {"qwen2.5-32b", qwen, qwen2, 64, 5120, 40, 8, 27648, 152064, 32768},
    {"quickstart", "bytes, two CPU cores, minutes", tied<llama>, 4, 192, 3, 0, 0, 257, 256},
    {"tiny-gpt2", test, gpt2, 2, 256, 4, 2, 0, 257, 128},
    {"tiny-llama", test, llama, 2, 256, 4, 2, 0, 257, 128},
    {"tiny-mistral", test, mistral<48>, 2, 256, 4, 2, 0, 257, 128},
    {"tiny-qwen2", test, tied<qwen2>, 2, 256, 4, 2, 0, 257, 128},
    {"tiny-megascale", test, windowed_megascale, 2, 256, 4, 2, 0, 257, 128},
};

Preset preset_of(const Row& r) {
    Preset p{r.name, r.source, {.layers = r.layers, .hidden = r.hidden, .heads = r.heads, .kv_heads = r.kv_heads, .ffn_hidden = r.ffn_hidden}};
    p.model.vocab = r.vocab;
    p.model.max_seq = r.max_seq;
    r.kind(p.model);
    return p;
}

}  // namespace

const std::vector<Preset>& presets() {
    static const std::vector<Preset> table = [] {
        std::vector<Preset> all;
        for (const Row& row : rows) all.push_back(preset_of(row));
        return all;
    }();
    return table;
}

const Preset& preset(const std::string& name) {
    std::vector<std::string> names;
    for (const Preset& p : presets()) {
        if (p.name == name) return p;
        names.push_back(p.name);
    }
    throw Problem(Exit::usage, "unknown preset \"" + name + "\": " + suggestion(name, names, "", "the presets are " + join_words(names)));
}

}  // namespace trifold
