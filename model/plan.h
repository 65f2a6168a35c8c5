// model/plan.h   What a run needs, known before anything is allocated: parameters, operations, memory, checkpoints,
// schedule.
#pragma once
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "model/config.h"
#include "model/trainer.h"

namespace trifold {

struct RankPlan {
    int64_t rank = 0, stage = 0;
    std::vector<int64_t> layers;  // global numbers
    int64_t params = 0;           // logical ones that lie here, without padding
    MemoryByClass memory{};       // bytes
};

// Bytes that the busiest rank sends in one step, by axis. Collectives count what each rank must send: (R-1)/R of a gathered or
// scattered tensor, twice that for an all-reduce. Sums of a few numbers (norms, losses) are left out.
struct CommunicationBytes {
    int64_t tp = 0, pp = 0, dp = 0, ep = 0;
};

struct Plan {
    int64_t params = 0, params_active = 0;  // whole model; those that one token uses
    double flops_per_token = 0;             // forward and backward, see flops_convention()
    std::vector<RankPlan> per_rank;
    CommunicationBytes comm_bytes_per_step;
    double bubble = 0;                  // idle time over ideal time, if all parts of the model take equally long
    double bubble_of_parts = 0;         // the same with the layers as they are, and the head
    std::vector<std::string> schedule;  // one line per stage: "stage 0: F0 B0 F1 B1"
    int64_t checkpoint_bytes = 0;       // of one checkpoint: fp32 weights and two moments, headers left out
};

// `config` is resolved for all ranks. `memory_of(config, rank)` is plan_memory, or what a test says. Ranks of one stage hold the same, but for
// a few rows of the vocabulary: each stage is planned once per tensor-parallel rank at most.
using MemoryOf = std::function<MemoryByClass(const Config&, int rank)>;
Plan make_plan(const Config& config, const MemoryOf& memory_of = plan_memory);
CommunicationBytes communication_bytes(const Config& config, int stage);

// A GPU by its data sheet: memory, and bf16 matrix products without sparsity.
struct GpuSheet {
    const char* name = "";
    int64_t memory_gib = 0;
    double bf16_flops = 0;
};
const GpuSheet& find_gpu(const std::string& name);  // throws Problem(Exit::usage) with the names there are

// The object of `trifold plan --json` (CONFIG.md), with "gpu" {name memory_bytes fits least_step_s} when one is given.
std::string to_json(const Plan& plan, const Config& config, const GpuSheet* gpu = nullptr);
// The same for people, with units and conventions.
std::string to_text(const Plan& plan, const Config& config, const GpuSheet* gpu = nullptr);

}  // namespace trifold
