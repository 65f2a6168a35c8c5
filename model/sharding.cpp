#include "model/sharding.h"

#include <algorithm>
#include <utility>

namespace trifold {

Sharding::Sharding(const ParameterTable& table, const ShardingOptions& options, const Group& dp, const Group& tie, Arena& arena)
    : table_(table),
      options_(options),
      dp_(&dp),
      tie_(&tie),
      shards_(options.zero == 0 ? 1 : dp.size()),
      each_micro_batch_(options.zero == 2 && dp.size() > 1),
      state_(table.buckets().size()) {
    const auto& buckets = table.buckets();
    const int64_t n = table.flat_elems();
    const auto gradients = [&](int64_t elems) { return arena.reserve(MemoryClass::grads, DType::f32, elems); };
    weight_ = arena.reserve(MemoryClass::params, options.type, n);
    slot_of_.assign(buckets.size(), -1);
    if (!each_micro_batch_) {
        const Tensor flat = gradients(n);
        for (const Bucket& b : buckets) grads_.push_back(flat.slice(b.begin, b.elems));
        if (options.micro_batches > fold_every) folded_ = gradients(n);
        return;
    }
    // Buckets of layers take turns in two slots; embeddings and head are written at both ends of a backward pass.
    int64_t largest = 0;
    for (const Bucket& b : buckets)
        if (b.first_layer >= 0) largest = std::max(largest, b.elems);
    const Tensor slots[2] = {gradients(largest), gradients(largest)};
    int turn = 0;
    for (size_t b = 0; b < buckets.size(); ++b) {
        const bool layers = buckets[b].first_layer >= 0;
        if (layers) slot_of_[b] = turn++ % 2;
        grads_.push_back(layers ? slots[slot_of_[b]].slice(0, buckets[b].elems) : gradients(buckets[b].elems));
    }
    slot_user_.assign(2, -1);
    summed_ = gradients(compact_elems());
}

Sharding::Shard Sharding::shard(size_t b) const {
    const Bucket& bucket = table_.buckets()[b];
    const int64_t elems = bucket.elems / shards_, rank = shards_ == 1 ? 0 : dp_->rank();
    return {bucket.begin + rank * elems, elems, bucket.begin / shards_};
}

Sharding::Shard Sharding::owned(size_t b) const {
    if (!replicated()) return shard(b);
    const Bucket& bucket = table_.buckets()[b];
    const int64_t elems = bucket.elems / dp_->size(), first = bucket.begin + dp_->rank() * elems;
    return {first, elems, first};
}

Tensor Sharding::shard_gradient(size_t b) const {
    const Shard s = shard(b);
    return each_micro_batch_ ? summed_.slice(s.compact, s.elems) : grads_[b].slice(s.first - table_.buckets()[b].begin, s.elems);
}

void Sharding::begin_step() {
    for (State& s : state_) s.micro_batches = 0;
}

void Sharding::acquire(Stream& compute, size_t b) { compute.follow(std::exchange(state_[b].gathered, {})); }

void Sharding::begin(Stream& compute, size_t b) {
    if (!each_micro_batch_) return;
    add_up(compute, b);
    if (slot_of_[b] < 0) return;
    int& user = slot_user_[static_cast<size_t>(slot_of_[b])];
    if (user >= 0) add_up(compute, static_cast<size_t>(user));
    user = static_cast<int>(b);
}

void Sharding::written(Stream& compute, size_t b) {
    const int64_t done = ++state_[b].micro_batches;
    const bool last = done == options_.micro_batches;
    if (folded_ && (last || done % fold_every == 0)) {
        const Tensor folded = folded_.slice(table_.buckets()[b].begin, table_.buckets()[b].elems);
        if (last) {
            add_into(compute, {.x = folded, .y = grads_[b]});
        } else {
            add_into(compute, {.x = grads_[b], .y = folded, .accumulate = done == fold_every ? Accumulate::overwrite : Accumulate::add});
            zero(compute, {.y = grads_[b]});
        }
    }
    if ((last && options_.fold == Fold::on) || each_micro_batch_) reduce(compute, b);
}

void Sharding::reduce(Stream& compute, size_t b) {
    State& state = state_[b];
    const Shard s = shard(b);
    if (!dp_->alone()) {
        dp_->follow(compute.last());
        state.reduced = shards_ == 1 ? dp_->all_reduce(grads_[b]) : dp_->reduce_scatter(grads_[b], grads_[b].slice(s.first - table_.buckets()[b].begin, s.elems));
        last_reduced_ = state.reduced;
        state.pending = each_micro_batch_;
    }
    const bool tied = table_.buckets()[b].token && !tie_->alone();
    if (!tied) return;
    TRIFOLD_ASSERT(!each_micro_batch_);  // refused with pipeline stages
    tie_->follow(dp_->alone() ? compute.last() : state.reduced);
    tied_ = tie_->all_reduce(shard_gradient(b));
}

// zero 2: this rank's part of a micro-batch's gradients joins the sum of the step.
void Sharding::add_up(Stream& compute, size_t b) {
    State& state = state_[b];
    if (!std::exchange(state.pending, false)) return;
    const Shard s = shard(b);
    compute.follow(state.reduced);
    add_into(compute, {.x = grads_[b].slice(s.first - table_.buckets()[b].begin, s.elems), .y = summed_.slice(s.compact, s.elems),
                       .accumulate = state.micro_batches == 1 ? Accumulate::overwrite : Accumulate::add});
}

void Sharding::settle(Stream& compute) {
    for (size_t b = 0; b < state_.size(); ++b) {
        TRIFOLD_ASSERT(state_[b].micro_batches == options_.micro_batches);
        if (options_.fold == Fold::off && !each_micro_batch_) reduce(compute, b);
    }
    for (size_t b = 0; each_micro_batch_ && b < state_.size(); ++b) add_up(compute, b);
    compute.follow(std::exchange(last_reduced_, {}));  // reductions end in the order in which they began
    compute.follow(std::exchange(tied_, {}));
}

void Sharding::gather(Stream& compute, size_t b) {
    if (shards_ == 1) return;
    const Bucket& bucket = table_.buckets()[b];
    dp_->follow(compute.last());
    state_[b].gathered = dp_->all_gather(shard_weight(b), weight_.slice(bucket.begin, bucket.elems));
    if (options_.fold == Fold::off) acquire(compute, b);
}

}  // namespace trifold
