#include "model/block.h"

#include <algorithm>
#include <cmath>

namespace trifold {
namespace {

// Products of rows [first, first + rows) of x and y; a row-parallel bias is added by the first rank of the sum alone.
struct RowRange {
    int64_t first = 0, rows = 0;
    Tensor of(const Tensor& t, int64_t width) const { return t.slice(first * width, rows * width); }
};

void linear(Stream& s, const LinearParams& p, const Tensor& x, const Tensor& y, const BlockWorkspace& w, const RowRange& r, bool with_bias = true,
            Accumulate accumulate = Accumulate::overwrite) {
    linear_forward(s, {.x_NI = r.of(x, p.I), .w_OI = p.w, .bias_O = with_bias ? p.b : Tensor{}, .y_NO = r.of(y, p.O), .workspace = w.linear,
                       .accumulate = accumulate, .N = r.rows, .I = p.I, .O = p.O});
}
void linear_input_gradient(Stream& s, const LinearParams& p, const Tensor& dy, const Tensor& dx, const BlockWorkspace& w, const RowRange& r,
                           Accumulate accumulate = Accumulate::overwrite) {
    linear_backward_input(s, {.dy_NO = r.of(dy, p.O), .w_OI = p.w, .dx_NI = r.of(dx, p.I), .workspace = w.linear, .accumulate = accumulate,
                              .N = r.rows, .I = p.I, .O = p.O});
}
void linear_weight_gradient(Stream& s, const LinearParams& p, const Tensor& dy, const Tensor& x, const BlockWorkspace& w, int64_t N,
                            Accumulate accumulate) {
    linear_backward_weight(s, {.dy_NO = dy, .x_NI = x, .dw_OI = p.dw, .dbias_O = p.db, .workspace = w.linear, .accumulate = accumulate,
                               .N = N, .I = p.I, .O = p.O});
}

// What of a call is the layer's own.
struct AttentionKind {
    int64_t window = 0;
    AttentionChoice by = {};
};

// The attention arguments of q, k and v inside one fused buffer of rows (q heads, k heads, v heads).
template <class Args> Args fused_attention(const LocalSizes& m, const SequenceInfo& seq, const AttentionKind& kind) {
    const int64_t S = m.qkv_width();
    Args a;
    a.B = seq.B;
    a.H = m.heads;
    a.K = m.kv_heads;
    a.D = m.head_dim;
    a.q_stride = a.kv_stride = S;
    a.q_batch_stride = a.kv_batch_stride = seq.T * S;
    a.window = kind.window;
    a.by = kind.by;
    a.scale = 1.0f / std::sqrt(static_cast<float>(m.head_dim));
    a.doc_start_N = seq.doc_start_N;
    return a;
}
AttentionForward forward_arguments(const LocalSizes& m, const SequenceInfo& seq, const AttentionKind& kind, const Tensor& qkv) {
    auto a = fused_attention<AttentionForward>(m, seq, kind);
    a.q_NHD = qkv;
    a.k_NKD = qkv.from(m.q_width());
    a.v_NKD = qkv.from(m.q_width() + m.kv_width());
    a.Tq = a.Tk = seq.T;
    return a;
}
AttentionBackward backward_arguments(const LocalSizes& m, const SequenceInfo& seq, const AttentionKind& kind, const Tensor& qkv, const Tensor& dqkv) {
    auto a = fused_attention<AttentionBackward>(m, seq, kind);
    const int64_t k = m.q_width(), v = k + m.kv_width();
    a.q_NHD = qkv;
    a.k_NKD = qkv.from(k);
    a.v_NKD = qkv.from(v);
    a.dq_NHD = dqkv;
    a.dk_NKD = dqkv.from(k);
    a.dv_NKD = dqkv.from(v);
    a.T = seq.T;
    return a;
}

void rotate(Stream& s, Position position, const LocalSizes& m, const SequenceInfo& seq, const Tensor& qkv, int direction) {
    if (position != Position::rope) return;
    rotary(s, {.x_NS = qkv, .position_N = seq.position_N, .cos_TR = seq.cos_TR, .sin_TR = seq.sin_TR, .direction = direction,
               .N = seq.tokens(), .heads = m.heads + m.kv_heads, .D = m.head_dim, .stride = m.qkv_width()});
}

// Puts the new keys and values behind those in the cache and points the attention at the whole of it.
void attend_to_cache(Stream& s, const LocalSizes& m, const SequenceInfo& seq, KvCache& cache, AttentionForward& a) {
    const int64_t width = m.kv_width();
    extend_cache(s, {.kv_NS = a.k_NKD, .k_BLW = cache.k, .v_BLW = cache.v, .B = seq.B, .T = seq.T, .length = cache.length,
                     .capacity = cache.capacity, .width = width, .stride = m.qkv_width()});
    a.k_NKD = cache.k;
    a.v_NKD = cache.v;
    a.kv_stride = width;
    a.kv_batch_stride = cache.capacity * width;
    a.q_offset = cache.length;
    a.Tk = cache.length + seq.T;
    cache.length += seq.T;
}

}  // namespace

BlockActivations reserve_activations(const ModelConfig& m, const BlockShape& shape, Recompute mode, const BlockActivations* shared, Arena& arena) {
    const LocalSizes local(m, shape.tp);
    const int64_t N = shape.N(), n = shape.n(), C = m.hidden;
    const DType type = shape.type;
    BlockActivations a;
    const auto reserve = [&](Tensor BlockActivations::*field, Recompute redone_from, DType t, int64_t elems) {
        const bool redone = shared && mode >= redone_from;
        a.*field = redone ? shared->*field : arena.reserve(MemoryClass::activations, t, elems);
    };
    using A = BlockActivations;
    a.x_nC = arena.reserve(MemoryClass::activations, type, n * C);
    reserve(&A::y1_nC, Recompute::selective, type, n * C);
    reserve(&A::rstd1_n, Recompute::full, DType::f32, n);
    reserve(&A::qkv_NS, Recompute::full, type, N * local.qkv_width());
    reserve(&A::o_NHD, Recompute::full, type, N * local.q_width());
    reserve(&A::lse_BHT, Recompute::full, DType::f32, N * local.heads);
    reserve(&A::up_NF, Recompute::full, type, N * local.up_width());
    reserve(&A::act_NF, Recompute::selective, type, N * local.ffn_hidden);
    if (m.norm == NormKind::layernorm) reserve(&A::mean1_n, Recompute::full, DType::f32, n);
    if (m.qk_norm) {
        reserve(&A::qk_saved_NHD, Recompute::full, type, N * (local.heads + local.kv_heads) * local.head_dim);
        reserve(&A::q_rstd_NH, Recompute::full, DType::f32, N * local.heads);
        reserve(&A::k_rstd_NH, Recompute::full, DType::f32, N * local.kv_heads);
    }
    if (m.block == BlockKind::serial) {
        reserve(&A::mid_nC, Recompute::full, type, n * C);
        reserve(&A::y2_nC, Recompute::selective, type, n * C);
        reserve(&A::rstd2_n, Recompute::full, DType::f32, n);
        if (m.norm == NormKind::layernorm) reserve(&A::mean2_n, Recompute::full, DType::f32, n);
    }
    return a;
}

DeferredGradients reserve_deferred(const ModelConfig& m, const BlockShape& shape, Arena& arena) {
    const LocalSizes local(m, shape.tp);
    const auto reserve = [&](int64_t elems) { return arena.reserve(MemoryClass::activations, shape.type, elems); };
    DeferredGradients d{.out_nC = reserve(shape.n() * m.hidden), .dqkv_NS = reserve(shape.N() * local.qkv_width()), .dup_NF = reserve(shape.N() * local.up_width())};
    if (m.block == BlockKind::serial) d.mid_nC = reserve(shape.n() * m.hidden);
    return d;
}

BlockWorkspace reserve_workspace(const ModelConfig& m, const BlockShape& shape, Passes passes, Arena& arena) {
    const LocalSizes local(m, shape.tp);
    const int64_t N = shape.N(), n = shape.n();
    const DType type = shape.type;
    const auto reserve = [&](DType t, int64_t elems) { return arena.reserve(MemoryClass::workspace, t, elems); };
    const SequenceInfo seq{.B = shape.B, .T = shape.T};
    const Tensor qkv{nullptr, type, N * local.qkv_width()};
    int64_t attention = 0;
    for (const auto& [window, layers] : m.layers_by_window()) {
        const AttentionKind kind{window, shape.attention};
        attention = std::max(attention, attention_workspace(arena.device(), forward_arguments(local, seq, kind, qkv)));
        if (passes == Passes::forward_and_backward)
            attention = std::max(attention, attention_workspace(arena.device(), backward_arguments(local, seq, kind, qkv, qkv)));
    }
    BlockWorkspace w;
    w.delta_nC = reserve(type, n * m.hidden);
    if (passes == Passes::forward_and_backward) {
        w.dy_nC = reserve(type, n * m.hidden);
        w.do_NHD = reserve(type, N * local.q_width());
        w.dqkv_NS = reserve(type, N * local.qkv_width());
        w.dact_NF = reserve(type, N * local.ffn_hidden);
        const int64_t heads = m.qk_norm ? norm_backward_workspace(arena.device(), N * local.heads, m.head_dim) : 0;
        w.norm = reserve(DType::u8, std::max(norm_backward_workspace(arena.device(), n, m.hidden), heads));
    }
    w.attention = reserve(DType::u8, attention);
    w.linear = reserve(DType::u8, linear_workspace(arena.device(), N, std::max({local.qkv_width(), local.up_width(), m.hidden})));
    return w;
}

Block::Block(const ModelConfig& model, const ParameterTable& table, const FlatBuffers& flat, int layer, AttentionChoice attention)
    : model_(model),
      local_(model, table.placement().tp),
      p_(layer_params(model, table, flat, layer)),
      window_(model.window_of(layer)),
      attention_(attention),
      forward_name_("layer " + std::to_string(layer) + " forward"),
      backward_name_("layer " + std::to_string(layer) + " backward") {}

Tensor Block::forward(Stream& s, const Tensor& x, const Tensor& delta, const SequenceInfo& seq, const BlockActivations& a,
                      const BlockWorkspace& w, TensorParallel& tp, KvCache* cache) const {
    const StreamRange range(s, forward_name_.c_str());
    const int64_t N = seq.tokens(), n = N / tp.size();
    const bool adds_bias = tp.rank() == 0;
    const Tensor partial = tp.partial(w.delta_nC);
    const auto project = [&](const LinearParams& p, const Tensor& from, Accumulate accumulate) {
        tp.scatter(s, N, [&](int64_t first, int64_t rows) { linear(s, p, from, partial, w, {first, rows}, adds_bias, accumulate); });
        tp.finish(s, w.delta_nC);
    };
    norm(s, p_.norm1, x, delta, a.x_nC, a.y1_nC, a.mean1_n, a.rstd1_n, n);
    tp.follow(s);
    const Gathered y1 = tp.gather(s, a.y1_nC, N, TensorParallel::Buffer::activations);
    attention_forward(s, y1, seq, a, w, tp, cache);
    if (!serial()) {
        linear(s, p_.out, a.o_NHD, partial, w, {0, N}, adds_bias);
        ffn_up(s, y1, a, w, tp, N);
        project(p_.down, a.act_NF, Accumulate::add);
        return a.x_nC;
    }
    project(p_.out, a.o_NHD, Accumulate::overwrite);
    norm(s, p_.norm2, a.x_nC, w.delta_nC, a.mid_nC, a.y2_nC, a.mean2_n, a.rstd2_n, n);
    tp.follow(s);
    ffn_up(s, tp.gather(s, a.y2_nC, N, TensorParallel::Buffer::activations), a, w, tp, N);
    project(p_.down, a.act_NF, Accumulate::overwrite);
    return a.mid_nC;
}

void Block::recompute(Stream& s, const SequenceInfo& seq, const BlockActivations& a) const {
    const int64_t N = seq.tokens(), n = a.x_nC.elems / model_.hidden;
    norm(s, p_.norm1, a.x_nC, {}, {}, a.y1_nC, a.mean1_n, a.rstd1_n, n);
    if (serial()) norm(s, p_.norm2, a.mid_nC, {}, {}, a.y2_nC, a.mean2_n, a.rstd2_n, n);
    activation_forward(s, {.x_NF = a.up_NF, .y_NF = a.act_NF, .kind = model_.activation, .N = N, .F = local_.ffn_hidden});
}

// The gradient of the activation's input replaces what is not needed any more: dact for GELU, the saved input for SwiGLU.
Tensor Block::dup_of(const BlockActivations& a, const BlockWorkspace& w, const DeferredGradients* deferred) const {
    return deferred ? deferred->dup_NF : model_.swiglu() ? a.up_NF : w.dact_NF;
}

void Block::backward(Stream& s, const Tensor& dres, const SequenceInfo& seq, const BlockActivations& a, const BlockWorkspace& w, TensorParallel& tp,
                     Accumulate accumulate, const DeferredGradients* deferred) const {
    const StreamRange range(s, backward_name_.c_str());
    using enum TensorParallel::Buffer;
    const int64_t N = seq.tokens(), n = N / tp.size();
    const Tensor dup = dup_of(a, w, deferred), dqkv = deferred ? deferred->dqkv_NS : w.dqkv_NS, partial = tp.partial(w.dy_nC);
    if (deferred) copy(s, {.x = dres, .y = deferred->out_nC});

    // Weight gradients of a matrix whose input rows `y` were gathered again run while the last rows of its input gradient travel.
    const auto input_gradient = [&](const LinearParams& p, const Tensor& dy, Accumulate into) {
        tp.scatter(s, N, [&](int64_t first, int64_t rows) { linear_input_gradient(s, p, dy, partial, w, {first, rows}, into); });
    };
    const auto weight_gradient = [&](const LinearParams& p, const Tensor& dy, const Gathered& y) {
        if (deferred) return;
        tp.arrive(s, y);
        linear_weight_gradient(s, p, dy, y.full_NC, w, N, accumulate);
    };
    const auto again = [&](const Tensor& y) { return deferred ? Gathered{} : tp.gather(s, y, N, activations); };

    tp.follow(s);
    Gathered dout = tp.gather(s, dres, N, gradients);
    if (serial()) {
        const Gathered y2 = again(a.y2_nC);
        ffn_backward(s, dout, a, w, dup, tp, N);
        if (!deferred) linear_weight_gradient(s, p_.down, dout.full_NC, a.act_NF, w, N, accumulate);
        input_gradient(p_.up, dup, Accumulate::overwrite);
        weight_gradient(p_.up, dup, y2);
        tp.finish(s, w.dy_nC);
        norm_backward(s, p_.norm2, w.dy_nC, a.mid_nC, a.mean2_n, a.rstd2_n, dres, w.norm, n, accumulate);
        if (deferred) copy(s, {.x = dres, .y = deferred->mid_nC});
        tp.follow(s);
        dout = tp.gather(s, dres, N, gradients);
    }
    const Gathered y1 = again(a.y1_nC);
    attention_backward(s, dout, seq, a, w, dqkv, tp, accumulate);
    if (!deferred) linear_weight_gradient(s, p_.out, dout.full_NC, a.o_NHD, w, N, accumulate);
    if (serial()) {
        input_gradient(p_.qkv, dqkv, Accumulate::overwrite);
        weight_gradient(p_.qkv, dqkv, y1);
    } else {
        ffn_backward(s, dout, a, w, dup, tp, N);
        if (!deferred) linear_weight_gradient(s, p_.down, dout.full_NC, a.act_NF, w, N, accumulate);
        linear_input_gradient(s, p_.qkv, dqkv, partial, w, {0, N});
        input_gradient(p_.up, dup, Accumulate::add);
        weight_gradient(p_.qkv, dqkv, y1);
        weight_gradient(p_.up, dup, y1);
    }
    tp.finish(s, w.dy_nC);
    norm_backward(s, p_.norm1, w.dy_nC, a.x_nC, a.mean1_n, a.rstd1_n, dres, w.norm, n, accumulate);
}

void Block::backward_weights(Stream& s, const SequenceInfo& seq, const BlockActivations& a, const BlockWorkspace& w, const TensorParallel& tp,
                             Accumulate accumulate, const DeferredGradients& d) const {
    using enum TensorParallel::Buffer;
    const int64_t N = seq.tokens();
    const auto pair = [&](const Tensor& dout_nC, const LinearParams& out, const Tensor& from, const Tensor& y_nC, const LinearParams& in, const Tensor& din) {
        tp.follow(s);
        const Gathered dout = tp.gather(s, dout_nC, N, gradients), y = tp.gather(s, y_nC, N, activations);
        tp.arrive(s, dout);
        linear_weight_gradient(s, out, dout.full_NC, from, w, N, accumulate);
        tp.arrive(s, y);
        linear_weight_gradient(s, in, din, y.full_NC, w, N, accumulate);
    };
    pair(d.out_nC, p_.down, a.act_NF, serial() ? a.y2_nC : a.y1_nC, p_.up, d.dup_NF);
    pair(serial() ? d.mid_nC : d.out_nC, p_.out, a.o_NHD, a.y1_nC, p_.qkv, d.dqkv_NS);
}

void Block::attention_forward(Stream& s, const Gathered& y, const SequenceInfo& seq, const BlockActivations& a, const BlockWorkspace& w,
                              const TensorParallel& tp, KvCache* cache) const {
    const int64_t N = seq.tokens(), D = model_.head_dim, S = local_.qkv_width();
    tp.on_arrival(s, y, [&](int64_t first, int64_t rows) { linear(s, p_.qkv, y.full_NC, a.qkv_NS, w, {first, rows}); });
    if (model_.qk_norm) {
        const float eps = static_cast<float>(model_.norm_eps);
        head_norm_forward(s, {.x_NS = a.qkv_NS, .saved_NHD = a.qk_saved_NHD, .rstd_NH = a.q_rstd_NH, .weight_D = p_.q_norm.w, .eps = eps,
                              .N = N, .heads = local_.heads, .D = D, .stride = S});
        head_norm_forward(s, {.x_NS = a.qkv_NS.from(local_.q_width()), .saved_NHD = a.qk_saved_NHD.from(N * local_.q_width()),
                              .rstd_NH = a.k_rstd_NH, .weight_D = p_.k_norm.w, .eps = eps, .N = N, .heads = local_.kv_heads, .D = D, .stride = S});
    }
    rotate(s, model_.position, local_, seq, a.qkv_NS, +1);
    AttentionForward args = forward_arguments(local_, seq, {window_, attention_}, a.qkv_NS);
    if (cache) attend_to_cache(s, local_, seq, *cache, args);
    args.o_NHD = a.o_NHD;
    args.lse_BHT = a.lse_BHT;
    args.workspace = w.attention;
    trifold::attention_forward(s, args);
}

void Block::attention_backward(Stream& s, const Gathered& ddelta, const SequenceInfo& seq, const BlockActivations& a, const BlockWorkspace& w,
                               const Tensor& dqkv, const TensorParallel& tp, Accumulate accumulate) const {
    const int64_t N = seq.tokens(), D = model_.head_dim, S = local_.qkv_width();
    tp.on_arrival(s, ddelta, [&](int64_t first, int64_t rows) { linear_input_gradient(s, p_.out, ddelta.full_NC, w.do_NHD, w, {first, rows}); });
    AttentionBackward args = backward_arguments(local_, seq, {window_, attention_}, a.qkv_NS, dqkv);
    args.o_NHD = a.o_NHD;
    args.do_NHD = w.do_NHD;
    args.lse_BHT = a.lse_BHT;
    args.workspace = w.attention;
    trifold::attention_backward(s, args);
    rotate(s, model_.position, local_, seq, dqkv, -1);
    if (!model_.qk_norm) return;
    head_norm_backward(s, {.dx_NS = dqkv, .saved_NHD = a.qk_saved_NHD, .rstd_NH = a.q_rstd_NH, .weight_D = p_.q_norm.w,
                           .dweight_D = p_.q_norm.dw, .workspace = w.norm, .accumulate = accumulate, .N = N, .heads = local_.heads, .D = D, .stride = S});
    head_norm_backward(s, {.dx_NS = dqkv.from(local_.q_width()), .saved_NHD = a.qk_saved_NHD.from(N * local_.q_width()),
                           .rstd_NH = a.k_rstd_NH, .weight_D = p_.k_norm.w, .dweight_D = p_.k_norm.dw, .workspace = w.norm,
                           .accumulate = accumulate, .N = N, .heads = local_.kv_heads, .D = D, .stride = S});
}

void Block::ffn_up(Stream& s, const Gathered& y, const BlockActivations& a, const BlockWorkspace& w, const TensorParallel& tp, int64_t N) const {
    tp.on_arrival(s, y, [&](int64_t first, int64_t rows) { linear(s, p_.up, y.full_NC, a.up_NF, w, {first, rows}); });
    activation_forward(s, {.x_NF = a.up_NF, .y_NF = a.act_NF, .kind = model_.activation, .N = N, .F = local_.ffn_hidden});
}

void Block::ffn_backward(Stream& s, const Gathered& ddelta, const BlockActivations& a, const BlockWorkspace& w, const Tensor& dup, const TensorParallel& tp,
                         int64_t N) const {
    tp.on_arrival(s, ddelta, [&](int64_t first, int64_t rows) { linear_input_gradient(s, p_.down, ddelta.full_NC, w.dact_NF, w, {first, rows}); });
    trifold::activation_backward(s, {.x_NF = a.up_NF, .dy_NF = w.dact_NF, .dx_NF = dup, .kind = model_.activation, .N = N, .F = local_.ffn_hidden});
}

void Block::norm(Stream& s, const NormParams& p, const Tensor& x, const Tensor& delta, const Tensor& sum, const Tensor& y,
                 const Tensor& mean, const Tensor& rstd, int64_t n) const {
    norm_forward(s, {.x_NC = x, .delta_NC = delta, .sum_NC = delta ? sum : Tensor{}, .weight_C = p.w, .bias_C = p.b, .y_NC = y, .mean_N = mean,
                     .rstd_N = rstd, .kind = model_.norm, .eps = static_cast<float>(model_.norm_eps), .N = n, .C = model_.hidden});
}

void Block::norm_backward(Stream& s, const NormParams& p, const Tensor& dy, const Tensor& x, const Tensor& mean, const Tensor& rstd,
                          const Tensor& dres, const Tensor& workspace, int64_t n, Accumulate accumulate) const {
    trifold::norm_backward(s, {.dy_NC = dy, .x_NC = x, .weight_C = p.w, .mean_N = mean, .rstd_N = rstd, .dresidual_NC = dres, .dx_NC = dres,
                               .dweight_C = p.dw, .dbias_C = p.db, .workspace = workspace, .kind = model_.norm, .accumulate = accumulate,
                               .N = n, .C = model_.hidden});
}

}  // namespace trifold
