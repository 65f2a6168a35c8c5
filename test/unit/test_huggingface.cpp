// test/unit/test_huggingface.cpp   Hugging Face folders: round trips of the four families, tensors that
// do not fit.
#include "test/catch.h"

#include <algorithm>
#include <cstring>
#include <map>

#include "checkpoint/hf_tensors.h"
#include "checkpoint/huggingface.h"
#include "checkpoint/safetensors.h"
#include "model/options.h"
#include "test/unit/problems.h"
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
        std::vector<float> back(weights.size());
        import_hf(folder / "out", model, whole_state(table, back.data()));
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
    const std::vector<HfTensor> tensors = hf_tensors(HfFamily::gpt2, table);
    const auto fused = std::find_if(tensors.begin(), tensors.end(), [](const HfTensor& t) { return t.name == "transformer.h.0.attn.c_attn.weight"; });
    REQUIRE(fused != tensors.end());
    CHECK(rows_at_once(*fused) < 300);
    dump_tensors(folder / "model.safetensors", model, table, weights.data());
    write_bytes(folder / "config.json", R"({"model_type": "gpt2"})");
    std::vector<float> back(weights.size());
    import_hf(folder.path(), model, whole_state(table, back.data()));
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
    import_hf(folder / "out", model, whole_state(table, back.data()));
    int wrong = 0;
    for (size_t i = 0; i < back.size(); ++i) wrong += back[i] != static_cast<float>(bf16(weights[i]));
    CHECK(wrong == 0);

    const std::string index = file_bytes(folder / "out/model.safetensors.index.json");
    CHECK(has(index, "\"total_size\": " + std::to_string(2 * table.count())));
    std::string renamed = index;
    renamed.replace(renamed.find("model.norm.weight"), 17, "model.nrom.weight");
    write_bytes(folder / "out/model.safetensors.index.json", renamed);
    CHECK(has(problem_of([&] { import_hf(folder / "out", model, whole_state(table, back.data())); }),
              "'model.nrom.weight' is not in model-00006"));
    write_bytes(folder / "out/model.safetensors.index.json", index);
    fs::remove(folder / "out/model-00003-of-00006.safetensors");
    CHECK(has(problem_of([&] { import_hf(folder / "out", model, whole_state(table, back.data())); }),
              "model-00003-of-00006.safetensors: No such file"));
    fs::remove(folder / "out/model.safetensors.index.json");
    CHECK(
        has(problem_of([&] { import_hf(folder / "out", model, whole_state(table, back.data())); }), "holds neither model.safetensors nor"));
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
    const auto rewrite = [&](const std::map<std::string, std::string>& names,
                             const std::vector<SafetensorsWriter::Entry>& added = {},
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
            import_hf(folder / "out", model, whole_state(table, back.data()));
            CHECK(std::memcmp(back.data(), weights.data(), back.size() * 4) == 0);
        });
        write_bytes(path, original);
        return problem;
    };
    CHECK(rewrite({}).empty());
    CHECK(rewrite({{"prefix", ""}}).empty());  // saved without the head, as the published GPT-2 is
    CHECK(has(rewrite({{"transformer.h.0.ln_1.bias", ""}}), "transformer.h.0.ln_1.bias is missing"));
    CHECK(has(rewrite({{"transformer.h.0.ln_1.bias", "x.y"}}),
              "transformer.h.0.ln_1.bias is missing and x.y is not part of the model"));
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
    const ParameterTable longer(model);
    std::vector<float> back(static_cast<size_t>(longer.flat_elems()));
    CHECK(has(problem_of([&] { import_hf(folder / "out", model, whole_state(longer, back.data())); }),
              "transformer.wpe.weight is [19, 24] there and [20, 24] in the model"));
    const ParameterTable llama(llama_model());
    back.resize(static_cast<size_t>(llama.flat_elems()));
    const std::string problem = problem_of([&] { import_hf(folder / "out", llama_model(), whole_state(llama, back.data())); });
    CHECK(has(problem, "layers.0.ffn.gate.weight is missing"));
    CHECK(has(problem, " more"));
    write_bytes(path, file_bytes(path).substr(0, 4000));
    CHECK(has(problem_of([&] { import_hf(folder / "out", model, whole_state(table, back.data())); }), "model.safetensors: "));
}
