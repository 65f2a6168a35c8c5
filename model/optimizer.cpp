#include "model/optimizer.h"

#include <algorithm>
#include <cmath>

namespace trifold {

Optimizer::Optimizer(const OptimConfig& config, const ParameterTable& table, DType type, int64_t micro_batches, Arena& arena)
    : config_(config), micro_batches_(micro_batches), segments_(table.segments(config.weight_decay)) {
    const int64_t n = table.flat_elems();
    const bool fp32 = type == DType::f32;
    master_ = arena.reserve(fp32 ? MemoryClass::params : MemoryClass::optimizer, DType::f32, n);
    weight_ = fp32 ? master_ : arena.reserve(MemoryClass::params, type, n);
    grad_ = arena.reserve(MemoryClass::grads, DType::f32, n);
    if (micro_batches > fold_every) folded_ = arena.reserve(MemoryClass::grads, DType::f32, n);
    m_ = arena.reserve(MemoryClass::optimizer, DType::f32, n);
    v_ = arena.reserve(MemoryClass::optimizer, DType::f32, n);
    const int64_t segments = static_cast<int64_t>(segments_.size());
    segment_table_ = arena.reserve(MemoryClass::workspace, DType::u8, segments * static_cast<int64_t>(sizeof(Segment)));
    workspace_ = arena.reserve(MemoryClass::workspace, DType::u8, segment_sums_workspace(arena.device(), n, segments));
    squared_norm_ = arena.reserve(MemoryClass::workspace, DType::f64, 1);
    control_ = arena.reserve(MemoryClass::workspace, DType::f32, 2);
    norm_ = arena.reserve(MemoryClass::workspace, DType::f32, 1);
    if (config.name == OptimizerKind::lamb) lamb_norms_ = arena.reserve(MemoryClass::workspace, DType::f64, 2 * segments);
}

void Optimizer::fill_constants(Stream& s) const {
    copy(s, {.x = Tensor{const_cast<Segment*>(segments_.data()), DType::u8, segment_table_.elems}, .y = segment_table_});
}

void Optimizer::fold_gradients(Stream& s, int64_t m) const {
    if (!folded_) return;
    if (m + 1 == micro_batches_) {
        add_into(s, {.x = folded_, .y = grad_});
    } else if ((m + 1) % fold_every == 0) {
        add_into(s, {.x = grad_, .y = folded_, .accumulate = m + 1 == fold_every ? Accumulate::overwrite : Accumulate::add});
    }
}

void Optimizer::refresh_weights(Stream& s) const {
    if (weight_.data != master_.data) add_into(s, {.x = master_, .y = weight_, .accumulate = Accumulate::overwrite});
}

void Optimizer::step(Stream& s, double lr, int64_t update, float unit) const {
    const Segment* segments = static_cast<const Segment*>(segment_table_.data);
    const int64_t count = static_cast<int64_t>(segments_.size());
    const Tensor param = weight_.data == master_.data ? Tensor{} : weight_;
    zero(s, {.y = squared_norm_});
    squared_norm(s, {.grad = grad_, .sums = squared_norm_, .workspace = workspace_, .segments = segments, .segment_count = count});
    clip_control(s, {.squared_norm = squared_norm_, .control = control_, .norm = norm_, .unit = unit, .clip = static_cast<float>(config_.clip)});
    const float beta1 = static_cast<float>(config_.beta1), beta2 = static_cast<float>(config_.beta2), eps = static_cast<float>(config_.eps);
    if (config_.name == OptimizerKind::adamw) {
        adamw(s, {.master = master_, .m = m_, .v = v_, .grad = grad_, .control = control_, .param = param, .segments = segments,
                  .segment_count = count, .lr = static_cast<float>(lr), .beta1 = beta1, .beta2 = beta2, .eps = eps, .step = update});
        return;
    }
    lamb_direction(s, {.master = master_, .control = control_, .m = m_, .v = v_, .grad = grad_, .norms = lamb_norms_, .workspace = workspace_,
                       .segments = segments, .segment_count = count, .beta1 = beta1, .beta2 = beta2, .eps = eps, .step = update});
    lamb_update(s, {.master = master_, .direction = grad_, .norms = lamb_norms_, .control = control_, .param = param, .segments = segments,
                    .segment_count = count, .lr = static_cast<float>(lr)});
}

Optimizer::Outcome Optimizer::outcome(Stream& s) const {
    float control[2] = {}, norm = 0;
    copy(s, {.x = control_, .y = Tensor{control, DType::f32, 2}});
    s.engine().wait(copy(s, {.x = norm_, .y = Tensor{&norm, DType::f32, 1}}));
    return {norm, control[1] != 0.0f};
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
