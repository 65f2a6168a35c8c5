// kernels/cpu/attention_backward.cpp   Gradients of flash attention (Dao, arXiv 2307.08691, algorithm 2), without atomics.
//
// One step   of a query tile and a key tile, with everything transposed to [key][query] as in forward:
//              S = K Q^T   P = exp(scale S - lse)   dP = V dO^T   dS = P (dP - delta)   delta = sum over d of dO * O
//              dV += P dO   dK += dS Q   dQ += dS^T K
// One pass   a thread owns one key/value head of one sequence and makes all these steps: 5 products. dK and dV stay in its
//            scratch memory, dQ in a tile; so the sums over queries and over the heads of a group have one fixed order.
// Two passes when there are too few heads for the threads: dQ by query tiles, then dK and dV by key tiles, 7 products. The
//            sums are the same, in the same order, so both give the same bits.
// Memory     fp32 scratch per thread: K, V, dK and dV of one head, 4 * T * D numbers, and a few tiles.
#include "kernels/cpu/attention_tiles.h"

namespace trifold {
namespace cpu::attention {
namespace {

constexpr int64_t tiles_per_part = 4;  // of the two passes: shares the cost of loading the other side

enum class Wanted : uint8_t { all, dq, dkv };

// What one thread does at a time. Query and key ranges begin at tiles.
struct Part {
    Wanted wanted = Wanted::all;
    int64_t b = 0, kv = 0;
    Range heads, queries, keys;
};

struct Scratch {
    float *k_TD, *v_TD, *dk_TD, *dv_TD;                   // of the part's keys
    float *q_QD, *do_QD, *dq_QD, *q_DQ, *do_DQ;           // of one query tile
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
    Backward(const AttentionBackward& args, float* scratch) : a_(args), Dp_(round_up(args.D, lanes)), s_(scratch, args.T, Dp_) {}

    void run(const Part& part) {
        first_key_ = part.keys.begin;
        load_keys(part);
        for (int64_t h = part.heads.begin; h < part.heads.end; ++h)
            for (int64_t query = part.queries.begin; query < part.queries.end; query += tile) {
                const Limits limits = limits_at(part.b, query);
                const Range keys = limits.all.within(part.keys);
                if (keys.empty()) continue;
                start(part, h, query, limits.queries);
                for (int64_t key = keys.begin / tile * tile; key < keys.end; key += tile) step(part, limits, key);
                if (part.wanted != Wanted::dkv)
                    store_rows(s_.dq_QD, limits.queries, a_.dq_NHD.as<T>() + q_at(part.b, query, h), a_.q_stride, a_.scale);
            }
        if (part.wanted == Wanted::dq) return;
        store_rows(s_.dk_TD, part.keys.size(), a_.dk_NKD.as<T>() + kv_at(part), a_.kv_stride, a_.scale);
        store_rows(s_.dv_TD, part.keys.size(), a_.dv_NKD.as<T>() + kv_at(part), a_.kv_stride, 1.0f);
    }

    Limits limits_at(int64_t b, int64_t query) const {
        const int32_t* doc_start = a_.doc_start_N ? a_.doc_start_N.as<int32_t>() + b * a_.T : nullptr;
        return limits_of({0, a_.window, a_.T, doc_start}, query, std::min(tile, a_.T - query));
    }

private:
    int64_t q_at(int64_t b, int64_t query, int64_t h) const { return b * a_.q_batch_stride + query * a_.q_stride + h * a_.D; }
    int64_t kv_at(const Part& part) const {
        return part.b * a_.kv_batch_stride + part.keys.begin * a_.kv_stride + part.kv * a_.D;
    }
    void store_rows(const float* from, int64_t rows, T* to, int64_t stride, float factor) const {
        for (int64_t r = 0; r < rows; ++r) store_row(from + r * Dp_, factor, a_.D, to + r * stride);
    }

    void load_keys(const Part& part) {
        load_rows<T>({a_.k_NKD.as<T>() + kv_at(part), a_.kv_stride}, part.keys.size(), a_.D, {s_.k_TD, Dp_});
        load_rows<T>({a_.v_NKD.as<T>() + kv_at(part), a_.kv_stride}, part.keys.size(), a_.D, {s_.v_TD, Dp_});
        if (part.wanted == Wanted::dq) return;
        const int64_t floats = round_up(part.keys.size(), tile) * Dp_;
        std::fill(s_.dk_TD, s_.dk_TD + floats, 0.0f);
        std::fill(s_.dv_TD, s_.dv_TD + floats, 0.0f);
    }

    void start(const Part& part, int64_t h, int64_t query, int64_t queries) {
        const int64_t o_row = (part.b * a_.T + query) * a_.H + h, o_stride = a_.H * a_.D;
        const T* o = a_.o_NHD.as<T>() + o_row * a_.D;
        load_rows<T>({a_.do_NHD.as<T>() + o_row * a_.D, o_stride}, queries, a_.D, {s_.do_QD, Dp_});
        load_rows<T>({a_.q_NHD.as<T>() + q_at(part.b, query, h), a_.q_stride}, queries, a_.D, {s_.q_QD, Dp_});
        transpose({s_.do_QD, Dp_}, queries, a_.D, 1.0f, s_.do_DQ);
        transpose({s_.q_QD, Dp_}, queries, a_.D, a_.scale, s_.q_DQ);
        std::fill(s_.dq_QD, s_.dq_QD + tile * Dp_, 0.0f);
        const float* lse = a_.lse_BHT.as<float>() + (part.b * a_.H + h) * a_.T + query;
        for (int64_t i = 0; i < tile; ++i) {
            s_.lse_Q[i] = i < queries ? lse[i] : 0.0f;
            f32x16 sum(0.0f);
            if (i < queries)
                simd::for_groups(a_.D, [&](int64_t d, auto width) TRIFOLD_BODY {
                    sum += simd::load(o + i * o_stride + d, width) * simd::load(s_.do_QD + i * Dp_ + d, simd::Full{});
                });
            s_.delta_Q[i] = simd::sum(sum);
        }
    }

    void step(const Part& part, const Limits& limits, int64_t key) {
        const Visible visible = visible_cells(limits, key);
        const int64_t row = (key - first_key_) * Dp_;
        for_runs(visible.vectors_of, [&](int64_t r, int64_t rows, Range q) {
            const int64_t at = r * tile + q.begin;
            Product s{.a = {s_.k_TD + row + r * Dp_, Dp_, 1}, .b = {s_.q_DQ + q.begin, tile}, .c = {s_.p_KQ + at, tile},
                      .rows = rows, .vectors = q.size() / lanes, .depth = a_.D};
            multiply<Start::zero>(s);
            s.a.data = s_.v_TD + row + r * Dp_, s.b.data = s_.do_DQ + q.begin, s.c.data = s_.ds_KQ + at;
            multiply<Start::zero>(s);
        });
        for (int64_t i = 0; i < tile / lanes; ++i)
            visible.whole ? softmax_gradient<true>(limits, visible, i) : softmax_gradient<false>(limits, visible, i);
        if (part.wanted != Wanted::dq) add_key_gradients(visible, row);
        if (part.wanted != Wanted::dkv) add_query_gradients(visible, row);
    }

    // Queries [16 v, 16 v + 16): S becomes P and dP becomes dS, exactly zero where nothing is seen.
    template <bool whole>
    void softmax_gradient(const Limits& limits, const Visible& visible, int64_t v) {
        const Range keys = visible.keys_of_vector(v);
        const LaneLimits lane_limits(limits, v);
        const f32x16 lse = simd::load(s_.lse_Q + v * lanes, simd::Full{}), delta = simd::load(s_.delta_Q + v * lanes, simd::Full{});
        for (int64_t k = keys.begin; k < keys.end; ++k) {
            float *s = s_.p_KQ + k * tile + v * lanes, *dp = s_.ds_KQ + k * tile + v * lanes;
            f32x16 p = exp_or_zero(simd::load(s, simd::Full{}) - lse);
            f32x16 ds = p * (simd::load(dp, simd::Full{}) - delta);
            if constexpr (!whole) {
                const simd::Mask seen = lane_limits.see(visible.key + k);
                p = simd::select(seen, p, f32x16(0.0f));
                ds = simd::select(seen, ds, f32x16(0.0f));
            }
            simd::store(s, p, simd::Full{});
            simd::store(dp, ds, simd::Full{});
        }
    }

    void add_key_gradients(const Visible& visible, int64_t row) {
        for_runs(visible.queries_of, [&](int64_t r, int64_t rows, Range q) {
            Product s{.a = {s_.p_KQ + r * tile + q.begin, tile, 1}, .b = {s_.do_QD + q.begin * Dp_, Dp_},
                      .c = {s_.dv_TD + row + r * Dp_, Dp_}, .rows = rows, .vectors = Dp_ / lanes, .depth = q.size()};
            multiply<Start::add>(s);
            s.a.data = s_.ds_KQ + r * tile + q.begin, s.b.data = s_.q_QD + q.begin * Dp_, s.c.data = s_.dk_TD + row + r * Dp_;
            multiply<Start::add>(s);
        });
    }

    void add_query_gradients(const Visible& visible, int64_t row) {
        for_runs(visible.keys_of, [&](int64_t r, int64_t rows, Range k) {
            multiply<Start::add>({.a = {s_.ds_KQ + r + k.begin * tile, 1, tile}, .b = {s_.k_TD + row + k.begin * Dp_, Dp_},
                                  .c = {s_.dq_QD + r * Dp_, Dp_}, .rows = rows, .vectors = Dp_ / lanes, .depth = k.size()});
        });
    }

    const AttentionBackward& a_;
    int64_t Dp_, first_key_ = 0;
    Scratch s_;
};

// The work as a list of parts that can be done in any order.
struct Plan {
    const AttentionBackward& a;
    int64_t chunk = tiles_per_part * tile, chunks = ceil_div(a.T, chunk);
    bool one_pass = true;

    Plan(const AttentionBackward& args, int64_t team) : a(args) {
        // Time in products: 5 per head and round of threads, or 7 shared evenly.
        one_pass = 5 * ceil_div(a.B * a.K, team) * team <= 7 * a.B * a.K || chunks == 1;
    }
    int64_t size() const { return one_pass ? a.B * a.K : a.B * (a.H + a.K) * chunks; }
    Part operator[](int64_t i) const {
        const int64_t group = a.H / a.K;
        const Range all{0, a.T};
        if (one_pass) return {Wanted::all, i / a.K, i % a.K, {i % a.K * group, (i % a.K + 1) * group}, all, all};
        const int64_t c = i / (a.B * (a.H + a.K)), b = i / (a.H + a.K) % a.B, j = i % (a.H + a.K);
        const Range part{c * chunk, std::min(a.T, (c + 1) * chunk)};
        if (j < a.K) return {Wanted::dkv, b, j, {j * group, (j + 1) * group}, {part.begin, a.T}, part};
        const int64_t h = j - a.K;
        return {Wanted::dq, b, h / group, {h, h + 1}, part, {0, part.end}};
    }
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
    a.q_NHD.dtype == DType::bf16 ? cpu::attention::backward<bf16>(a) : cpu::attention::backward<float>(a);
}

int64_t attention_workspace(const AttentionBackward& a) {
    return omp_get_max_threads() * cpu::attention::Scratch::bytes(a.T, cpu::attention::round_up(a.D, cpu::attention::lanes));
}

}  // namespace trifold
