// model/trainer.h   Everything of a training run that one rank keeps in memory, allocated once from one plan, and its groups.
#pragma once
#include <array>
#include <memory>

#include "kernels/arena.h"
#include "model/optimizer.h"
#include "model/pipeline.h"
#include "model/sharding.h"
#include "model/stage.h"
#include "parallel/world.h"

namespace trifold {

using MemoryByClass = std::array<int64_t, memory_classes>;

// The device of a resolved configuration; a GPU is claimed for this process (the local_rank-th). Throws Problem when there is none.
Device prepare_device(const RunConfig&, int local_rank = 0);

// The groups of one rank, each with a stream of its own. Groups of one have none.
struct Groups {
    Group tp, dp, pp;
    Group tie;                             // first and last stage, when an embedding is tied across them
    std::array<Group, 2> out, in;          // by Payload: links to and from the neighbouring stages
    // Everybody connects its groups in this order.
    static Groups connect(World&, const Config&, StreamEngine&);
    // The sizes and places alone, for the planner.
    static Groups planned(const Config&, int rank);
    Channels channels() const { return {{&out[0], &out[1]}, {&in[0], &in[1]}}; }
    std::vector<const Group*> of(Axis axis) const;
    int64_t host_scratch_bytes() const;  // of all of them, where hosts' memories carry the data
    void abort() const noexcept;
};

// Computed in the `device` arena; `host` is the same one on a CPU.
struct TrainerMemory {
    Sharding sharding;
    Optimizer optimizer;
    TensorParallel tensor_parallel;
    Stage stage;
    Pipeline pipeline;
    // fp32, three buffers of this rank's shards: the host's copy of weights and moments beside a GPU, and what the background writer of
    // checkpoints reads. Empty on a CPU when saves are synchronous.
    Tensor snapshot;
    Tensor maxima;  // fp64 [4]
    TrainerMemory(const Config&, const ParameterTable&, const Groups&, const StageProgram&, Arena& device, Arena& host);
};

class Trainer {
public:
    // Connects the groups, allocates; throws Problem when the machine has too little memory.
    Trainer(const Config&, World&);
    ~Trainer();  // waits: what still runs uses the memory
    Trainer(const Trainer&) = delete;
    Trainer& operator=(const Trainer&) = delete;

    const Config& config() const { return config_; }
    const ParameterTable& table() const { return table_; }
    const Groups& groups() const { return groups_; }
    Stage& stage() { return memory_->stage; }
    Pipeline& pipeline() { return memory_->pipeline; }
    Sharding& sharding() { return memory_->sharding; }
    Optimizer& optimizer() { return memory_->optimizer; }
    const Tensor& snapshot() const { return memory_->snapshot; }
    Stream& compute() { return *compute_; }
    StreamEngine& engine() { return engine_; }
    int64_t memory_bytes() const;  // allocated by us on the device, workspace of matrix products and of the host transport included
    // Seconds for which compute was blocked by an axis so far.
    double waited_s(Axis axis) const;
    int64_t sent_bytes(Axis axis) const;  // by this rank so far

    // This rank's shards of weights and moments in host memory: on a CPU the buffers themselves, beside a GPU the snapshot. To be filled by
    // the host, who then calls `host_state_changed`.
    std::vector<StateShard> host_state();
    void host_state_changed();
    // The same with the present values, to be read; waits for all that was submitted.
    std::vector<StateShard> read_state();
    // What of host_state() this rank has to fill; the rest comes from the others.
    std::vector<StateSlice> state_to_fill();
    // This rank's shards of the gradients as settle_gradients() left them, one after the other.
    std::vector<float> read_gradients();
    // Such a buffer seen as state: its values stand for master weights (and moments).
    std::vector<StateShard> shards_in(float* values) const;
    // Each value becomes its maximum over all ranks.
    void max_over_all(std::array<double, 4>& values);
    // The part of it that this rank answers for in checkpoints, owners only.
    std::vector<StateSlice> owned_state(const std::vector<StateShard>& state) const;
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
    Groups groups_;
    bool on_gpu() const { return config_.run.device == Device::cuda; }
    void share_replicated_state();
    void meet_neighbours();
    std::vector<StateShard> owned_shards(const std::vector<StateShard>& state) const;
    Tensor snapshot_of(const StateShard& shard, size_t bucket, int kind) const;

    std::unique_ptr<Arena> arena_, host_arena_;  // host_arena_: null on a CPU
    std::unique_ptr<TrainerMemory> memory_;
};

// What rank `rank` would allocate on its device, by class, without allocating anything.
MemoryByClass plan_memory(const Config&, int rank = 0);

// Micro-batches of one data-parallel rank in a step.
int micro_batches(const Config&);

}  // namespace trifold
