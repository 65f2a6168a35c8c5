// model/plan.cpp   What a run needs, known before anything is allocated, as a table and as JSON.
#include "model/plan.h"

#include <fmt/format.h>

#include <nlohmann/json.hpp>
#include <numeric>

#include "base/text.h"
#include "model/flops.h"
#include "model/options.h"

namespace trifold {
namespace {

constexpr int64_t checkpoint_bytes_per_param = 12;  // fp32 weight and both moments
constexpr size_t longest_schedule_line = 100;

int64_t total(const MemoryByClass& memory) { return std::accumulate(memory.begin(), memory.end(), int64_t{0}); }

// One process runs its micro-batches one after the other: forward, then backward.
std::string schedule_line(int64_t micro_batches) {
    std::string line = "stage 0:";
    for (int64_t m = 0; m < micro_batches; ++m) line += fmt::format(" F{0} B{0}", m);
    return line;
}

std::string shortened(const std::string& line) {
    if (line.size() <= longest_schedule_line) return line;
    return line.substr(0, line.rfind(' ', longest_schedule_line / 2)) + " ..." +
           line.substr(line.find(' ', line.size() - longest_schedule_line / 5));
}

std::string mib(int64_t bytes) { return fmt::format("{:.1f}", static_cast<double>(bytes) / (1 << 20)); }

std::string memory_table(const Plan& plan) {
    std::string text = fmt::format("memory per rank (MiB)\n  {:>4} {:>5} {:>9}", "rank", "stage", "layers");
    for (int c = 0; c < memory_classes; ++c) text += fmt::format(" {:>12}", name_of(static_cast<MemoryClass>(c)));
    text += fmt::format(" {:>12}\n", "total");
    for (const RankPlan& r : plan.per_rank) {
        text += fmt::format("  {:>4} {:>5} {:>9}", r.rank, r.stage,
                            fmt::format("{}-{}", r.layers.front(), r.layers.back()));
        for (const int64_t bytes : r.memory) text += fmt::format(" {:>12}", mib(bytes));
        text += fmt::format(" {:>12}\n", mib(total(r.memory)));
    }
    return text;
}

}  // namespace

Plan make_plan(const Config& config, const MemoryByClass& memory) {
    const ModelConfig& m = config.model;
    Plan plan;
    plan.params = plan.params_active = parameter_count(m);
    plan.flops_per_token = flops_per_token(m, config.train.seq);
    RankPlan rank{
        .layers = std::vector<int64_t>(static_cast<size_t>(m.layers)), .params = plan.params, .memory = memory};
    std::iota(rank.layers.begin(), rank.layers.end(), 0);
    plan.per_rank.push_back(rank);
    plan.schedule = {schedule_line(config.train.global_batch / config.train.micro_batch)};
    plan.checkpoint_bytes = checkpoint_bytes_per_param * plan.params;
    return plan;
}

std::string to_json(const Plan& plan) {
    using Json = nlohmann::ordered_json;
    Json ranks = Json::array();
    for (const RankPlan& r : plan.per_rank) {
        Json memory = Json::object();
        for (int c = 0; c < memory_classes; ++c)
            memory[name_of(static_cast<MemoryClass>(c))] = r.memory[static_cast<size_t>(c)];
        memory["total"] = total(r.memory);
        ranks.push_back({{"rank", r.rank},
                         {"stage", r.stage},
                         {"layers", r.layers},
                         {"params", r.params},
                         {"memory_bytes", memory}});
    }
    const auto& comm = plan.comm_bytes_per_step;
    const Json object = {
        {"params", plan.params},
        {"params_active", plan.params_active},
        {"flops_per_token", plan.flops_per_token},
        {"flops_convention", flops_convention()},
        {"per_rank", ranks},
        {"comm_bytes_per_step", {{"tp", comm.tp}, {"pp", comm.pp}, {"dp", comm.dp}, {"ep", comm.ep}}},
        {"bubble", plan.bubble},
        {"schedule", join_words(plan.schedule, "\n")},
        {"checkpoint_bytes", plan.checkpoint_bytes},
    };
    return object.dump(2);
}

std::string to_text(const Plan& plan, const Config& config) {
    const double tokens = static_cast<double>(config.train.global_batch) * static_cast<double>(config.train.seq);
    std::string text = describe(config);
    const std::string active = plan.params_active == plan.params ? "all" : with_commas(plan.params_active) + " of them";
    text += fmt::format("parameters  {}, {} used per token\n", with_commas(plan.params), active);
    text += fmt::format("operations  {} FLOP per token, {} FLOP per step\n", with_prefix(plan.flops_per_token),
                        with_prefix(plan.flops_per_token * tokens));
    text += fmt::format("            {}\n", wrapped(flops_convention(), 12));
    text += fmt::format("checkpoint  {} each (12 bytes per parameter: fp32 weights and two moments)\n",
                        human_bytes(plan.checkpoint_bytes));
    text += fmt::format("pipeline    bubble {:.1f} % (idle over ideal time)\n", 100 * plan.bubble);
    for (const std::string& line : plan.schedule) text += fmt::format("            {}\n", shortened(line));
    return text + memory_table(plan);
}

}  // namespace trifold
