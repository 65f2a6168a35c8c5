#if __has_include(<catch2/catch_all.hpp>)
#include <catch2/catch_all.hpp>
#else
#include <catch2/catch.hpp>
#endif
// test/unit/test_huggingface.cpp   Hugging Face folders: round trips of the four families, both generations of
// config.json, refusals.
#include <cstring>
#include <map>

#include "base/error.h"
#include "checkpoint/hf_tensors.h"
#include "checkpoint/huggingface.h"
#include "checkpoint/safetensors.h"
#include "model/options.h"
#include "test/unit/temporary_folder.h"

using namespace trifold;
namespace fs = std::filesystem;

namespace {

ModelConfig gpt2_model() {
    ModelConfig m;
    m.layers = 2;
    m.hidden = 24;
    m.heads = m.kv_heads = 3;
    m.head_dim = 8;
    m.ffn_hidden = 40;
    m.vocab = 61;
    m.max_seq = 19;
    return m;
}
ModelConfig llama_model() {
    ModelConfig m = gpt2_model();
    m.kv_heads = 1;
    m.head_dim = 12;
    m.norm = NormKind::rmsnorm;
    m.norm_eps = 1e-6;
    m.position = Position::rope;
    m.rope_base = 500000;
    m.rope_scaling = {RopeScalingKind::llama3, 8.0, 1.0, 4.0, 16};
    m.activation = ActivationKind::swiglu;
    m.bias = Bias::none;
    m.tied = false;
    return m;
}
ModelConfig mistral_model() {
    ModelConfig m = llama_model();
    m.rope_scaling = {};
    m.window = 7;
    return m;
}
ModelConfig qwen2_model() {
    ModelConfig m = llama_model();
    m.rope_scaling = {RopeScalingKind::linear, 2.0, 1.0, 4.0, 8192};
    m.bias = Bias::qkv;
    m.head_dim = 8;
    m.tied = true;
    return m;
}

// Every element its own value, padding zero.
std::vector<float> weights_of(const ParameterTable& table) {
    std::vector<float> flat(static_cast<size_t>(table.flat_elems()));
    float next = 1.0f;
    for (const Parameter& p : table.all())
        for (int64_t i = 0; i < p.elems; ++i) flat[static_cast<size_t>(p.offset + i)] = next++;
    return flat;
}

// Every option of the model, also those that differences() leaves out.
void check_same(const ModelConfig& a, const ModelConfig& b) {
    CHECK(differences(a, b).empty());
    CHECK(a.max_seq == b.max_seq);
    CHECK(a.init_std == b.init_std);
}

template <class Act>
std::string problem_of(Act act) {
    try {
        act();
    } catch (const Problem& e) {
        CHECK(e.code() == Exit::checkpoint);
        return e.what();
    }
    return "";
}
bool has(const std::string& text, const std::string& part) {
    const bool found = text.find(part) != std::string::npos;
    if (!found) UNSCOPED_INFO("said: " << text << "\nwanted: " << part);
    return found;
}

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

TEST_CASE("a folder of each family comes back as it was written") {
    std::vector<std::pair<const char*, ModelConfig>> models = {
        {"gpt2", gpt2_model()}, {"llama", llama_model()}, {"mistral", mistral_model()}, {"qwen2", qwen2_model()}};
    ModelConfig m = gpt2_model();
    m.activation = ActivationKind::gelu_erf;
    m.tied = false;
    m.ffn_hidden = 4 * m.hidden;
    models.push_back({"gpt2", m});
    m = llama_model();
    m.bias = Bias::all;
    m.tied = true;
    models.push_back({"llama", m});
    m = llama_model();
    m.heads = m.kv_heads = 5;  // Llama's own config wants hidden to be a multiple of heads
    models.push_back({"mistral", m});
    m = qwen2_model();
    m.window = 5;
    models.push_back({"qwen2", m});
    m.layers = 5;
    m.full_attention_every = 2;
    models.push_back({"qwen2", m});

    for (const auto& [type, model] : models) {
        INFO(type);
        const TemporaryFolder folder;
        const ParameterTable table(model);
        const std::vector<float> weights = weights_of(table);
        CHECK(export_hf(folder / "out/", model, table, weights.data()) == 4 * table.count());
        CHECK(is_hf_folder(folder / "out"));
        CHECK(has(file_bytes(folder / "out/config.json"), "\"model_type\": \"" + std::string(type) + "\""));
        check_same(read_hf_config(folder / "out"), model);
        std::vector<float> back(weights.size(), 1.0f);
        import_hf(folder / "out", table, back.data());
        CHECK(std::memcmp(back.data(), weights.data(), back.size() * 4) == 0);
        CHECK((SafetensorsFile(folder / "out/model.safetensors").find("lm_head.weight") == nullptr) == model.tied);
        CHECK_FALSE(fs::exists(folder / "out.tmp"));
    }
}

TEST_CASE("GPT-2 keeps q, k and v in one tensor and matrices transposed") {
    const TemporaryFolder folder;
    ModelConfig model = gpt2_model();
    model.hidden = 320;  // large enough that a matrix is handled in several parts
    model.heads = model.kv_heads = 40;
    const ParameterTable table(model);
    const std::vector<float> weights = weights_of(table);
    CHECK(rows_at_once(hf_tensors(HfFamily::gpt2, table)[4]) < 300);
    dump_tensors(folder / "model.safetensors", model, table, weights.data());
    write_bytes(folder / "config.json", R"({"model_type": "gpt2"})");
    std::vector<float> back(weights.size());
    import_hf(folder.path(), table, back.data());
    CHECK(std::memcmp(back.data(), weights.data(), back.size() * 4) == 0);
    const SafetensorsFile file(folder / "model.safetensors");
    CHECK(file.tensors().size() == 2 + 2 * 12 + 2);
    const auto at = [&](const std::string& name, int64_t i) {
        float x = 0;
        to_float(*file.find(name), i, 1, &x);
        return x;
    };
    const auto ours = [&](const std::string& name, int64_t i) {
        return weights[static_cast<size_t>(table.at(name).offset + i)];
    };
    const int64_t C = model.hidden, F = model.ffn_hidden;
    const std::string layer = "transformer.h.1.";
    REQUIRE(file.find(layer + "attn.c_attn.weight"));
    CHECK(file.find(layer + "attn.c_attn.weight")->shape == std::vector<int64_t>{C, 3 * C});
    CHECK(at(layer + "attn.c_attn.weight", 5 * 3 * C + C + 7) == ours("layers.1.attention.k.weight", 7 * C + 5));
    CHECK(at(layer + "attn.c_attn.weight", 301 * 3 * C + C + 7) == ours("layers.1.attention.k.weight", 7 * C + 301));
    CHECK(at(layer + "attn.c_attn.bias", 2 * C + 3) == ours("layers.1.attention.v.bias", 3));
    CHECK(at(layer + "mlp.c_fc.weight", 4 * F + 9) == ours("layers.1.ffn.up.weight", 9 * C + 4));
    CHECK(at(layer + "mlp.c_proj.weight", 4 * C + 9) == ours("layers.1.ffn.down.weight", 9 * F + 4));
    CHECK(at("transformer.wte.weight", 60 * C + 1) == ours("embedding.token.weight", 60 * C + 1));
    CHECK(at("transformer.ln_f.bias", 2) == ours("final_norm.bias", 2));
}

TEST_CASE("dumps of models outside the families have our names") {
    const TemporaryFolder folder;
    ModelConfig model = gpt2_model();
    model.block = BlockKind::parallel;
    const ParameterTable table(model);
    const std::vector<float> weights = weights_of(table);
    dump_tensors(folder / "x.safetensors", model, table, weights.data());
    const SafetensorsFile file(folder / "x.safetensors");
    CHECK(file.tensors().size() == table.all().size());
    for (const Parameter& p : table.all()) {
        REQUIRE(file.find(p.name));
        CHECK(std::memcmp(file.find(p.name)->data, &weights[static_cast<size_t>(p.offset)],
                          static_cast<size_t>(p.elems) * 4) == 0);
    }
    CHECK(has(problem_of([&] { export_hf(folder / "out", model, table, weights.data()); }), "model.block=parallel"));
    model = qwen2_model();
    model.qk_norm = true;
    CHECK(family_of(model) == HfFamily::none);
    model = llama_model();
    model.window = 4;
    model.full_attention_every = 2;
    CHECK(family_of(model) == HfFamily::none);
}

TEST_CASE("bf16 and several files") {
    const TemporaryFolder folder;
    const ModelConfig model = llama_model();
    const ParameterTable table(model);
    const std::vector<float> weights = weights_of(table);
    write_bytes(folder / "tokenizer.json", "{}");
    CHECK(export_hf(folder / "out", model, table, weights.data(),
                    {.dtype = DType::bf16, .file_bytes = 5000, .tokenizer = folder / "tokenizer.json"}) ==
          2 * table.count());
    CHECK(fs::exists(folder / "out/tokenizer.json"));
    CHECK(fs::exists(folder / "out/model-00001-of-00006.safetensors"));
    CHECK_FALSE(fs::exists(folder / "out/model.safetensors"));
    CHECK(SafetensorsFile(folder / "out/model-00001-of-00006.safetensors").tensors()[0].type == SafeType::bf16);
    CHECK(SafetensorsFile(folder / "out/model-00001-of-00006.safetensors").metadata().at("format") == "pt");
    std::vector<float> back(weights.size());
    import_hf(folder / "out", table, back.data());
    int wrong = 0;
    for (size_t i = 0; i < back.size(); ++i) wrong += back[i] != static_cast<float>(bf16(weights[i]));
    CHECK(wrong == 0);

    const std::string index = file_bytes(folder / "out/model.safetensors.index.json");
    CHECK(has(index, "\"total_size\": " + std::to_string(2 * table.count())));
    std::string renamed = index;
    renamed.replace(renamed.find("model.norm.weight"), 17, "model.nrom.weight");
    write_bytes(folder / "out/model.safetensors.index.json", renamed);
    CHECK(has(problem_of([&] { import_hf(folder / "out", table, back.data()); }),
              "'model.nrom.weight' is not in model-00006"));
    write_bytes(folder / "out/model.safetensors.index.json", index);
    fs::remove(folder / "out/model-00003-of-00006.safetensors");
    CHECK(has(problem_of([&] { import_hf(folder / "out", table, back.data()); }),
              "model-00003-of-00006.safetensors: No such file"));
    fs::remove(folder / "out/model.safetensors.index.json");
    CHECK(
        has(problem_of([&] { import_hf(folder / "out", table, back.data()); }), "holds neither model.safetensors nor"));
    CHECK(has(problem_of([&] { export_hf(folder / "out", model, table, weights.data()); }), "is not an empty folder"));
    CHECK(has(
        problem_of([&] { export_hf(folder / "new", model, table, weights.data(), {.tokenizer = folder / "gone"}); }),
        "gone"));
    CHECK_FALSE(fs::exists(folder / "new"));
    CHECK_FALSE(fs::exists(folder / "new.tmp"));
}

TEST_CASE("tensors that do not fit are named") {
    const TemporaryFolder folder;
    ModelConfig model = gpt2_model();
    const ParameterTable table(model);
    const std::vector<float> weights = weights_of(table);
    export_hf(folder.path() + "/out", model, table, weights.data());
    const std::string path = folder / "out/model.safetensors";

    // Writes the file again with some tensors renamed, left out (empty name), or added.
    const auto rewrite = [&](const Fields& names, const std::vector<SafetensorsWriter::Entry>& added = {},
                             const float* added_data = nullptr) {
        const std::string original = file_bytes(path);
        {
            const SafetensorsFile file(path);
            std::vector<SafetensorsWriter::Entry> entries;
            std::vector<const SafeTensor*> kept;
            for (const SafeTensor& t : file.tensors()) {
                std::string name = t.name;
                if (names.contains("prefix")) name = name.substr(name.find('.') + 1);
                if (const auto it = names.find(t.name); it != names.end()) name = it->second;
                if (name.empty()) continue;
                entries.push_back({name, t.type, t.shape});
                kept.push_back(&t);
            }
            entries.insert(entries.end(), added.begin(), added.end());
            SafetensorsWriter writer(folder / "new", entries);
            for (const SafeTensor* t : kept) writer.write(t->data, t->bytes);
            for (const auto& e : added) writer.write(added_data, elems_of(e.shape) * 4);
            writer.finish();
        }
        fs::rename(folder / "new", path);
        std::vector<float> back(weights.size());
        const std::string problem = problem_of([&] {
            import_hf(folder / "out", table, back.data());
            CHECK(std::memcmp(back.data(), weights.data(), back.size() * 4) == 0);
        });
        write_bytes(path, original);
        return problem;
    };
    CHECK(rewrite({}).empty());
    CHECK(rewrite({{"prefix", ""}}).empty());  // saved without the head, as the published GPT-2 is
    CHECK(has(rewrite({{"transformer.h.0.ln_1.bias", ""}}), "transformer.h.0.ln_1.bias is missing"));
    CHECK(has(rewrite({{"transformer.h.0.ln_1.bias", "x.y"}}),
              "transformer.h.0.ln_1.bias is missing, x.y is not part of the model"));
    const std::vector<float> masks(61 * 24, 0.5f);
    CHECK(rewrite({},
                  {{"transformer.h.0.attn.bias", SafeType::f32, {1, 1, 19, 19}},
                   {"h.1.attn.masked_bias", SafeType::f32, {}}},
                  masks.data())
              .empty());
    CHECK(has(rewrite({}, {{"lm_head.weight", SafeType::f32, {61, 24}}}, masks.data()),
              "lm_head.weight is not the embedding, though the head is tied"));
    CHECK(rewrite({}, {{"lm_head.weight", SafeType::f32, {61, 24}}},
                  &weights[static_cast<size_t>(table.at("embedding.token.weight").offset)])
              .empty());

    model.max_seq = 20;
    std::vector<float> back(static_cast<size_t>(ParameterTable(model).flat_elems()));
    CHECK(has(problem_of([&] { import_hf(folder / "out", ParameterTable(model), back.data()); }),
              "transformer.wpe.weight is [19, 24] there and [20, 24] in the model"));
    const ParameterTable llama(llama_model());
    back.resize(static_cast<size_t>(llama.flat_elems()));
    const std::string problem = problem_of([&] { import_hf(folder / "out", llama, back.data()); });
    CHECK(has(problem, "layers.0.ffn.gate.weight is missing"));
    CHECK(has(problem, " more"));
    write_bytes(path, file_bytes(path).substr(0, 4000));
    CHECK(has(problem_of([&] { import_hf(folder / "out", table, back.data()); }), "model.safetensors: "));
}

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
              "not valid JSON"));
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
    CHECK(has(problem_of([&] { read_hf_config(folder.path()); }), "the key 'model_type' is given twice"));
    write_bytes(folder / "config.json", "[]");
    CHECK(has(problem_of([&] { read_hf_config(folder.path()); }), "is not a JSON object"));
}
