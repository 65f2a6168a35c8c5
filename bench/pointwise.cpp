// bench/pointwise.cpp   The memory-bound CPU operations against copy bandwidth, at the sizes of GPT-2 124M.
//
// For every operation: compulsory bytes (every input read once, every output written once) per second, and their share
// of a copy (copy_floor.h).
//   pointwise [--json] [--only TEXT] [--tokens N] [--rounds R] [--threads T] [--clock wall|cpu]
#include <omp.h>

#include <stdexcept>

#include "bench/copy_floor.h"

using namespace trifold;
using bench::Bench;
using bench::Case;
using bench::Memory;

namespace {

struct Arguments {
    bench::Options options;
    int64_t tokens = 2048, threads = omp_get_max_threads();
};

Arguments parse(const std::vector<std::string>& words) {
    Arguments a;
    for (size_t i = 0; i < words.size(); ++i) {
        const std::string &word = words[i], value = i + 1 < words.size() ? words[i + 1] : "";
        if (word == "--json")
            a.options.json = true;
        else if (word == "--only")
            a.options.only = value;
        else if (word == "--rounds")
            a.options.rounds = std::stoll(value);
        else if (word == "--tokens")
            a.tokens = std::stoll(value);
        else if (word == "--threads")
            a.threads = std::stoll(value);
        else if (word == "--clock")
            a.options.clock = value == "cpu" ? bench::Clock::cpu : bench::Clock::wall;
        else
            throw std::invalid_argument("unknown option " + word);
        if (word != "--json") ++i;
    }
    if (a.options.clock == bench::Clock::cpu) a.threads = 1;
    return a;
}

void rows(Bench& bench, DType act, int64_t N) {
    const int64_t C = 768, F = 3072, H = 12, D = 64, V = 50257, P = 50304, size = size_of(act);
    const std::string tag = std::string(".") + name_of(act);
    const auto f32 = DType::f32;

    bench.add("embedding_forward" + tag, [=](Memory& m) -> Case {
        EmbeddingForward a{.token_N = m.integers(N, V),
                           .position_N = m.integers(N, 1024),
                           .wte_VC = m.floats(act, P * C),
                           .wpe_TC = m.floats(act, 1024 * C),
                           .x_NC = m.floats(act, N * C),
                           .N = N,
                           .C = C,
                           .V = P};
        return {3 * N * C * size, [=] { cpu::embedding_forward(a); }};
    });
    for (const NormKind kind : {NormKind::layernorm, NormKind::rmsnorm}) {
        const std::string name = kind == NormKind::layernorm ? "layernorm" : "rmsnorm";
        const bool bias = kind == NormKind::layernorm;
        bench.add(name + "_forward" + tag, [=](Memory& m) -> Case {
            NormForward a{.x_NC = m.floats(act, N * C),
                          .delta_NC = m.floats(act, N * C),
                          .sum_NC = m.floats(act, N * C),
                          .weight_C = m.floats(act, C),
                          .bias_C = bias ? m.floats(act, C) : Tensor{},
                          .y_NC = m.floats(act, N * C),
                          .mean_N = m.floats(f32, N),
                          .rstd_N = m.floats(f32, N),
                          .kind = kind,
                          .N = N,
                          .C = C};
            return {4 * N * C * size, [=] { cpu::norm_forward(a); }};
        });
        bench.add(name + "_backward" + tag, [=](Memory& m) -> Case {
            NormBackward a{.dy_NC = m.floats(act, N * C),
                           .x_NC = m.floats(act, N * C),
                           .weight_C = m.floats(act, C),
                           .mean_N = m.floats(f32, N),
                           .rstd_N = m.floats(f32, N),
                           .dresidual_NC = m.floats(act, N * C),
                           .dx_NC = m.floats(act, N * C),
                           .dweight_C = m.floats(f32, C),
                           .dbias_C = bias ? m.floats(f32, C) : Tensor{},
                           .workspace = m.reserve(DType::u8, cpu::norm_backward_workspace(N, C)),
                           .kind = kind,
                           .N = N,
                           .C = C};
            return {4 * N * C * size, [=] { cpu::norm_backward(a); }};
        });
    }
    bench.add("head_norm_forward" + tag, [=](Memory& m) -> Case {
        HeadNormForward a{.x_NS = m.floats(act, N * 3 * C),
                          .saved_NHD = m.floats(act, N * C),
                          .rstd_NH = m.floats(f32, N * H),
                          .weight_D = m.floats(act, D),
                          .N = N,
                          .heads = H,
                          .D = D,
                          .stride = 3 * C};
        return {3 * N * C * size, [=] { cpu::head_norm_forward(a); }};
    });
    bench.add("head_norm_backward" + tag, [=](Memory& m) -> Case {
        HeadNormBackward a{.dx_NS = m.floats(act, N * 3 * C),
                           .saved_NHD = m.floats(act, N * C),
                           .rstd_NH = m.floats(f32, N * H),
                           .weight_D = m.floats(act, D),
                           .dweight_D = m.floats(f32, D),
                           .workspace = m.reserve(DType::u8, cpu::norm_backward_workspace(N, D)),
                           .N = N,
                           .heads = H,
                           .D = D,
                           .stride = 3 * C};
        return {3 * N * C * size, [=] { cpu::head_norm_backward(a); }};
    });
    bench.add("rotary" + tag, [=](Memory& m) -> Case {
        Rotary a{.x_NS = m.floats(act, N * 3 * C),
                 .position_N = m.integers(N, 1024),
                 .cos_TR = m.floats(f32, 1024 * D / 2),
                 .sin_TR = m.floats(f32, 1024 * D / 2),
                 .N = N,
                 .heads = 2 * H,
                 .D = D,
                 .stride = 3 * C};
        return {4 * N * C * size, [=] { cpu::rotary(a); }};
    });
    const std::pair<const char*, ActivationKind> kinds[] = {{"gelu_tanh", ActivationKind::gelu_tanh},
                                                            {"gelu_erf", ActivationKind::gelu_erf},
                                                            {"swiglu", ActivationKind::swiglu}};
    for (const auto& [name, kind] : kinds) {
        const int64_t width = kind == ActivationKind::swiglu ? 2 : 1;
        bench.add(name + ("_forward" + tag), [=](Memory& m) -> Case {
            ActivationForward a{
                .x_NF = m.floats(act, N * width * F), .y_NF = m.floats(act, N * F), .kind = kind, .N = N, .F = F};
            return {(width + 1) * N * F * size, [=] { cpu::activation_forward(a); }};
        });
        bench.add(name + ("_backward" + tag), [=](Memory& m) -> Case {
            ActivationBackward a{.x_NF = m.floats(act, N * width * F),
                                 .dy_NF = m.floats(act, N * F),
                                 .dx_NF = m.floats(act, N * width * F),
                                 .kind = kind,
                                 .N = N,
                                 .F = F};
            return {(2 * width + 1) * N * F * size, [=] { cpu::activation_backward(a); }};
        });
    }
    bench.add("cross_entropy" + tag, [=](Memory& m) -> Case {
        const Tensor logits = m.floats(act, N * P);  // in place, as in training
        CrossEntropy a{.logits_NP = logits,
                       .target_N = m.integers(N, V),
                       .loss_N = m.floats(f32, N),
                       .dlogits_NP = logits,
                       .grad_scale = 1.0f / static_cast<float>(N),
                       .N = N,
                       .V = V,
                       .P = P};
        return {2 * N * P * size, [=] { cpu::cross_entropy(a); }};
    });
    for (const Accumulate mode : {Accumulate::overwrite, Accumulate::add}) {
        bench.add((mode == Accumulate::add ? "embedding_backward_add" : "embedding_backward_overwrite") + tag,
                  [=](Memory& m) -> Case {
                      EmbeddingBackward a{.token_N = m.integers(N, V),
                                          .position_N = {},
                                          .dx_NC = m.floats(act, N * C),
                                          .dwte_VC = m.floats(f32, P * C),
                                          .dwpe_TC = {},
                                          .workspace = m.reserve(DType::u8, cpu::embedding_backward_workspace(N, P)),
                                          .accumulate_wte = mode,
                                          .N = N,
                                          .C = C,
                                          .V = P};
                      const int64_t table = mode == Accumulate::add ? 8 * N * C : 4 * P * C;
                      return {N * C * size + table, [=] { cpu::embedding_backward(a); }};
                  });
    }
}

void flat(Bench& bench) {
    const int64_t n = 124'475'904, activations = 2048 * 3072;
    const auto f32 = DType::f32;
    static const Segment segment{.elems = n, .weight_decay = 0.1f};

    bench.add("add_into.bf16_to_fp32", [=](Memory& m) -> Case {
        AddInto a{.x = m.floats(DType::bf16, activations), .y = m.floats(f32, activations)};
        return {activations * 10, [=] { cpu::add_into(a); }};
    });
    bench.add("add_into.fp32_to_bf16", [=](Memory& m) -> Case {
        AddInto a{.x = m.floats(f32, activations),
                  .y = m.floats(DType::bf16, activations),
                  .accumulate = Accumulate::overwrite};
        return {activations * 6, [=] { cpu::add_into(a); }};
    });
    bench.add("zero", [=](Memory& m) -> Case {
        Zero a{.y = m.floats(f32, n)};
        return {n * 4, [=] { cpu::zero(a); }};
    });
    bench.add("squared_norm", [=](Memory& m) -> Case {
        SquaredNorm a{
            .grad = m.floats(f32, n), .sums = m.reserve(DType::f64, 1), .segments = &segment, .segment_count = 1};
        a.sums.as<double>()[0] = 0;
        return {n * 4, [=] { cpu::squared_norm(a); }};
    });
    const auto control = [](Memory& m) {
        const Tensor t = m.reserve(DType::f32, 2);
        t.as<float>()[0] = t.as<float>()[1] = 1.0f;
        return t;
    };
    for (const bool mixed : {false, true}) {
        const std::string tag = mixed ? ".bf16" : ".fp32";
        bench.add("adamw" + tag, [=](Memory& m) -> Case {
            AdamW a{.master = m.floats(f32, n),
                    .m = m.floats(f32, n),
                    .v = m.floats(f32, n),
                    .grad = m.floats(f32, n),
                    .control = control(m),
                    .param = mixed ? m.floats(DType::bf16, n) : Tensor{},
                    .segments = &segment,
                    .segment_count = 1,
                    .lr = 1e-4f};
            cpu::zero({.y = a.v});
            return {n * (mixed ? 30 : 28), [=] { cpu::adamw(a); }};
        });
    }
    bench.add("lamb_direction", [=](Memory& m) -> Case {
        LambDirection a{.master = m.floats(f32, n),
                        .control = control(m),
                        .m = m.floats(f32, n),
                        .v = m.floats(f32, n),
                        .grad = m.floats(f32, n),
                        .norms = m.reserve(DType::f64, 2),
                        .segments = &segment,
                        .segment_count = 1};
        cpu::zero({.y = a.v});
        return {n * 28, [=] { cpu::lamb_direction(a); }};
    });
    bench.add("lamb_update", [=](Memory& m) -> Case {
        LambUpdate a{.master = m.floats(f32, n),
                     .direction = m.floats(f32, n),
                     .norms = m.reserve(DType::f64, 2),
                     .control = control(m),
                     .param = {},
                     .segments = &segment,
                     .segment_count = 1,
                     .lr = 1e-4f};
        a.norms.as<double>()[0] = a.norms.as<double>()[1] = 1.0;
        return {n * 12, [=] { cpu::lamb_update(a); }};
    });
}

}  // namespace

int main(int argc, char** argv) try {
    const Arguments a = parse({argv + 1, argv + argc});
    omp_set_num_threads(static_cast<int>(a.threads));
    Bench bench(a.options);
    for (const DType act : {DType::f32, DType::bf16}) rows(bench, act, a.tokens);
    flat(bench);
} catch (const std::exception& e) {
    std::fprintf(stderr,
                 "pointwise: %s\nusage: pointwise [--json] [--only TEXT] [--tokens N] [--rounds R] [--threads T]"
                 " [--clock wall|cpu]\n",
                 e.what());
    return 2;
}
