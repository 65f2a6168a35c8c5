// checkpoint/hf_config.cpp   config.json of GPT-2, Llama, Mistral and Qwen2 <-> ModelConfig.
//
// Absent keys have the defaults of transformers' own classes. transformers 5.x moved the rotary settings into
// rope_parameters and calls torch_dtype dtype; both forms are read, and written side by side.

#include <algorithm>
#include <filesystem>
#include <optional>

#include "base/json.h"
#include "checkpoint/files.h"
#include "checkpoint/hf_tensors.h"
#include "checkpoint/huggingface.h"

namespace trifold {
namespace {

// The keys of one JSON object, with the file's name in every complaint. null counts as absent.
class Keys {
public:
    explicit Keys(const std::string& path) : Keys(parse_json<JsonValue>(read_text(path, Exit::checkpoint), path, {.code = Exit::checkpoint}), path) {}
    Keys(JsonValue object, std::string where) : object_(std::move(object)), where_(std::move(where)) {
        if (!object_.is_object()) throw Problem(Exit::checkpoint, where_ + " is not a JSON object");
    }
    const JsonValue* find(const std::string& key) const {
        const auto it = object_.find(key);
        return it == object_.end() || it->is_null() ? nullptr : &*it;
    }
    bool mentions(const std::string& key) const { return object_.contains(key); }
    template <class... Args>
    [[noreturn]] void refuse(const std::string& key, fmt::format_string<Args...> why, Args&&... args) const {
        const JsonValue* value = find(key);
        trifold::refuse(Exit::checkpoint, "{}: {} is {}: {}", where_, key, value ? value->dump() : "missing",
                        fmt::format(why, std::forward<Args>(args)...));
    }

    int64_t size(const std::string& key, int64_t least = 1) const { return size_or({}, key, least); }
    int64_t size_or(std::optional<int64_t> absent, const std::string& key, int64_t least = 1) const {
        const auto good = [&](const JsonValue& v) { return v.is_number_integer() && v >= least && v <= INT32_MAX; };
        return value(key, absent, good, fmt::format("a whole number of at least {} is needed", least));
    }
    double number(const std::string& key, std::optional<double> absent = {}) const {
        return value(key, absent, [](const JsonValue& v) { return v.is_number() && v > 0; }, "a number above 0 is needed");
    }
    bool flag(const std::string& key, bool absent) const {
        return value<bool>(key, absent, [](const JsonValue& v) { return v.is_boolean(); }, "true or false is needed");
    }
    std::string text(const std::string& key, const std::string& absent = "") const {
        return value<std::string>(key, absent, [](const JsonValue& v) { return v.is_string(); }, "a text is needed");
    }

private:
    template <class T, class Good>
    T value(const std::string& key, const std::optional<T>& absent, Good good, const std::string& needed) const {
        const JsonValue* v = find(key);
        if (!v && absent) return *absent;
        if (!v || !good(*v)) refuse(key, "{}", needed);
        return v->get<T>();
    }

    JsonValue object_;
    std::string where_;
};

// Keys that change the formula of a model, and the value at which they do not.
void check_neutral(const Keys& keys) {
    const std::pair<JsonValue, std::vector<const char*>> neutral[] = {
        {true, {"scale_attn_weights"}},
        {false, {"scale_attn_by_inverse_layer_idx", "add_cross_attention", "alibi", "use_qk_norm"}},
        {1.0, {"embedding_multiplier", "residual_multiplier", "logits_scaling", "logit_scale", "partial_rotary_factor"}},
        {nullptr,
         {"attn_logit_softcapping", "final_logit_softcapping", "quantization_config", "query_pre_attn_scalar", "attention_multiplier",
          "num_local_experts", "num_experts", "per_layer_config"}}};
    for (const auto& [value, names] : neutral)
        for (const char* name : names)
            if (const JsonValue* found = keys.find(name); found && *found != value) keys.refuse(name, "this is not supported");
}

void read_gpt2(const Keys& keys, ModelConfig& m) {
    m.layers = keys.size("n_layer");
    m.hidden = keys.size("n_embd");
    m.heads = m.kv_heads = keys.size("n_head");
    if (m.hidden % m.heads != 0) keys.refuse("n_head", "n_embd {} is not a multiple of it", m.hidden);
    m.head_dim = m.hidden / m.heads;
    m.ffn_hidden = keys.size_or(4 * m.hidden, "n_inner");
    m.max_seq = keys.size("n_positions");
    m.norm = NormKind::layernorm;
    m.norm_eps = keys.number("layer_norm_epsilon", 1e-5);
    m.position = Position::learned;
    m.bias = Bias::all;
    m.tied = keys.flag("tie_word_embeddings", true);
    const std::string activation = keys.text("activation_function", "gelu_new");
    if (activation == "gelu_new" || activation == "gelu_pytorch_tanh")
        m.activation = ActivationKind::gelu_tanh;
    else if (activation == "gelu")
        m.activation = ActivationKind::gelu_erf;
    else
        keys.refuse("activation_function", "gelu_new, gelu_pytorch_tanh and gelu are supported");
}

void read_rope(const Keys& keys, const std::string& where, ModelConfig& m) {
    // transformers 5.x takes rope_scaling, the old key, first as well.
    const char* section = keys.find("rope_scaling") ? "rope_scaling" : "rope_parameters";
    const JsonValue object = keys.find(section) ? *keys.find(section) : JsonValue::object();
    const Keys rope(object, where + ": " + section);
    for (const auto& [key, value] : object.items())
        if (value.is_object()) rope.refuse(key, "rotary settings that differ between layers are not supported");
    check_neutral(rope);
    m.position = Position::rope;
    m.rope_base = keys.number("rope_theta", 10000.0);
    const double inner_base = rope.number("rope_theta", m.rope_base);
    if (keys.find("rope_theta") && inner_base != m.rope_base) rope.refuse("rope_theta", "outside it is {}", m.rope_base);
    m.rope_base = inner_base;

    const std::string type = rope.text("rope_type", rope.text("type", "default"));
    if (type == "default") return;
    if (type != "linear" && type != "llama3") rope.refuse(rope.find("rope_type") ? "rope_type" : "type", "default, linear and llama3 are supported");
    m.rope_scaling.kind = type == "linear" ? RopeScalingKind::linear : RopeScalingKind::llama3;
    m.rope_scaling.factor = rope.number("factor");
    if (type == "linear") return;
    m.rope_scaling.low_freq_factor = rope.number("low_freq_factor");
    m.rope_scaling.high_freq_factor = rope.number("high_freq_factor");
    const char* original = "original_max_position_embeddings";
    m.rope_scaling.original_max_seq = keys.size_or(rope.size_or(m.max_seq, original), original);
    if (rope.find(original) && rope.size(original) != m.rope_scaling.original_max_seq)
        rope.refuse(original, "outside it is {}", m.rope_scaling.original_max_seq);
}

// Which layers have the window, from layer_types, or else `windowed_from` on.
std::vector<bool> windowed_layers(const Keys& keys, int64_t layers, int64_t windowed_from) {
    std::vector<bool> windowed(static_cast<size_t>(layers));
    const JsonValue* types = keys.find("layer_types");
    if (types && (!types->is_array() || static_cast<int64_t>(types->size()) != layers))
        keys.refuse("layer_types", "a list of {} entries is needed", layers);
    for (size_t l = 0; l < windowed.size(); ++l) {
        windowed[l] = types ? types->at(l) == "sliding_attention" : static_cast<int64_t>(l) >= windowed_from;
        if (types && !windowed[l] && types->at(l) != "full_attention")
            keys.refuse("layer_types", "full_attention and sliding_attention are supported");
    }
    return windowed;
}

// Ours is either one window for all layers, or one that every k-th layer is without.
void read_windows(const Keys& keys, HfFamily family, ModelConfig& m) {
    const bool used = family == HfFamily::mistral || (family == HfFamily::qwen2 && keys.flag("use_sliding_window", false));
    const int64_t window = used ? keys.size_or(keys.mentions("sliding_window") ? 0 : 4096, "sliding_window") : 0;
    if (family == HfFamily::llama && keys.find("sliding_window")) keys.refuse("sliding_window", "Llama has none; is it a Mistral?");
    const int64_t from = window == 0 ? m.layers : family == HfFamily::qwen2 ? keys.size_or(28, "max_window_layers", 0) : 0;
    const std::vector<bool> windowed = windowed_layers(keys, m.layers, from);
    const auto count = std::count(windowed.begin(), windowed.end(), true);
    if (count > 0 && window == 0) keys.refuse("layer_types", "a layer has sliding attention, but the model has no window");
    if (family != HfFamily::qwen2 && window > 0 && count < m.layers)
        keys.refuse("layer_types", "this model_type has the same attention in all layers");
    m.window = count > 0 ? window : 0;
    if (count == 0 || count == m.layers) return;
    const auto first_full = std::find(windowed.begin(), windowed.end(), false) - windowed.begin();
    m.full_attention_every = first_full + 1;
    for (int64_t l = 0; l < m.layers; ++l)
        if ((m.window_of(l) > 0) != windowed[static_cast<size_t>(l)])
            keys.refuse(keys.find("layer_types") ? "layer_types" : "max_window_layers",
                        "only a window in all layers, or in all but every k-th, can be expressed");
}

Bias read_bias(const Keys& keys, HfFamily family) {
    const bool attention = keys.flag("attention_bias", false), mlp = keys.flag("mlp_bias", false);
    if (family == HfFamily::llama && attention && mlp) return Bias::all;
    if (mlp) keys.refuse("mlp_bias", "biases are supported on all linear layers of Llama, or on none");
    if (attention && family != HfFamily::qwen2) keys.refuse("attention_bias", "biases are supported on all linear layers of Llama, or on none");
    return family == HfFamily::qwen2 ? Bias::qkv : Bias::none;
}

void read_llama(const Keys& keys, const std::string& where, HfFamily family, ModelConfig& m) {
    m.layers = keys.size("num_hidden_layers");
    m.hidden = keys.size("hidden_size");
    m.heads = keys.size("num_attention_heads");
    // Absent, it is the number of heads for Llama only; the other classes have defaults that belong to one size of model.
    if (family != HfFamily::llama && !keys.mentions("num_key_value_heads")) keys.refuse("num_key_value_heads", "it is needed");
    m.kv_heads = keys.size_or(m.heads, "num_key_value_heads");
    if (m.heads % m.kv_heads != 0) keys.refuse("num_key_value_heads", "{} heads are not a multiple of it", m.heads);
    if (!keys.find("head_dim") && m.hidden % m.heads != 0)
        keys.refuse("num_attention_heads", "hidden_size {} is not a multiple of it and head_dim is missing", m.hidden);
    m.head_dim = keys.size_or(m.hidden / m.heads, "head_dim");
    m.ffn_hidden = keys.size("intermediate_size");
    m.max_seq = keys.size("max_position_embeddings");
    m.norm = NormKind::rmsnorm;
    m.norm_eps = keys.number("rms_norm_eps", 1e-6);
    m.activation = ActivationKind::swiglu;
    const std::string activation = keys.text("hidden_act", "silu");
    if (activation != "silu" && activation != "swish") keys.refuse("hidden_act", "silu is supported");
    m.tied = keys.flag("tie_word_embeddings", false);
    m.bias = read_bias(keys, family);
    read_rope(keys, where, m);
    read_windows(keys, family, m);
}

HfFamily read_family(const Keys& keys) {
    const HfFamily family = family_of_type(keys.text("model_type"));
    if (family == HfFamily::none) keys.refuse("model_type", "gpt2, llama, mistral and qwen2 are supported");
    const JsonValue* list = keys.find("architectures");
    const std::string causal = architecture(family), base = causal.substr(0, causal.find(family == HfFamily::gpt2 ? "LMHead" : "For")) + "Model";
    if (list && std::find(list->begin(), list->end(), causal) == list->end() && std::find(list->begin(), list->end(), base) == list->end())
        keys.refuse("architectures", "{} is supported", causal);
    return family;
}

OrderedJson rope_json(const ModelConfig& m) {
    const RopeScaling& s = m.rope_scaling;
    if (s.kind == RopeScalingKind::none) return {{"rope_type", "default"}};
    if (s.kind == RopeScalingKind::linear) return {{"rope_type", "linear"}, {"factor", s.factor}};
    return {{"rope_type", "llama3"}, {"factor", s.factor}, {"low_freq_factor", s.low_freq_factor}, {"high_freq_factor", s.high_freq_factor},
            {"original_max_position_embeddings", s.original_max_seq}};
}

void write_gpt2(const ModelConfig& m, OrderedJson& json) {
    json.update({{"n_layer", m.layers}, {"n_embd", m.hidden}, {"n_head", m.heads},
                 {"n_inner", m.ffn_hidden == 4 * m.hidden ? OrderedJson() : OrderedJson(m.ffn_hidden)}, {"n_positions", m.max_seq},
                 {"layer_norm_epsilon", m.norm_eps},
                 {"activation_function", m.activation == ActivationKind::gelu_tanh ? "gelu_new" : "gelu"},
                 {"resid_pdrop", 0.0}, {"embd_pdrop", 0.0}, {"attn_pdrop", 0.0}});
}
void write_windows(const ModelConfig& m, HfFamily family, OrderedJson& json) {
    if (family == HfFamily::llama) return;
    json["sliding_window"] = m.window > 0 ? OrderedJson(m.window) : OrderedJson();
    if (family == HfFamily::mistral) return;
    json["use_sliding_window"] = m.window > 0;
    json["max_window_layers"] = m.window > 0 ? 0 : m.layers;  // what versions before layer_types read
    for (int64_t l = 0; l < m.layers; ++l) json["layer_types"].push_back(m.window_of(l) > 0 ? "sliding_attention" : "full_attention");
}

void write_llama(const ModelConfig& m, HfFamily family, OrderedJson& json) {
    json.update({{"num_hidden_layers", m.layers}, {"hidden_size", m.hidden},
                 {"num_attention_heads", m.heads}, {"num_key_value_heads", m.kv_heads}, {"head_dim", m.head_dim},
                 {"intermediate_size", m.ffn_hidden}, {"max_position_embeddings", m.max_seq}, {"rms_norm_eps", m.norm_eps},
                 {"hidden_act", "silu"}, {"attention_dropout", 0.0}});
    if (family == HfFamily::llama) json.update({{"attention_bias", m.bias == Bias::all}, {"mlp_bias", m.bias == Bias::all}});
    OrderedJson rope = rope_json(m);
    json["rope_theta"] = m.rope_base;
    json["rope_scaling"] = m.rope_scaling.kind == RopeScalingKind::none ? OrderedJson() : rope;
    rope["rope_theta"] = m.rope_base;
    json["rope_parameters"] = rope;
    write_windows(m, family, json);
}

}  // namespace

bool is_hf_folder(const std::string& dir) {
    const std::string path = dir + "/config.json";
    std::error_code ignored;
    if (!std::filesystem::is_regular_file(path, ignored)) return false;
    const JsonValue json = JsonValue::parse(read_text(path, Exit::checkpoint), nullptr, /*allow_exceptions=*/false);
    return json.is_object() && json.contains("model_type");
}

HfFamily read_hf_family(const std::string& dir) {
    const std::string path = dir + "/config.json";
    return read_family(Keys(path));
}

ModelConfig read_hf_config(const std::string& dir) {
    const std::string path = dir + "/config.json";
    const Keys keys(path);
    const HfFamily family = read_family(keys);
    check_neutral(keys);
    ModelConfig m;
    m.vocab = keys.size("vocab_size");
    m.init_std = keys.number("initializer_range", 0.02);
    if (family == HfFamily::gpt2)
        read_gpt2(keys, m);
    else
        read_llama(keys, path, family, m);
    return m;
}

std::string hf_config_text(const ModelConfig& m, HfFamily family, DType dtype) {
    const char* type = dtype == DType::bf16 ? "bfloat16" : "float32";
    OrderedJson json = {{"architectures", {architecture(family)}}, {"model_type", model_type(family)}, {"vocab_size", m.vocab},
                        {"tie_word_embeddings", m.tied}, {"initializer_range", m.init_std}, {"bos_token_id", nullptr},
                        {"eos_token_id", nullptr}, {"dtype", type}, {"torch_dtype", type}};
    if (family == HfFamily::gpt2)
        write_gpt2(m, json);
    else
        write_llama(m, family, json);
    return json.dump(2) + "\n";
}

}  // namespace trifold
