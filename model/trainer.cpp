#include "model/trainer.h"

#include "kernels/cpu/linear.h"
#include "kernels/cuda/runtime.h"

namespace trifold {
namespace {

// A background save needs a copy of weights and moments, and so does a host that cannot read the device's memory.
bool needs_snapshot(const Config& c) {
    return c.run.device == Device::cuda || (c.checkpoint.async && c.overlap_checkpoint && c.checkpoint.every > 0);
}

FlatBuffers flat_buffers(const Optimizer& o) { return {o.weight(), o.grad()}; }

}  // namespace

Device prepare_device(const RunConfig& run) {
    if (run.device == Device::cuda) cuda::select(0);
    return run.device;
}

TrainerMemory::TrainerMemory(const Config& c, const ParameterTable& table, Arena& device, Arena& host)
    : optimizer(c.optim, table, c.train.dtype, c.train.global_batch / c.train.micro_batch, device),
      stage(c.model, table, flat_buffers(optimizer), c.train.dtype, c.train.micro_batch, c.train.seq, c.train.recompute,
            Passes::forward_and_backward, c.data.documents == Documents::isolated, device) {
    if (needs_snapshot(c)) snapshot = host.reserve(MemoryClass::workspace, DType::f32, 3 * table.flat_elems());
}

Trainer::Trainer(const Config& config)
    : config_(config),
      table_(config_.model),
      engine_(config_.debug.streams, prepare_device(config_.run)),
      compute_(&engine_.add("compute", StreamKind::compute)) {
    const std::string what = "training " + (config_.model.preset.empty() ? std::string("this model") : config_.model.preset);
    Arena plan(config_.run.device), host_plan;
    TrainerMemory(config_, table_, plan, on_gpu() ? host_plan : plan);
    arena_ = std::make_unique<Arena>(plan, what);
    if (on_gpu()) {
        host_arena_ = std::make_unique<Arena>(host_plan, what + ": the host's copy of weights and moments");
        host_arena_->pin();
    }
    memory_ = std::make_unique<TrainerMemory>(config_, table_, *arena_, on_gpu() ? *host_arena_ : *arena_);
    stage().fill_constants(compute());
    optimizer().fill_constants(compute());
    if (!on_gpu()) linear_prepare();
}

Trainer::~Trainer() { engine_.drain(); }

int64_t Trainer::memory_bytes() const { return arena_->bytes() + (on_gpu() ? 0 : linear_scratch_bytes()); }

FlatState Trainer::host_state() {
    const auto part = [&](int i) { return (on_gpu() ? snapshot_part(i) : state_tensors()[static_cast<size_t>(i)]).as<float>(); };
    return {part(0), part(1), part(2)};
}

void Trainer::host_state_changed() {
    for (int i = 0; on_gpu() && i < 3; ++i) copy(compute(), {.x = snapshot_part(i), .y = state_tensors()[static_cast<size_t>(i)]});
    optimizer().refresh_weights(compute());
    engine_.wait_all();  // the host may write its copy again
}

FlatState Trainer::read_state() {
    for (int i = 0; on_gpu() && i < 3; ++i) copy(compute(), {.x = state_tensors()[static_cast<size_t>(i)], .y = snapshot_part(i)});
    engine_.wait_all();
    return host_state();
}

void Trainer::initialize_weights() {
    initialize(table_, config_.train.seed, host_state().master);
    host_state_changed();
}

MemoryByClass plan_memory(const Config& config) {
    const ParameterTable table(config.model);
    Arena plan(config.run.device), host_plan;
    const bool gpu = config.run.device == Device::cuda;
    TrainerMemory(config, table, plan, gpu ? host_plan : plan);
    MemoryByClass by_class{};
    for (int c = 0; c < memory_classes; ++c) by_class[static_cast<size_t>(c)] = plan.bytes(static_cast<MemoryClass>(c));
    if (!gpu) by_class[static_cast<size_t>(MemoryClass::workspace)] += linear_scratch_bytes();
    return by_class;
}

}  // namespace trifold
