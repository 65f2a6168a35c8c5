// model/optimizer.h   Gradient norm, clipping, AdamW or LAMB over the flat buffers.
//
// Gradients are summed in two levels: at most `fold_every` micro-batches into grad(), these sums into a second buffer. In one
// level the roundings of many equal additions point the same way (256 identical micro-batches: 2e-6 instead of 3e-7).
//
// The host never waits between backward and update: the norm, the clip factor and the decision to apply stay where the
// gradients are (kernels/ops.h, ClipControl), so a step with NaN or infinite gradients changes nothing.
#pragma once
#include <vector>

#include "kernels/arena.h"
#include "model/config.h"
#include "model/parameters.h"

namespace trifold {

class Optimizer {
public:
    // In fp32 the master weights are the weights; in bf16 `weight` is their rounded copy.
    Optimizer(const OptimConfig&, const ParameterTable&, DType, int64_t micro_batches, Arena&);

    // How the backward pass of micro-batch m writes its gradients, and what follows it. After the last one grad() holds all.
    Accumulate accumulate(int64_t m) const { return m % fold_every == 0 ? Accumulate::overwrite : Accumulate::add; }
    void fold_gradients(Stream&, int64_t m) const;

    const Tensor& master() const { return master_; }
    const Tensor& weight() const { return weight_; }
    const Tensor& grad() const { return grad_; }
    const Tensor& m() const { return m_; }
    const Tensor& v() const { return v_; }

    // Once, when the memory is real: the table of segments, which lies where the operations run.
    void fill_constants(Stream&) const;
    // After initial values or a checkpoint were written to master(): rounds them into weight().
    void refresh_weights(Stream&) const;
    // Norm of `unit` * gradients, clipping, update number `update` (1 for the first) with learning rate lr.
    // unit = nominal / valid tokens turns the accumulated gradients into those of the mean loss.
    void step(Stream&, double lr, int64_t update, float unit) const;
    // Of the last step, read by the host.
    struct Outcome {
        float grad_norm = 0;  // before clipping
        bool applied = false;
    };
    Outcome outcome(Stream&) const;

    static constexpr int64_t fold_every = 16;

private:
    OptimConfig config_;
    int64_t micro_batches_;
    std::vector<Segment> segments_;
    Tensor master_, weight_, grad_, folded_, m_, v_;
    Tensor segment_table_, squared_norm_, control_, norm_, lamb_norms_, workspace_;
};

// Learning rate of step 1, 2, ...: linear warm-up that gives step 1 lr / warmup_steps, then the schedule down to min_lr.
double learning_rate(const OptimConfig&, int64_t step, int64_t total_steps);

}  // namespace trifold
