// kernels/cpu/attention_decode.cpp   o = softmax(scale * q k^T + mask) v for up to 4 queries of each sequence.
//
// Work item   one key/value head and one part of its keys, for all queries of the heads that share it: keys and values
//             come from memory once. The parts of a head are merged afterwards, in order, by their maxima and sums.
// Parts       cut by the number of keys alone: results depend neither on threads nor on other sequences.
// Traffic     2 * Tk * D elements per key/value head; memory bound.
// Numerics    fp32 sums; lane by lane over D for the scores, key by key for the output.
#include "kernels/cpu/attention_decode.h"

#include "kernels/cpu/attention_tiles.h"

namespace trifold::cpu::attention {
namespace {

constexpr int64_t max_parts = 16, shortest_part = 256;

// One query of one head within one part: its scaled vector, the unscaled sum of values, the maximum and the sum.
struct Partial {
    float *q_D, *o_D, *max, *sum;
    Partial(float* base, int64_t Dp) : q_D(base), o_D(q_D + Dp), max(o_D + Dp), sum(max + 1) {}
    static int64_t floats(int64_t Dp) { return 2 * Dp + lanes; }
};

// Lane r of the result is the sum over the lanes of in[r]; each step adds halves and interleaves them.
template <int... i>
TRIFOLD_INLINE Register sums_of_lanes(Register* in, std::integer_sequence<int, i...>) {
    constexpr int w = register_lanes;
    for (int n = w / 2; n > 0; n /= 2)
        for (int r = 0; r < n; ++r)
            in[r] = __builtin_shufflevector(in[r], in[r + n], (i / 2 + i % 2 * w)...) +
                    __builtin_shufflevector(in[r], in[r + n], (w / 2 + i / 2 + i % 2 * w)...);
    return in[0];
}

// sum[r] = the lanewise products of q and key r, added up. Up to 8 keys, so that their addresses stay in registers.
template <int keys, class T>
TRIFOLD_INLINE void add_products(const float* q, const T* const (&key)[keys], int64_t D, Register* sum) {
    for (int r = 0; r < keys; ++r) sum[r] = Register{};
    simd::for_groups(D, [&](int64_t d, auto width) TRIFOLD_BODY {
        const f32x16 q_d = load(q + d);
        for (int r = 0; r < keys; ++r) {
            const f32x16 k_d = simd::load(key[r] + d, width);
            for (int p = 0; p < f32x16::parts; ++p) sum[r] += k_d.part[p] * q_d.part[p];
        }
    });
}

// score[k] = q . key k in whole registers; those from `keys` on repeat the last key.
template <class T>
void dot_products(const float* q, Rows<T> k_KD, int64_t keys, int64_t D, float* score) {
    constexpr int w = register_lanes, at_once = std::min(w, 8);
    for (int64_t k = 0; k < keys; k += w) {
        Register sum[w];
        for (int r = 0; r < w; r += at_once) {
            const T* key[at_once];
            for (int i = 0; i < at_once; ++i) key[i] = k_KD[std::min(k + r + i, keys - 1)];
            add_products(q, key, D, sum + r);
        }
        store_register(score + k, sums_of_lanes(sum, std::make_integer_sequence<int, w>()));
    }
}

// o[d] = o[d] * shrink + sum over k of p[k] * v[k][d], for `vectors` vectors of columns.
template <int64_t vectors, class T, class Width>
TRIFOLD_INLINE void add_values(const float* p, Rows<T> v_KD, int64_t keys, float shrink, float* o, Width width) {
    f32x16 sum[vectors];
    for (int64_t v = 0; v < vectors; ++v) sum[v] = load(o + v * lanes) * shrink;
    for (int64_t k = 0; k < keys; ++k)
        for (int64_t v = 0; v < vectors; ++v) sum[v] += simd::load(v_KD[k] + v * lanes, width) * p[k];
    for (int64_t v = 0; v < vectors; ++v) store(o + v * lanes, sum[v]);
}
template <class T>
void add_values(const float* p, Rows<T> v_KD, int64_t keys, float shrink, int64_t D, float* o) {
    int64_t d = 0;
    for (; d + 4 * lanes <= D; d += 4 * lanes) add_values<4>(p, v_KD.at(0, d), keys, shrink, o + d, simd::Full{});
    simd::for_groups(D - d, [&](int64_t i, auto width)
                                TRIFOLD_BODY { add_values<1>(p, v_KD.at(0, d + i), keys, shrink, o + d + i, width); });
}

// Scores of a tile become probabilities relative to the new maximum, zero outside `seen`; returns what the sums so far
// shrink by.
float softmax(float* score, Range seen, const Partial& row) {
    f32x16 highest(*row.max);
    for (int64_t k = 0; k < tile; ++k)
        if (k < seen.begin || k >= seen.end) score[k] = -INFINITY;
    for (int64_t k = 0; k < tile; k += lanes) highest = simd::max(highest, load(score + k));
    const float now = simd::max(highest);
    f32x16 sum(0.0f);
    for (int64_t k = 0; k < tile; k += lanes) {
        const f32x16 p = exp_or_zero(load(score + k) - now);
        store(score + k, p);
        sum += p;
    }
    const float shrink = exp_or_zero(f32x16(*row.max - now)).part[0][0];
    *row.sum = *row.sum * shrink + simd::sum(sum);
    *row.max = now;
    return shrink;
}

template <class T>
class Decode {
public:
    explicit Decode(const AttentionForward& args)
        : a_(args),
          Dp_(round_up(args.D, lanes)),
          group_(args.H / args.K),
          part_(std::max(shortest_part, round_up(ceil_div(args.Tk, max_parts), tile))) {}

    void run() const {
        TRIFOLD_ASSERT(a_.workspace.bytes() >= decode_workspace(a_));
        const int64_t heads = a_.B * a_.K;
#pragma omp parallel
        {
#pragma omp for collapse(2) schedule(dynamic, 1)
            for (int64_t bk = 0; bk < heads; ++bk)
                for (int64_t part = 0; part < parts(); ++part) attend(bk / a_.K, bk % a_.K, part);
#pragma omp for
            for (int64_t row = 0; row < a_.B * a_.H * a_.Tq; ++row)
                merge(row / a_.Tq / a_.H, row / a_.Tq % a_.H, row % a_.Tq);
        }
    }

private:
    int64_t parts() const { return ceil_div(a_.Tk, part_); }
    Partial partial(int64_t b, int64_t h, int64_t i, int64_t part) const {
        const int64_t row = ((b * a_.H + h) * a_.Tq + i) * parts() + part;
        return {static_cast<float*>(a_.workspace.data) + row * Partial::floats(Dp_), Dp_};
    }
    Limits limits(int64_t b) const {
        const int32_t* doc_start = a_.doc_start_N ? a_.doc_start_N.as<int32_t>() + b * a_.Tq : nullptr;
        return limits_of({a_.q_offset, a_.window, a_.Tk, doc_start}, 0, a_.Tq);
    }

    void attend(int64_t b, int64_t kv, int64_t part) const {
        const Limits seen = limits(b);
        for_rows(kv, [&](int64_t h, int64_t i) { start(b, h, i, partial(b, h, i, part)); });
        const Range keys = seen.all.within({part * part_, std::min(a_.Tk, (part + 1) * part_)});
        const int64_t head = b * a_.kv_batch_stride + kv * a_.D;
        const Rows<T> k{a_.k_NKD.as<T>() + head, a_.kv_stride}, v{a_.v_NKD.as<T>() + head, a_.kv_stride};
        for (int64_t key = keys.begin / tile * tile; key < keys.end; key += tile) {
            const int64_t count = std::min(tile, keys.end - key), next = key + tile;
            Ahead ahead;
            ahead.add(v.at(next), std::min(tile, keys.end - next), a_.D);
            ahead.add(k.at(next), std::min(tile, keys.end - next), a_.D);
            for_rows(kv, [&](int64_t h, int64_t i) {
                const Partial row = partial(b, h, i, part);
                alignas(64) float p[tile];
                ahead.fetch_some();
                dot_products(row.q_D, k.at(key), count, a_.D, p);
                const float shrink = softmax(p, {seen.first[i] - key, std::min(seen.last[i] + 1 - key, count)}, row);
                ahead.fetch_some();
                add_values(p, v.at(key), count, shrink, a_.D, row.o_D);
            });
        }
    }
    template <class Body>
    void for_rows(int64_t kv, const Body& body) const {
        for (int64_t h = kv * group_; h < (kv + 1) * group_; ++h)
            for (int64_t i = 0; i < a_.Tq; ++i) body(h, i);
    }

    void start(int64_t b, int64_t h, int64_t i, const Partial& row) const {
        const T* q = a_.q_NHD.as<T>() + b * a_.q_batch_stride + i * a_.q_stride + h * a_.D;
        simd::for_groups(
            a_.D, [&](int64_t d, auto width) TRIFOLD_BODY { store(row.q_D + d, simd::load(q + d, width) * a_.scale); });
        std::fill(row.o_D, row.o_D + Dp_, 0.0f);
        *row.max = lowest_score;
        *row.sum = 0.0f;
    }

    // The first part's sums become those of all parts.
    void merge(int64_t b, int64_t h, int64_t i) const {
        const Partial total = partial(b, h, i, 0);
        float highest = lowest_score, sum = 0.0f;
        for (int64_t part = 0; part < parts(); ++part) highest = std::max(highest, *partial(b, h, i, part).max);
        for (int64_t part = 0; part < parts(); ++part) {
            const Partial row = partial(b, h, i, part);
            const float shrink = exp_or_zero(f32x16(*row.max - highest)).part[0][0];
            sum += *row.sum * shrink;
            for (int64_t d = 0; d < Dp_; ++d) total.o_D[d] = (part ? total.o_D[d] : 0.0f) + row.o_D[d] * shrink;
        }
        store_row(total.o_D, 1.0f / sum, a_.D, a_.o_NHD.as<T>() + ((b * a_.Tq + i) * a_.H + h) * a_.D);
        if (a_.lse_BHT) a_.lse_BHT.as<float>()[(b * a_.H + h) * a_.Tq + i] = highest + std::log(sum);
    }

    const AttentionForward& a_;
    int64_t Dp_, group_, part_;
};

}  // namespace

template <class T>
void decode(const AttentionForward& args) {
    Decode<T>(args).run();
}
template void decode<float>(const AttentionForward&);
template void decode<bf16>(const AttentionForward&);

int64_t decode_workspace(const AttentionForward& a) {
    return 4 * a.B * a.H * decode_queries * max_parts * Partial::floats(round_up(a.D, lanes));
}

}  // namespace trifold::cpu::attention
