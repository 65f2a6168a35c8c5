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

Head::Head(const ModelConfig& m, const ParameterTable& table, const FlatBuffers& flat, DType type, int64_t tokens, bool with_backward, Arena& arena)
    : model_(m),
      norm_(norm_params(table, flat, "final_norm")),
      head_(padded_matrix(m, table, flat, m.tied ? "embedding.token" : "head")),
      chunk_(rows_per_chunk(tokens, m.padded_vocab())) {
    const auto keep = [&](DType t, int64_t elems) { return arena.reserve(MemoryClass::activations, t, elems); };
    const auto scratch = [&](DType t, int64_t elems) { return arena.reserve(MemoryClass::workspace, t, elems); };
    x_NC_ = keep(type, tokens * m.hidden);
    y_NC_ = keep(type, tokens * m.hidden);
    rstd_N_ = keep(DType::f32, tokens);
    if (m.norm == NormKind::layernorm) mean_N_ = keep(DType::f32, tokens);
    loss_N_ = scratch(DType::f32, tokens);
    logits_ = scratch(with_backward ? type : DType::f32, chunk_ * m.padded_vocab());
    linear_workspace_ = scratch(DType::u8, linear_workspace(arena.device(), chunk_, m.padded_vocab()));
    if (with_backward) {
        dy_NC_ = scratch(type, tokens * m.hidden);
        workspace_ = scratch(DType::u8, norm_backward_workspace(arena.device(), tokens, m.hidden));
    }
}

void Head::norm_forward(Stream& s, const Tensor& x, const Tensor& delta, int64_t N) const {
    trifold::norm_forward(s, {.x_NC = x, .delta_NC = delta, .sum_NC = x_NC_, .weight_C = norm_.w, .bias_C = norm_.b, .y_NC = y_NC_,
                              .mean_N = mean_N_, .rstd_N = rstd_N_, .kind = model_.norm, .eps = static_cast<float>(model_.norm_eps),
                              .N = N, .C = model_.hidden});
}

// Logits and losses of rows [first, first + rows); with dlogits (which may be logits_) their gradients too.
void Head::chunk_loss(Stream& s, const Tensor& target, int64_t first, int64_t rows, float grad_scale, const Tensor& dlogits) const {
    const int64_t C = model_.hidden, P = model_.padded_vocab();
    const Tensor logits = logits_.slice(0, rows * P);
    linear_forward(s, {.x_NI = y_NC_.slice(first * C, rows * C), .w_OI = head_.w, .y_NO = logits, .workspace = linear_workspace_,
                       .N = rows, .I = C, .O = P});
    cross_entropy(s, {.logits_NP = logits, .target_N = target.slice(first, rows), .loss_N = loss_N_.slice(first, rows), .dlogits_NP = dlogits,
                      .grad_scale = grad_scale, .N = rows, .V = model_.vocab, .P = P});
}

void Head::loss(Stream& s, const Tensor& target, int64_t N, const Tensor& loss_sum) const {
    for (int64_t first = 0; first < N; first += chunk_) chunk_loss(s, target, first, std::min(chunk_, N - first), 1.0f, {});
    sum(s, {.x = loss_N_.slice(0, N), .sum = loss_sum, .accumulate = Accumulate::add});
}

void Head::loss_and_backward(Stream& s, const Tensor& target, int64_t N, float grad_scale, const Tensor& loss_sum, const Tensor& dresidual,
                             Accumulate accumulate) const {
    const int64_t C = model_.hidden, P = model_.padded_vocab();
    Accumulate into_head = accumulate;
    for (int64_t first = 0; first < N; first += chunk_) {
        const int64_t rows = std::min(chunk_, N - first);
        const Tensor dlogits = logits_.slice(0, rows * P);
        chunk_loss(s, target, first, rows, grad_scale, dlogits);
        linear_backward_weight(s, {.dy_NO = dlogits, .x_NI = y_NC_.slice(first * C, rows * C), .dw_OI = head_.dw, .workspace = linear_workspace_,
                                   .accumulate = into_head, .N = rows, .I = C, .O = P});
        linear_backward_input(s, {.dy_NO = dlogits, .w_OI = head_.w, .dx_NI = dy_NC_.slice(first * C, rows * C),
                                  .workspace = linear_workspace_, .N = rows, .I = C, .O = P});
        into_head = Accumulate::add;
    }
    sum(s, {.x = loss_N_.slice(0, N), .sum = loss_sum, .accumulate = Accumulate::add});
    norm_backward(s, {.dy_NC = dy_NC_, .x_NC = x_NC_, .weight_C = norm_.w, .mean_N = mean_N_, .rstd_N = rstd_N_, .dx_NC = dresidual,
                      .dweight_C = norm_.dw, .dbias_C = norm_.db, .workspace = workspace_, .kind = model_.norm, .accumulate = accumulate,
                      .N = N, .C = C});
}

Tensor Head::logits_of(Stream& s, int64_t n) const {
    const int64_t C = model_.hidden, P = model_.padded_vocab();
    const Tensor logits = logits_.slice(0, P);
    linear_forward(s, {.x_NI = y_NC_.slice(n * C, C), .w_OI = head_.w, .y_NO = logits, .workspace = linear_workspace_, .N = 1, .I = C, .O = P});
    return logits;
}

}  // namespace trifold
