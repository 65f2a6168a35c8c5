#include "kernels/attention_trial.h"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cmath>

#include "kernels/arena.h"
#include "kernels/cuda/cudnn_attention.h"

namespace trifold {
namespace {

constexpr int tries = 8;

// Both passes of one library. Inputs are shared.
struct Side {
    AttentionForward forward;
    AttentionBackward backward;
    Tensor o, dqkv;
};

struct Operands {
    Tensor qkv, d_o;
    Side own, cudnn;

    Operands(Arena& arena, const AttentionCase& c) {
        const int64_t width = (c.H + 2 * c.K) * c.D, N = c.B * c.T;
        const auto reserve = [&](DType t, int64_t elems) { return arena.reserve(MemoryClass::workspace, t, elems); };
        qkv = reserve(DType::bf16, N * width);
        d_o = reserve(DType::bf16, N * c.H * c.D);
        for (Side* side : {&own, &cudnn}) {
            const AttentionChoice by{side == &own ? AttentionProvider::own : AttentionProvider::cudnn, false};
            side->o = reserve(DType::bf16, N * c.H * c.D);
            side->dqkv = reserve(DType::bf16, N * width);
            const Tensor lse = reserve(DType::f32, N * c.H);
            const auto fill = [&](auto& a) {
                a.B = c.B, a.H = c.H, a.K = c.K, a.D = c.D, a.window = c.window, a.by = by;
                a.q_NHD = qkv, a.k_NKD = qkv.from(c.H * c.D), a.v_NKD = qkv.from((c.H + c.K) * c.D);
                a.o_NHD = side->o, a.lse_BHT = lse;
                a.q_stride = a.kv_stride = width, a.q_batch_stride = a.kv_batch_stride = c.T * width;
                a.scale = 1.0f / std::sqrt(static_cast<float>(c.D));
            };
            fill(side->forward), fill(side->backward);
            side->forward.Tq = side->forward.Tk = side->backward.T = c.T;
            side->backward.do_NHD = d_o;
            side->backward.dq_NHD = side->dqkv, side->backward.dk_NKD = side->dqkv.from(c.H * c.D), side->backward.dv_NKD = side->dqkv.from((c.H + c.K) * c.D);
            side->forward.workspace = side->backward.workspace =
                reserve(DType::u8, std::max(attention_workspace(arena.device(), side->forward), attention_workspace(arena.device(), side->backward)));
        }
    }
};

// Values in [-2, 2). A row never repeats: the period is a prime.
void fill(Stream& s, const Tensor& to) {
    constexpr int64_t period = 1000003;
    std::vector<bf16> values(static_cast<size_t>(std::min(period, to.elems)));
    uint32_t state = 1;
    for (bf16& v : values) {
        state = state * 1664525u + 1013904223u;
        v = bf16(static_cast<float>(static_cast<int32_t>(state)) * 0x1p-30f);
    }
    for (int64_t at = 0; at < to.elems; at += period) {
        const int64_t n = std::min(period, to.elems - at);
        copy(s, {.x = Tensor{values.data(), DType::bf16, n}, .y = to.slice(at, n)});
    }
    s.engine().wait(s.last());
}

void run(Stream& s, const Side& side) {
    attention_forward(s, side.forward);
    attention_backward(s, side.backward);
    s.engine().wait(s.last());
}

std::vector<bf16> values_of(Stream& s, const Tensor& t) {
    std::vector<bf16> values(static_cast<size_t>(t.elems));
    s.engine().wait(copy(s, {.x = t, .y = Tensor{values.data(), DType::bf16, t.elems}}));
    return values;
}

// Columns [first, last) of rows of `width`, relative to the first version. Not finite where one of them is not.
double difference(const std::vector<bf16>& a, const std::vector<bf16>& b, int64_t width, int64_t first, int64_t last) {
    double square = 0, apart = 0;
    for (int64_t row = 0; row < std::ssize(a); row += width)
        for (int64_t i = row + first; i < row + last; ++i) {
            const double x = static_cast<float>(a[static_cast<size_t>(i)]), y = static_cast<float>(b[static_cast<size_t>(i)]);
            square += x * x;
            apart += (x - y) * (x - y);
        }
    return std::sqrt(apart / square);
}

double largest(double a, double b) { return std::isnan(a) || a > b ? a : b; }

// Of o, and of the gradients of q, k and v, which are of different sizes and so are compared apart.
double largest_difference(Stream& s, const AttentionCase& c, const Operands& x) {
    const int64_t q = c.H * c.D, kv = c.K * c.D, width = q + 2 * kv;
    double worst = difference(values_of(s, x.own.o), values_of(s, x.cudnn.o), q, 0, q);
    const std::vector<bf16> own = values_of(s, x.own.dqkv), cudnn = values_of(s, x.cudnn.dqkv);
    for (const auto& [first, last] : {std::pair{int64_t{0}, q}, std::pair{q, q + kv}, std::pair{q + kv, width}})
        worst = largest(difference(own, cudnn, width, first, last), worst);
    return worst;
}

// A GPU that has failed stays so, and everything after would fail without a word about the cause.
void check_gpu(Stream& s, const Problem& seen) {
    try {
        s.engine().wait(s.last());
    } catch (const Problem&) {
        throw Problem(Exit::fault, fmt::format("the GPU failed while cuDNN's attention was tried ({}); --run.attention=own does without it", seen.what()));
    }
}

}  // namespace

AttentionVerdict judge(const AttentionMeasured& m) {
    const double gain = m.own_s / m.cudnn_s;
    if (!(m.difference <= attention_tolerance)) return {AttentionProvider::own, fmt::format("cuDNN's differs by {:.2g}, and rounding explains {:.2g}", m.difference, attention_tolerance)};
    if (!(gain >= attention_gain)) return {AttentionProvider::own, fmt::format("cuDNN's is {:.2f} times as fast", gain)};
    return {AttentionProvider::cudnn, fmt::format("{:.2f} times as fast as our own, results agree to {:.1g}", gain, m.difference)};
}

AttentionVerdict try_attention(const std::vector<AttentionCase>& cases, StreamEngine::Watch watch) {
    if (const std::string problem = cuda::cudnn_problem(); !problem.empty()) return {AttentionProvider::own, problem};
    double on_gpu_s = 0;  // of the operations since it was set to zero
    StreamEngine engine(StreamMode::normal, Device::cuda);
    Stream& s = engine.add("trial", StreamKind::compute);
    engine.observe([&](const Stream&, const char*, StreamTime begin, StreamTime end) { on_gpu_s += std::chrono::duration<double>(end - begin).count(); });
    if (watch) engine.watch(std::move(watch));
    AttentionMeasured sum;
    try {
        for (const AttentionCase& c : cases) {
            Arena plan(s.device());
            Operands(plan, c);
            Arena arena(plan, "trying cuDNN's attention");
            const Operands x(arena, c);
            fill(s, x.qkv), fill(s, x.d_o);
            for (const Side* side : {&x.own, &x.cudnn}) run(s, *side);
            sum.difference = largest(largest_difference(s, c, x), sum.difference);
            if (!(sum.difference <= attention_tolerance)) break;  // how fast it is does not matter
            double best_own_s = INFINITY, best_cudnn_s = INFINITY;
            for (int i = 0; i < tries; ++i)  // in turn, so that clocks and other users of the machine are the same for both
                for (const auto& [side, best] : {std::pair{&x.own, &best_own_s}, std::pair{&x.cudnn, &best_cudnn_s}}) {
                    on_gpu_s = 0;
                    run(s, *side);
                    *best = std::min(*best, on_gpu_s);
                }
            sum.own_s += best_own_s * static_cast<double>(c.layers);
            sum.cudnn_s += best_cudnn_s * static_cast<double>(c.layers);
        }
    } catch (const Problem& p) {
        check_gpu(s, p);
        return {AttentionProvider::own, p.what()};
    }
    return judge(sum);
}

}  // namespace trifold
