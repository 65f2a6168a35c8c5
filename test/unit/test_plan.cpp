// test/unit/test_plan.cpp   What `trifold plan` prints.
#include "test/catch.h"

#include <nlohmann/json.hpp>

#include "model/flops.h"
#include "model/options.h"
#include "model/plan.h"

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
    const auto plan = nlohmann::json::parse(to_json(make_plan(c, memory)));
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
    const std::string text = to_text(make_plan(c, memory), c);
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
