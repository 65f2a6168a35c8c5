#include "model/trainer.h"

#include <fmt/format.h>

#include <algorithm>
#include <exception>

#include "kernels/cpu/linear.h"
#include "kernels/cuda/runtime.h"
#include "parallel/host_collectives.h"
#include "parallel/nccl.h"

namespace trifold {
namespace {

// A background save needs a copy of weights and moments, and so does a host that cannot read the device's memory.
bool needs_snapshot(const Config& c) {
    return c.run.device == Device::cuda || (c.checkpoint.async && c.overlap.checkpoint && c.checkpoint.every > 0);
}

Fold fold_of(bool on) { return on ? Fold::on : Fold::off; }

StageOptions stage_options(const Config& c, const StageProgram& program) {
    const bool apart = std::any_of(program.actions.begin(), program.actions.end(), [](const Action& a) { return a.act == Act::W; });
    return {.type = c.train.dtype, .B = c.train.micro_batch, .T = c.train.seq, .recompute = c.train.recompute, .documents = c.data.documents,
            .weight_gradients = apart ? WeightGradients::apart : WeightGradients::with_input_gradients, .slots = program.slots.count,
            .attention = {c.run.attention, c.run.deterministic}};
}

int stage_of(const Config& c, int rank) { return mesh_of(c).at(rank).pp; }

ParameterTable table_of(const Config& c, int rank) { return ParameterTable(c.model, placement_of(c, rank), c.overlap.dp_bucket); }

}  // namespace

Device prepare_device(const RunConfig& run, int local_rank) {
    if (run.device == Device::cuda) cuda::select(local_rank, run.comm == Comm::host ? cuda::Sharing::allowed : cuda::Sharing::refused);
    return run.device;
}

int micro_batches(const Config& c) { return static_cast<int>(c.train.global_batch / (c.train.micro_batch * c.mesh.dp)); }

namespace {

// Who belongs to which group of rank `rank`: make(name, members, group) is called for each group of more than one, in an order in which all
// ranks can connect (links by the stage they start from).
template <class Make>
void for_groups(const Config& c, int rank, Groups& g, Make make) {
    const Mesh mesh = mesh_of(c);
    const Coordinates at = mesh.at(rank);
    const auto on_stage = [&](int stage) { return mesh.rank_of({at.tp, at.cp, at.dp, stage}); };
    const auto form = [&](const std::string& name, const std::vector<int>& members, Group& group) {
        if (members.size() > 1) make(name, members, group);
    };
    form("tp", mesh.members(Axis::tp, rank), g.tp);
    form("dp", mesh.members(Axis::dp, rank), g.dp);
    if (mesh.pp == 1) return;
    form("pp", mesh.members(Axis::pp, rank), g.pp);
    const bool ring = c.mesh.virtual_stages > 1;
    for (int from = 0; from < mesh.pp; ++from) {
        const int to = (from + 1) % mesh.pp;
        if ((at.pp != from && at.pp != to) || (to == 0 && !ring)) continue;
        const std::vector<int> down = {on_stage(from), on_stage(to)}, up = {on_stage(to), on_stage(from)};
        form(fmt::format("activations {}>{}", from, to), down, at.pp == from ? g.out[0] : g.in[0]);
        form(fmt::format("gradients {}>{}", to, from), up, at.pp == to ? g.out[1] : g.in[1]);
    }
    if (c.model.tied && (at.pp == 0 || at.pp == mesh.pp - 1)) form("tie", {on_stage(0), on_stage(mesh.pp - 1)}, g.tie);
}

}  // namespace

Groups Groups::connect(World& world, const Config& c, StreamEngine& engine) {
    Groups g;
    const bool nccl = c.run.comm == Comm::nccl;
    if (nccl && world.size() > 1) set_nccl_environment(c.run.deterministic ? NcclSums::repeatable : NcclSums::fastest);
    for_groups(c, world.rank(), g, [&](const std::string& name, const std::vector<int>& members, Group& group) {
        Stream& stream = engine.add(name, nccl ? StreamKind::communication : StreamKind::host_communication);
        group = nccl ? world.nccl_group(name, members, stream) : world.host_group(name, members, stream, 0, c.run.device);
    });
    return g;
}

Groups Groups::planned(const Config& c, int rank) {
    Groups g;
    for_groups(c, rank, g, [&](const std::string& name, const std::vector<int>& members, Group& group) {
        const auto place = std::find(members.begin(), members.end(), rank) - members.begin();
        group = Group::planned(name, static_cast<int>(place), static_cast<int>(members.size()));
    });
    return g;
}

void Groups::abort() const noexcept {
    for (const Group* g : {&tp, &dp, &pp, &tie, &out[0], &out[1], &in[0], &in[1]}) g->abort();
}

TrainerMemory::TrainerMemory(const Config& c, const ParameterTable& table, const Groups& g, const StageProgram& program, Arena& device, Arena& host)
    : sharding(table, {.type = c.train.dtype, .zero = c.optim.zero, .micro_batches = micro_batches(c), .fold = fold_of(c.overlap.dp)}, g.dp, g.tie, device),
      optimizer(c.optim, sharding, {&g.tp, &g.dp, &g.pp}, device),
      tensor_parallel(g.tp, {.fold = fold_of(c.overlap.tp), .chunks = c.overlap.tp_chunks}, c.train.dtype, c.train.micro_batch * c.train.seq, c.model.hidden,
                      TensorParallel::Gradients::yes, device),
      stage(c.model, table, sharding.flat(), stage_options(c, program), tensor_parallel, &sharding, optimizer.loss_sum(), device),
      pipeline(c, table.placement().stage, program, stage, g.channels(), c.train.micro_batch * c.train.seq / g.tp.size() * c.model.hidden, device) {
    maxima = device.reserve(MemoryClass::workspace, DType::f64, 4);
    if (c.run.device == Device::cuda) stage.reserve_uploads(std::max<int64_t>(micro_batches(c), c.mesh.pp), host);
    if (needs_snapshot(c)) snapshot = host.reserve(MemoryClass::workspace, DType::f32, 3 * sharding.compact_elems());
}

Trainer::Trainer(const Config& config, World& world)
    : config_(config),
      table_(table_of(config_, world.rank())),
      engine_(config_.debug.streams, prepare_device(config_.run, world.local_rank())),
      compute_(&engine_.add("compute", StreamKind::compute)),
      groups_(Groups::connect(world, config_, engine_)) {
    const std::string what = "training " + (config_.model.preset.empty() ? std::string("this model") : config_.model.preset) +
                             (config_.run.attention == AttentionProvider::cudnn ? " with cuDNN's attention" : "");
    const StageProgram program = training_program(config_, stage_of(config_, world.rank()), micro_batches(config_));
    Arena plan(config_.run.device), host_plan;
    TrainerMemory(config_, table_, groups_, program, plan, on_gpu() ? host_plan : plan);
    arena_ = std::make_unique<Arena>(plan, what);
    if (on_gpu()) {
        host_arena_ = std::make_unique<Arena>(host_plan, what + ": the host's copy of weights and moments");
        host_arena_->pin();
    }
    memory_ = std::make_unique<TrainerMemory>(config_, table_, groups_, program, *arena_, on_gpu() ? *host_arena_ : *arena_);
    if (on_gpu() && world.size() > 1) engine_.watch([&world](double waited_s, bool over) { world.watch(waited_s, over); });
    stage().fill_constants(compute());
    optimizer().fill_constants(compute());
    if (on_gpu())
        meet_neighbours();
    else
        linear_prepare();
}

// NCCL connects two ranks at their first message, and both wait for that: link after link, before a schedule has them wait for others.
void Trainer::meet_neighbours() {
    const int stage = table_.placement().stage, stages = table_.placement().stages;
    const Tensor word = memory_->maxima.slice(0, 1);
    const auto pass = [&](const Group& link, bool sends) {
        if (!link.alone()) engine_.wait(sends ? link.send(1, word) : link.receive(0, word));
    };
    for (int from = 0; from < stages && stages > 1; ++from) {
        const bool first = stage == from, second = stage == (from + 1) % stages;
        if (!first && !second) continue;
        pass(first ? groups_.out[0] : groups_.in[0], first);
        pass(first ? groups_.in[1] : groups_.out[1], second);
    }
}

// After a failure peers may never answer: what still waits for them must not.
Trainer::~Trainer() {
    if (std::uncaught_exceptions() == 0) {
        engine_.drain();
        return;
    }
    groups_.abort();
    engine_.abandon();
}

int64_t Groups::host_scratch_bytes() const {
    int64_t bytes = 0;
    for (const Axis axis : {Axis::tp, Axis::dp, Axis::pp})
        for (const Group* g : of(axis)) bytes += g->alone() ? 0 : host_collectives_bytes(g->size());
    return bytes;
}

int64_t Trainer::memory_bytes() const { return arena_->bytes() + (on_gpu() ? 0 : linear_scratch_bytes() + groups_.host_scratch_bytes()); }

std::vector<const Group*> Groups::of(Axis axis) const {
    switch (axis) {
        case Axis::tp: return {&tp};
        case Axis::dp: return {&dp, &tie};
        case Axis::pp: return {&pp, &out[0], &out[1], &in[0], &in[1]};
        case Axis::cp: return {};
    }
    return {};
}

double Trainer::waited_s(Axis axis) const {
    double seconds = 0;
    for (const Group* g : groups_.of(axis))
        if (!g->alone()) seconds += engine_.waited_s(g->stream());
    return seconds;
}

int64_t Trainer::sent_bytes(Axis axis) const {
    int64_t bytes = 0;
    for (const Group* g : groups_.of(axis)) bytes += g->sent_bytes();
    return bytes;
}

Tensor Trainer::snapshot_of(const StateShard& shard, size_t b, int kind) const {
    return snapshot().slice(kind * memory_->sharding.compact_elems() + memory_->sharding.shard(b).compact, shard.elems);
}

std::vector<StateShard> Trainer::host_state() {
    std::vector<StateShard> state = optimizer().shards();
    for (size_t b = 0; on_gpu() && b < state.size(); ++b)
        state[b] = {state[b].first, state[b].elems, snapshot_of(state[b], b, 0).as<float>(), snapshot_of(state[b], b, 1).as<float>(), snapshot_of(state[b], b, 2).as<float>()};
    return state;
}

void Trainer::host_state_changed() {
    const std::vector<StateShard> state = host_state();
    for (size_t b = 0; on_gpu() && b < state.size(); ++b) {
        copy(compute(), {.x = snapshot_of(state[b], b, 0), .y = optimizer().master(b)});
        copy(compute(), {.x = snapshot_of(state[b], b, 1), .y = optimizer().m(b)});
        copy(compute(), {.x = snapshot_of(state[b], b, 2), .y = optimizer().v(b)});
    }
    if (sharding().replicated()) share_replicated_state();
    optimizer().refresh_weights(compute());
    engine_.wait_all();  // the host may write its copy again
}

// What all data-parallel ranks hold was read by one of them, an equal part by each.
void Trainer::share_replicated_state() {
    const Group& dp = sharding().dp();
    for (size_t b = 0; b < table_.buckets().size(); ++b)
        for (const Tensor& whole : {optimizer().master(b), optimizer().m(b), optimizer().v(b)}) {
            const int64_t part = whole.elems / dp.size();
            dp.follow(compute().last());
            compute().follow(dp.all_gather(whole.slice(dp.rank() * part, part), whole));
        }
}

std::vector<StateShard> Trainer::read_state() {
    const std::vector<StateShard> state = host_state();
    for (size_t b = 0; on_gpu() && b < state.size(); ++b) {
        copy(compute(), {.x = optimizer().master(b), .y = snapshot_of(state[b], b, 0)});
        copy(compute(), {.x = optimizer().m(b), .y = snapshot_of(state[b], b, 1)});
        copy(compute(), {.x = optimizer().v(b), .y = snapshot_of(state[b], b, 2)});
    }
    engine_.wait_all();
    return state;
}

std::vector<StateShard> Trainer::owned_shards(const std::vector<StateShard>& state) const {
    std::vector<StateShard> owned;
    for (size_t b = 0; b < state.size(); ++b) {
        const Sharding::Shard s = memory_->sharding.owned(b);
        const int64_t skip = s.first - state[b].first;
        owned.push_back({s.first, s.elems, state[b].master + skip, state[b].m + skip, state[b].v + skip});
    }
    return owned;
}

std::vector<StateSlice> Trainer::state_to_fill() { return slices_of(table_, owned_shards(host_state())); }

std::vector<StateSlice> Trainer::owned_state(const std::vector<StateShard>& state) const {
    std::vector<StateSlice> slices = slices_of(table_, owned_shards(state));
    std::erase_if(slices, [](const StateSlice& s) { return !s.parameter->owned; });
    return slices;
}

std::vector<float> Trainer::read_gradients() {
    std::vector<float> host(static_cast<size_t>(sharding().compact_elems()));
    std::vector<Copy> copies;
    for (size_t b = 0; b < table_.buckets().size(); ++b) {
        const Sharding::Shard s = sharding().shard(b);
        copies.push_back({sharding().shard_gradient(b), Tensor{host.data() + s.compact, DType::f32, s.elems}});
    }
    read_back(compute(), copies, "read_gradients");
    return host;
}

std::vector<StateShard> Trainer::shards_in(float* values) const {
    std::vector<StateShard> shards;
    for (size_t b = 0; b < table_.buckets().size(); ++b) {
        const Sharding::Shard s = memory_->sharding.shard(b);
        float* v = values + s.compact;
        shards.push_back({s.first, s.elems, v, v, v});
    }
    return shards;
}

void Trainer::max_over_all(std::array<double, 4>& values) {
    if (groups_.tp.alone() && groups_.dp.alone() && groups_.pp.alone()) return;
    const Tensor host{values.data(), DType::f64, 4}, &all = memory_->maxima;
    copy(compute(), {.x = host, .y = all});
    for (const Group* g : {&groups_.tp, &groups_.dp, &groups_.pp}) {
        if (g->alone()) continue;
        g->follow(compute().last());
        compute().follow(g->all_reduce_max(all));
    }
    read_back(compute(), {{all, host}}, "max_over_all");
}

void Trainer::initialize_weights() {
    initialize(state_to_fill(), config_.train.seed);
    host_state_changed();
}

MemoryByClass plan_memory(const Config& config, int rank) {
    const ParameterTable table = table_of(config, rank);
    Arena plan(config.run.device), host_plan;
    const bool gpu = config.run.device == Device::cuda;
    const Groups groups = Groups::planned(config, rank);
    TrainerMemory(config, table, groups, training_program(config, stage_of(config, rank), micro_batches(config)), plan, gpu ? host_plan : plan);
    MemoryByClass by_class{};
    for (int c = 0; c < memory_classes; ++c) by_class[static_cast<size_t>(c)] = plan.bytes(static_cast<MemoryClass>(c));
    if (!gpu) by_class[static_cast<size_t>(MemoryClass::workspace)] += linear_scratch_bytes() + groups.host_scratch_bytes();
    return by_class;
}

}  // namespace trifold
