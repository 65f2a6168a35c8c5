// model/plan.h   What a run needs, known before anything is allocated: parameters, operations, memory, checkpoints,
// schedule.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

#include "model/config.h"
#include "model/trainer.h"

namespace trifold {

struct RankPlan {
    int64_t rank = 0, stage = 0;
    std::vector<int64_t> layers;  // global numbers
    int64_t params = 0;           // logical, without padding
    MemoryByClass memory{};       // bytes
};

struct Plan {
    int64_t params = 0, params_active = 0;  // whole model; those that one token uses
    double flops_per_token = 0;             // forward and backward, see flops_convention()
    std::vector<RankPlan> per_rank;
    struct {
        int64_t tp = 0, pp = 0, dp = 0, ep = 0;
    } comm_bytes_per_step;
    double bubble = 0;                  // idle time over ideal time
    std::vector<std::string> schedule;  // one line per stage: "stage 0: F0 B0 F1 B1"
    int64_t checkpoint_bytes = 0;       // of one checkpoint: fp32 weights and two moments, headers left out
};

// `config` is resolved; `memory` is what plan_memory(config) says (one process, so one rank).
Plan make_plan(const Config& config, const MemoryByClass& memory);

// The object of `trifold plan --json` (CONFIG.md).
std::string to_json(const Plan& plan);
// The same for people, with units and conventions.
std::string to_text(const Plan& plan, const Config& config);

}  // namespace trifold
