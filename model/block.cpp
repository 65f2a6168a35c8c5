#include "model/block.h"

#include <algorithm>
#include <cmath>

namespace trifold {
namespace {

int64_t fused_width(const ModelConfig& m) { return (m.heads + 2 * m.kv_heads) * m.head_dim; }
int64_t up_width(const ModelConfig& m) { return m.swiglu() ? 2 * m.ffn_hidden : m.ffn_hidden; }

void linear(Stream& s, const LinearParams& p, const Tensor& x, const Tensor& y, const BlockWorkspace& w, int64_t N,
            Accumulate accumulate = Accumulate::overwrite) {
    linear_forward(s, {.x_NI = x, .w_OI = p.w, .bias_O = p.b, .y_NO = y, .workspace = w.linear, .accumulate = accumulate,
                       .N = N, .I = p.I, .O = p.O});
}
void linear_input_gradient(Stream& s, const LinearParams& p, const Tensor& dy, const Tensor& dx, const BlockWorkspace& w, int64_t N,
                           Accumulate accumulate = Accumulate::overwrite) {
    linear_backward_input(s, {.dy_NO = dy, .w_OI = p.w, .dx_NI = dx, .workspace = w.linear, .accumulate = accumulate,
                              .N = N, .I = p.I, .O = p.O});
}
void linear_weight_gradient(Stream& s, const LinearParams& p, const Tensor& dy, const Tensor& x, const BlockWorkspace& w, int64_t N,
                            Accumulate accumulate) {
    linear_backward_weight(s, {.dy_NO = dy, .x_NI = x, .dw_OI = p.dw, .dbias_O = p.db, .workspace = w.linear, .accumulate = accumulate,
                               .N = N, .I = p.I, .O = p.O});
}

// The attention arguments of q, k and v inside one fused buffer of rows (q heads, k heads, v heads).
template <class Args> Args fused_attention(const ModelConfig& m, const SequenceInfo& seq, int64_t window) {
    const int64_t S = fused_width(m);
    Args a;
    a.B = seq.B;
    a.H = m.heads;
    a.K = m.kv_heads;
    a.D = m.head_dim;
    a.q_stride = a.kv_stride = S;
    a.q_batch_stride = a.kv_batch_stride = seq.T * S;
    a.window = window;
    a.scale = 1.0f / std::sqrt(static_cast<float>(m.head_dim));
    a.doc_start_N = seq.doc_start_N;
    return a;
}
AttentionForward forward_arguments(const ModelConfig& m, const SequenceInfo& seq, int64_t window, const Tensor& qkv) {
    auto a = fused_attention<AttentionForward>(m, seq, window);
    a.q_NHD = qkv;
    a.k_NKD = qkv.from(m.heads * m.head_dim);
    a.v_NKD = qkv.from((m.heads + m.kv_heads) * m.head_dim);
    a.Tq = a.Tk = seq.T;
    return a;
}
AttentionBackward backward_arguments(const ModelConfig& m, const SequenceInfo& seq, int64_t window, const Tensor& qkv, const Tensor& dqkv) {
    auto a = fused_attention<AttentionBackward>(m, seq, window);
    const int64_t k = m.heads * m.head_dim, v = k + m.kv_heads * m.head_dim;
    a.q_NHD = qkv;
    a.k_NKD = qkv.from(k);
    a.v_NKD = qkv.from(v);
    a.dq_NHD = dqkv;
    a.dk_NKD = dqkv.from(k);
    a.dv_NKD = dqkv.from(v);
    a.T = seq.T;
    return a;
}

void rotate(Stream& s, const ModelConfig& m, const SequenceInfo& seq, const Tensor& qkv, int direction) {
    if (m.position != Position::rope) return;
    rotary(s, {.x_NS = qkv, .position_N = seq.position_N, .cos_TR = seq.cos_TR, .sin_TR = seq.sin_TR, .direction = direction,
               .N = seq.tokens(), .heads = m.heads + m.kv_heads, .D = m.head_dim, .stride = fused_width(m)});
}

// Puts the new keys and values behind those in the cache and points the attention at the whole of it.
void extend_cache(Stream& s, const ModelConfig& m, const SequenceInfo& seq, KvCache& cache, AttentionForward& a) {
    const int64_t width = m.kv_heads * m.head_dim, S = fused_width(m), k = m.heads * m.head_dim;
    TRIFOLD_ASSERT(cache.length + seq.T <= cache.capacity);
    for (int64_t b = 0; b < seq.B; ++b)
        for (int64_t t = 0; t < seq.T; ++t) {
            const int64_t from = (b * seq.T + t) * S + k, to = (b * cache.capacity + cache.length + t) * width;
            copy(s, {.x = a.q_NHD.slice(from, width), .y = cache.k.slice(to, width)});
            copy(s, {.x = a.q_NHD.slice(from + width, width), .y = cache.v.slice(to, width)});
        }
    a.k_NKD = cache.k;
    a.v_NKD = cache.v;
    a.kv_stride = width;
    a.kv_batch_stride = cache.capacity * width;
    a.q_offset = cache.length;
    a.Tk = cache.length + seq.T;
    cache.length += seq.T;
}

}  // namespace

BlockActivations reserve_activations(const ModelConfig& m, DType type, int64_t B, int64_t T, Recompute mode, const BlockActivations* shared,
                                     Arena& arena) {
    const int64_t N = B * T, C = m.hidden, H = m.heads, K = m.kv_heads, D = m.head_dim;
    BlockActivations a;
    const auto reserve = [&](Tensor BlockActivations::*field, Recompute redone_from, DType t, int64_t elems) {
        const bool redone = shared && mode >= redone_from;
        a.*field = redone ? shared->*field : arena.reserve(MemoryClass::activations, t, elems);
    };
    const auto always = [&](Tensor BlockActivations::*field, DType t, int64_t elems) {
        a.*field = arena.reserve(MemoryClass::activations, t, elems);
    };
    using A = BlockActivations;
    always(&A::x_NC, type, N * C);
    reserve(&A::y1_NC, Recompute::selective, type, N * C);
    reserve(&A::rstd1_N, Recompute::full, DType::f32, N);
    reserve(&A::qkv_NS, Recompute::full, type, N * fused_width(m));
    reserve(&A::o_NHD, Recompute::full, type, N * H * D);
    reserve(&A::lse_BHT, Recompute::full, DType::f32, N * H);
    reserve(&A::up_NF, Recompute::full, type, N * up_width(m));
    reserve(&A::act_NF, Recompute::selective, type, N * m.ffn_hidden);
    if (m.norm == NormKind::layernorm) reserve(&A::mean1_N, Recompute::full, DType::f32, N);
    if (m.qk_norm) {
        reserve(&A::qk_saved_NHD, Recompute::full, type, N * (H + K) * D);
        reserve(&A::q_rstd_NH, Recompute::full, DType::f32, N * H);
        reserve(&A::k_rstd_NH, Recompute::full, DType::f32, N * K);
    }
    if (m.block == BlockKind::serial) {
        reserve(&A::mid_NC, Recompute::full, type, N * C);
        reserve(&A::y2_NC, Recompute::selective, type, N * C);
        reserve(&A::rstd2_N, Recompute::full, DType::f32, N);
        if (m.norm == NormKind::layernorm) reserve(&A::mean2_N, Recompute::full, DType::f32, N);
    }
    return a;
}

BlockWorkspace reserve_workspace(const ModelConfig& m, DType type, int64_t B, int64_t T, Passes passes, Arena& arena) {
    const int64_t N = B * T, HD = m.heads * m.head_dim;
    const auto reserve = [&](DType t, int64_t elems) { return arena.reserve(MemoryClass::workspace, t, elems); };
    const SequenceInfo seq{.B = B, .T = T};
    int64_t attention = attention_workspace(arena.device(), forward_arguments(m, seq, 0, Tensor{nullptr, type, N * fused_width(m)}));
    BlockWorkspace w;
    w.delta_NC = reserve(type, N * m.hidden);
    if (passes == Passes::forward_and_backward) {
        const Tensor qkv{nullptr, type, N * fused_width(m)};
        attention = std::max(attention, attention_workspace(arena.device(), backward_arguments(m, seq, 0, qkv, qkv)));
        w.dy_NC = reserve(type, N * m.hidden);
        w.do_NHD = reserve(type, N * HD);
        w.dqkv_NS = reserve(type, N * fused_width(m));
        w.dact_NF = reserve(type, N * m.ffn_hidden);
        const int64_t heads = m.qk_norm ? norm_backward_workspace(arena.device(), N * m.heads, m.head_dim) : 0;
        w.norm = reserve(DType::u8, std::max(norm_backward_workspace(arena.device(), N, m.hidden), heads));
    }
    w.attention = reserve(DType::u8, attention);
    w.linear = reserve(DType::u8, linear_workspace(arena.device(), N, std::max({fused_width(m), up_width(m), m.hidden})));
    return w;
}

Block::Block(const ModelConfig& model, const ParameterTable& table, const FlatBuffers& flat, int layer)
    : model_(model),
      p_(layer_params(model, table, flat, layer)),
      window_(model.window_of(layer)),
      forward_name_("layer " + std::to_string(layer) + " forward"),
      backward_name_("layer " + std::to_string(layer) + " backward") {}

Tensor Block::forward(Stream& s, const Tensor& x, const Tensor& delta, const SequenceInfo& seq, const BlockActivations& a,
                      const BlockWorkspace& w, KvCache* cache) const {
    const StreamRange range(s, forward_name_.c_str());
    const int64_t N = seq.tokens();
    norm(s, p_.norm1, x, delta, a.x_NC, a.y1_NC, a.mean1_N, a.rstd1_N, N);
    attention_forward(s, a.y1_NC, seq, a, w, cache);
    if (!serial()) {
        ffn_forward(s, a.y1_NC, N, a, w, Accumulate::add);
        return a.x_NC;
    }
    norm(s, p_.norm2, a.x_NC, w.delta_NC, a.mid_NC, a.y2_NC, a.mean2_N, a.rstd2_N, N);
    ffn_forward(s, a.y2_NC, N, a, w, Accumulate::overwrite);
    return a.mid_NC;
}

void Block::recompute(Stream& s, const SequenceInfo& seq, const BlockActivations& a) const {
    const int64_t N = seq.tokens();
    norm(s, p_.norm1, a.x_NC, {}, {}, a.y1_NC, a.mean1_N, a.rstd1_N, N);
    if (serial()) norm(s, p_.norm2, a.mid_NC, {}, {}, a.y2_NC, a.mean2_N, a.rstd2_N, N);
    activation_forward(s, {.x_NF = a.up_NF, .y_NF = a.act_NF, .kind = model_.activation, .N = N, .F = model_.ffn_hidden});
}

void Block::backward(Stream& s, const Tensor& dres, const SequenceInfo& seq, const BlockActivations& a, const BlockWorkspace& w,
                     Accumulate accumulate) const {
    const StreamRange range(s, backward_name_.c_str());
    const int64_t N = seq.tokens();
    if (serial()) {
        ffn_backward(s, dres, a.y2_NC, N, a, w, Accumulate::overwrite, accumulate);
        norm_backward(s, p_.norm2, w.dy_NC, a.mid_NC, a.mean2_N, a.rstd2_N, dres, w.norm, N, accumulate);
        attention_backward(s, dres, a.y1_NC, seq, a, w, accumulate);
    } else {
        attention_backward(s, dres, a.y1_NC, seq, a, w, accumulate);
        ffn_backward(s, dres, a.y1_NC, N, a, w, Accumulate::add, accumulate);
    }
    norm_backward(s, p_.norm1, w.dy_NC, a.x_NC, a.mean1_N, a.rstd1_N, dres, w.norm, N, accumulate);
}

void Block::attention_forward(Stream& s, const Tensor& y, const SequenceInfo& seq, const BlockActivations& a, const BlockWorkspace& w,
                              KvCache* cache) const {
    const ModelConfig& m = model_;
    const int64_t N = seq.tokens(), D = m.head_dim, S = fused_width(m);
    linear(s, p_.qkv, y, a.qkv_NS, w, N);
    if (m.qk_norm) {
        const float eps = static_cast<float>(m.norm_eps);
        head_norm_forward(s, {.x_NS = a.qkv_NS, .saved_NHD = a.qk_saved_NHD, .rstd_NH = a.q_rstd_NH, .weight_D = p_.q_norm.w, .eps = eps,
                              .N = N, .heads = m.heads, .D = D, .stride = S});
        head_norm_forward(s, {.x_NS = a.qkv_NS.from(m.heads * D), .saved_NHD = a.qk_saved_NHD.from(N * m.heads * D),
                              .rstd_NH = a.k_rstd_NH, .weight_D = p_.k_norm.w, .eps = eps, .N = N, .heads = m.kv_heads, .D = D, .stride = S});
    }
    rotate(s, m, seq, a.qkv_NS, +1);
    AttentionForward args = forward_arguments(m, seq, window_, a.qkv_NS);
    if (cache) extend_cache(s, m, seq, *cache, args);
    args.o_NHD = a.o_NHD;
    args.lse_BHT = a.lse_BHT;
    args.workspace = w.attention;
    trifold::attention_forward(s, args);
    linear(s, p_.out, a.o_NHD, w.delta_NC, w, N);
}

void Block::attention_backward(Stream& s, const Tensor& ddelta, const Tensor& y, const SequenceInfo& seq, const BlockActivations& a,
                               const BlockWorkspace& w, Accumulate accumulate) const {
    const ModelConfig& m = model_;
    const int64_t N = seq.tokens(), D = m.head_dim, S = fused_width(m);
    linear_weight_gradient(s, p_.out, ddelta, a.o_NHD, w, N, accumulate);
    linear_input_gradient(s, p_.out, ddelta, w.do_NHD, w, N);
    AttentionBackward args = backward_arguments(m, seq, window_, a.qkv_NS, w.dqkv_NS);
    args.o_NHD = a.o_NHD;
    args.do_NHD = w.do_NHD;
    args.lse_BHT = a.lse_BHT;
    args.workspace = w.attention;
    trifold::attention_backward(s, args);
    rotate(s, m, seq, w.dqkv_NS, -1);
    if (m.qk_norm) {
        head_norm_backward(s, {.dx_NS = w.dqkv_NS, .saved_NHD = a.qk_saved_NHD, .rstd_NH = a.q_rstd_NH, .weight_D = p_.q_norm.w,
                               .dweight_D = p_.q_norm.dw, .workspace = w.norm, .accumulate = accumulate, .N = N, .heads = m.heads, .D = D, .stride = S});
        head_norm_backward(s, {.dx_NS = w.dqkv_NS.from(m.heads * D), .saved_NHD = a.qk_saved_NHD.from(N * m.heads * D),
                               .rstd_NH = a.k_rstd_NH, .weight_D = p_.k_norm.w, .dweight_D = p_.k_norm.dw, .workspace = w.norm,
                               .accumulate = accumulate, .N = N, .heads = m.kv_heads, .D = D, .stride = S});
    }
    linear_weight_gradient(s, p_.qkv, w.dqkv_NS, y, w, N, accumulate);
    linear_input_gradient(s, p_.qkv, w.dqkv_NS, w.dy_NC, w, N);
}

void Block::ffn_forward(Stream& s, const Tensor& y, int64_t N, const BlockActivations& a, const BlockWorkspace& w, Accumulate into_delta) const {
    linear(s, p_.up, y, a.up_NF, w, N);
    activation_forward(s, {.x_NF = a.up_NF, .y_NF = a.act_NF, .kind = model_.activation, .N = N, .F = model_.ffn_hidden});
    linear(s, p_.down, a.act_NF, w.delta_NC, w, N, into_delta);
}

void Block::ffn_backward(Stream& s, const Tensor& ddelta, const Tensor& y, int64_t N, const BlockActivations& a, const BlockWorkspace& w,
                         Accumulate into_dy, Accumulate accumulate) const {
    linear_weight_gradient(s, p_.down, ddelta, a.act_NF, w, N, accumulate);
    linear_input_gradient(s, p_.down, ddelta, w.dact_NF, w, N);
    // The gradient of the activation's input replaces what is not needed any more: dact for GELU, the saved input for SwiGLU.
    const Tensor dup = model_.swiglu() ? a.up_NF : w.dact_NF;
    trifold::activation_backward(s, {.x_NF = a.up_NF, .dy_NF = w.dact_NF, .dx_NF = dup, .kind = model_.activation, .N = N, .F = model_.ffn_hidden});
    linear_weight_gradient(s, p_.up, dup, y, w, N, accumulate);
    linear_input_gradient(s, p_.up, dup, w.dy_NC, w, N, into_dy);
}

void Block::norm(Stream& s, const NormParams& p, const Tensor& x, const Tensor& delta, const Tensor& sum, const Tensor& y,
                 const Tensor& mean, const Tensor& rstd, int64_t N) const {
    norm_forward(s, {.x_NC = x, .delta_NC = delta, .sum_NC = delta ? sum : Tensor{}, .weight_C = p.w, .bias_C = p.b, .y_NC = y, .mean_N = mean,
                     .rstd_N = rstd, .kind = model_.norm, .eps = static_cast<float>(model_.norm_eps), .N = N, .C = model_.hidden});
}

void Block::norm_backward(Stream& s, const NormParams& p, const Tensor& dy, const Tensor& x, const Tensor& mean, const Tensor& rstd,
                          const Tensor& dres, const Tensor& workspace, int64_t N, Accumulate accumulate) const {
    trifold::norm_backward(s, {.dy_NC = dy, .x_NC = x, .weight_C = p.w, .mean_N = mean, .rstd_N = rstd, .dresidual_NC = dres, .dx_NC = dres,
                               .dweight_C = p.dw, .dbias_C = p.db, .workspace = workspace, .kind = model_.norm, .accumulate = accumulate,
                               .N = N, .C = model_.hidden});
}

}  // namespace trifold
