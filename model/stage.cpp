#include "model/stage.h"

#include <cmath>

namespace trifold {

void fill_rotary_tables(Stream& s, const ModelConfig& m, const Tensor& cos, const Tensor& sin) {
    const int64_t R = m.head_dim / 2;
    std::vector<float> cos_TR(static_cast<size_t>(cos.elems)), sin_TR(static_cast<size_t>(sin.elems));
    const RopeScaling& scaling = m.rope_scaling;
    constexpr double pi = 3.14159265358979323846;
    for (int64_t r = 0; r < R; ++r) {
        double frequency = std::pow(m.rope_base, -2.0 * static_cast<double>(r) / static_cast<double>(m.head_dim));
        if (scaling.kind == RopeScalingKind::linear) frequency /= scaling.factor;
        if (scaling.kind == RopeScalingKind::llama3) {
            const double turns = static_cast<double>(scaling.original_max_seq) * frequency / (2 * pi);  // over the original context
            if (turns < scaling.low_freq_factor) {
                frequency /= scaling.factor;
            } else if (turns <= scaling.high_freq_factor) {
                const double smooth = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor);
                frequency *= (1 - smooth) / scaling.factor + smooth;
            }
        }
        for (int64_t t = 0; t < m.max_seq; ++t) {
            cos_TR[static_cast<size_t>(t * R + r)] = static_cast<float>(std::cos(static_cast<double>(t) * frequency));
            sin_TR[static_cast<size_t>(t * R + r)] = static_cast<float>(std::sin(static_cast<double>(t) * frequency));
        }
    }
    copy(s, {.x = Tensor{cos_TR.data(), DType::f32, cos.elems}, .y = cos});
    s.engine().wait(copy(s, {.x = Tensor{sin_TR.data(), DType::f32, sin.elems}, .y = sin}));
}

Stage::Stage(const ModelConfig& m, const ParameterTable& table, const FlatBuffers& flat, DType type, int64_t B, int64_t T, Recompute recompute,
             Passes passes, bool isolated_documents, Arena& arena)
    : model_(m),
      recompute_(recompute),
      token_embedding_(padded_matrix(m, table, flat, "embedding.token")),
      head_(m, table, flat, type, B * T, passes == Passes::forward_and_backward, arena) {
    const int64_t N = B * T;
    const auto scratch = [&](DType t, int64_t elems) { return arena.reserve(MemoryClass::workspace, t, elems); };
    if (const Parameter* p = table.find("embedding.position.weight")) {
        position_weight_ = flat.weight.slice(p->offset, p->elems);
        if (flat.grad) position_grad_ = flat.grad.slice(p->offset, p->elems);
    }
    // Without a backward pass one set of activations serves all layers but for their inputs.
    const Recompute kept = passes == Passes::forward_only ? Recompute::full : recompute;
    for (int l = 0; l < static_cast<int>(m.layers); ++l) {
        blocks_.emplace_back(m, table, flat, l);
        activations_.push_back(reserve_activations(m, type, B, T, kept, l > 0 ? &activations_[0] : nullptr, arena));
    }
    workspace_ = reserve_workspace(m, type, B, T, passes, arena);
    sequence_ = {.B = B, .T = T};
    sequence_.position_N = scratch(DType::i32, N);
    if (isolated_documents) sequence_.doc_start_N = scratch(DType::i32, N);
    if (m.position == Position::rope) {
        sequence_.cos_TR = scratch(DType::f32, m.max_seq * m.head_dim / 2);
        sequence_.sin_TR = scratch(DType::f32, m.max_seq * m.head_dim / 2);
    }
    token_N_ = scratch(DType::i32, N);
    target_N_ = scratch(DType::i32, N);
    loss_sum_ = scratch(DType::f64, 1);
    if (passes == Passes::forward_and_backward) {
        dresidual_NC_ = scratch(type, N * m.hidden);
        embedding_workspace_ = scratch(DType::u8, embedding_backward_workspace(arena.device(), N, m.vocab));
    }
}

void Stage::fill_constants(Stream& s) const {
    if (sequence_.cos_TR) fill_rotary_tables(s, model_, sequence_.cos_TR, sequence_.sin_TR);
}

void Stage::reset_loss(Stream& s) const { zero(s, {.y = loss_sum_}); }

void Stage::load(Stream& s, const TokenBatch& batch) const {
    const int64_t N = sequence_.tokens();
    const auto upload = [&](const int32_t* from, const Tensor& to) {
        copy(s, {.x = Tensor{const_cast<int32_t*>(from), DType::i32, N}, .y = to});
    };
    upload(batch.tokens, token_N_);
    upload(batch.targets, target_N_);
    upload(batch.positions, sequence_.position_N);
    if (sequence_.doc_start_N) upload(batch.doc_start, sequence_.doc_start_N);
}

void Stage::forward(Stream& s, const TokenBatch& batch) const {
    const int64_t N = sequence_.tokens(), C = model_.hidden;
    load(s, batch);
    Tensor x = activations_[0].x_NC, delta;
    embedding_forward(s, {.token_N = token_N_, .position_N = sequence_.position_N, .wte_VC = token_embedding_.w, .wpe_TC = position_weight_,
                          .x_NC = x, .N = N, .C = C});
    for (size_t l = 0; l < blocks_.size(); ++l) {
        x = blocks_[l].forward(s, x, delta, sequence_, activations_[l], workspace_);
        delta = workspace_.delta_NC;
    }
    head_.norm_forward(s, x, delta, N);
}

void Stage::loss(Stream& s) const { head_.loss(s, target_N_, sequence_.tokens(), loss_sum_); }

void Stage::backward(Stream& s, float grad_scale, Accumulate accumulate) const {
    const int64_t N = sequence_.tokens();
    head_.loss_and_backward(s, target_N_, N, grad_scale, loss_sum_, dresidual_NC_, accumulate);
    for (size_t l = blocks_.size(); l-- > 0;) {
        recompute(s, l);
        blocks_[l].backward(s, dresidual_NC_, sequence_, activations_[l], workspace_, accumulate);
    }
    // A tied embedding already holds the head's gradient.
    embedding_backward(s, {.token_N = token_N_, .position_N = sequence_.position_N, .dx_NC = dresidual_NC_, .dwte_VC = token_embedding_.dw,
                           .dwpe_TC = position_grad_, .workspace = embedding_workspace_,
                           .accumulate_wte = model_.tied ? Accumulate::add : accumulate, .accumulate_wpe = accumulate,
                           .N = N, .C = model_.hidden, .V = model_.padded_vocab(), .positions = model_.max_seq});
}

// The last layer's activations are still there from forward; those of the others were overwritten where they are shared.
void Stage::recompute(Stream& s, size_t l) const {
    if (recompute_ == Recompute::none || l + 1 == blocks_.size()) return;
    if (recompute_ == Recompute::selective) return blocks_[l].recompute(s, sequence_, activations_[l]);
    blocks_[l].forward(s, activations_[l].x_NC, {}, sequence_, activations_[l], workspace_);
}

double Stage::loss_sum(Stream& s) const {
    double sum = 0;
    s.engine().wait(copy(s, {.x = loss_sum_, .y = Tensor{&sum, DType::f64, 1}}));
    return sum;
}

}  // namespace trifold
