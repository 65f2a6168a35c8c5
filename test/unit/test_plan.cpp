// test/unit/test_plan.cpp   What `trifold plan` prints.
#include "test/catch.h"

#include <algorithm>
#include <nlohmann/json.hpp>
#include <set>

#include "model/flops.h"
#include "model/options.h"
#include "model/plan.h"
#include "model/presets.h"

using namespace trifold;

namespace {

constexpr MemoryByClass memory = {1 << 20, 2 << 20, 3 << 20, 4 << 20, 5 << 20};

Config config_of(std::vector<std::string> args) {
    args.insert(args.begin(), "--model.preset=gpt2-124m");
    Config c = parse_config(args);
    resolve(c);
    return c;
}

}  // namespace

TEST_CASE("plan as JSON has the documented object") {
    const Config c = config_of({"--train.micro_batch=2", "--train.global_batch=6"});
    const auto plan = nlohmann::json::parse(to_json(make_plan(c, [](const Config&, int) { return memory; }), c));
    CHECK(plan["params"] == 124439808);
    CHECK(plan["params_active"] == 124439808);
    CHECK(plan["flops_per_token"] == flops_per_token(c.model, 1024));
    CHECK(plan["flops_convention"] == flops_convention());
    CHECK(plan["checkpoint_bytes"] == 12 * 124439808ll);
    CHECK(plan["bubble"] == 0);
    CHECK(plan["schedule"] == "stage 0: F0 B0 F1 B1 F2 B2");
    for (const char* axis : {"tp", "pp", "dp", "ep"}) CHECK(plan["comm_bytes_per_step"][axis] == 0);
    REQUIRE(plan["per_rank"].size() == 1);
    const auto& rank = plan["per_rank"][0];
    CHECK(rank["rank"] == 0);
    CHECK(rank["stage"] == 0);
    CHECK(rank["layers"].size() == 12);
    CHECK(rank["layers"][11] == 11);
    CHECK(rank["params"] == 124439808);
    CHECK(rank["memory_bytes"] ==
          nlohmann::json::parse(R"({"params": 1048576, "grads": 2097152, "optimizer": 3145728, "activations": 4194304,
                                                           "workspace": 5242880, "total": 15728640})"));
}

TEST_CASE("plan for people has units and the convention, and shortens long schedules") {
    const Config c = config_of({"--train.global_batch=512"});
    const std::string text = to_text(make_plan(c, [](const Config&, int) { return memory; }), c);
    for (const char* part : {"124,439,808", "FLOP per token", "causal", "memory per rank (MiB)", "0-11", "15.0",
                             "1.39 GiB each", "stage 0: F0 B0 F1", " ... ", "F511 B511"}) {
        INFO(part);
        CHECK(text.find(part) != std::string::npos);
    }
    size_t longest = 0;
    for (size_t at = 0, end; at < text.size(); at = end + 1) {
        end = text.find('\n', at);
        longest = std::max(longest, end - at);
    }
    CHECK(longest <= 120);
}

TEST_CASE("every preset is planned on a machine it was made for") {
    for (const Preset& preset : presets()) {
        const std::string& name = preset.name;
        INFO(name);
        Config c = parse_config({"--model.preset=" + name, "--train.dtype=bf16", "--train.recompute=selective"});
        const auto heads = [&](int64_t tp) { return c.model.kv_heads % tp == 0 && c.model.heads % tp == 0; };
        Config one = c;
        resolve(one);
        c.model = one.model;
        const bool large = parameter_count(c.model) > int64_t{20} * 1000 * 1000 * 1000;
        c.mesh.tp = heads(8) && large ? 8 : 1;
        c.mesh.pp = large ? std::min<int64_t>(16, c.model.layers) : 1;
        c.train.global_batch = 0;
        resolve(c, static_cast<int>(c.mesh.tp * c.mesh.pp * 4));
        const Plan plan = make_plan(c);
        CHECK(plan.per_rank.size() == static_cast<size_t>(c.mesh.tp * c.mesh.pp * 4));
        std::set<int64_t> layers;
        for (const RankPlan& r : plan.per_rank) {
            layers.insert(r.layers.begin(), r.layers.end());
            CHECK(r.memory[0] >= 2 * r.params);
        }
        CHECK(static_cast<int64_t>(layers.size()) == c.model.layers);
        CHECK(to_text(plan, c, &find_gpu("h200")).find("fit in its 141 GiB") != std::string::npos);
    }
}

TEST_CASE("the schedule has one line per stage") {
    Config c = parse_config({"--model.preset=gpt2-124m", "--mesh.pp=2", "--train.global_batch=2"});
    resolve(c, 2);
    CHECK(nlohmann::json::parse(to_json(make_plan(c), c))["schedule"] == "stage 0: F0 F1 B0 B1\nstage 1: F0 B0 F1 B1");
}

TEST_CASE("MegaScale's 12,288 ranks: the paper's bubble") {
    Config c = parse_config({"--model.preset=megascale-175b", "--mesh.tp=8", "--mesh.pp=8", "--mesh.virtual_stages=6", "--train.global_batch=6144", "--train.dtype=bf16"});
    resolve(c, 12288);
    const Plan plan = make_plan(c);
    CHECK(plan.per_rank.size() == 12288);
    CHECK(plan.bubble == Approx(7.0 / (6 * 32)));  // arXiv 2402.15627: m = 32, v = 6, p = 8
    CHECK(plan.per_rank.front().layers == std::vector<int64_t>{0, 1, 16, 17, 32, 33, 48, 49, 64, 65, 80, 81});
    CHECK_THROWS_AS(find_gpu("h1000"), Problem);
}
