#include "model/optimizer.h"

#include <algorithm>
#include <cmath>

namespace trifold {
namespace {

int64_t table_bytes(const std::vector<Segment>& segments) { return static_cast<int64_t>(segments.size() * sizeof(Segment)); }

}  // namespace

void ReductionGroups::sum_over_all(Stream& compute, const Tensor& x) const {
    for (const Group* g : {tp, dp, pp}) {
        if (!g || g->alone()) continue;
        g->follow(compute.last());
        compute.follow(g->all_reduce(x));
    }
}

Optimizer::Optimizer(const OptimConfig& config, Sharding& sharding, const ReductionGroups& groups, Arena& arena)
    : config_(config), sharding_(sharding), groups_(groups), type_(sharding.weight().dtype) {
    const ParameterTable& table = sharding.table();
    int64_t workspace = 0;
    for (size_t b = 0; b < table.buckets().size(); ++b) {
        const Sharding::Shard s = sharding.shard(b);
        const auto segments = table.segments(table.buckets()[b], s.first, s.elems, config.weight_decay, ParameterTable::Which::all);
        // What all data-parallel ranks hold is counted by the first of them.
        const auto which = sharding.replicated() && sharding.dp().rank() > 0 ? 0 : s.elems;
        const auto counted = table.segments(table.buckets()[b], s.first, which, config.weight_decay, ParameterTable::Which::owned);
        parts_.push_back({static_cast<int64_t>(updated_.size()), static_cast<int64_t>(segments.size())});
        updated_.insert(updated_.end(), segments.begin(), segments.end());
        counted_.insert(counted_.end(), counted.begin(), counted.end());
        workspace = std::max(workspace, segment_sums_workspace(arena.device(), s.elems, parts_.back().count));
    }
    const auto scratch = [&](DType t, int64_t elems) { return arena.reserve(MemoryClass::workspace, t, elems); };
    const int64_t n = sharding.compact_elems();
    if (type_ != DType::f32) master_ = arena.reserve(MemoryClass::optimizer, DType::f32, n);
    m_ = arena.reserve(MemoryClass::optimizer, DType::f32, n);
    v_ = arena.reserve(MemoryClass::optimizer, DType::f32, n);
    updated_table_ = scratch(DType::u8, table_bytes(updated_));
    counted_table_ = scratch(DType::u8, table_bytes(counted_));
    workspace_ = scratch(DType::u8, workspace);
    sums_ = scratch(DType::f64, 3);
    squared_norm_ = sums_.slice(0, 1);
    loss_sum_ = sums_.slice(1, 1);
    request_ = sums_.slice(2, 1);
    control_ = scratch(DType::f32, 2);
    norm_ = scratch(DType::f32, 1);
    if (config.name == OptimizerKind::lamb) lamb_norms_ = scratch(DType::f64, 2 * static_cast<int64_t>(updated_.size()));
}

Tensor Optimizer::compact(const Tensor& all, size_t b) const {
    const Sharding::Shard s = sharding_.shard(b);
    return all.slice(s.compact, s.elems);
}

Tensor Optimizer::master(size_t b) const { return master_ ? compact(master_, b) : sharding_.shard_weight(b); }

std::vector<StateShard> Optimizer::shards() const {
    std::vector<StateShard> shards;
    for (size_t b = 0; b < parts_.size(); ++b) {
        const Sharding::Shard s = sharding_.shard(b);
        shards.push_back({s.first, s.elems, master(b).as<float>(), m(b).as<float>(), v(b).as<float>()});
    }
    return shards;
}

void Optimizer::fill_constants(Stream& s) const {
    copy(s, {.x = Tensor{const_cast<Segment*>(updated_.data()), DType::u8, updated_table_.elems}, .y = updated_table_});
    copy(s, {.x = Tensor{const_cast<Segment*>(counted_.data()), DType::u8, counted_table_.elems}, .y = counted_table_});
}

void Optimizer::refresh_weights(Stream& s) const {
    for (size_t b = 0; b < parts_.size(); ++b) {
        if (master_) add_into(s, {.x = master(b), .y = sharding_.shard_weight(b), .accumulate = Accumulate::overwrite});
        sharding_.gather(s, b);
    }
}

void Optimizer::settle_gradients(Stream& s) const {
    sharding_.settle(s);
    if (groups_.tp->alone()) return;
    // Norms and positions saw only this rank's rows of the sequence.
    Ticket summed;
    groups_.tp->follow(s.last());
    for (size_t b = 0; b < parts_.size(); ++b) {
        const Bucket& bucket = sharding_.table().buckets()[b];
        const Sharding::Shard shard = sharding_.shard(b);
        const int64_t partial = std::clamp(bucket.begin + bucket.partial_elems - shard.first, int64_t{0}, shard.elems);
        if (partial > 0) summed = groups_.tp->all_reduce(sharding_.shard_gradient(b).slice(0, partial));
    }
    s.follow(summed);
}

void Optimizer::step(Stream& s, double lr, int64_t number, float unit, const double* request) const {
    copy(s, {.x = Tensor{const_cast<double*>(request), DType::f64, 1}, .y = request_});
    zero(s, {.y = squared_norm_});
    for (size_t b = 0; b < parts_.size(); ++b)
        squared_norm(s, {.grad = sharding_.shard_gradient(b), .sums = squared_norm_, .workspace = workspace_, .segments = table(counted_table_, b),
                         .segment_count = parts_[b].count});
    groups_.sum_over_all(s, sums_);
    clip_control(s, {.squared_norm = squared_norm_, .control = control_, .norm = norm_, .unit = unit, .clip = static_cast<float>(config_.clip)});
    if (config_.name == OptimizerKind::lamb) return lamb(s, lr, number);
    for (size_t b = 0; b < parts_.size(); ++b) {
        adamw(s, {.master = master(b), .m = m(b), .v = v(b), .grad = sharding_.shard_gradient(b), .control = control_,
                  .param = master_ ? sharding_.shard_weight(b) : Tensor{}, .segments = table(updated_table_, b), .segment_count = parts_[b].count,
                  .lr = static_cast<float>(lr), .beta1 = static_cast<float>(config_.beta1), .beta2 = static_cast<float>(config_.beta2),
                  .eps = static_cast<float>(config_.eps), .step = number});
        sharding_.gather(s, b);
    }
}

// The two norms of every tensor are summed over the ranks that hold parts of it. A tensor that all tensor-parallel ranks hold is summed too:
// both its norms grow by the same factor, and only their ratio matters.
void Optimizer::lamb(Stream& s, double lr, int64_t number) const {
    const auto norms = [&](size_t b) { return lamb_norms_.slice(2 * parts_[b].first, 2 * parts_[b].count); };
    for (size_t b = 0; b < parts_.size(); ++b)
        lamb_direction(s, {.master = master(b), .control = control_, .m = m(b), .v = v(b), .grad = sharding_.shard_gradient(b), .norms = norms(b),
                           .workspace = workspace_, .segments = table(updated_table_, b), .segment_count = parts_[b].count,
                           .beta1 = static_cast<float>(config_.beta1), .beta2 = static_cast<float>(config_.beta2),
                           .eps = static_cast<float>(config_.eps), .step = number});
    ReductionGroups{.tp = groups_.tp, .dp = sharding_.replicated() ? nullptr : groups_.dp}.sum_over_all(s, lamb_norms_);
    for (size_t b = 0; b < parts_.size(); ++b) {
        lamb_update(s, {.master = master(b), .direction = sharding_.shard_gradient(b), .norms = norms(b), .control = control_,
                        .param = master_ ? sharding_.shard_weight(b) : Tensor{}, .segments = table(updated_table_, b),
                        .segment_count = parts_[b].count, .lr = static_cast<float>(lr)});
        sharding_.gather(s, b);
    }
}

Optimizer::Outcome Optimizer::outcome(Stream& s) const {
    float control[2] = {}, norm = 0;
    double sums[3] = {};
    read_back(s, {{control_, Tensor{control, DType::f32, 2}}, {norm_, Tensor{&norm, DType::f32, 1}}, {sums_, Tensor{sums, DType::f64, 3}}}, "outcome");
    return {norm, control[1] != 0.0f, sums[1], sums[2]};
}

Optimizer::Evaluation Optimizer::evaluation(Stream& s, double tokens) const {
    const bool counts = groups_.tp->rank() == 0 && groups_.pp->rank() == 0;
    double sums[3] = {counts ? tokens : 0.0};
    const Tensor host{sums, DType::f64, 3};
    copy(s, {.x = host.slice(0, 1), .y = squared_norm_});
    groups_.sum_over_all(s, sums_);
    read_back(s, {{sums_, host}}, "evaluation");
    return {sums[1], sums[0]};
}

double learning_rate(const OptimConfig& c, int64_t step, int64_t total_steps) {
    if (step <= c.warmup_steps) return c.lr * static_cast<double>(step) / static_cast<double>(c.warmup_steps);
    const auto between = [&](double coefficient) { return c.min_lr + (c.lr - c.min_lr) * coefficient; };
    const double n = static_cast<double>(step), W = static_cast<double>(c.warmup_steps), D = static_cast<double>(c.decay_steps);
    switch (c.schedule) {
        case LrSchedule::constant: return c.lr;
        case LrSchedule::linear: return between(std::max(0.0, 1 - (n - W) / std::max(D - W, 1.0)));
        case LrSchedule::cosine: {
            const double r = std::min(1.0, (n - W) / std::max(D - W, 1.0));
            return between(0.5 * (1 + std::cos(3.14159265358979323846 * r)));
        }
        // Warm-up, stable, decay (MiniCPM): the last decay_steps fall as 1 - sqrt(x).
        case LrSchedule::wsd: {
            const double x = (n - static_cast<double>(total_steps - c.decay_steps)) / std::max(D, 1.0);
            return x <= 0 ? c.lr : between(1 - std::sqrt(std::min(x, 1.0)));
        }
    }
    return c.lr;
}

}  // namespace trifold
