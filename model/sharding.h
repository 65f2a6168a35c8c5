// model/sharding.h   Weights and gradients over data-parallel ranks, bucket by bucket (ZeRO, arXiv 1910.02054; folded as MegaScale 3.2).
//
//   acquire   before a bucket's weights are read: compute comes after their all-gather, which the optimizer started
//   begin     before a micro-batch's gradients of a bucket are written
//   written   after them; the last micro-batch of a step (zero 2: every one) starts the reduction behind the backward pass
//   settle    all gradients of the step are in shard_gradient(): what the optimizer reads
//   gather    after the update of a bucket: its weights travel to the other ranks while the next bucket is updated and the next step begins
//
//   zero      what a rank keeps                                         gradients                         weights
//   0         everything                                                all-reduce, once per step         -
//   1         master weights and moments of its shard                   reduce-scatter, once per step     all-gather, once per step
//   2         gradients of its shard too; two buckets of layers whole   reduce-scatter, each micro-batch  all-gather, once per step
//
// Gradients of a long step are summed in two levels of fold_every micro-batches, so that equal additions do not all round the same way.
// A tied embedding on two stages is reduced on each, then summed between the two, shard by shard.
#pragma once
#include <vector>

#include "kernels/arena.h"
#include "model/layers.h"
#include "model/parameters.h"
#include "parallel/group.h"
#include "parallel/tensor_parallel.h"

namespace trifold {

struct ShardingOptions {
    DType type = DType::f32;  // of the weights
    int64_t zero = 1;
    int64_t micro_batches = 1;
    Fold fold = Fold::on;  // off: reductions start when all gradients are there, gathers are waited for at once
};

class Sharding {
public:
    Sharding(const ParameterTable& table, const ShardingOptions& options, const Group& dp, const Group& tie, Arena& arena);

    const ParameterTable& table() const { return table_; }
    const Group& dp() const { return *dp_; }
    FlatBuffers flat() const { return {weight_, grads_}; }
    const Tensor& weight() const { return weight_; }

    // The interval of a bucket that this rank updates, in the flat buffers; and its place in buffers that hold shards alone.
    struct Shard {
        int64_t first = 0, elems = 0, compact = 0;
    };
    Shard shard(size_t bucket) const;
    int64_t compact_elems() const { return table_.flat_elems() / shards_; }
    // The interval whose checkpoint and norms this rank answers for: the shard, or its part of what all ranks hold (zero 0).
    Shard owned(size_t bucket) const;
    bool replicated() const { return shards_ == 1 && dp_->size() > 1; }
    Tensor shard_weight(size_t bucket) const { return weight_.slice(shard(bucket).first, shard(bucket).elems); }
    Tensor shard_gradient(size_t bucket) const;

    void begin_step();
    void acquire(Stream& compute, size_t bucket);
    void begin(Stream& compute, size_t bucket);
    // Whether a tensor's first gradient of a step is still to come decides the caller; with zero 2 every micro-batch starts anew.
    Accumulate accumulate(bool first_of_step) const { return first_of_step || each_micro_batch_ ? Accumulate::overwrite : Accumulate::add; }
    void written(Stream& compute, size_t bucket);
    void settle(Stream& compute);
    void gather(Stream& compute, size_t bucket);

    static constexpr int64_t fold_every = 16;

private:
    struct State {  // of one bucket
        int64_t micro_batches = 0;
        bool pending = false;        // zero 2: a reduction has not been added up yet
        Ticket reduced, gathered;
    };
    void reduce(Stream& compute, size_t bucket);
    void add_up(Stream& compute, size_t bucket);

    const ParameterTable& table_;
    ShardingOptions options_;
    const Group *dp_, *tie_;
    int64_t shards_;            // parts that a bucket's state is cut into
    bool each_micro_batch_;
    Tensor weight_, folded_, summed_;
    std::vector<Tensor> grads_;
    std::vector<int> slot_user_;  // zero 2: which bucket's gradients lie in each of the two shared slots
    std::vector<int> slot_of_;
    std::vector<State> state_;
    Ticket last_reduced_, tied_;  // of this step
};

}  // namespace trifold
