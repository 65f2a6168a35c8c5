// test/unit/test_hf_config.cpp   config.json of transformers: both generations, and what is refused.
#include "test/catch.h"

#include <map>

#include "checkpoint/huggingface.h"
#include "test/unit/problems.h"
#include "test/unit/temporary_folder.h"

using namespace trifold;

namespace {

// A config.json from keys and JSON values; later ones replace earlier ones, and an empty value removes the key.
using Fields = std::map<std::string, std::string>;
ModelConfig read_config(const Fields& base, const Fields& changes = {}) {
    const TemporaryFolder folder;
    Fields all = base;
    for (const auto& [key, value] : changes) all[key] = value;
    std::string text;
    for (const auto& [key, value] : all)
        if (!value.empty()) text += (text.empty() ? "{\"" : ", \"") + key + "\": " + value;
    write_bytes(folder / "config.json", text + "}");
    return read_hf_config(folder.path());
}
const Fields gpt2_fields = {{"model_type", "\"gpt2\""},
                            {"architectures", "[\"GPT2LMHeadModel\"]"},
                            {"n_layer", "2"},
                            {"n_embd", "24"},
                            {"n_head", "3"},
                            {"n_positions", "19"},
                            {"vocab_size", "61"},
                            {"n_inner", "null"},
                            {"attn_pdrop", "0.1"}};
const Fields llama_fields = {{"model_type", "\"llama\""},       {"architectures", "[\"LlamaForCausalLM\"]"},
                             {"num_hidden_layers", "4"},        {"hidden_size", "24"},
                             {"num_attention_heads", "3"},      {"intermediate_size", "40"},
                             {"max_position_embeddings", "19"}, {"vocab_size", "61"},
                             {"rms_norm_eps", "1e-05"},         {"torch_dtype", "\"bfloat16\""}};
Fields of_type(const std::string& type, const Fields& more = {}) {
    Fields f = llama_fields;
    f["model_type"] = "\"" + type + "\"";
    f["architectures"] = "";
    f["num_key_value_heads"] = "1";
    for (const auto& [key, value] : more) f[key] = value;
    return f;
}

}  // namespace

TEST_CASE("config.json as transformers 4 and 5 write it") {
    ModelConfig m = read_config(gpt2_fields);
    CHECK((m.norm == NormKind::layernorm && m.position == Position::learned && m.bias == Bias::all && m.tied &&
           !m.swiglu()));
    CHECK((m.head_dim == 8 && m.kv_heads == 3 && m.ffn_hidden == 96 && m.max_seq == 19 && m.norm_eps == 1e-5 &&
           m.init_std == 0.02));
    CHECK(read_config(gpt2_fields, {{"activation_function", "\"gelu\""}}).activation == ActivationKind::gelu_erf);
    CHECK_FALSE(read_config(gpt2_fields, {{"tie_word_embeddings", "false"}}).tied);

    m = read_config(llama_fields);
    CHECK((m.kv_heads == 3 && m.head_dim == 8 && m.rope_base == 10000 && m.rope_scaling.kind == RopeScalingKind::none &&
           !m.tied && m.bias == Bias::none && m.window == 0));
    const std::string scaling =
        R"({"factor": 32.0, "high_freq_factor": 4.5, "low_freq_factor": 1.5, "original_max_position_embeddings": 8192, "rope_type": "llama3")";
    for (const Fields& form : {Fields{{"rope_theta", "500000.0"}, {"rope_scaling", scaling + "}"}},
                               Fields{{"rope_parameters", scaling + ", \"rope_theta\": 500000}"}},
                               Fields{{"rope_theta", "5e5"},
                                      {"rope_scaling", scaling + "}"},
                                      {"rope_parameters", scaling + ", \"rope_theta\": 500000}"}}}) {
        m = read_config(llama_fields, form);
        CHECK((m.rope_base == 500000 && m.rope_scaling.kind == RopeScalingKind::llama3 && m.rope_scaling.factor == 32 &&
               m.rope_scaling.low_freq_factor == 1.5));
        CHECK((m.rope_scaling.high_freq_factor == 4.5 && m.rope_scaling.original_max_seq == 8192));
    }
    m = read_config(llama_fields, {{"rope_scaling", R"({"type": "linear", "factor": 4})"}});
    CHECK((m.rope_scaling.kind == RopeScalingKind::linear && m.rope_scaling.factor == 4));

    CHECK(read_config(of_type("mistral")).window == 4096);  // the default of the class
    CHECK(read_config(of_type("mistral", {{"sliding_window", "null"}})).window == 0);
    CHECK(read_config(of_type("mistral", {{"sliding_window", "8"}, {"head_dim", "null"}})).window == 8);

    m = read_config(of_type("qwen2", {{"sliding_window", "8"}}));
    CHECK((m.bias == Bias::qkv && m.window == 0));  // not used unless use_sliding_window says so
    const auto qwen2 = [&](const Fields& more) {
        Fields f = of_type("qwen2", {{"use_sliding_window", "true"}, {"sliding_window", "8"}});
        return read_config(f, more);
    };
    CHECK(qwen2({}).window == 0);  // 28 layers without a window is the default of the class
    CHECK(qwen2({{"max_window_layers", "4"}}).window == 0);
    CHECK(qwen2({{"max_window_layers", "0"}}).window == 8);
    CHECK(qwen2({{"max_window_layers", "0"}}).full_attention_every == 0);
    m = qwen2({{"layer_types", R"(["sliding_attention", "full_attention", "sliding_attention", "full_attention"])"}});
    CHECK((m.window == 8 && m.full_attention_every == 2));
    m = qwen2(
        {{"layer_types", R"(["sliding_attention", "sliding_attention", "sliding_attention", "full_attention"])"}});
    CHECK(m.full_attention_every == 4);
}

TEST_CASE("what cannot be expressed is refused with key and value") {
    const auto refused = [](const Fields& base, const std::string& key, const std::string& value,
                            const Fields& more = {}) {
        Fields changes = more;
        changes[key] = value;
        const std::string sentence = problem_of([&] { read_config(base, changes); });
        return has(sentence, "config.json") && has(sentence, key + " is " + (value.empty() ? "missing" : value));
    };
    CHECK(refused(gpt2_fields, "model_type", "\"gpt_neo\""));
    CHECK(refused(gpt2_fields, "model_type", ""));
    CHECK(refused(gpt2_fields, "architectures", "[\"GPT2ForSequenceClassification\"]"));
    CHECK(refused(gpt2_fields, "activation_function", "\"relu\""));
    CHECK(refused(gpt2_fields, "scale_attn_by_inverse_layer_idx", "true"));
    CHECK(refused(gpt2_fields, "scale_attn_weights", "false"));
    CHECK(refused(gpt2_fields, "add_cross_attention", "true"));
    CHECK(refused(gpt2_fields, "n_layer", ""));
    CHECK(refused(gpt2_fields, "n_layer", "0"));
    CHECK(refused(gpt2_fields, "n_layer", "\"2\""));
    CHECK(refused(gpt2_fields, "n_layer", "2.5"));
    CHECK(refused(gpt2_fields, "n_head", "5"));
    CHECK(refused(gpt2_fields, "layer_norm_epsilon", "-1e-05"));
    CHECK(refused(gpt2_fields, "tie_word_embeddings", "1"));
    CHECK(refused(llama_fields, "hidden_act", "\"gelu\""));
    CHECK(refused(llama_fields, "mlp_bias", "true"));
    CHECK(refused(llama_fields, "attention_bias", "true"));
    CHECK(read_config(llama_fields, {{"attention_bias", "true"}, {"mlp_bias", "true"}}).bias == Bias::all);
    CHECK(refused(llama_fields, "num_key_value_heads", "2"));
    CHECK(refused(llama_fields, "sliding_window", "8"));
    CHECK(refused(llama_fields, "final_logit_softcapping", "30.0"));
    CHECK(refused(llama_fields, "quantization_config", R"({"bits":4})"));
    CHECK(refused(llama_fields, "partial_rotary_factor", "0.5"));
    CHECK(refused(llama_fields, "rope_theta", "\"big\""));
    CHECK(refused(llama_fields, "layer_types",
                  R"(["chunked_attention","full_attention","full_attention","full_attention"])"));
    CHECK(refused(llama_fields, "layer_types",
                  R"(["sliding_attention","full_attention","full_attention","full_attention"])"));
    CHECK(refused(llama_fields, "layer_types", R"(["full_attention"])"));
    CHECK(has(problem_of([&] {
                  read_config(llama_fields, {{"rope_scaling", R"({"rope_type": "yarn", "factor": 4.0})"}});
              }),
              "rope_scaling: rope_type is \"yarn\""));
    CHECK(has(problem_of([&] {
                  read_config(llama_fields, {{"rope_scaling", R"({"type": "dynamic", "factor": 4.0})"}});
              }),
              "rope_scaling: type is \"dynamic\""));
    CHECK(has(problem_of([&] {
                  read_config(llama_fields, {{"rope_parameters", R"({"rope_type": "llama3", "factor": 4.0})"}});
              }),
              "rope_parameters: low_freq_factor is missing"));
    CHECK(has(problem_of([&] {
                  read_config(llama_fields, {{"rope_parameters", R"({"rope_theta": 5}))"}, {"rope_theta", "6"}});
              }),
              "config.json, line 1, column "));
    CHECK(has(problem_of([&] {
                  read_config(llama_fields, {{"rope_parameters", R"({"rope_theta": 5})"}, {"rope_theta", "6"}});
              }),
              "rope_theta is 5: outside it is 6"));
    CHECK(has(problem_of([&] {
                  read_config(llama_fields, {{"rope_parameters", R"({"full_attention": {"rope_theta": 5}})"}});
              }),
              "differ between layers"));
    CHECK(refused(of_type("mistral"), "num_key_value_heads", ""));
    CHECK(refused(of_type("mistral"), "layer_types",
                  R"(["sliding_attention","full_attention","sliding_attention","full_attention"])"));
    const Fields qwen2 = of_type("qwen2", {{"use_sliding_window", "true"}, {"sliding_window", "8"}});
    CHECK(refused(qwen2, "max_window_layers", "2"));
    CHECK(refused(qwen2, "layer_types",
                  R"(["full_attention","sliding_attention","sliding_attention","sliding_attention"])"));
    CHECK(refused(of_type("qwen2"), "layer_types",
                  R"(["sliding_attention","sliding_attention","sliding_attention","sliding_attention"])"));

    const TemporaryFolder folder;
    CHECK_FALSE(is_hf_folder(folder.path()));
    write_bytes(folder / "config.json", R"({"model": {"layers": 3}})");
    CHECK_FALSE(is_hf_folder(folder.path()));
    write_bytes(folder / "config.json", R"({"model_type": "gpt2", "model_type": "llama"})");
    CHECK(has(problem_of([&] { read_hf_config(folder.path()); }), "the key model_type appears twice"));
    write_bytes(folder / "config.json", "[]");
    CHECK(has(problem_of([&] { read_hf_config(folder.path()); }), "is not a JSON object"));
}
