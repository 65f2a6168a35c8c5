// model/parameters.cpp   Which tensors a model has, where they lie, and their initial values.
#include "model/parameters.h"

#include <cmath>
#include <numeric>

namespace trifold {
namespace {

constexpr int64_t group_alignment = 64;  // elements: 128 bytes of bf16, so every group starts on a cache line

int64_t product(const std::vector<int64_t>& shape) {
    return std::accumulate(shape.begin(), shape.end(), int64_t{1}, std::multiplies<>());
}

Parameter matrix(std::string name, int layer, int64_t rows, int64_t columns, int tp_dim, float std) {
    return {.name = std::move(name), .shape = {rows, columns}, .role = Role::matrix, .layer = layer, .tp_dim = tp_dim, .init_std = std};
}
// A bias of a column-parallel layer is split with its outputs. That of a row-parallel layer is replicated, and under
// sequence parallelism each rank sees only its part of the tokens.
Parameter bias_of(std::string name, int layer, int64_t size, bool column_parallel) {
    return {.name = std::move(name), .shape = {size}, .role = Role::bias, .layer = layer, .tp_dim = column_parallel ? 0 : -1,
            .partial_over_tp = !column_parallel, .init = InitKind::zeros, .decay = false};
}
Parameter norm_weight(std::string name, int layer, int64_t size) {
    return {.name = std::move(name), .shape = {size}, .role = Role::norm, .layer = layer, .partial_over_tp = true,
            .init = InitKind::ones, .decay = false};
}
Parameter norm_bias(std::string name, int layer, int64_t size) {
    Parameter p = norm_weight(std::move(name), layer, size);
    p.init = InitKind::zeros;
    return p;
}

// Philox4x32-10 (Salmon et al., SC'11): four 32-bit words from a 64-bit key and a 64-bit counter.
struct Philox {
    uint32_t word[4];
};
inline Philox philox(uint64_t key, uint64_t counter) {
    uint32_t c0 = static_cast<uint32_t>(counter), c1 = static_cast<uint32_t>(counter >> 32), c2 = 0, c3 = 0;
    uint32_t k0 = static_cast<uint32_t>(key), k1 = static_cast<uint32_t>(key >> 32);
    for (int round = 0; round < 10; ++round) {
        const uint64_t p0 = uint64_t{0xD2511F53u} * c0, p1 = uint64_t{0xCD9E8D57u} * c2;
        const uint32_t n0 = static_cast<uint32_t>(p1 >> 32) ^ c1 ^ k0, n2 = static_cast<uint32_t>(p0 >> 32) ^ c3 ^ k1;
        c1 = static_cast<uint32_t>(p1);
        c3 = static_cast<uint32_t>(p0);
        c0 = n0;
        c2 = n2;
        k0 += 0x9E3779B9u;
        k1 += 0xBB67AE85u;
    }
    return {{c0, c1, c2, c3}};
}

// A nearly normal value from integers alone: the sum of eight 16-bit words (Irwin-Hall, excess kurtosis -0.15, |z| < 4.9).
// The sum is exact and the one multiplication rounds the same everywhere.
inline float normal(uint64_t key, uint64_t index, float scale) {
    const Philox r = philox(key, index);
    uint32_t sum = 0;
    for (const uint32_t w : r.word) sum += (w & 0xffffu) + (w >> 16);
    return static_cast<float>(static_cast<int32_t>(2 * sum) - 8 * 65535) * scale;
}

uint64_t key_of(uint64_t seed, const std::string& name) {
    uint64_t h = 0xcbf29ce484222325ull;  // FNV-1a
    for (const char c : name) h = (h ^ static_cast<unsigned char>(c)) * 0x100000001b3ull;
    return h ^ (seed * 0x9E3779B97F4A7C15ull);
}

}  // namespace

ParameterTable::ParameterTable(const ModelConfig& m) {
    const int64_t C = m.hidden, H = m.heads, K = m.kv_heads, D = m.head_dim, F = m.ffn_hidden;
    const float std = static_cast<float>(m.init_std);
    const float residual_std = static_cast<float>(m.init_std / std::sqrt(2.0 * static_cast<double>(std::max<int64_t>(m.layers, 1))));
    const bool layernorm = m.norm == NormKind::layernorm;
    const auto add_norm = [&](const std::string& name, int layer) {
        add(norm_weight(name + ".weight", layer, C));
        if (layernorm) add(norm_bias(name + ".bias", layer, C));
    };

    Parameter token = matrix("embedding.token.weight", -1, m.vocab, C, 0, std);
    token.role = Role::token_embedding;
    token.row_padded = true;
    token.padded_elems = m.padded_vocab() * C;
    add(token);
    if (m.position == Position::learned) {
        Parameter position = matrix("embedding.position.weight", -1, m.max_seq, C, -1, std);
        position.role = Role::position_embedding;
        position.partial_over_tp = true;
        add(position);
    }
    for (int l = 0; l < static_cast<int>(m.layers); ++l) {
        const std::string layer = "layers." + std::to_string(l) + ".", attention = layer + "attention.", ffn = layer + "ffn.";
        add_norm(layer + "norm1", l);
        add(matrix(attention + "q.weight", l, H * D, C, 0, std));
        add(matrix(attention + "k.weight", l, K * D, C, 0, std), false);
        add(matrix(attention + "v.weight", l, K * D, C, 0, std), false);
        if (m.has_bias(true)) {
            add(bias_of(attention + "q.bias", l, H * D, true));
            add(bias_of(attention + "k.bias", l, K * D, true), false);
            add(bias_of(attention + "v.bias", l, K * D, true), false);
        }
        if (m.qk_norm) {
            add(norm_weight(attention + "q_norm.weight", l, D));
            add(norm_weight(attention + "k_norm.weight", l, D));
        }
        add(matrix(attention + "out.weight", l, C, H * D, 1, residual_std));
        if (m.has_bias(false)) add(bias_of(attention + "out.bias", l, C, false));
        if (m.block == BlockKind::serial) add_norm(layer + "norm2", l);
        if (m.swiglu()) add(matrix(ffn + "gate.weight", l, F, C, 0, std));
        add(matrix(ffn + "up.weight", l, F, C, 0, std), !m.swiglu());
        if (m.has_bias(false)) {
            if (m.swiglu()) add(bias_of(ffn + "gate.bias", l, F, true));
            add(bias_of(ffn + "up.bias", l, F, true), !m.swiglu());
        }
        add(matrix(ffn + "down.weight", l, C, F, 1, residual_std));
        if (m.has_bias(false)) add(bias_of(ffn + "down.bias", l, C, false));
    }
    add_norm("final_norm", -1);
    if (!m.tied) {
        Parameter head = matrix("head.weight", -1, m.vocab, C, 0, std);
        head.role = Role::head;
        head.row_padded = true;
        head.padded_elems = m.padded_vocab() * C;
        add(head);
    }
    flat_elems_ = (flat_elems_ + group_alignment - 1) / group_alignment * group_alignment;
}

void ParameterTable::add(Parameter p, bool start_of_group) {
    p.elems = product(p.shape);
    p.padded_elems = std::max(p.padded_elems, p.elems);
    if (start_of_group) flat_elems_ = (flat_elems_ + group_alignment - 1) / group_alignment * group_alignment;
    p.offset = flat_elems_;
    flat_elems_ += p.padded_elems;
    index_[p.name] = all_.size();
    all_.push_back(std::move(p));
}

const Parameter* ParameterTable::find(const std::string& name) const {
    const auto it = index_.find(name);
    return it == index_.end() ? nullptr : &all_[it->second];
}

const Parameter& ParameterTable::at(const std::string& name) const {
    const Parameter* p = find(name);
    if (!p) bug(__FILE__, __LINE__, "the table has this parameter", name);
    return *p;
}

int64_t ParameterTable::count() const {
    int64_t n = 0;
    for (const Parameter& p : all_) n += p.elems;
    return n;
}

std::vector<Segment> ParameterTable::segments(double weight_decay) const {
    std::vector<Segment> s;
    for (const Parameter& p : all_) s.push_back({p.offset, p.elems, p.decay ? static_cast<float>(weight_decay) : 0.0f, p.decay});
    return s;
}

void initialize(const ParameterTable& table, uint64_t seed, float* flat) {
    // Standard deviation of the integer sum in normal(): twice that of eight uniform 16-bit words.
    const double unit = 2.0 * std::sqrt(8.0 * (65536.0 * 65536.0 - 1.0) / 12.0);
    for (const Parameter& p : table.all()) {
        float* w = flat + p.offset;
        if (p.init == InitKind::normal) {
            const uint64_t key = key_of(seed, p.name);
            const float scale = static_cast<float>(p.init_std / unit);
#pragma omp parallel for simd schedule(static)
            for (int64_t i = 0; i < p.elems; ++i) w[i] = normal(key, static_cast<uint64_t>(i), scale);
        } else {
            std::fill(w, w + p.elems, p.init == InitKind::ones ? 1.0f : 0.0f);
        }
        std::fill(w + p.elems, w + p.padded_elems, 0.0f);
    }
}

}  // namespace trifold
