// commands/plan.cpp   trifold plan: what a run needs, without running it.
#include "commands/plan.h"

#include <fmt/format.h>

#include <cstdio>

#include "base/error.h"
#include "commands/inference.h"
#include "model/options.h"
#include "model/plan.h"

namespace trifold {

int plan_command(int argc, char** argv) {
    bool json = false;
    int64_t ranks = 1;
    ParseContext context;
    context.read_model = read_model_of;
    context.flags = {{"ranks", "N", "processes of the planned run; this build runs 1 [1]", &ranks},
                     {"json", "", "print one JSON object and nothing else", &json}};
    const std::vector<std::string> args(argv + 1, argv + argc);
    if (wants_help(args)) {
        fmt::print(
            "trifold plan: parameters, operations, memory and checkpoint size of a run, without running it.\n\n{}",
            help_text(context.flags));
        return static_cast<int>(Exit::ok);
    }
    Config config = parse_config(args, context);
    if (ranks != 1)
        throw Problem(Exit::usage, fmt::format("--ranks={}, but this build runs one process: it must be 1", ranks));
    resolve(config);
    const Plan plan = make_plan(config, plan_memory(config));
    fmt::print("{}", json ? to_json(plan) + "\n" : to_text(plan, config));
    return static_cast<int>(Exit::ok);
}

}  // namespace trifold
