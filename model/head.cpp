#include "model/head.h"

#include <algorithm>

namespace trifold {
namespace {

// Rows per chunk: even chunks, each a multiple of 64 rows, none larger than the limit.
int64_t rows_per_chunk(int64_t tokens, int64_t padded_vocab) {
    const int64_t limit = std::max<int64_t>(64, head_chunk_bytes / (padded_vocab * 4));
    const int64_t chunks = (tokens + limit - 1) / limit;
    const int64_t rows = ((tokens + chunks - 1) / chunks + 63) / 64 * 64;
    return std::min(rows, tokens);
}

}  // namespace

HeadActivations reserve_head_activations(const ModelConfig& m, const BlockShape& shape, Arena& arena) {
    const auto keep = [&](DType t, int64_t elems) { return arena.reserve(MemoryClass::activations, t, elems); };
    HeadActivations a{.x_nC = keep(shape.type, shape.n() * m.hidden), .y_nC = keep(shape.type, shape.n() * m.hidden), .rstd_n = keep(DType::f32, shape.n())};
    if (m.norm == NormKind::layernorm) a.mean_n = keep(DType::f32, shape.n());
    return a;
}

Head::Head(const ModelConfig& m, const ParameterTable& table, const FlatBuffers& flat, DType type, int64_t N, Passes passes, const TensorParallel& tp, Arena& arena)
    : model_(m),
      norm_(norm_params(table, flat, "final_norm")),
      head_(padded_matrix(m, table, flat, m.tied ? "embedding.token" : "head")),
      rows_(table.rows()),
      first_row_(table.first_row()),
      chunk_(rows_per_chunk(N, table.padded_rows())) {
    const auto scratch = [&](DType t, int64_t elems) { return arena.reserve(MemoryClass::workspace, t, elems); };
    const bool backward = passes == Passes::forward_and_backward;
    const int64_t n = N / tp.size();
    loss_N_ = scratch(DType::f32, N);
    logits_ = scratch(backward ? type : DType::f32, chunk_ * head_.O);
    linear_workspace_ = scratch(DType::u8, linear_workspace(arena.device(), chunk_, head_.O));
    if (!tp.alone()) {
        stats_ = scratch(DType::f32, chunk_ * 3);
        all_stats_ = scratch(DType::f32, tp.size() * chunk_ * 3);
    }
    if (backward) {
        dy_nC_ = scratch(type, n * m.hidden);
        workspace_ = scratch(DType::u8, norm_backward_workspace(arena.device(), n, m.hidden));
    }
}

void Head::norm_forward(Stream& s, const Tensor& x, const Tensor& delta, const HeadActivations& a, int64_t n) const {
    trifold::norm_forward(s, {.x_NC = x, .delta_NC = delta, .sum_NC = a.x_nC, .weight_C = norm_.w, .bias_C = norm_.b, .y_NC = a.y_nC,
                              .mean_N = a.mean_n, .rstd_N = a.rstd_n, .kind = model_.norm, .eps = static_cast<float>(model_.norm_eps),
                              .N = n, .C = model_.hidden});
}

// Logits and losses of rows [first, first + rows); with dlogits (which may be logits_) their gradients too.
void Head::chunk_loss(Stream& s, const Tensor& y, const Tensor& target, int64_t first, int64_t rows, float grad_scale, const TensorParallel& tp,
                      const Tensor& dlogits) const {
    const int64_t C = model_.hidden, P = head_.O;
    const Tensor logits = logits_.slice(0, rows * P), targets = target.slice(first, rows), losses = loss_N_.slice(first, rows);
    linear_forward(s, {.x_NI = y.slice(first * C, rows * C), .w_OI = head_.w, .y_NO = logits, .workspace = linear_workspace_, .N = rows, .I = C, .O = P});
    if (tp.alone()) {
        cross_entropy(s, {.logits_NP = logits, .target_N = targets, .loss_N = losses, .dlogits_NP = dlogits, .grad_scale = grad_scale, .N = rows, .V = rows_, .P = P});
        return;
    }
    const Tensor own = stats_.slice(0, rows * 3), all = all_stats_.slice(0, tp.size() * rows * 3);
    cross_entropy_stats(s, {.logits_NP = logits, .target_N = targets, .stats_N3 = own, .N = rows, .V = rows_, .P = P, .first = first_row_});
    tp.group().follow(s.last());
    s.follow(tp.group().all_gather(own, all));
    cross_entropy_combine(s, {.logits_NP = logits, .target_N = targets, .stats_RN3 = all, .loss_N = losses, .dlogits_NP = dlogits, .grad_scale = grad_scale,
                              .N = rows, .V = rows_, .P = P, .first = first_row_, .ranks = tp.size()});
}

void Head::loss(Stream& s, const Tensor& target, const HeadActivations& a, int64_t N, const TensorParallel& tp, const Tensor& loss_sum) const {
    tp.follow(s);
    const TensorParallel::Gathered y = tp.gather(s, a.y_nC, N, TensorParallel::Buffer::activations);
    tp.arrive(s, y);
    for (int64_t first = 0; first < N; first += chunk_) chunk_loss(s, y.full_NC, target, first, std::min(chunk_, N - first), 1.0f, tp, {});
    if (tp.rank() == 0) sum(s, {.x = loss_N_.slice(0, N), .sum = loss_sum, .accumulate = Accumulate::add});
}

void Head::loss_and_backward(Stream& s, const Tensor& target, const HeadActivations& a, int64_t N, float grad_scale, TensorParallel& tp,
                             const Tensor& loss_sum, const Tensor& dresidual, Accumulate accumulate) const {
    const int64_t C = model_.hidden, P = head_.O;
    tp.follow(s);
    const TensorParallel::Gathered y = tp.gather(s, a.y_nC, N, TensorParallel::Buffer::activations);
    const Tensor dy = tp.partial(dy_nC_);
    tp.arrive(s, y);
    Accumulate into_head = accumulate;
    for (int64_t first = 0; first < N; first += chunk_) {
        const int64_t rows = std::min(chunk_, N - first);
        const Tensor dlogits = logits_.slice(0, rows * P);
        chunk_loss(s, y.full_NC, target, first, rows, grad_scale, tp, dlogits);
        linear_backward_weight(s, {.dy_NO = dlogits, .x_NI = y.full_NC.slice(first * C, rows * C), .dw_OI = head_.dw, .workspace = linear_workspace_,
                                   .accumulate = into_head, .N = rows, .I = C, .O = P});
        linear_backward_input(s, {.dy_NO = dlogits, .w_OI = head_.w, .dx_NI = dy.slice(first * C, rows * C),
                                  .workspace = linear_workspace_, .N = rows, .I = C, .O = P});
        into_head = Accumulate::add;
    }
    tp.scatter(s, N, [](int64_t, int64_t) {});  // all rows were taken in the same order on every rank
    if (tp.rank() == 0) sum(s, {.x = loss_N_.slice(0, N), .sum = loss_sum, .accumulate = Accumulate::add});
    tp.finish(s, dy_nC_);
    norm_backward(s, {.dy_NC = dy_nC_, .x_NC = a.x_nC, .weight_C = norm_.w, .mean_N = a.mean_n, .rstd_N = a.rstd_n, .dx_NC = dresidual,
                      .dweight_C = norm_.dw, .dbias_C = norm_.db, .workspace = workspace_, .kind = model_.norm, .accumulate = accumulate,
                      .N = N / tp.size(), .C = C});
}

Tensor Head::logits_of(Stream& s, const HeadActivations& a, int64_t n) const {
    const int64_t C = model_.hidden, P = head_.O;
    const Tensor logits = logits_.slice(0, P);
    linear_forward(s, {.x_NI = a.y_nC.slice(n * C, C), .w_OI = head_.w, .y_NO = logits, .workspace = linear_workspace_, .N = 1, .I = C, .O = P});
    return logits;
}

}  // namespace trifold
