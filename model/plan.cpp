// model/plan.cpp   What a run needs, known before anything is allocated, as a table and as JSON.
#include "model/plan.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <map>
#include <nlohmann/json.hpp>
#include <numeric>

#include "base/error.h"
#include "base/text.h"
#include "model/flops.h"
#include "model/options.h"
#include "parallel/schedule_simulation.h"

namespace trifold {
namespace {

constexpr int64_t checkpoint_bytes_per_param = 12;  // fp32 weight and both moments
constexpr size_t longest_schedule_line = 100;

int64_t total(const MemoryByClass& memory) { return std::accumulate(memory.begin(), memory.end(), int64_t{0}); }

std::string shortened(const std::string& line) {
    if (line.size() <= longest_schedule_line) return line;
    return line.substr(0, line.rfind(' ', longest_schedule_line / 2)) + " ..." +
           line.substr(line.find(' ', line.size() - longest_schedule_line / 5));
}

std::string mib(int64_t bytes) { return fmt::format("{:.1f}", static_cast<double>(bytes) / (1 << 20)); }

std::string layer_text(const std::vector<int64_t>& layers) {
    std::string text;
    for (size_t i = 0; i < layers.size();) {
        size_t j = i;
        while (j + 1 < layers.size() && layers[j + 1] == layers[j] + 1) ++j;
        text += (text.empty() ? "" : " ") + (i == j ? std::to_string(layers[i]) : fmt::format("{}-{}", layers[i], layers[j]));
        i = j + 1;
    }
    return text;
}

// Of all ranks that hold the same, the one that holds most.
struct Alike {
    RankPlan most;
    int64_t ranks = 0;
};
std::vector<Alike> by_stage(const Plan& plan) {
    std::map<int64_t, Alike> stages;
    for (const RankPlan& r : plan.per_rank) {
        Alike& a = stages[r.stage];
        if (a.ranks++ == 0 || total(r.memory) > total(a.most.memory)) a.most = r;
    }
    std::vector<Alike> all;
    for (auto& [stage, a] : stages) all.push_back(std::move(a));
    return all;
}

std::string memory_table(const Plan& plan, Device device) {
    std::string text = fmt::format("memory per rank (MiB), with the buffers of the {}\n  {:>5} {:>5} {:>14}",
                                   device == Device::cuda ? "CUDA backend; context and libraries of a GPU come on top, about 1 GiB" : "CPU backend", "stage", "ranks", "params");
    for (int c = 0; c < memory_classes; ++c) text += fmt::format(" {:>11}", name_of(static_cast<MemoryClass>(c)));
    text += fmt::format(" {:>11}  layers\n", "total");
    for (const Alike& a : by_stage(plan)) {
        text += fmt::format("  {:>5} {:>5} {:>14}", a.most.stage, a.ranks, with_commas(a.most.params));
        for (const int64_t bytes : a.most.memory) text += fmt::format(" {:>11}", mib(bytes));
        text += fmt::format(" {:>11}  {}\n", mib(total(a.most.memory)), shortened(layer_text(a.most.layers)));
    }
    return text;
}

// FLOPs of every part of the model for one token, forward.
std::vector<double> part_costs(const Config& c) {
    const ModelConfig& m = c.model;
    const std::vector<int> layers = layers_of_parts(m, static_cast<int>(c.mesh.pp), static_cast<int>(c.mesh.virtual_stages), c.mesh.layers_per_stage);
    const double head = 2.0 * static_cast<double>(m.vocab) * static_cast<double>(m.hidden);
    const double layer = (forward_flops_per_token(m, c.train.seq) - head) / static_cast<double>(m.layers);
    std::vector<double> costs;
    for (const int n : layers) costs.push_back(n * layer);
    costs.back() += head;
    return costs;
}

void plan_schedule(const Config& c, Plan& plan) {
    const ScheduleShape shape = schedule_shape(c, micro_batches(c));
    const std::vector<Program> programs = make_schedule(shape);
    plan.schedule = text_of(programs, shape.virtual_stages);
    if (shape.stages == 1) return;
    plan.bubble = simulate(programs, shape.virtual_stages, {}).bubble;
    ScheduleCosts costs{.parts = {}};
    for (const double f : part_costs(c)) costs.parts.push_back({f, f, f});
    plan.bubble_of_parts = simulate(programs, shape.virtual_stages, costs).bubble;
}

int64_t most_memory(const Plan& plan) {
    int64_t most = 0;
    for (const RankPlan& r : plan.per_rank) most = std::max(most, total(r.memory));
    return most;
}
bool fits(const Plan& plan, const GpuSheet& gpu) { return most_memory(plan) <= gpu.memory_gib << 30; }
// At the full rate of the data sheet, bubble included.
double least_step_s(const Plan& plan, const Config& c, const GpuSheet& gpu) {
    const double tokens = static_cast<double>(c.train.global_batch) * static_cast<double>(c.train.seq);
    return plan.flops_per_token * tokens / (static_cast<double>(plan.per_rank.size()) * gpu.bf16_flops) * (1 + plan.bubble_of_parts);
}

}  // namespace

const GpuSheet& find_gpu(const std::string& name) {
    static constexpr GpuSheet sheets[] = {{"a100", 80, 312e12}, {"h100", 80, 989e12}, {"h200", 141, 989e12}, {"b200", 180, 2250e12}, {"l40s", 48, 362e12}};
    std::vector<std::string> names;
    for (const GpuSheet& g : sheets) {
        if (g.name == name) return g;
        names.emplace_back(g.name);
    }
    throw Problem(Exit::usage, fmt::format("--gpu={}: known are {}", name, join_words(names)));
}

// What Block, Head, Stage, Pipeline and Sharding send (test_plan.cpp counts it).
CommunicationBytes communication_bytes(const Config& c, int stage) {
    const Mesh mesh = mesh_of(c);
    const Placement place = placement_of(c, mesh.rank_of({0, 0, 0, stage}));
    const ParameterTable table(c.model, place, c.overlap.dp_bucket);
    const int64_t micros = micro_batches(c), act = size_of(c.train.dtype), N = c.train.micro_batch * c.train.seq;
    const int64_t rows = N / mesh.tp * c.model.hidden * act;  // n rows of C
    const bool parallel = c.model.block == BlockKind::parallel, full = c.train.recompute == Recompute::full;
    CommunicationBytes sent;
    for (const Part& part : place.chunks) {
        // Gathers and scatters of [N, C]: forward, backward, and the norms' outputs again.
        const int64_t way = parallel ? 2 : 4, again = parallel ? 1 : 2;
        int64_t times = part.layers() * (way * (full ? 3 : 2) + again);
        if (c.mesh.schedule == ScheduleKind::zero_bubble) times += part.layers() * (parallel ? 3 : 2);  // gradients once more for W
        if (full && part.layers() > 0 && mesh.pp == 1) times -= way;  // the last layer's activations are still there
        if (part.embedding) times += 2;
        if (part.head) {
            times += 2;
            sent.tp += micros * (mesh.tp - 1) * N * 3 * size_of(DType::f32);
        }
        sent.tp += micros * times * (mesh.tp - 1) * rows;
        if (mesh.pp > 1) sent.pp += micros * rows * ((part.head ? 0 : 1) + (part.embedding ? 0 : 1));
    }
    const int64_t n = table.flat_elems(), D = mesh.dp, reductions = c.optim.zero == 2 ? micros : 1;
    for (const Bucket& b : table.buckets())  // a tied embedding: summed between its two stages
        if (b.token && place.ties_stages(c.model)) sent.dp += b.elems / (c.optim.zero == 0 ? 1 : D) * 4;
    if (D > 1) sent.dp += (D - 1) * (n / D) * (c.optim.zero == 0 ? 2 * 4 : reductions * 4 + act);
    return sent;
}

Plan make_plan(const Config& config, const MemoryOf& memory_of) {
    const ModelConfig& m = config.model;
    const Mesh mesh = mesh_of(config);
    Plan plan;
    plan.params = plan.params_active = parameter_count(m);
    plan.flops_per_token = flops_per_token(m, config.train.seq);
    plan.checkpoint_bytes = checkpoint_bytes_per_param * plan.params;
    plan_schedule(config, plan);
    for (int stage = 0; stage < mesh.pp; ++stage) {
        const int first = mesh.rank_of({0, 0, 0, stage});
        RankPlan same{.stage = stage, .memory = memory_of(config, first)};
        const Placement place = placement_of(config, first);
        for (const Part& part : place.chunks)
            for (int l = part.first_layer; l < part.last_layer; ++l) same.layers.push_back(l);
        std::vector<int64_t> params;
        for (int t = 0; t < mesh.tp; ++t) params.push_back(ParameterTable(m, placement_of(config, mesh.rank_of({t, 0, 0, stage}))).count());
        for (int r = first; r < first + mesh.tp * mesh.cp * mesh.dp; ++r) {
            same.rank = r;
            same.params = params[static_cast<size_t>(mesh.at(r).tp)];
            plan.per_rank.push_back(same);
        }
        const CommunicationBytes sent = communication_bytes(config, stage);
        CommunicationBytes& most = plan.comm_bytes_per_step;
        most = {std::max(most.tp, sent.tp), std::max(most.pp, sent.pp), std::max(most.dp, sent.dp), 0};
    }
    return plan;
}

std::string to_json(const Plan& plan, const Config& config, const GpuSheet* gpu) {
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
    Json object = {
        {"params", plan.params},
        {"params_active", plan.params_active},
        {"flops_per_token", plan.flops_per_token},
        {"flops_convention", flops_convention()},
        {"per_rank", ranks},
        {"comm_bytes_per_step", {{"tp", comm.tp}, {"pp", comm.pp}, {"dp", comm.dp}, {"ep", comm.ep}}},
        {"bubble", plan.bubble},
        {"schedule", fmt::format("{}", fmt::join(plan.schedule, "\n"))},
        {"checkpoint_bytes", plan.checkpoint_bytes},
    };
    if (gpu) object["gpu"] = {{"name", gpu->name}, {"memory_bytes", gpu->memory_gib << 30}, {"fits", fits(plan, *gpu)}, {"least_step_s", least_step_s(plan, config, *gpu)}};
    return object.dump(2);
}

std::string to_text(const Plan& plan, const Config& config, const GpuSheet* gpu) {
    const double tokens = static_cast<double>(config.train.global_batch) * static_cast<double>(config.train.seq);
    std::string text = describe(config);
    const std::string active = plan.params_active == plan.params ? "all" : with_commas(plan.params_active) + " of them";
    text += fmt::format("parameters  {}, {} used per token\n", with_commas(plan.params), active);
    text += fmt::format("operations  {} FLOP per token, {} FLOP per step\n", with_prefix(plan.flops_per_token),
                        with_prefix(plan.flops_per_token * tokens));
    text += fmt::format("            {}\n", wrapped(flops_convention(), 12));
    text += fmt::format("checkpoint  {} each (12 bytes per parameter: fp32 weights and two moments)\n",
                        human_bytes(plan.checkpoint_bytes));
    const MeshConfig& mesh = config.mesh;
    text += fmt::format("ranks       {}: tp {}, pp {}{}, dp {}, zero {}; {} micro-batches of {} x {} tokens\n", plan.per_rank.size(), mesh.tp, mesh.pp,
                        mesh.virtual_stages > 1 ? fmt::format(" x {}", mesh.virtual_stages) : "", mesh.dp, config.optim.zero, micro_batches(config),
                        config.train.micro_batch, config.train.seq);
    const CommunicationBytes& sent = plan.comm_bytes_per_step;
    if (plan.per_rank.size() > 1)
        text += fmt::format("sent        by the busiest rank in a step: tp {}, pp {}, dp {}\n", human_bytes(sent.tp), human_bytes(sent.pp), human_bytes(sent.dp));
    text += fmt::format("pipeline    bubble {:.1f} % (idle over ideal time){}\n", 100 * plan.bubble,
                        mesh.pp > 1 ? fmt::format(", {:.1f} % with these layers and the head", 100 * plan.bubble_of_parts) : "");
    for (const std::string& line : plan.schedule) text += fmt::format("            {}\n", shortened(line));
    if (gpu)
        text += fmt::format("{:<12}{} of the fullest rank {} its {} GiB; a step takes at least {:.3g} s (its data sheet, and the bubble)\n", gpu->name,
                            human_bytes(most_memory(plan)), fits(plan, *gpu) ? "fit in" : "DO NOT fit in", gpu->memory_gib, least_step_s(plan, config, *gpu));
    return text + memory_table(plan, config.run.device);
}

}  // namespace trifold
