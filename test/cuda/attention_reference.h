// test/cuda/attention_reference.h   Operands of attention in the layout of the model, and the same computation in
// double precision together with how far a kernel that rounds may be from it.
#pragma once
#include <algorithm>
#include <cmath>
#include <limits>
#include <string>
#include <vector>

#include "kernels/ops.h"
#include "test/unit/operands.h"

namespace trifold::test {

// Tq queries stand behind `cached` keys of their own sequence.
struct AttentionShape {
    int64_t B = 1, Tq = 1, cached = 0, H = 1, K = 1, D = 64, window = 0;
    std::vector<int64_t> documents;  // first positions of all but the first document
    double amplitude = 1.0;

    int64_t Tk() const { return cached + Tq; }
    int64_t stride() const { return (H + 2 * K) * D + 8; }
    int64_t batch_stride() const { return Tk() * stride() + 24; }
    int64_t at(int64_t b, int64_t position, int64_t head) const {
        return b * batch_stride() + position * stride() + head * D;
    }
    int64_t dense(int64_t b, int64_t t, int64_t h) const { return ((b * Tq + t) * H + h) * D; }
    int64_t lse_row(int64_t b, int64_t h, int64_t t) const { return (b * H + h) * Tq + t; }
    int64_t k_head(int64_t h) const { return H + h / (H / K); }
    int64_t v_head(int64_t h) const { return k_head(h) + K; }
    float scale() const { return 1.0f / std::sqrt(static_cast<float>(D)); }
    int64_t doc_start(int64_t position) const {
        int64_t start = 0;
        for (const int64_t d : documents) start = d <= position ? d : start;
        return start;
    }
    int64_t first_key(int64_t position) const {
        return std::max(doc_start(position), window > 0 ? std::max<int64_t>(0, position - window + 1) : 0);
    }
    std::string name() const {
        std::string s = "B " + std::to_string(B) + " Tq " + std::to_string(Tq) + " cached " + std::to_string(cached) +
                        " H " + std::to_string(H) + " K " + std::to_string(K) + " D " + std::to_string(D) + " window " +
                        std::to_string(window) + " documents at";
        for (const int64_t d : documents) s += " " + std::to_string(d);
        return s;
    }
};

// q, k, v and their gradients in fused rows with padding. Outputs are NaN until written.
struct AttentionOperands {
    AttentionShape s;
    DType type;
    Operand qkv, dqkv, o, d_o, lse, doc_start, workspace;

    AttentionOperands(const AttentionShape& shape, DType dtype, uint64_t seed = 1)
        : s(shape),
          type(dtype),
          qkv(Operand::random(dtype, s.B * s.batch_stride(), seed, s.amplitude)),
          dqkv(Operand::nans(dtype, s.B * s.batch_stride())),
          o(Operand::nans(dtype, s.B * s.Tq * s.H * s.D)),
          d_o(Operand::random(dtype, s.B * s.Tq * s.H * s.D, seed + 1000)),
          lse(Operand::nans(DType::f32, s.B * s.H * s.Tq)) {
        if (s.documents.empty()) return;
        std::vector<int32_t> starts;
        for (int64_t b = 0; b < s.B; ++b)
            for (int64_t t = 0; t < s.Tq; ++t) starts.push_back(static_cast<int32_t>(s.doc_start(s.cached + t)));
        doc_start = Operand::integers(starts);
    }

    // Without workspace.
    AttentionForward forward() {
        AttentionForward a;
        fill(a);
        a.q_NHD = qkv.tensor().from(s.cached * s.stride());
        a.Tq = s.Tq, a.Tk = s.Tk(), a.q_offset = s.cached;
        return a;
    }
    AttentionBackward backward() {
        AttentionBackward a;
        fill(a);
        a.q_NHD = qkv.tensor();
        a.do_NHD = d_o.tensor();
        a.dq_NHD = dqkv.tensor();
        a.dk_NKD = dqkv.tensor().from(s.H * s.D);
        a.dv_NKD = dqkv.tensor().from((s.H + s.K) * s.D);
        a.T = s.Tq;
        return a;
    }
    // Fresh memory for a workspace: NaN as floats, negative as counters.
    Tensor workspace_of(int64_t bytes) {
        workspace = Operand::filled(DType::u8, bytes, 255.0);
        return workspace.tensor();
    }

private:
    template <class Args>
    void fill(Args& a) {
        a.k_NKD = qkv.tensor().from(s.H * s.D);
        a.v_NKD = qkv.tensor().from((s.H + s.K) * s.D);
        if (doc_start.elems() > 0) a.doc_start_N = doc_start.tensor();
        a.o_NHD = o.tensor();
        a.lse_BHT = lse.tensor();
        a.B = s.B, a.H = s.H, a.K = s.K, a.D = s.D, a.window = s.window, a.scale = s.scale();
        a.q_stride = a.kv_stride = s.stride();
        a.q_batch_stride = a.kv_batch_stride = s.batch_stride();
    }
};

// A result: its value, the sum of the magnitudes of what bf16 kernels round before they add it up (P v, P dO, dS q, dS
// k), and the sum of magnitudes of everything that fp32 arithmetic adds up on the way.
struct Bounded {
    Values value, rounded, added;
    explicit Bounded(size_t elems) : value(elems, 0.0), rounded(elems, 0.0), added(elems, 0.0) {}
};

struct AttentionReference {
    Bounded o, dqkv;
    Values lse;

    explicit AttentionReference(const AttentionOperands& x)
        : o(static_cast<size_t>(x.o.elems())),
          dqkv(static_cast<size_t>(x.qkv.elems())),
          lse(static_cast<size_t>(x.lse.elems()), 0.0) {
        const AttentionShape& s = x.s;
        for (int64_t b = 0; b < s.B; ++b)
            for (int64_t h = 0; h < s.H; ++h)
                for (int64_t t = 0; t < s.Tq; ++t) forward_row(x, b, h, t);
    }

    // Gradients for the o and lse that the kernels were given: o is rounded, and delta follows it.
    void add_gradients(const AttentionOperands& x) {
        const AttentionShape& s = x.s;
        for (int64_t b = 0; b < s.B; ++b)
            for (int64_t h = 0; h < s.H; ++h)
                for (int64_t t = 0; t < s.Tq; ++t) backward_row(x, b, h, t);
    }

private:
    static size_t index(int64_t i) { return static_cast<size_t>(i); }

    static double score(const AttentionOperands& x, int64_t b, int64_t h, int64_t position, int64_t key) {
        double sum = 0.0;
        const int64_t q = x.s.at(b, position, h), k = x.s.at(b, key, x.s.k_head(h));
        for (int64_t d = 0; d < x.s.D; ++d) sum += x.qkv[q + d] * x.qkv[k + d];
        return sum * static_cast<double>(x.s.scale());
    }

    void forward_row(const AttentionOperands& x, int64_t b, int64_t h, int64_t t) {
        const AttentionShape& s = x.s;
        const int64_t position = s.cached + t, first = s.first_key(position);
        Values p;
        for (int64_t key = first; key <= position; ++key) p.push_back(score(x, b, h, position, key));
        const double highest = *std::max_element(p.begin(), p.end());
        double sum = 0.0;
        for (double& v : p) sum += v = std::exp(v - highest);
        lse[index(s.lse_row(b, h, t))] = highest + std::log(sum);
        for (size_t j = 0; j < p.size(); ++j)
            for (int64_t d = 0; d < s.D; ++d) {
                const size_t to = index(s.dense(b, t, h) + d);
                const double term = p[j] / sum * x.qkv[s.at(b, first + static_cast<int64_t>(j), s.v_head(h)) + d];
                o.value[to] += term;
                o.rounded[to] += std::abs(term);
                o.added[to] += std::abs(term);
            }
    }

    void add(int64_t to, double factor, double magnitude, double x) {
        dqkv.value[index(to)] += factor * x;
        dqkv.rounded[index(to)] += std::abs(factor * x);
        dqkv.added[index(to)] += magnitude * std::abs(x);
    }

    void backward_row(const AttentionOperands& x, int64_t b, int64_t h, int64_t t) {
        const AttentionShape& s = x.s;
        const int64_t q = s.at(b, t, h), dense = s.dense(b, t, h);
        const double scale = static_cast<double>(s.scale());
        double delta = 0.0, delta_magnitude = 0.0;
        for (int64_t d = 0; d < s.D; ++d) {
            delta += x.d_o[dense + d] * x.o[dense + d];
            delta_magnitude += std::abs(x.d_o[dense + d] * x.o[dense + d]);
        }
        for (int64_t key = s.first_key(t); key <= t; ++key) {
            const int64_t k = s.at(b, key, s.k_head(h)), v = s.at(b, key, s.v_head(h));
            const double p = std::exp(score(x, b, h, t, key) - lse[index(s.lse_row(b, h, t))]);
            double dp = 0.0, magnitude = delta_magnitude;
            for (int64_t d = 0; d < s.D; ++d) {
                dp += x.d_o[dense + d] * x.qkv[v + d];
                magnitude += std::abs(x.d_o[dense + d] * x.qkv[v + d]);
            }
            const double ds = p * (dp - delta) * scale;
            for (int64_t d = 0; d < s.D; ++d) {
                add(q + d, ds, p * magnitude * scale, x.qkv[k + d]);
                add(k + d, ds, p * magnitude * scale, x.qkv[q + d]);
                add(v + d, p, p, x.d_o[dense + d]);
            }
        }
    }
};

// What a kernel rounds: everything in fp32, only its results to bf16 (the CPU), or P and dS to bf16 as well (tensor
// cores).
enum class Rounds : uint8_t { nothing, results, operands };

// Largest |got - want| in units of what is allowed; at most 1 is a pass, NaN is infinite. Rounding to bf16 changes a
// number by at most 2^-8 of it. fp32 sums and exponentials are within `fp32` of the magnitudes they add up.
inline double worst_error(const Operand& got, const Bounded& want, Rounds rounds, double fp32) {
    double worst = 0.0;
    for (size_t i = 0; i < want.value.size(); ++i) {
        if (want.added[i] == 0.0) continue;  // padding
        const double half_ulp = 0x1p-8 * 1.01;
        double allowed = fp32 * want.added[i] + 1e-30;
        if (rounds != Rounds::nothing) allowed += half_ulp * std::abs(want.value[i]);
        if (rounds == Rounds::operands) allowed += half_ulp * want.rounded[i];
        const double units = std::abs(got[static_cast<int64_t>(i)] - want.value[i]) / allowed;
        worst = units <= worst ? worst : std::isnan(units) ? std::numeric_limits<double>::infinity() : units;
    }
    return worst;
}

}  // namespace trifold::test
