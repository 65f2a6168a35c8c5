#include "model/trainer.h"

#include "kernels/cpu/linear.h"

namespace trifold {
namespace {

// A background save needs a copy of weights and moments; a save at the end of the run, or a synchronous one, does not.
bool needs_snapshot(const Config& c) { return c.checkpoint.async && c.overlap_checkpoint && c.checkpoint.every > 0; }

FlatBuffers flat_buffers(const Optimizer& o) { return {o.weight(), o.grad()}; }

}  // namespace

TrainerMemory::TrainerMemory(const Config& c, const ParameterTable& table, Arena& arena)
    : optimizer(c.optim, table, c.train.dtype, c.train.global_batch / c.train.micro_batch, arena),
      stage(c.model, table, flat_buffers(optimizer), c.train.dtype, c.train.micro_batch, c.train.seq, c.train.recompute,
            Passes::forward_and_backward, c.data.documents == Documents::isolated, arena) {
    if (needs_snapshot(c)) snapshot = arena.reserve(MemoryClass::workspace, DType::f32, 3 * table.flat_elems());
}

Trainer::Trainer(const Config& config)
    : config_(config), table_(config_.model), engine_(config_.debug.streams), compute_(&engine_.add("compute", StreamKind::compute)) {
    Arena plan;
    TrainerMemory(config_, table_, plan);
    arena_ = std::make_unique<Arena>(plan, "training " + (config_.model.preset.empty() ? std::string("this model") : config_.model.preset));
    memory_ = std::make_unique<TrainerMemory>(config_, table_, *arena_);
    memory_->stage.fill_constants();
    linear_prepare();
}

int64_t Trainer::memory_bytes() const { return arena_->bytes() + linear_scratch_bytes(); }

void Trainer::initialize_weights() {
    initialize(table_, config_.train.seed, optimizer().master().as<float>());
    optimizer().refresh_weights(compute());
}

MemoryByClass plan_memory(const Config& config) {
    const ParameterTable table(config.model);
    Arena plan;
    TrainerMemory(config, table, plan);
    MemoryByClass by_class{};
    for (int c = 0; c < memory_classes; ++c) by_class[static_cast<size_t>(c)] = plan.bytes(static_cast<MemoryClass>(c));
    by_class[static_cast<size_t>(MemoryClass::workspace)] += linear_scratch_bytes();
    return by_class;
}

}  // namespace trifold
