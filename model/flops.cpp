// model/flops.cpp   What a model costs: parameters and floating-point operations per token, in closed form.
#include "model/flops.h"

#include <algorithm>

namespace trifold {
namespace {

// Matrices of one block: q, k, v, out, and up, down (and gate).
int64_t block_matrices(const ModelConfig& m) {
    const int64_t attention = 2 * m.hidden * (m.heads + m.kv_heads) * m.head_dim;
    const int64_t ffn = (m.swiglu() ? 3 : 2) * m.hidden * m.ffn_hidden;
    return attention + ffn;
}

int64_t norm_parameters(const ModelConfig& m) { return (m.norm == NormKind::layernorm ? 2 : 1) * m.hidden; }

// Norms and biases of one block. A parallel block has one norm, which feeds both of its halves.
int64_t block_vectors(const ModelConfig& m) {
    int64_t n = (m.block == BlockKind::serial ? 2 : 1) * norm_parameters(m);
    if (m.has_bias(/*qkv=*/true)) n += (m.heads + 2 * m.kv_heads) * m.head_dim;
    if (m.has_bias(/*qkv=*/false)) n += 2 * m.hidden + (m.swiglu() ? 2 : 1) * m.ffn_hidden;
    if (m.qk_norm) n += 2 * m.head_dim;
    return n;
}

}  // namespace

int64_t parameter_count(const ModelConfig& m) {
    const int64_t positions = m.position == Position::learned ? m.max_seq * m.hidden : 0;
    const int64_t vocabulary = (m.tied ? 1 : 2) * m.vocab * m.hidden;
    return vocabulary + positions + m.layers * (block_matrices(m) + block_vectors(m)) + norm_parameters(m);
}

int64_t matrix_parameters(const ModelConfig& m) { return m.layers * block_matrices(m) + m.vocab * m.hidden; }

double mean_visible_keys(int64_t seq, int64_t window) {
    // Positions 0 .. w-1 see 1 .. w keys, the others w.
    const double s = static_cast<double>(seq), w = static_cast<double>(window > 0 ? std::min(window, seq) : seq);
    return (w * (w + 1) / 2 + (s - w) * w) / s;
}

double forward_flops_per_token(const ModelConfig& m, int64_t seq) {
    double keys = 0;
    for (int64_t l = 0; l < m.layers; ++l) keys += mean_visible_keys(seq, m.window_of(l));
    return 2.0 * static_cast<double>(matrix_parameters(m)) + 4.0 * static_cast<double>(m.heads * m.head_dim) * keys;
}

double flops_per_token(const ModelConfig& m, int64_t seq) { return 3 * forward_flops_per_token(m, seq); }

std::string flops_convention() {
    return "6 per matrix parameter and token (head once, input embedding none) and 12 * heads * head_dim per layer and "
           "visible "
           "key (causal, within the window); forward and backward, no recomputation";
}

}  // namespace trifold
