// kernels/cpu/attention_backward.cpp   Gradients of flash attention (Dao, arXiv 2307.08691, algorithm 2), no atomics.
//
// One step    of a query tile with a key tile; squares are kept as [key][query], as in forward:
//               S = scale K Q^T   P = exp(S - lse)   dP = V dO^T   dS = P (dP - delta)   delta = sum over d of dO * O
//               dV += P dO   dK += scale dS Q   dQ += scale dS^T K
// One pass    a thread owns one key/value head of one sequence and makes all its steps: 5 products. dK and dV stay in
//             its scratch memory, dQ in a tile, so the sums over queries and heads of a group have one fixed order.
// Two passes  with few heads for the threads: dQ by query tiles, dK and dV by key tiles, 7 products. The sums are the
//             same in the same order, so both ways give the same bits.
// Memory      fp32 scratch per thread: K, V, dK and dV of one head (4 * T * D numbers) and a few tiles.
// Numerics    fp32 throughout; dq, dk and dv are rounded once.
#include "kernels/cpu/attention_tiles.h"

namespace trifold {
namespace cpu::attention {
namespace {

enum class Wanted : uint8_t { all, dq, dkv };

// What one thread does at a time. Query and key ranges begin at tiles.
struct Part {
    Wanted wanted = Wanted::all;
    int64_t b = 0, kv = 0;
    Range heads, queries, keys;
};

struct Scratch {
    float *k_TD, *v_TD, *dk_TD, *dv_TD;          // of the part's keys
    float *q_QD, *do_QD, *dq_QD, *q_DQ, *do_DQ;  // of one query tile
    float *lse_Q, *delta_Q, *p_KQ, *ds_KQ;

    Scratch(float* base, int64_t T, int64_t Dp) {
        Cutter cut(base);
        for (float** rows : {&k_TD, &v_TD, &dk_TD, &dv_TD}) *rows = cut.floats(round_up(T, tile) * Dp);
        for (float** rows : {&q_QD, &do_QD, &dq_QD, &q_DQ, &do_DQ}) *rows = cut.floats(tile * Dp);
        for (float** square : {&p_KQ, &ds_KQ}) *square = cut.floats(tile * tile);
        for (float** row : {&lse_Q, &delta_Q}) *row = cut.floats(tile);
    }
    static int64_t bytes(int64_t T, int64_t Dp) {
        return 4 * ((4 * round_up(T, tile) + 5 * tile) * Dp + 2 * tile * tile + 2 * tile);
    }
};

template <class T>
class Backward {
public:
    Backward(const AttentionBackward& args, float* scratch)
        : a_(args), Dp_(round_up(args.D, lanes)), s_(scratch, args.T, Dp_) {}

    void run(const Part& part) {
        ahead_.clear();
        start_keys(part);
        for (int64_t h = part.heads.begin; h < part.heads.end; ++h)
            for (int64_t query = part.queries.begin; query < part.queries.end; query += tile) run(part, h, query);
        if (part.wanted != Wanted::dq) finish_keys(part);
    }

private:
    // Rows of one head, from the given token of a sequence on.
    Rows<T> q_rows(const Tensor& q, int64_t b, int64_t token, int64_t h) const {
        return {q.as<T>() + b * a_.q_batch_stride + token * a_.q_stride + h * a_.D, a_.q_stride};
    }
    Rows<T> o_rows(const Tensor& o, int64_t b, int64_t token, int64_t h) const {
        return {o.as<T>() + ((b * a_.T + token) * a_.H + h) * a_.D, a_.H * a_.D};
    }
    Rows<T> key_rows(const Tensor& k, const Part& part) const {
        const int64_t at = part.b * a_.kv_batch_stride + part.keys.begin * a_.kv_stride + part.kv * a_.D;
        return {k.as<T>() + at, a_.kv_stride};
    }

    void start_keys(const Part& part) {
        const int64_t rows = part.keys.size(), floats = round_up(rows, tile) * Dp_;
        load_rows(key_rows(a_.k_NKD, part), rows, a_.D, {s_.k_TD, Dp_});
        load_rows(key_rows(a_.v_NKD, part), rows, a_.D, {s_.v_TD, Dp_});
        std::fill(s_.dk_TD, s_.dk_TD + floats, 0.0f);
        std::fill(s_.dv_TD, s_.dv_TD + floats, 0.0f);
    }

    void finish_keys(const Part& part) const {
        store_rows(s_.dk_TD, part.keys.size(), a_.scale, key_rows(a_.dk_NKD, part));
        store_rows(s_.dv_TD, part.keys.size(), 1.0f, key_rows(a_.dv_NKD, part));
    }
    void store_rows(const float* from, int64_t rows, float factor, Rows<T> to) const {
        for (int64_t r = 0; r < rows; ++r) store_row(from + r * Dp_, factor, a_.D, to[r]);
    }

    // One query tile with every key tile of the part.
    void run(const Part& part, int64_t h, int64_t query) {
        const int32_t* doc_start = a_.doc_start_N ? a_.doc_start_N.as<int32_t>() + part.b * a_.T : nullptr;
        const Limits limits = limits_of({0, a_.window, a_.T, doc_start}, query, std::min(tile, a_.T - query));
        const Range keys = limits.all.within(part.keys);
        if (keys.empty()) return;
        start_queries(part, h, query, limits.queries);
        look_ahead(part, h, query);
        for (int64_t key = keys.begin / tile * tile; key < keys.end; key += tile) step(part, limits, key);
        if (part.wanted != Wanted::dkv)
            store_rows(s_.dq_QD, limits.queries, a_.scale, q_rows(a_.dq_NHD, part.b, query, h));
    }

    void start_queries(const Part& part, int64_t h, int64_t query, int64_t queries) {
        load_rows(q_rows(a_.q_NHD, part.b, query, h), queries, a_.D, {s_.q_QD, Dp_});
        load_rows(o_rows(a_.do_NHD, part.b, query, h), queries, a_.D, {s_.do_QD, Dp_});
        transpose({s_.q_QD, Dp_}, queries, a_.D, a_.scale, s_.q_DQ);
        transpose({s_.do_QD, Dp_}, queries, a_.D, 1.0f, s_.do_DQ);
        std::fill(s_.dq_QD, s_.dq_QD + tile * Dp_, 0.0f);
        const float* lse = a_.lse_BHT.as<float>() + (part.b * a_.H + h) * a_.T + query;
        const Rows<T> o = o_rows(a_.o_NHD, part.b, query, h);
        for (int64_t i = 0; i < tile; ++i) {
            s_.lse_Q[i] = i < queries ? lse[i] : 0.0f;
            s_.delta_Q[i] = i < queries ? dot(o[i], s_.do_QD + i * Dp_) : 0.0f;
        }
    }
    float dot(const T* x, const float* y) const {
        f32x16 sum(0.0f);
        simd::for_groups(a_.D,
                         [&](int64_t d, auto width) TRIFOLD_BODY { sum += simd::load(x + d, width) * load(y + d); });
        return simd::sum(sum);
    }

    // Asks for this tile's dq and the next tile's inputs; with the last query tile, for dk and dv.
    void look_ahead(const Part& part, int64_t h, int64_t query) {
        const int64_t next = query + tile, rows = std::min(tile, part.queries.end - next);
        if (part.wanted != Wanted::dq && rows <= 0 && h + 1 == part.heads.end) {
            ahead_.add(key_rows(a_.dk_NKD, part), part.keys.size(), a_.D);
            ahead_.add(key_rows(a_.dv_NKD, part), part.keys.size(), a_.D);
        }
        ahead_.add(q_rows(a_.q_NHD, part.b, next, h), rows, a_.D);
        ahead_.add(o_rows(a_.o_NHD, part.b, next, h), rows, a_.D);
        ahead_.add(o_rows(a_.do_NHD, part.b, next, h), rows, a_.D);
        if (part.wanted != Wanted::dkv)
            ahead_.add(q_rows(a_.dq_NHD, part.b, query, h), std::min(tile, part.queries.end - query), a_.D);
    }

    void step(const Part& part, const Limits& limits, int64_t key) {
        const Visible visible = visible_cells(limits, key);
        const int64_t at = (key - part.keys.begin) * Dp_;  // of the key tile in the part's rows
        add_scores(visible, at);
        for (int64_t v = 0; v < tile / lanes; ++v)
            visible.whole ? softmax_gradient<true>(limits, visible, v) : softmax_gradient<false>(limits, visible, v);
        if (part.wanted != Wanted::dq) add_key_gradients(visible, at);
        if (part.wanted != Wanted::dkv) add_query_gradients(visible, at);
    }

    // S and dP
    void add_scores(const Visible& visible, int64_t at) {
        for_runs(visible.vectors_of, [&](int64_t row, int64_t rows, Range q) {
            ahead_.fetch_some();
            const int64_t from = at + row * Dp_, to = row * tile + q.begin;
            Product p{.a = {s_.k_TD + from, Dp_, 1},
                      .b = {s_.q_DQ + q.begin, tile},
                      .c = {s_.p_KQ + to, tile},
                      .rows = rows,
                      .vectors = q.size() / lanes,
                      .depth = a_.D};
            multiply<Start::zero>(p);
            p.a.data = s_.v_TD + from, p.b.data = s_.do_DQ + q.begin, p.c.data = s_.ds_KQ + to;
            multiply<Start::zero>(p);
        });
    }

    // Queries [16 v, 16 v + 16): S becomes P and dP becomes dS, exactly zero where nothing is seen.
    template <bool whole>
    void softmax_gradient(const Limits& tile_limits, const Visible& visible, int64_t v) {
        const Range keys = visible.keys_of_vector(v);
        const LaneLimits limits(tile_limits, v);
        const f32x16 lse = load(s_.lse_Q + v * lanes), delta = load(s_.delta_Q + v * lanes);
        for (int64_t k = keys.begin; k < keys.end; ++k) {
            float *s = s_.p_KQ + k * tile + v * lanes, *dp = s_.ds_KQ + k * tile + v * lanes;
            f32x16 p = exp_or_zero(load(s) - lse);
            f32x16 ds = p * (load(dp) - delta);
            if constexpr (!whole) {
                const simd::Mask seen = limits.see(visible.key + k);
                p = simd::select(seen, p, f32x16(0.0f));
                ds = simd::select(seen, ds, f32x16(0.0f));
            }
            store(s, p);
            store(dp, ds);
        }
    }

    void add_key_gradients(const Visible& visible, int64_t at) {
        for_runs(visible.queries_of, [&](int64_t row, int64_t rows, Range q) {
            ahead_.fetch_some();
            const int64_t from = row * tile + q.begin, to = at + row * Dp_;
            Product p{.a = {s_.p_KQ + from, tile, 1},
                      .b = {s_.do_QD + q.begin * Dp_, Dp_},
                      .c = {s_.dv_TD + to, Dp_},
                      .rows = rows,
                      .vectors = Dp_ / lanes,
                      .depth = q.size()};
            multiply<Start::add>(p);
            p.a.data = s_.ds_KQ + from, p.b.data = s_.q_QD + q.begin * Dp_, p.c.data = s_.dk_TD + to;
            multiply<Start::add>(p);
        });
    }

    void add_query_gradients(const Visible& visible, int64_t at) {
        for_runs(visible.keys_of, [&](int64_t row, int64_t rows, Range k) {
            ahead_.fetch_some();
            multiply<Start::add>({.a = {s_.ds_KQ + k.begin * tile + row, 1, tile},
                                  .b = {s_.k_TD + at + k.begin * Dp_, Dp_},
                                  .c = {s_.dq_QD + row * Dp_, Dp_},
                                  .rows = rows,
                                  .vectors = Dp_ / lanes,
                                  .depth = k.size()});
        });
    }

    const AttentionBackward& a_;
    int64_t Dp_;
    Scratch s_;
    Ahead ahead_;
};

// The work as a list of parts that can be done in any order.
class Plan {
public:
    Plan(const AttentionBackward& args, int64_t team) : a_(args), chunks_(ceil_div(args.T, chunk)) {
        // Work of one round of threads: a whole head, or its share of two passes, which take 1.5 times as long in all.
        one_pass_ = 2 * ceil_div(a_.B * a_.K, team) * team <= 3 * a_.B * a_.K || chunks_ == 1;
    }
    int64_t size() const { return one_pass_ ? a_.B * a_.K : a_.B * (a_.H + a_.K) * chunks_; }
    Part operator[](int64_t i) const {
        const int64_t group = a_.H / a_.K;
        const Range all{0, a_.T};
        if (one_pass_) return {Wanted::all, i / a_.K, i % a_.K, {i % a_.K * group, (i % a_.K + 1) * group}, all, all};
        const int64_t b = i / (a_.H + a_.K) / chunks_, c = i / (a_.H + a_.K) % chunks_, j = i % (a_.H + a_.K);
        const Range part{c * chunk, std::min(a_.T, (c + 1) * chunk)};
        if (j < a_.K) return {Wanted::dkv, b, j, {j * group, (j + 1) * group}, {part.begin, a_.T}, part};
        const int64_t h = j - a_.K;
        const int64_t first_key = a_.window > 0 ? std::max<int64_t>(0, part.begin - a_.window) / tile * tile : 0;
        return {Wanted::dq, b, h / group, {h, h + 1}, part, {first_key, part.end}};
    }

private:
    static constexpr int64_t chunk = 4 * tile;  // of the two passes: shares the cost of loading the other side
    const AttentionBackward& a_;
    int64_t chunks_;
    bool one_pass_;
};

template <class T>
void backward(const AttentionBackward& a) {
    const int64_t bytes = Scratch::bytes(a.T, round_up(a.D, lanes));
    const int team = team_size(a.workspace, bytes);
    const Plan plan(a, team);
#pragma omp parallel num_threads(team)
    {
        Backward<T> worker(a, static_cast<float*>(a.workspace.data) + omp_get_thread_num() * (bytes / 4));
#pragma omp for schedule(dynamic, 1)
        for (int64_t i = 0; i < plan.size(); ++i) worker.run(plan[i]);
    }
}

}  // namespace
}  // namespace cpu::attention

void cpu::attention_backward(const AttentionBackward& a) {
    TRIFOLD_ASSERT(a.H % a.K == 0);
    if (a.B * a.T * a.H * a.D == 0) return;
    with_act(a.q_NHD.dtype, [&](auto act) { attention::backward<decltype(act)>(a); });
}

int64_t cpu::attention_workspace(const AttentionBackward& a) {
    return omp_get_max_threads() *
           cpu::attention::Scratch::bytes(a.T, cpu::attention::round_up(a.D, cpu::attention::lanes));
}

}  // namespace trifold
