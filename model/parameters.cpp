// model/parameters.cpp   Which tensors a model has, where they lie, and their initial values.
#include "model/parameters.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <utility>

namespace trifold {
namespace {

constexpr int64_t group_alignment = 64;  // elements: 128 bytes of bf16, so every group starts on a cache line

int64_t product(const std::vector<int64_t>& shape) {
    return std::accumulate(shape.begin(), shape.end(), int64_t{1}, std::multiplies<>());
}

Parameter matrix(std::string name, int layer, int64_t rows, int64_t columns, int tp_dim, float std) {
    return {.name = std::move(name), .shape = {rows, columns}, .role = Role::matrix, .layer = layer, .tp_dim = tp_dim, .init_std = std};
}
// A bias of a column-parallel layer is split with its outputs. That of a row-parallel layer is replicated; its gradient is whole on
// every rank, because it is summed from the gathered gradient of the layer's output.
Parameter bias_of(std::string name, int layer, int64_t size, bool column_parallel) {
    return {.name = std::move(name), .shape = {size}, .role = Role::bias, .layer = layer, .tp_dim = column_parallel ? 0 : -1,
            .init = InitKind::zeros, .decay = false};
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

// A matrix whose rows are ids of the vocabulary.
Parameter vocabulary(std::string name, Role role, int64_t vocab, int64_t C, float std) {
    Parameter p = matrix(std::move(name), -1, vocab, C, 0, std);
    p.role = role;
    return p;
}

int64_t rounded_up(int64_t n, int64_t multiple) { return (n + multiple - 1) / multiple * multiple; }

using Groups = std::vector<std::vector<Parameter>>;

// The groups of one layer, in forward order.
Groups layer_groups(const ModelConfig& m, int l) {
    const int64_t C = m.hidden, H = m.heads, K = m.kv_heads, D = m.head_dim, F = m.ffn_hidden;
    const float std = static_cast<float>(m.init_std);
    const float residual_std = static_cast<float>(m.init_std / std::sqrt(2.0 * static_cast<double>(std::max<int64_t>(m.layers, 1))));
    const std::string layer = "layers." + std::to_string(l) + ".", attention = layer + "attention.", ffn = layer + "ffn.";
    Groups groups;
    const auto add = [&](Parameter p) { groups.push_back({std::move(p)}); };
    const auto add_norm = [&](const std::string& name) {
        add(norm_weight(name + ".weight", l, C));
        if (m.norm == NormKind::layernorm) add(norm_bias(name + ".bias", l, C));
    };
    add_norm(layer + "norm1");
    groups.push_back({matrix(attention + "q.weight", l, H * D, C, 0, std), matrix(attention + "k.weight", l, K * D, C, 0, std),
                      matrix(attention + "v.weight", l, K * D, C, 0, std)});
    if (m.has_bias(true))
        groups.push_back({bias_of(attention + "q.bias", l, H * D, true), bias_of(attention + "k.bias", l, K * D, true), bias_of(attention + "v.bias", l, K * D, true)});
    if (m.qk_norm) {
        add(norm_weight(attention + "q_norm.weight", l, D));
        add(norm_weight(attention + "k_norm.weight", l, D));
    }
    add(matrix(attention + "out.weight", l, C, H * D, 1, residual_std));
    if (m.has_bias(false)) add(bias_of(attention + "out.bias", l, C, false));
    if (m.block == BlockKind::serial) add_norm(layer + "norm2");
    Parameter up = matrix(ffn + "up.weight", l, F, C, 0, std);
    if (m.swiglu())
        groups.push_back({matrix(ffn + "gate.weight", l, F, C, 0, std), std::move(up)});
    else
        add(std::move(up));
    if (m.has_bias(false)) {
        Parameter up_bias = bias_of(ffn + "up.bias", l, F, true);
        if (m.swiglu())
            groups.push_back({bias_of(ffn + "gate.bias", l, F, true), std::move(up_bias)});
        else
            add(std::move(up_bias));
    }
    add(matrix(ffn + "down.weight", l, C, F, 1, residual_std));
    if (m.has_bias(false)) add(bias_of(ffn + "down.bias", l, C, false));
    return groups;
}

int64_t elems_of(const Groups& groups) {
    int64_t n = 0;
    for (const auto& group : groups)
        for (const Parameter& p : group) n += product(p.shape);
    return n;
}

}  // namespace

std::vector<int64_t> Parameter::box_begin() const {
    std::vector<int64_t> b(shape.size(), 0);
    if (tp_dim >= 0) b[static_cast<size_t>(tp_dim)] = begin;
    return b;
}

std::vector<int64_t> Parameter::box_shape() const {
    std::vector<int64_t> s = shape;
    if (tp_dim >= 0) s[static_cast<size_t>(tp_dim)] = count;
    return s;
}

ParameterTable::ParameterTable(const ModelConfig& m, const Placement& placement, int64_t bucket_elems) : placement_(placement) {
    // Ids are spread evenly over the tensor-parallel ranks; each pads its own rows to a multiple of 128.
    const int64_t per_rank = (m.vocab + placement.tp - 1) / placement.tp;
    first_row_ = std::min(m.vocab, placement.tp_rank * per_rank);
    rows_ = std::min(m.vocab - first_row_, per_rank);
    padded_rows_ = rounded_up(per_rank, 128);
    const float std = static_cast<float>(m.init_std);
    const auto token = [&] { return Groups{{vocabulary("embedding.token.weight", Role::token_embedding, m.vocab, m.hidden, std)}}; };
    for (int c = 0; c < static_cast<int>(placement.chunks.size()); ++c) {
        const Part& part = placement.chunks[static_cast<size_t>(c)];
        if (part.embedding) {
            close_bucket({.chunk = c, .token = true}, token());
            if (m.position == Position::learned) {
                Parameter position = matrix("embedding.position.weight", -1, m.max_seq, m.hidden, -1, std);
                position.role = Role::position_embedding;
                position.partial_over_tp = true;
                close_bucket({.chunk = c, .position = true}, {{position}});
            }
        }
        Groups layers;
        int first = part.first_layer;
        for (int l = part.first_layer; l < part.last_layer; ++l) {
            for (auto& group : layer_groups(m, l)) layers.push_back(std::move(group));
            if (elems_of(layers) < bucket_elems * placement.tp && l + 1 < part.last_layer) continue;
            close_bucket({.chunk = c, .first_layer = first, .last_layer = l + 1}, std::exchange(layers, {}));
            first = l + 1;
        }
        if (!part.head) continue;
        if (m.tied && !part.embedding) {  // the same tensor as on the first stage, with the same shards
            Groups copy = token();
            copy[0][0].owned = false;
            close_bucket({.chunk = c, .token = true}, std::move(copy));
        }
        Groups tail;
        tail.push_back({norm_weight("final_norm.weight", -1, m.hidden)});
        if (m.norm == NormKind::layernorm) tail.push_back({norm_bias("final_norm.bias", -1, m.hidden)});
        if (!m.tied) tail.push_back({vocabulary("head.weight", Role::head, m.vocab, m.hidden, std)});
        close_bucket({.chunk = c, .head = true}, std::move(tail));
    }
}

// Gives every tensor of the bucket its box and its place.
void ParameterTable::close_bucket(Bucket bucket, Groups groups) {
    std::stable_partition(groups.begin(), groups.end(), [](const auto& group) { return group[0].partial_over_tp; });
    bucket.begin = flat_elems_;
    for (auto& group : groups) {
        flat_elems_ = rounded_up(flat_elems_, group_alignment);
        for (Parameter& p : group) {
            const bool by_row = p.role == Role::token_embedding || p.role == Role::head;
            if (by_row) {
                p.begin = first_row_;
                p.count = rows_;
            } else if (p.tp_dim >= 0) {
                TRIFOLD_ASSERT(p.shape[static_cast<size_t>(p.tp_dim)] % placement_.tp == 0);
                p.count = p.shape[static_cast<size_t>(p.tp_dim)] / placement_.tp;
                p.begin = p.count * placement_.tp_rank;
            } else {
                p.owned = p.owned && placement_.tp_rank == 0;
            }
            p.elems = product(p.box_shape());
            p.padded_elems = by_row ? padded_rows_ * p.shape[1] : p.elems;
            p.offset = flat_elems_;
            p.bucket = static_cast<int>(buckets_.size());
            flat_elems_ += p.padded_elems;
            if (p.partial_over_tp) bucket.partial_elems = flat_elems_ - bucket.begin;
            index_[p.name] = all_.size();
            all_.push_back(std::move(p));
        }
    }
    bucket.elems = rounded_up(flat_elems_ - bucket.begin, group_alignment * placement_.dp);
    flat_elems_ = bucket.end();
    buckets_.push_back(bucket);
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

std::vector<Segment> ParameterTable::segments(const Bucket& bucket, int64_t first, int64_t elems, double weight_decay, Which which) const {
    std::vector<Segment> s;
    for (const Parameter& p : all_) {
        if (&buckets_[static_cast<size_t>(p.bucket)] != &bucket) continue;
        const int64_t begin = std::clamp(p.offset - first, int64_t{0}, elems), end = std::clamp(p.offset + p.elems - first, int64_t{0}, elems);
        const int64_t here = which == Which::owned && !p.owned ? 0 : end - begin;
        s.push_back({begin, here, p.decay ? static_cast<float>(weight_decay) : 0.0f, p.decay});
    }
    return s;
}

std::vector<StateSlice> slices_of(const ParameterTable& table, const std::vector<StateShard>& shards) {
    std::vector<StateSlice> slices;
    const auto at = [](float* base, int64_t offset) { return base ? base + offset : nullptr; };
    for (const StateShard& s : shards)
        for (const Parameter& p : table.all()) {
            const int64_t first = std::max(s.first, p.offset), last = std::min(s.first + s.elems, p.offset + p.elems);
            if (first >= last) continue;
            slices.push_back({&p, first - p.offset, last - p.offset, at(s.master, first - s.first), at(s.m, first - s.first), at(s.v, first - s.first)});
        }
    return slices;
}

std::vector<StateSlice> whole_state(const ParameterTable& table, float* master, float* m, float* v) {
    return slices_of(table, {{0, table.flat_elems(), master, m, v}});
}

void initialize(const std::vector<StateSlice>& slices, uint64_t seed) {
    // Standard deviation of the integer sum in normal(): twice that of eight uniform 16-bit words.
    const double unit = 2.0 * std::sqrt(8.0 * (65536.0 * 65536.0 - 1.0) / 12.0);
    for (const StateSlice& s : slices) {
        const Parameter& p = *s.parameter;
        if (p.init != InitKind::normal) {
            std::fill(s.master, s.master + (s.last - s.first), p.init == InitKind::ones ? 1.0f : 0.0f);
            continue;
        }
        const uint64_t key = key_of(seed, p.name);
        const float scale = static_cast<float>(p.init_std / unit);
        // Element i of the box is element (row + row_offset) * columns + column + column_offset of the whole tensor.
        const std::vector<int64_t> box = p.box_shape(), begin = p.box_begin();
        const int64_t width = box.size() > 1 ? box[1] : 1, columns = p.shape.size() > 1 ? p.shape[1] : 1;
        const int64_t row_offset = begin[0], column_offset = begin.size() > 1 ? begin[1] : 0;
#pragma omp parallel for schedule(static)
        for (int64_t row = s.first / width; row <= (s.last - 1) / width; ++row) {
            const int64_t first = std::max(s.first, row * width), last = std::min(s.last, (row + 1) * width);
            const auto global = static_cast<uint64_t>((row + row_offset) * columns + column_offset + first - row * width);
            float* const values = s.master + (first - s.first);
#pragma omp simd
            for (int64_t i = 0; i < last - first; ++i) values[i] = normal(key, global + static_cast<uint64_t>(i), scale);
        }
    }
}

}  // namespace trifold
