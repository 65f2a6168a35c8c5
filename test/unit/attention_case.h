// test/unit/attention_case.h   Operands of attention and the same computation written out in double precision.
#pragma once
#include <algorithm>
#include <cmath>
#include <memory>
#include <string>
#include <vector>

#include "kernels/ops.h"
#include "test/unit/operands.h"

namespace trifold::test {

// Between the rows of fused buffers; nothing may change it.
inline constexpr float canary = 12345.0f;

struct Shape {
    int64_t B = 1, T = 1, H = 1, K = 1, D = 8, window = 0;
    std::vector<int64_t> documents;  // first positions of all but the first document
    std::string name() const {
        std::string s = "B " + std::to_string(B) + " T " + std::to_string(T) + " H " + std::to_string(H) + " K " +
                        std::to_string(K) + " D " + std::to_string(D) + " window " + std::to_string(window) +
                        " documents at";
        for (int64_t d : documents) s += " " + std::to_string(d);
        return s;
    }
    int64_t doc_start(int64_t t) const {
        int64_t start = 0;
        for (int64_t d : documents) start = d <= t ? d : start;
        return start;
    }
    bool sees(int64_t query, int64_t key) const {
        return key <= query && (window == 0 || query - key < window) && key >= doc_start(query);
    }
    float scale() const { return 1.0f / std::sqrt(static_cast<float>(D)); }
    // Rows of a fused buffer [q heads, k heads, v heads, padding]; sequences are padded too.
    int64_t stride() const { return (H + 2 * K) * D + 3; }
    int64_t batch_stride() const { return T * stride() + 5; }
    int64_t at(int64_t b, int64_t t, int64_t head, int64_t d = 0) const {
        return b * batch_stride() + t * stride() + head * D + d;
    }
    int64_t dense(int64_t b, int64_t t, int64_t h, int64_t d = 0) const { return ((b * T + t) * H + h) * D + d; }
};

template <class T>
Tensor view(const std::vector<T>& v) {
    return {const_cast<T*>(v.data()), dtype_of<T>(), static_cast<int64_t>(v.size())};
}

// Exactly the bytes that were asked for, followed by a guard.
class Workspace {
public:
    explicit Workspace(int64_t bytes) : bytes_(bytes), memory_(static_cast<size_t>(bytes) + 128, guard) {
        void* p = memory_.data();
        size_t room = memory_.size();
        first_ = static_cast<uint8_t*>(std::align(64, static_cast<size_t>(bytes), p, room));
    }
    Tensor tensor() { return {first_, DType::u8, bytes_}; }
    bool intact() const {
        return std::all_of(static_cast<const uint8_t*>(first_) + bytes_, memory_.data() + memory_.size(),
                           [](uint8_t byte) { return byte == guard; });
    }

private:
    static constexpr uint8_t guard = 0xff;  // as floats: NaN, so that nothing may rely on fresh memory
    int64_t bytes_;
    std::vector<uint8_t> memory_;
    uint8_t* first_;
};

// Operands of attention: q, k and v (and their gradients) in a fused buffer, as in the model.
template <class T>
struct Case {
    Shape s;
    std::vector<T> qkv, dqkv, o, dO;
    std::vector<float> lse;
    std::vector<int32_t> doc_start;

    explicit Case(const Shape& shape, uint64_t seed = 1, float amplitude = 1.0f) : s(shape) {
        Numbers numbers(seed);
        qkv.assign(s.B * s.batch_stride(), T(canary));
        dqkv = qkv;
        for (int64_t b = 0; b < s.B; ++b)
            for (int64_t t = 0; t < s.T; ++t)
                for (int64_t i = 0; i < (s.H + 2 * s.K) * s.D; ++i)
                    qkv[s.at(b, t, 0, i)] = T(amplitude * static_cast<float>(numbers.next()));
        o.assign(s.B * s.T * s.H * s.D, T(0.0f));
        dO = o;
        for (T& x : dO) x = T(static_cast<float>(numbers.next()));
        lse.assign(s.B * s.H * s.T, 0.0f);
        if (!s.documents.empty())
            for (int64_t b = 0; b < s.B; ++b)
                for (int64_t t = 0; t < s.T; ++t) doc_start.push_back(static_cast<int32_t>(s.doc_start(t)));
    }
    float q(int64_t b, int64_t t, int64_t h, int64_t d) const { return static_cast<float>(qkv[s.at(b, t, h, d)]); }
    float k(int64_t b, int64_t t, int64_t h, int64_t d) const {
        return static_cast<float>(qkv[s.at(b, t, s.H + h * s.K / s.H, d)]);
    }
    float v(int64_t b, int64_t t, int64_t h, int64_t d) const {
        return static_cast<float>(qkv[s.at(b, t, s.H + s.K + h * s.K / s.H, d)]);
    }

    AttentionForward forward_args() const {
        AttentionForward a;
        a.q_NHD = view(qkv);
        a.k_NKD = view(qkv).from(s.H * s.D);
        a.v_NKD = view(qkv).from((s.H + s.K) * s.D);
        if (!doc_start.empty()) a.doc_start_N = view(doc_start);
        a.o_NHD = view(o);
        a.lse_BHT = view(lse);
        a.B = s.B, a.Tq = a.Tk = s.T, a.H = s.H, a.K = s.K, a.D = s.D, a.window = s.window, a.scale = s.scale();
        a.q_stride = a.kv_stride = s.stride();
        a.q_batch_stride = a.kv_batch_stride = s.batch_stride();
        return a;
    }
    AttentionBackward backward_args() const {
        AttentionBackward a;
        const AttentionForward f = forward_args();
        a.q_NHD = f.q_NHD, a.k_NKD = f.k_NKD, a.v_NKD = f.v_NKD, a.doc_start_N = f.doc_start_N;
        a.o_NHD = view(o), a.do_NHD = view(dO), a.lse_BHT = view(lse);
        a.dq_NHD = view(dqkv);
        a.dk_NKD = view(dqkv).from(s.H * s.D);
        a.dv_NKD = view(dqkv).from((s.H + s.K) * s.D);
        a.B = s.B, a.T = s.T, a.H = s.H, a.K = s.K, a.D = s.D, a.window = s.window, a.scale = s.scale();
        a.q_stride = a.kv_stride = s.stride();
        a.q_batch_stride = a.kv_batch_stride = s.batch_stride();
        return a;
    }
    void run() {
        AttentionForward f = forward_args();
        Workspace forward(cpu::attention_workspace(f));
        f.workspace = forward.tensor();
        cpu::attention_forward(f);
        AttentionBackward g = backward_args();
        Workspace backward(cpu::attention_workspace(g));
        g.workspace = backward.tensor();
        cpu::attention_backward(g);
        TRIFOLD_ASSERT(forward.intact() && backward.intact());
    }
};

// The same in double precision, in the same layouts.
struct Reference {
    std::vector<double> dqkv, o, lse;

    template <class T>
    explicit Reference(const Case<T>& c) : dqkv(c.qkv.size(), canary), o(c.o.size(), 0.0), lse(c.lse.size(), 0.0) {
        const Shape& s = c.s;
        for (int64_t b = 0; b < s.B; ++b)
            for (int64_t t = 0; t < s.T; ++t) std::fill_n(dqkv.begin() + s.at(b, t, 0), (s.H + 2 * s.K) * s.D, 0.0);
        for (int64_t b = 0; b < s.B; ++b)
            for (int64_t h = 0; h < s.H; ++h)
                for (int64_t t = 0; t < s.T; ++t) row(c, b, h, t);
    }

    template <class T>
    void row(const Case<T>& c, int64_t b, int64_t h, int64_t t) {
        const Shape& s = c.s;
        std::vector<double> p(s.T, 0.0), q(s.D), d_o(s.D);
        for (int64_t d = 0; d < s.D; ++d)
            q[d] = c.q(b, t, h, d), d_o[d] = static_cast<float>(c.dO[s.dense(b, t, h, d)]);
        double highest = -1e300, sum = 0.0, delta = 0.0;
        for (int64_t j = 0; j <= t; ++j) {
            if (!s.sees(t, j)) continue;
            for (int64_t d = 0; d < s.D; ++d) p[j] += q[d] * c.k(b, j, h, d);
            p[j] *= s.scale();
            highest = std::max(highest, p[j]);
        }
        for (int64_t j = 0; j <= t; ++j) sum += p[j] = s.sees(t, j) ? std::exp(p[j] - highest) : 0.0;
        lse[(b * s.H + h) * s.T + t] = highest + std::log(sum);
        double* o_t = &o[s.dense(b, t, h)];
        for (int64_t j = 0; j <= t; ++j) {
            p[j] /= sum;
            if (p[j] == 0.0) continue;
            for (int64_t d = 0; d < s.D; ++d) o_t[d] += p[j] * c.v(b, j, h, d);
        }
        for (int64_t d = 0; d < s.D; ++d) delta += d_o[d] * o_t[d];
        for (int64_t j = 0; j <= t; ++j) {
            if (p[j] == 0.0) continue;
            double *dq = &dqkv[s.at(b, t, h)], *dk = &dqkv[s.at(b, j, s.H + h * s.K / s.H)], *dv = dk + s.K * s.D;
            double dp = 0.0;
            for (int64_t d = 0; d < s.D; ++d) dp += d_o[d] * c.v(b, j, h, d);
            const double ds = p[j] * (dp - delta) * s.scale();
            for (int64_t d = 0; d < s.D; ++d) {
                dq[d] += ds * c.k(b, j, h, d);
                dk[d] += ds * q[d];
                dv[d] += p[j] * d_o[d];
            }
        }
    }
};

}  // namespace trifold::test
