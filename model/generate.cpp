#include "model/generate.h"

#include <algorithm>
#include <cmath>
#include <numeric>

namespace trifold {
namespace {

// Uniform in [0, 1) from (seed, index): the 64-bit finaliser of SplitMix, 53 bits of it.
double uniform(uint64_t seed, uint64_t index) {
    uint64_t z = seed * 0xD1B54A32D192ED03ull + (index + 1) * 0x9E3779B97F4A7C15ull;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
    return static_cast<double>((z ^ (z >> 31)) >> 11) * 0x1p-53;
}

}  // namespace

int32_t choose_token(const float* logits, int64_t vocab, const SamplingOptions& o, uint64_t index) {
    if (o.temperature <= 0) return static_cast<int32_t>(std::max_element(logits, logits + vocab) - logits);
    std::vector<int32_t> order(static_cast<size_t>(vocab));
    std::iota(order.begin(), order.end(), 0);
    const auto better = [&](int32_t a, int32_t b) { return logits[a] != logits[b] ? logits[a] > logits[b] : a < b; };
    size_t kept = o.top_k > 0 ? std::min<size_t>(order.size(), static_cast<size_t>(o.top_k)) : order.size();
    std::partial_sort(order.begin(), order.begin() + static_cast<std::ptrdiff_t>(kept), order.end(), better);
    std::vector<double> weight(kept);
    double total = 0;
    for (size_t i = 0; i < kept; ++i) total += weight[i] = std::exp((static_cast<double>(logits[order[i]]) - logits[order[0]]) / o.temperature);
    // Nucleus: the smallest set whose probability reaches top_p, always at least one token.
    double nucleus = 0;
    for (size_t i = 0; i < kept; ++i) {
        nucleus += weight[i];
        if (nucleus >= o.top_p * total) kept = i + 1;
    }
    double draw = uniform(o.seed, index) * nucleus;
    for (size_t i = 0; i < kept; ++i) {
        draw -= weight[i];
        if (draw < 0) return order[i];
    }
    return order[kept - 1];
}

Generator::Generator(const ModelConfig& m, const ParameterTable& table, const Tensor& weights, int64_t max_tokens, int64_t prompt_chunk, Arena& arena)
    : model_(m),
      type_(weights.dtype),
      max_tokens_(max_tokens),
      chunk_(std::min(prompt_chunk, max_tokens)),
      token_embedding_(padded_matrix(m, table, {weights, {}}, "embedding.token")),
      head_(m, table, {weights, {}}, weights.dtype, chunk_, Passes::forward_only, alone_, arena) {
    const auto reserve = [&](MemoryClass c, DType t, int64_t elems) { return arena.reserve(c, t, elems); };
    if (const Parameter* p = table.find("embedding.position.weight")) position_weight_ = weights.slice(p->offset, p->elems);
    for (int l = 0; l < static_cast<int>(m.layers); ++l) {
        blocks_.emplace_back(m, table, FlatBuffers{weights, {}}, l);
        const int64_t elems = max_tokens * m.kv_heads * m.head_dim;
        caches_.push_back({reserve(MemoryClass::activations, type_, elems), reserve(MemoryClass::activations, type_, elems), max_tokens, 0});
    }
    const BlockShape shape{.B = 1, .T = chunk_, .tp = 1, .type = type_};
    activations_ = reserve_activations(m, shape, Recompute::none, nullptr, arena);
    workspace_ = reserve_workspace(m, shape, Passes::forward_only, arena);
    head_activations_ = reserve_head_activations(m, shape, arena);
    token_N_ = reserve(MemoryClass::workspace, DType::i32, chunk_);
    position_N_ = reserve(MemoryClass::workspace, DType::i32, chunk_);
    if (m.position == Position::rope) {
        cos_TR_ = reserve(MemoryClass::workspace, DType::f32, m.max_seq * m.head_dim / 2);
        sin_TR_ = reserve(MemoryClass::workspace, DType::f32, m.max_seq * m.head_dim / 2);
    }
    logits_.resize(static_cast<size_t>(table.padded_rows()));
}

void Generator::fill_constants(Stream& s) const {
    if (cos_TR_) fill_rotary_tables(s, model_, cos_TR_, sin_TR_);
}

void Generator::reset() {
    length_ = 0;
    for (KvCache& c : caches_) c.length = 0;
}

void Generator::feed(Stream& s, const std::vector<int32_t>& tokens) {
    TRIFOLD_ASSERT(!tokens.empty() && length_ + static_cast<int64_t>(tokens.size()) <= max_tokens_);
    const int64_t total = static_cast<int64_t>(tokens.size());
    for (int64_t first = 0; first < total; first += chunk_) forward(s, tokens.data() + first, std::min(chunk_, total - first));
}

void Generator::forward(Stream& s, const int32_t* tokens, int64_t count) {
    host_positions_.resize(static_cast<size_t>(count));
    std::iota(host_positions_.begin(), host_positions_.end(), static_cast<int32_t>(length_));
    const auto upload = [&](const int32_t* from, const Tensor& to) {
        s.engine().wait(copy(s, {.x = Tensor{const_cast<int32_t*>(from), DType::i32, count}, .y = to.slice(0, count)}));
    };
    upload(tokens, token_N_);
    upload(host_positions_.data(), position_N_);
    SequenceInfo sequence{.B = 1, .T = count, .position_N = position_N_, .doc_start_N = {}, .cos_TR = cos_TR_, .sin_TR = sin_TR_};
    Tensor x = activations_.x_nC, delta;
    embedding_forward(s, {.token_N = token_N_, .position_N = position_N_, .wte_VC = token_embedding_.w, .wpe_TC = position_weight_, .x_NC = x,
                          .N = count, .C = model_.hidden, .V = token_embedding_.O});
    for (size_t l = 0; l < blocks_.size(); ++l) {
        x = blocks_[l].forward(s, x, delta, sequence, activations_, workspace_, alone_, &caches_[l]);
        delta = workspace_.delta_nC;
    }
    head_.norm_forward(s, x, delta, head_activations_, count);
    length_ += count;
    last_row_ = count - 1;
}

const float* Generator::next_logits(Stream& s) {
    const Tensor logits = head_.logits_of(s, head_activations_, last_row_);
    read_back(s, {{logits, Tensor{logits_.data(), DType::f32, logits.elems}}}, "next_logits");
    return logits_.data();
}

}  // namespace trifold
