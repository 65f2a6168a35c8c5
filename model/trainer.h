// model/trainer.h   Everything of a training run that lives in memory, allocated once from one plan.
#pragma once
#include <array>
#include <memory>

#include "kernels/arena.h"
#include "model/optimizer.h"
#include "model/stage.h"

namespace trifold {

using MemoryByClass = std::array<int64_t, memory_classes>;

// The device of a resolved configuration; a GPU is claimed for this process. Throws Problem when there is none.
Device prepare_device(const RunConfig&);

// Computed in the `device` arena; `host` is the same one on a CPU.
struct TrainerMemory {
    Optimizer optimizer;
    Stage stage;
    // fp32, three flat buffers: the host's copy of weights and moments beside a GPU, and what the background writer of
    // checkpoints reads. Empty on a CPU when saves are synchronous.
    Tensor snapshot;
    TrainerMemory(const Config&, const ParameterTable&, Arena& device, Arena& host);
};

class Trainer {
public:
    explicit Trainer(const Config&);  // allocates; throws Problem when the machine has too little memory
    ~Trainer();                       // waits: what still runs uses the memory
    Trainer(const Trainer&) = delete;
    Trainer& operator=(const Trainer&) = delete;

    const Config& config() const { return config_; }
    const ParameterTable& table() const { return table_; }
    Stage& stage() { return memory_->stage; }
    Optimizer& optimizer() { return memory_->optimizer; }
    const Tensor& snapshot() const { return memory_->snapshot; }
    Stream& compute() { return *compute_; }
    StreamEngine& engine() { return engine_; }
    int64_t memory_bytes() const;  // allocated by us on the device, workspace of the matrix library included

    // Weights and moments in host memory: on a CPU the buffers themselves, beside a GPU the snapshot. To be filled by the
    // host, who then calls `host_state_changed`.
    FlatState host_state();
    void host_state_changed();
    // The same with the present values, to be read; waits for all that was submitted.
    FlatState read_state();
    // Random initial values from train.seed.
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
    bool on_gpu() const { return config_.run.device == Device::cuda; }
    std::array<Tensor, 3> state_tensors() { return {optimizer().master(), optimizer().m(), optimizer().v()}; }
    Tensor snapshot_part(int i) const { return snapshot().slice(i * table_.flat_elems(), table_.flat_elems()); }

    std::unique_ptr<Arena> arena_, host_arena_;  // host_arena_: null on a CPU
    std::unique_ptr<TrainerMemory> memory_;
};

// What Trainer(config) would allocate on its device, by class, without allocating anything.
MemoryByClass plan_memory(const Config&);

}  // namespace trifold
