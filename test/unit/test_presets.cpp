// test/unit/test_presets.cpp   Presets and the cost model against published numbers.
#include "test/catch.h"

#include <cmath>

#include "model/flops.h"
#include "model/options.h"
#include "model/parameters.h"
#include "model/presets.h"

using namespace trifold;

namespace {

ModelConfig model_of(const std::vector<std::string>& args) {
    Config c = parse_config(args);
    resolve(c);
    return c.model;
}
bool near(double a, double b, double relative = 1e-12) { return std::abs(a - b) <= relative * std::abs(b); }
ModelConfig preset_model(const std::string& name) { return model_of({"--model.preset=" + name}); }

}  // namespace

TEST_CASE("parameter counts of the presets are the published ones") {
    const std::pair<const char*, int64_t> published[] = {
        {"gpt2-124m", 124'439'808},     {"gpt2-355m", 354'823'168},       {"gpt2-774m", 774'030'080},
        {"gpt2-1558m", 1'557'611'200},  {"llama2-7b", 6'738'415'616},     {"llama3-8b", 8'030'261'248},
        {"llama3-70b", 70'553'706'496}, {"llama3-405b", 405'853'388'800}, {"mistral-7b", 7'241'732'096},
        {"qwen2.5-0.5b", 494'032'768},  {"qwen2.5-7b", 7'615'616'512},    {"qwen2.5-32b", 32'763'876'352},
    };
    for (const auto& [name, params] : published) {
        INFO(name);
        CHECK(parameter_count(preset_model(name)) == params);
    }
    // Published in words only, or with another vocabulary: billions.
    const std::pair<const char*, double> about[] = {
        {"gpt3-1.3b", 1.3}, {"gpt3-13b", 13}, {"gpt3-175b", 175}, {"megascale-175b", 175}, {"megascale-530b", 530}};
    for (const auto& [name, billions] : about) {
        INFO(name);
        CHECK(near(static_cast<double>(parameter_count(preset_model(name))), billions * 1e9, 0.02));
    }
}

TEST_CASE("every preset resolves, and the closed formula counts what the parameter table counts") {
    for (const Preset& p : presets()) {
        INFO(p.name);
        const ModelConfig m = preset_model(p.name);
        CHECK(m.preset == p.name);
        CHECK(parameter_count(m) == ParameterTable(m).count());
        CHECK(m.kv_heads > 0);
    }
    const std::vector<std::string> tiny = {"--model.preset=tiny-llama"};
    for (const char* flag :
         {"--model.bias=all", "--model.bias=qkv", "--model.norm=layernorm", "--model.qk_norm", "--model.tied",
          "--model.position=learned", "--model.block=parallel", "--model.activation=gelu", "--model.head_dim=48"}) {
        INFO(flag);
        const ModelConfig m = model_of({tiny[0], flag});
        CHECK(parameter_count(m) == ParameterTable(m).count());
    }
}

TEST_CASE("the ten parameter counts of Megatron-LM's SC'21 table") {
    struct Row {
        double billions;
        int64_t heads, hidden, layers;
    };
    const Row rows[] = {{1.7, 24, 2304, 24},      {3.6, 32, 3072, 30},     {7.5, 32, 4096, 36},
                        {18.4, 48, 6144, 40},     {39.1, 64, 8192, 48},    {76.1, 80, 10240, 60},
                        {145.6, 96, 12288, 80},   {310.1, 128, 16384, 96}, {529.6, 128, 20480, 105},
                        {1008.0, 160, 25600, 128}};
    for (const Row& r : rows) {
        INFO(r.billions);
        const ModelConfig m =
            model_of({"--model.layers=" + std::to_string(r.layers), "--model.hidden=" + std::to_string(r.hidden),
                      "--model.heads=" + std::to_string(r.heads), "--model.vocab=51200", "--model.max_seq=2048"});
        const double digits = r.billions > 1000 ? 1 : 10;  // as many as were printed
        CHECK(near(std::round(static_cast<double>(parameter_count(m)) / 1e9 * digits) / digits, r.billions));
    }
}

TEST_CASE("Megatron-Bridge's TFLOP/s per GPU follow from its tokens/s") {
    // Its convention takes seq / 2 visible keys; counted exactly they are (seq + 1) / 2.
    CHECK(std::abs(14451 * flops_per_token(preset_model("llama3-8b"), 8192) / 1e12 - 743.8) < 0.06);
    CHECK(std::abs(1602 * flops_per_token(preset_model("llama3-70b"), 8192) / 1e12 - 719.7) < 0.06);
}

TEST_CASE("visible keys are counted exactly") {
    for (const int64_t seq : {1, 2, 7, 64})
        for (const int64_t window : {0, 1, 3, 7, 64, 100}) {
            INFO(seq << " " << window);
            int64_t pairs = 0;
            for (int64_t i = 0; i < seq; ++i)
                for (int64_t j = 0; j <= i; ++j) pairs += window == 0 || i - j < window;
            CHECK(near(mean_visible_keys(seq, window) * static_cast<double>(seq), static_cast<double>(pairs)));
        }
}

TEST_CASE("operations per token, by hand for a small model") {
    // tiny-megascale: hidden 256, 4 heads of 64 on 2 keys, ffn 1024, vocabulary 257, layer 0 has window 48, layer 1
    // none.
    const ModelConfig m = preset_model("tiny-megascale");
    const int64_t matrices = 2 * (256 * 256 + 2 * 128 * 256 + 256 * 256 + 2 * 256 * 1024) + 257 * 256;
    const double keys = (48.0 * 49 / 2 + 80 * 48) / 128 + 64.5;
    CHECK(matrix_parameters(m) == matrices);
    CHECK(near(flops_per_token(m, 128), 6.0 * static_cast<double>(matrices) + 12.0 * 256 * keys));
    CHECK(forward_flops_per_token(m, 128) * 3 == flops_per_token(m, 128));
    ModelConfig untied = m;
    untied.tied = false;
    CHECK(flops_per_token(untied, 128) == flops_per_token(m, 128));
}
