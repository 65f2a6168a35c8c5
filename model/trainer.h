// model/trainer.h   Everything of a training run that lives in memory, allocated once from one plan.
#pragma once
#include <array>
#include <memory>

#include "kernels/arena.h"
#include "model/optimizer.h"
#include "model/stage.h"

namespace trifold {

using MemoryByClass = std::array<int64_t, memory_classes>;

struct TrainerMemory {
    Optimizer optimizer;
    Stage stage;
    Tensor snapshot;  // fp32, three flat buffers: what the background writer of checkpoints reads; empty when saves are synchronous
    TrainerMemory(const Config&, const ParameterTable&, Arena&);
};

class Trainer {
public:
    explicit Trainer(const Config&);  // allocates; throws Problem when the machine has too little memory

    const Config& config() const { return config_; }
    const ParameterTable& table() const { return table_; }
    Stage& stage() { return memory_->stage; }
    Optimizer& optimizer() { return memory_->optimizer; }
    const Tensor& snapshot() const { return memory_->snapshot; }
    Stream& compute() { return *compute_; }
    StreamEngine& engine() { return engine_; }
    int64_t memory_bytes() const;  // allocated by us, workspace of the matrix library included

    // Random initial values from train.seed, written to the master weights.
    void initialize_weights();

    // Progress of the run: what a checkpoint stores besides the tensors.
    int64_t step = 0;     // optimizer steps done, skipped ones included
    int64_t updates = 0;  // steps that changed the weights
    int64_t skipped = 0, skipped_in_a_row = 0;

private:
    Config config_;
    ParameterTable table_;
    StreamEngine engine_;
    Stream* compute_;
    std::unique_ptr<Arena> arena_;
    std::unique_ptr<TrainerMemory> memory_;
};

// What Trainer(config) would allocate, by class, without allocating anything.
MemoryByClass plan_memory(const Config&);

}  // namespace trifold
