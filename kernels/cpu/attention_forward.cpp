// kernels/cpu/attention_forward.cpp   o = softmax(scale * q k^T + mask) v in the flash form (Dao, arXiv 2307.08691).
//
// Work item   up to 4 tiles of 64 queries of one head, which share each key tile while it is in the cache.
// One step    S = K Q^T; the running maximum and sum of each query follow; P = exp(S - maximum);
//             O = O * exp(old maximum - new maximum) + P^T V.
// Memory      fp32 scratch per thread, no [T, T] array. Key tiles that none of the queries sees are never read.
// Numerics    fp32 scores, statistics and sums; key tiles in ascending order.
// Saves       lse = maximum + log(sum), all that the backward pass needs to make P again.
#include "kernels/cpu/attention_decode.h"
#include "kernels/cpu/attention_tiles.h"

namespace trifold {
namespace cpu::attention {
namespace {

constexpr int64_t tiles_per_item = 4;

struct QueryTile {
    float *q_DQ, *o_QD, *max_Q, *sum_Q;
    Limits limits;
    int64_t query = 0;
};

struct Scratch {
    QueryTile tiles[tiles_per_item];
    float *k_KD, *v_KD, *s_KQ, *shrink_Q;

    Scratch(float* base, int64_t Dp) {
        Cutter cut(base);
        for (QueryTile& t : tiles) {
            t.q_DQ = cut.floats(tile * Dp), t.o_QD = cut.floats(tile * Dp);
            t.max_Q = cut.floats(tile), t.sum_Q = cut.floats(tile);
        }
        k_KD = cut.floats(tile * Dp), v_KD = cut.floats(tile * Dp);
        s_KQ = cut.floats(tile * tile), shrink_Q = cut.floats(tile);
    }
    static int64_t bytes(int64_t Dp) {
        return 4 * (tiles_per_item * 2 * tile * (Dp + 1) + 2 * tile * Dp + tile * (tile + 1));
    }
};

struct Item {
    int64_t b, h;
    Range queries;
};

template <class T>
class Forward {
public:
    Forward(const AttentionForward& args, float* scratch) : a_(args), Dp_(round_up(args.D, lanes)), s_(scratch, Dp_) {}

    void run(const Item& item) {
        const int64_t n = ceil_div(item.queries.size(), tile);
        Range keys;
        ahead_.clear();
        for (int64_t t = 0; t < n; ++t) {
            start(item, item.queries.begin + t * tile, s_.tiles[t]);
            keys = keys.with(s_.tiles[t].limits.all);
        }
        const int64_t head = item.b * a_.kv_batch_stride + item.h / (a_.H / a_.K) * a_.D;
        const Rows<T> k{a_.k_NKD.as<T>() + head, a_.kv_stride}, v{a_.v_NKD.as<T>() + head, a_.kv_stride};
        for (int64_t key = keys.begin / tile * tile; key < keys.end; key += tile) {
            const int64_t next = key + tile, count = std::min(tile, keys.end - key);
            load_rows(k.at(key), count, a_.D, {s_.k_KD, Dp_});
            load_rows(v.at(key), count, a_.D, {s_.v_KD, Dp_});
            ahead_.add(v.at(next), std::min(tile, keys.end - next), a_.D);
            ahead_.add(k.at(next), std::min(tile, keys.end - next), a_.D);
            for (int64_t t = 0; t < n; ++t) step(s_.tiles[t], key);
        }
        for (int64_t t = 0; t < n; ++t) finish(item, s_.tiles[t]);
    }

private:
    Rows<T> o(const Item& item, int64_t query) const {
        return {a_.o_NHD.as<T>() + ((item.b * a_.Tq + query) * a_.H + item.h) * a_.D, a_.H * a_.D};
    }

    void start(const Item& item, int64_t query, QueryTile& t) {
        const int64_t queries = std::min(tile, item.queries.end - query);
        const int32_t* doc_start = a_.doc_start_N ? a_.doc_start_N.as<int32_t>() + item.b * a_.Tq : nullptr;
        t.query = query;
        t.limits = limits_of({a_.q_offset, a_.window, a_.Tk, doc_start}, query, queries);
        T* q = a_.q_NHD.as<T>() + item.b * a_.q_batch_stride + query * a_.q_stride + item.h * a_.D;
        load_rows(Rows<T>{q, a_.q_stride}, queries, a_.D, {t.o_QD, Dp_});
        transpose({t.o_QD, Dp_}, queries, a_.D, a_.scale, t.q_DQ);
        std::fill(t.o_QD, t.o_QD + tile * Dp_, 0.0f);
        std::fill(t.max_Q, t.max_Q + tile, lowest_score);
        std::fill(t.sum_Q, t.sum_Q + tile, 0.0f);
        ahead_.add(o(item, query), queries, a_.D);
    }

    void step(QueryTile& t, int64_t key) {
        if (t.limits.all.within({key, key + tile}).empty()) return;
        const Visible visible = visible_cells(t.limits, key);
        for_runs(visible.vectors_of, [&](int64_t row, int64_t rows, Range q) {
            ahead_.fetch_some();
            multiply<Start::zero>({.a = {s_.k_KD + row * Dp_, Dp_, 1},
                                   .b = {t.q_DQ + q.begin, tile},
                                   .c = {s_.s_KQ + row * tile + q.begin, tile},
                                   .rows = rows,
                                   .vectors = q.size() / lanes,
                                   .depth = a_.D});
        });
        for (int64_t v = 0; v < tile / lanes; ++v)
            visible.whole ? softmax<true>(t, visible, v) : softmax<false>(t, visible, v);
        for_runs(visible.keys_of, [&](int64_t row, int64_t rows, Range k) {
            ahead_.fetch_some();
            multiply<Start::scale>({.a = {s_.s_KQ + k.begin * tile + row, 1, tile},
                                    .b = {s_.v_KD + k.begin * Dp_, Dp_},
                                    .c = {t.o_QD + row * Dp_, Dp_},
                                    .rows = rows,
                                    .vectors = Dp_ / lanes,
                                    .depth = k.size(),
                                    .factor = s_.shrink_Q + row});
        });
    }

    // Queries [16 v, 16 v + 16): scores become probabilities relative to the new maximum, exactly zero where nothing is
    // seen.
    template <bool whole>
    void softmax(QueryTile& t, const Visible& visible, int64_t v) {
        const Range keys = visible.keys_of_vector(v);
        const LaneLimits limits(t.limits, v);
        float *s = s_.s_KQ + v * lanes, *max = t.max_Q + v * lanes, *sum = t.sum_Q + v * lanes;
        const f32x16 old = load(max);
        f32x16 highest[cell] = {old, old, old, old};
        for (int64_t k = keys.begin; k < keys.end; k += cell)
            for (int64_t i = 0; i < cell; ++i) {
                f32x16 score = load(s + (k + i) * tile);
                if constexpr (!whole) {
                    score = simd::select(limits.see(visible.key + k + i), score, f32x16(-INFINITY));
                    store(s + (k + i) * tile, score);
                }
                highest[i] = simd::max(highest[i], score);
            }
        const f32x16 now = simd::max(simd::max(highest[0], highest[1]), simd::max(highest[2], highest[3]));
        const f32x16 shrink = exp_or_zero(old - now);
        f32x16 total = load(sum) * shrink;
        for (int64_t k = keys.begin; k < keys.end; ++k) {
            const f32x16 p = exp_or_zero(load(s + k * tile) - now);
            store(s + k * tile, p);
            total += p;
        }
        store(max, now);
        store(sum, total);
        store(s_.shrink_Q + v * lanes, shrink);
    }

    void finish(const Item& item, const QueryTile& t) {
        float* lse = a_.lse_BHT ? a_.lse_BHT.as<float>() + (item.b * a_.H + item.h) * a_.Tq + t.query : nullptr;
        for (int64_t i = 0; i < t.limits.queries; ++i) {
            store_row(t.o_QD + i * Dp_, 1.0f / t.sum_Q[i], a_.D, o(item, t.query)[i]);
            if (lse) lse[i] = t.max_Q[i] + std::log(t.sum_Q[i]);
        }
    }

    const AttentionForward& a_;
    int64_t Dp_;
    Scratch s_;
    Ahead ahead_;
};

template <class T>
void forward(const AttentionForward& a) {
    const int64_t bytes = Scratch::bytes(round_up(a.D, lanes));
    const int team = team_size(a.workspace, bytes);
    // Few items: smaller ones keep every thread busy. Results do not depend on the size.
    const int64_t tiles = ceil_div(a.Tq, tile), heads = a.B * a.H;
    const int64_t size = std::clamp<int64_t>(heads * tiles / (2 * team), 1, std::min(tiles, tiles_per_item));
    const int64_t chunks = ceil_div(tiles, size);
#pragma omp parallel num_threads(team)
    {
        Forward<T> worker(a, static_cast<float*>(a.workspace.data) + omp_get_thread_num() * (bytes / 4));
        // The last queries of a sequence see most keys: they go first. Items of one head are neighbours, for the cache.
#pragma omp for schedule(dynamic, 1)
        for (int64_t i = 0; i < heads * chunks; ++i) {
            const int64_t begin = (chunks - 1 - i % chunks) * size * tile, bh = i / chunks;
            worker.run({bh / a.H, bh % a.H, {begin, std::min(a.Tq, begin + size * tile)}});
        }
    }
}

}  // namespace
}  // namespace cpu::attention

void cpu::attention_forward(const AttentionForward& a) {
    TRIFOLD_ASSERT(a.H % a.K == 0 && a.q_offset + a.Tq <= a.Tk);
    if (a.B * a.Tq * a.H * a.D == 0) return;
    with_act(a.q_NHD.dtype, [&](auto act) {
        using T = decltype(act);
        a.Tq <= attention::decode_queries ? attention::decode<T>(a) : attention::forward<T>(a);
    });
}

// Enough for fewer queries and for any number of keys as well.
int64_t cpu::attention_workspace(const AttentionForward& a) {
    using namespace cpu::attention;
    const int64_t tiles = omp_get_max_threads() * Scratch::bytes(round_up(a.D, lanes));
    return std::max(tiles, decode_workspace(a));
}

}  // namespace trifold
