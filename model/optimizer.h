// model/optimizer.h   Master weights, moments, gradient norm, clipping, AdamW and LAMB, on this rank's shard of every bucket.
//
// The host never waits between backward and update: the norm, the clip factor and the decision to apply stay where the gradients are
// (kernels/ops.h, ClipControl). The squared norm is summed over the owners on all ranks, so a NaN anywhere reaches everybody and a step with
// gradients that are not finite changes nothing anywhere: no vote of its own. The sum of the losses rides on the same all-reduce.
#pragma once
#include <vector>

#include "kernels/arena.h"
#include "model/config.h"
#include "model/sharding.h"

namespace trifold {

// The groups over which a step's sums run, one after the other.
struct ReductionGroups {
    const Group *tp = nullptr, *dp = nullptr, *pp = nullptr;
    // x, summed over all ranks; compute comes after it.
    void sum_over_all(Stream& compute, const Tensor& x) const;
};

class Optimizer {
public:
    // In fp32 the master weights are this rank's part of the weights; in bf16 the weights are their rounded copy.
    Optimizer(const OptimConfig&, Sharding&, const ReductionGroups&, Arena&);

    // Losses are added up here (fp64 [1]), and summed over all ranks by step() or evaluation().
    const Tensor& loss_sum() const { return loss_sum_; }

    // This rank's part of the state, in table order; all of it where it is replicated.
    std::vector<StateShard> shards() const;
    Tensor master(size_t bucket) const;
    Tensor m(size_t bucket) const { return compact(m_, bucket); }
    Tensor v(size_t bucket) const { return compact(v_, bucket); }

    // Once, when the memory is real: the tables of segments, which lie where the operations run.
    void fill_constants(Stream&) const;
    // After initial values or a checkpoint were written to the master weights: rounds them into the weights, and gathers.
    void refresh_weights(Stream&) const;
    // After settle_gradients(): norm of `unit` * gradients, clipping, update number `update` (1 for the first) with learning rate lr.
    // unit = nominal / valid tokens turns the accumulated gradients into those of the mean loss.
    // `request` (0: none) is summed over the ranks too; what it points to must stay until the outcome is read.
    void step(Stream&, double lr, int64_t update, float unit, const double* request) const;
    // After the last backward pass of a step: every rank's shard of the gradients is complete.
    void settle_gradients(Stream&) const;
    // Of the last step, read by the host.
    struct Outcome {
        float grad_norm = 0;  // before clipping
        bool applied = false;
        double loss_sum = 0;  // nats, over all valid tokens of the global batch
        double requests = 0;  // sum over the ranks
    };
    Outcome outcome(Stream&) const;
    // Sums over all ranks of the losses added up and of `tokens`, which each model replica gives once. Read by the host.
    struct Evaluation {
        double loss_sum = 0, tokens = 0;
    };
    Evaluation evaluation(Stream&, double tokens) const;

private:
    struct Part {  // one bucket's segments: what this rank updates, and what it counts in the norm
        int64_t first = 0, count = 0;
    };
    Tensor compact(const Tensor& all, size_t bucket) const;
    const Segment* table(const Tensor& all, size_t bucket) const { return static_cast<const Segment*>(all.data) + parts_[bucket].first; }
    void update(Stream&, double lr, int64_t update, size_t bucket) const;
    void lamb(Stream&, double lr, int64_t update) const;

    OptimConfig config_;
    Sharding& sharding_;
    ReductionGroups groups_;
    DType type_;
    std::vector<Part> parts_;
    std::vector<Segment> updated_, counted_;
    Tensor master_, m_, v_;
    Tensor updated_table_, counted_table_, sums_, squared_norm_, loss_sum_, request_, control_, norm_, lamb_norms_, workspace_;
};

// Learning rate of step 1, 2, ...: linear warm-up that gives step 1 lr / warmup_steps, then the schedule down to min_lr.
double learning_rate(const OptimConfig&, int64_t step, int64_t total_steps);

}  // namespace trifold
