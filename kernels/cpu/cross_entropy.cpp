// kernels/cpu/cross_entropy.cpp   Softmax and cross-entropy in one pass over memory.
//
// loss = log(sum) - (x_target - r),  dx_v = scale * (e^(x_v - r) / sum - [v == target]),  sum = sum_v e^(x_v - r)
// Traffic    logits in, dlogits out (evaluation: logits in). The gradient's sweep finds the row in the second-level
//            cache; two exponentials per element are cheaper than storing probabilities. In bf16 they are the bound.
// Numerics   r need not be the maximum, only near it: it starts as x_0 and moves up when a piece of 1024 columns holds
//            an x more than 20 above it. Everything is relative to r, never to the log-sum: at logits of 10^4 that
//            alone would cost three digits. A NaN makes the row NaN.
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
    float reference = static_cast<float>(x[0]);
    f32x16 total = 0.0f;
    for (int64_t begin = 0; begin < V; begin += piece) {
        const int64_t count = std::min(piece, V - begin);
        Piece p(x + begin, count, reference);
        if (const float largest = max(p.largest); largest > reference + headroom) {
            total = total * std::exp(reference - largest);
            reference = largest;
            p = Piece(x + begin, count, reference);
        }
        total += p.sum;
    }
    return {reference, sum(total)};
}

// dlogits may be the same memory as x.
template <class L, class D>
void gradient(const L* x, Softmax s, int32_t target, float scale, D* dlogits, int64_t V) {
    const float factor = scale / s.sum;
    const float at_target = static_cast<float>(x[target]) - s.reference;
    for_groups(
        V, [&](int64_t i, auto w) TRIFOLD_BODY { store(dlogits + i, exp(load(x + i, w) - s.reference) * factor, w); });
    dlogits[target] = D(std::exp(at_target) * factor - scale);
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

}  // namespace trifold::cpu
