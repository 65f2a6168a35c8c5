// commands/plan.cpp   trifold plan: what a run needs, without running it.
#include <fmt/format.h>

#include <algorithm>

#include "base/refuse.h"
#include "commands/commands.h"
#include "commands/inference.h"
#include "model/options.h"
#include "model/plan.h"

namespace trifold {

constexpr int64_t most_ranks = 1 << 24;

int plan_command(const Words& args) {
    bool json = false, schedule = false;
    std::string gpu;
    int64_t ranks = 0;
    ParseContext context;
    context.read_model = read_model_of;
    context.flags = {{"ranks", "N", "ranks of the planned run [tp * pp * cp * dp]", &ranks, {.min = 0, .max = most_ranks}},
                     {"gpu", "NAME", "whether it fits one: a100, h100, h200, b200, l40s", &gpu},
                     {"schedule", "", "print the pipeline's schedule alone, every action, one line per stage", &schedule},
                     {"json", "", "print one JSON object and nothing else", &json}};
    if (wants_help(args)) {
        fmt::print(
            "trifold plan: parameters, operations, memory and checkpoint size of a run, without running it.\n\n{}",
            help_text(context.flags));
        return static_cast<int>(Exit::ok);
    }
    Config config = parse_config(args, context);
    const GpuSheet* sheet = gpu.empty() ? nullptr : &find_gpu(gpu);
    if (ranks == 0) ranks = config.mesh.tp * config.mesh.pp * config.mesh.cp * std::max<int64_t>(1, config.mesh.dp);
    if (ranks > most_ranks) refuse(Exit::usage, "this mesh has {} ranks; plan takes at most {}", ranks, most_ranks);
    resolve(config, static_cast<int>(ranks));
    config.run.attention = AttentionProvider::own;  // only a GPU knows what cuDNN's needs
    const Plan plan = make_plan(config);
    if (schedule && !json) {
        for (const std::string& line : plan.schedule) fmt::print("{}\n", line);
        return static_cast<int>(Exit::ok);
    }
    fmt::print("{}", json ? to_json(plan, config, sheet) + "\n" : to_text(plan, config, sheet));
    return static_cast<int>(Exit::ok);
}

}  // namespace trifold
