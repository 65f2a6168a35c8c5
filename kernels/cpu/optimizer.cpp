// kernels/cpu/optimizer.cpp   Gradient norm, clipping, AdamW and LAMB over the flat parameter buffer.
//
// Formulas   in kernels/ops.h. Bias corrections are computed in double and multiplied in.
// Traffic    AdamW, one pass: reads w, m, v, g, writes w, m, v (and bf16 w): 28 (30) bytes per parameter. LAMB's
//            direction reads w, m, v, g, writes m, v, u: 28; its update reads w, u, writes w: 12 (14). The norm reads
//            4. All memory bound.
// Order      the segments laid end to end are cut into at most 256 chunks, whatever the number of threads. Norms are
//            summed in double: 16 lanes within a piece, then piece after piece. AdamW and LAMB treat every element by
//            itself.
#include <cmath>

#include "kernels/cpu/parallel.h"

namespace trifold::cpu {
namespace {

using simd::f32x16;
using simd::f64x16;
using simd::for_groups;

constexpr int64_t most_chunks = 256;

// A run of elements of one segment inside one chunk; `begin` counts from the start of the flat buffer.
struct Piece {
    int64_t segment, begin, elems;
    bool whole;  // the piece is its whole segment
};

struct Chunks {
    const Segment* segments;
    int64_t segment_count;
    Blocks blocks;

    Chunks(const Segment* segments, int64_t count) : segments(segments), segment_count(count), blocks{0, 1} {
        int64_t total = 0;
        for (int64_t s = 0; s < count; ++s) total += segments[s].elems;
        blocks = at_most(most_chunks, total, 4096);
    }
    // body(piece) for the pieces of one chunk, in order.
    template <class Body>
    void for_pieces(int64_t chunk, const Body& body) const {
        int64_t start = 0;  // of the segment, among the segments laid end to end
        for (int64_t s = 0; s < segment_count; start += segments[s++].elems) {
            const int64_t begin = std::max(start, blocks.begin(chunk));
            const int64_t end = std::min(start + segments[s].elems, blocks.end(chunk));
            if (begin < end)
                body(Piece{s, segments[s].offset + begin - start, end - begin, end - begin == segments[s].elems});
        }
    }
    template <class Body>
    void parallel_pieces(const Body& body) const {
        parallel_for(blocks.count(), [&](int64_t c) { for_pieces(c, body); });
    }
};

template <class Op>
Chunks chunks_of(const Op& a) {
    return {a.segments, a.segment_count};
}

// How clipping and the skipping of bad steps reach the update: {scale, apply}, see ClipControl.
bool applies(const Tensor& control) { return control.as<float>()[1] != 0.0f; }

// Constants of one update, and the part that AdamW and LAMB share: moments, then m^ / (sqrt(v^) + eps).
struct Adam {
    float scale, beta1, beta2, correction1, correction2, eps;

    template <class Op>
    explicit Adam(const Op& a)
        : scale(a.control.template as<float>()[0]),
          beta1(a.beta1),
          beta2(a.beta2),
          correction1(correction(a.beta1, a.step)),
          correction2(correction(a.beta2, a.step)),
          eps(a.eps) {}
    static float correction(double beta, int64_t step) {
        return static_cast<float>(1.0 / (1.0 - std::pow(beta, static_cast<double>(step))));
    }
    template <class Width>
    TRIFOLD_INLINE f32x16 direction(const float* grad, float* m, float* v, Width w) const {
        const f32x16 g = load(grad, w) * scale;
        const f32x16 new_m = load(m, w) * beta1 + g * (1.0f - beta1);
        const f32x16 new_v = load(v, w) * beta2 + g * g * (1.0f - beta2);
        store(m, new_m, w);
        store(v, new_v, w);
        return new_m * correction1 / (sqrt(new_v * correction2) + eps);
    }
};

}  // namespace

void squared_norm(const SquaredNorm& a) {
    const Chunks chunks = chunks_of(a);
    const float* grad = a.grad.as<float>();
    double sums[most_chunks];
    parallel_for(chunks.blocks.count(), [&](int64_t c) {
        sums[c] = 0.0;
        chunks.for_pieces(c, [&](const Piece& p) {
            f64x16 total = 0.0;
            for_groups(p.elems, [&](int64_t i, auto w) TRIFOLD_BODY {
                __builtin_prefetch(grad + p.begin + i + 1024);  // the machine's own stops at the end of a page
                const f64x16 g = widen(load(grad + p.begin + i, w));
                total += g * g;
            });
            sums[c] += sum(total);
        });
    });
    for (int64_t c = 0; c < chunks.blocks.count(); ++c) a.sums.as<double>()[0] += sums[c];
}

void clip_control(const ClipControl& a) {
    const float norm = static_cast<float>(a.unit * std::sqrt(a.squared_norm.as<double>()[0]));
    const bool finite = std::isfinite(norm);
    const float shrink = a.clip > 0.0f && norm > a.clip ? a.clip / norm : 1.0f;
    a.norm.as<float>()[0] = norm;
    a.control.as<float>()[0] = finite ? a.unit * shrink : 0.0f;
    a.control.as<float>()[1] = finite ? 1.0f : 0.0f;
}

void adamw(const AdamW& a) {
    if (!applies(a.control)) return;
    const Adam adam(a);
    const float* grad = a.grad.as<float>();
    float *master = a.master.as<float>(), *m = a.m.as<float>(), *v = a.v.as<float>();
    bf16* param = a.param.as<bf16>();
    chunks_of(a).parallel_pieces([&](const Piece& p) {
        const float lr = a.lr, decay = a.segments[p.segment].weight_decay;
        const auto update = [=](int64_t i, auto w) TRIFOLD_BODY {
            const f32x16 old = load(master + i, w);
            const f32x16 now = old - (adam.direction(grad + i, m + i, v + i, w) + old * decay) * lr;
            store(master + i, now, w);
            return now;
        };
        if (param)
            for_groups(p.elems,
                       [&](int64_t i, auto w) TRIFOLD_BODY { store(param + p.begin + i, update(p.begin + i, w), w); });
        else
            for_groups(p.elems, [&](int64_t i, auto w) TRIFOLD_BODY { update(p.begin + i, w); });
    });
}

void lamb_direction(const LambDirection& a) {
    double* norms = a.norms.as<double>();
    std::fill(norms, norms + 2 * a.segment_count, 0.0);
    if (!applies(a.control)) return;
    const Adam adam(a);
    const float* master = a.master.as<float>();
    float *grad = a.grad.as<float>(), *m = a.m.as<float>(), *v = a.v.as<float>();
    const Chunks chunks = chunks_of(a);
    // Only the first and the last piece of a chunk can belong to a segment that other chunks share: their sums wait.
    double waiting[most_chunks][2][2];
    parallel_for(chunks.blocks.count(), [&](int64_t c) {
        int next = 0;
        chunks.for_pieces(c, [&](const Piece& p) {
            const float decay = a.segments[p.segment].weight_decay;
            f64x16 w_total = 0.0, u_total = 0.0;
            for_groups(p.elems, [&](int64_t k, auto width) TRIFOLD_BODY {
                const int64_t i = p.begin + k;
                const f32x16 w = load(master + i, width);
                const f32x16 u = keep(adam.direction(grad + i, m + i, v + i, width) + w * decay, width);
                store(grad + i, u, width);
                w_total += widen(w) * widen(w);
                u_total += widen(u) * widen(u);
            });
            double* to = p.whole ? norms + 2 * p.segment : waiting[c][next++];
            to[0] = sum(w_total);
            to[1] = sum(u_total);
        });
    });
    for (int64_t c = 0; c < chunks.blocks.count(); ++c) {
        int next = 0;
        chunks.for_pieces(c, [&](const Piece& p) {
            if (p.whole) return;
            norms[2 * p.segment] += waiting[c][next][0];
            norms[2 * p.segment + 1] += waiting[c][next++][1];
        });
    }
}

void lamb_update(const LambUpdate& a) {
    if (!applies(a.control)) return;
    const float* direction = a.direction.as<float>();
    float* master = a.master.as<float>();
    bf16* param = a.param.as<bf16>();
    chunks_of(a).parallel_pieces([&](const Piece& p) {
        const double w_norm = std::sqrt(a.norms.as<double>()[2 * p.segment]);
        const double u_norm = std::sqrt(a.norms.as<double>()[2 * p.segment + 1]);
        const bool scaled = a.segments[p.segment].trust_ratio && w_norm > 0.0 && u_norm > 0.0;
        const float rate = static_cast<float>(a.lr * (scaled ? w_norm / u_norm : 1.0));
        for_groups(p.elems, [&](int64_t k, auto w) TRIFOLD_BODY {
            const int64_t i = p.begin + k;
            const f32x16 now = load(master + i, w) - load(direction + i, w) * rate;
            store(master + i, now, w);
            if (param) store(param + i, now, w);
        });
    });
}

int64_t segment_sums_workspace(int64_t, int64_t) { return 0; }  // the partial sums are few enough for the stack

}  // namespace trifold::cpu
