// kernels/cpu/cross_entropy.cpp   Softmax and cross-entropy in one pass over memory.
//
// loss = log(sum) - (x_target - r),  dx_v = scale * (e^(x_v - r) / sum - [v == target]),  sum = sum_v e^(x_v - r)
// Split      over ranks, r is the largest maximum M and sum = sum_q sum_q e^(M_q - M) in rank order: three numbers a row
//            from each rank.
// Traffic    logits in, dlogits out (evaluation: logits in). The gradient's sweep finds the row in the second-level
//            cache; two exponentials per element are cheaper than storing probabilities. In bf16 they are the bound.
//            Split, each of the two operations reads the logits from memory.
// Numerics   r need not be the maximum, only near it: it starts as x_0 and moves up when a piece of 1024 columns holds
//            an x more than 20 above it. Everything is relative to r, never to the log-sum: at logits of 10^4 that
//            alone would cost three digits. A NaN makes the row NaN; so do logits that are all -infinity.
// Padding    columns [V, P) are never read; their gradient is zero.
#include <cmath>
#include <limits>

#include "kernels/cpu/parallel.h"

namespace trifold::cpu {
namespace {

using simd::f32x16;
using simd::for_groups;

constexpr float minus_infinity = -std::numeric_limits<float>::infinity();

struct Softmax {
    float reference, sum;  // probability of v: e^(x_v - reference) / sum
    float largest;         // x; -infinity where there is none
};

// The sum of e^(x - reference) and the largest x of one piece.
struct Piece {
    f32x16 sum = 0.0f, largest = minus_infinity;

    template <class L>
    Piece(const L* x, int64_t count, float reference) {
        for_groups(count, [&](int64_t i, auto w) TRIFOLD_BODY {
            const f32x16 v = keep(load(x + i, w), w, minus_infinity);
            sum += exp(v - reference);
            largest = max(v, largest);
        });
    }
};

template <class L>
Softmax reduce(const L* x, int64_t V) {
    constexpr int64_t piece = 1024;
    constexpr float headroom = 20.0f;  // e^20 times the largest vocabulary is far from overflow
    float reference = V > 0 ? std::max(-std::numeric_limits<float>::max(), static_cast<float>(x[0])) : 0.0f;
    f32x16 total = 0.0f, largest = minus_infinity;
    for (int64_t begin = 0; begin < V; begin += piece) {
        const int64_t count = std::min(piece, V - begin);
        Piece p(x + begin, count, reference);
        if (const float peak = max(p.largest); peak > reference + headroom) {
            total = total * std::exp(reference - peak);
            reference = peak;
            p = Piece(x + begin, count, reference);
        }
        total += p.sum;
        largest = max(p.largest, largest);
    }
    return {reference, sum(total), max(largest)};
}

// dlogits may be the same memory as x. The target is another rank's where it is not in [0, V).
template <class L, class D>
void gradient(const L* x, const Softmax& s, int64_t target, float scale, D* dlogits, int64_t V) {
    const bool own = target >= 0 && target < V;
    const float factor = scale / s.sum;
    const float at_target = own ? static_cast<float>(x[target]) - s.reference : 0.0f;
    for_groups(
        V, [&](int64_t i, auto w) TRIFOLD_BODY { store(dlogits + i, exp(load(x + i, w) - s.reference) * factor, w); });
    if (own) dlogits[target] = D(std::exp(at_target) * factor - scale);
}

template <class L, class D>
void rows(const CrossEntropy& a) {
    const int64_t V = a.V, P = a.P;
    parallel_rows(a.N, P, [&](int64_t n) {
        const L* x = a.logits_NP.as<L>() + n * P;
        D* dlogits = a.dlogits_NP ? a.dlogits_NP.as<D>() + n * P : nullptr;
        const int32_t target = a.target_N.as<int32_t>()[n];
        TRIFOLD_ASSERT(target >= -1 && target < V);
        const bool masked = target == -1;
        float loss = 0.0f;
        if (!masked) {
            const Softmax s = reduce(x, V);
            loss = std::log(s.sum) - (static_cast<float>(x[target]) - s.reference);
            if (dlogits) gradient(x, s, target, a.grad_scale, dlogits, V);
        }
        a.loss_N.as<float>()[n] = loss;
        if (dlogits) std::fill(dlogits + (masked ? 0 : V), dlogits + P, D(0.0f));
    });
}

// ---------------------------------------------------------------- the vocabulary split over ranks

template <class L>
void stats_rows(const CrossEntropyStats& a) {
    parallel_rows(a.N, a.P, [&](int64_t n) {
        const L* x = a.logits_NP.as<L>() + n * a.P;
        const int64_t target = a.target_N.as<int32_t>()[n] - a.first;
        const Softmax s = reduce(x, a.V);
        float* stats = a.stats_N3.as<float>() + 3 * n;
        stats[0] = s.largest;
        stats[1] = s.largest == minus_infinity ? s.sum : s.sum * std::exp(s.reference - s.largest);  // 0 or NaN stays so
        stats[2] = target >= 0 && target < a.V ? static_cast<float>(x[target]) : 0.0f;
    });
}

// Row n of the whole vocabulary, from what the ranks found.
struct Combined {
    Softmax softmax;
    float at_target = 0.0f;  // exactly one rank has it, the others add zero

    Combined(const CrossEntropyCombine& a, int64_t n) : softmax{minus_infinity, 0.0f, minus_infinity} {
        const auto of_rank = [&](int64_t q) { return a.stats_RN3.as<float>() + 3 * (q * a.N + n); };
        for (int64_t q = 0; q < a.ranks; ++q) softmax.largest = std::max(softmax.largest, of_rank(q)[0]);
        softmax.reference = softmax.largest;
        for (int64_t q = 0; q < a.ranks; ++q) {
            softmax.sum += of_rank(q)[1] * std::exp(of_rank(q)[0] - softmax.reference);
            at_target += of_rank(q)[2];
        }
    }
};

template <class L, class D>
void combine_rows(const CrossEntropyCombine& a) {
    parallel_rows(a.N, a.dlogits_NP ? a.P : a.ranks, [&](int64_t n) {
        const int32_t target = a.target_N.as<int32_t>()[n];
        TRIFOLD_ASSERT(target >= -1);
        const bool masked = target == -1;
        const Combined row(a, n);
        a.loss_N.as<float>()[n] =
            masked ? 0.0f : std::log(row.softmax.sum) - (row.at_target - row.softmax.reference);
        if (!a.dlogits_NP) return;
        D* dlogits = a.dlogits_NP.as<D>() + n * a.P;
        if (!masked)
            gradient(a.logits_NP.as<L>() + n * a.P, row.softmax, target - a.first, a.grad_scale, dlogits, a.V);
        std::fill(dlogits + (masked ? 0 : a.V), dlogits + a.P, D(0.0f));
    });
}

}  // namespace

void cross_entropy(const CrossEntropy& a) {
    TRIFOLD_ASSERT(a.V > 0 && a.V <= a.P && a.logits_NP.elems >= a.N * a.P && a.loss_N.elems >= a.N &&
                   a.target_N.elems >= a.N);
    TRIFOLD_ASSERT(!a.dlogits_NP || a.dlogits_NP.elems >= a.N * a.P);
    with_act(a.logits_NP.dtype, [&](auto logit) {
        with_act(a.dlogits_NP ? a.dlogits_NP.dtype : DType::f32,
                 [&](auto dlogit) { rows<decltype(logit), decltype(dlogit)>(a); });
    });
}

void cross_entropy_stats(const CrossEntropyStats& a) {
    TRIFOLD_ASSERT(a.V >= 0 && a.V <= a.P && a.first >= 0 && a.logits_NP.elems >= a.N * a.P &&
                   a.stats_N3.elems >= a.N * 3 && a.target_N.elems >= a.N);
    with_act(a.logits_NP.dtype, [&](auto logit) { stats_rows<decltype(logit)>(a); });
}

void cross_entropy_combine(const CrossEntropyCombine& a) {
    TRIFOLD_ASSERT(a.V >= 0 && a.V <= a.P && a.first >= 0 && a.ranks > 0 && a.stats_RN3.elems >= a.ranks * a.N * 3 &&
                   a.loss_N.elems >= a.N && a.target_N.elems >= a.N);
    TRIFOLD_ASSERT(!a.dlogits_NP || (a.dlogits_NP.elems >= a.N * a.P && a.logits_NP.elems >= a.N * a.P));
    with_act(a.logits_NP.dtype, [&](auto logit) {
        with_act(a.dlogits_NP ? a.dlogits_NP.dtype : DType::f32,
                 [&](auto dlogit) { combine_rows<decltype(logit), decltype(dlogit)>(a); });
    });
}

}  // namespace trifold::cpu
