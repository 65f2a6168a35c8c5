// bench/gpu.cpp   Every CUDA operation against what the GPU can do: memory-bound ones against a copy, products and attention against
// the matrix rate, both measured in the same run. Shapes of a 1.3B model: 8192 tokens, width 2048.
//
//   bench_gpu [--only TEXT] [--json FILE] [--tokens N] [--rounds R]
//
// Times      Medians of rounds; in each round an operation runs as often as 20 ms need, the host waits once.
// Bytes      compulsory ones: every input read once, every output written once. Operands exceed the level-2 cache.
// FLOPs      attention: causal, 4 * T^2 / 2 * D per head forward, 2.5 times that backward
#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <functional>
#include <nlohmann/json.hpp>
#include <random>

#include "kernels/arena.h"
#include "kernels/cuda/cudnn_attention.h"
#include "kernels/cuda/matmul.h"
#include "kernels/cuda/runtime.h"
#include "kernels/gpu_rate.h"
#include "kernels/ops.h"

using namespace trifold;

namespace {

struct Options {
    std::string only, json;
    int64_t tokens = 8192, rounds = 5;
};

Options parse(int argc, char** argv) {
    Options o;
    for (int i = 1; i < argc; ++i) {
        const std::string word = argv[i], value = i + 1 < argc ? argv[i + 1] : "";
        if (value.empty()) throw Problem(Exit::usage, "bench_gpu: " + word + " needs a value");
        if (word == "--only") o.only = value;
        else if (word == "--json") o.json = value;
        else if (word == "--tokens") o.tokens = std::stoll(value);
        else if (word == "--rounds") o.rounds = std::stoll(value);
        else throw Problem(Exit::usage, "bench_gpu: unknown option " + word);
        ++i;
    }
    return o;
}

// Operands on the device, released with the case that uses them. Floats lie in [-1, 1).
class Operands {
public:
    explicit Operands(Stream& s) : s_(s) {}
    ~Operands() {
        for (void* p : memory_) cuda::release(p);
    }
    Operands(const Operands&) = delete;
    Tensor empty(DType type, int64_t elems) {
        void* p = cuda::allocate(std::max<int64_t>(elems * size_of(type), 256));
        if (!p) throw Problem(Exit::usage, "the GPU has too little memory for this benchmark");
        memory_.push_back(p);
        return {p, type, elems};
    }
    Tensor floats(DType type, int64_t elems) {
        const Tensor t = empty(type, elems);
        std::vector<float> values(static_cast<size_t>(std::min<int64_t>(elems, 1 << 20)));
        for (float& v : values) v = static_cast<float>(static_cast<int32_t>(random_())) * 0x1p-31f;
        const Tensor piece = type == DType::f32 ? t : empty(DType::f32, static_cast<int64_t>(values.size()));
        for (int64_t first = 0; first < elems; first += static_cast<int64_t>(values.size())) {
            const int64_t count = std::min<int64_t>(elems - first, static_cast<int64_t>(values.size()));
            const Tensor host{values.data(), DType::f32, count};
            copy(s_, {.x = host, .y = type == DType::f32 ? t.slice(first, count) : piece.slice(0, count)});
            if (type != DType::f32) add_into(s_, {.x = piece.slice(0, count), .y = t.slice(first, count), .accumulate = Accumulate::overwrite});
        }
        s_.engine().wait_all();
        return t;
    }
    Tensor integers(int64_t elems, int64_t below) {
        std::vector<int32_t> values(static_cast<size_t>(elems));
        for (int32_t& v : values) v = static_cast<int32_t>(random_() % static_cast<uint64_t>(below));
        return upload(DType::i32, elems, values.data());
    }
    Tensor counting(int64_t elems, int64_t below) {
        std::vector<int32_t> values(static_cast<size_t>(elems));
        for (int64_t i = 0; i < elems; ++i) values[static_cast<size_t>(i)] = static_cast<int32_t>(i % below);
        return upload(DType::i32, elems, values.data());
    }
    Tensor upload(DType type, int64_t elems, const void* host) {
        const Tensor t = empty(type, elems);
        s_.engine().wait(copy(s_, {.x = Tensor{const_cast<void*>(host), type, elems}, .y = t}));
        return t;
    }

private:
    Stream& s_;
    std::vector<void*> memory_;
    std::mt19937 random_{1};
};

enum class Bound { memory, matrix };
struct Work {
    Bound bound = Bound::memory;
    double amount = 0;  // bytes or FLOPs
    std::function<void(Stream&)> run;
};
struct Case {
    std::string name;
    std::function<Work(Operands&)> make;
};

double seconds_of(Stream& s, const Work& work, int64_t rounds) {
    using Clock = std::chrono::steady_clock;
    const auto time = [&](int64_t times) {
        const auto begin = Clock::now();
        for (int64_t i = 0; i < times; ++i) work.run(s);
        s.engine().wait(s.last());
        return std::chrono::duration<double>(Clock::now() - begin).count();
    };
    time(2);
    const int64_t times = std::clamp<int64_t>(static_cast<int64_t>(0.02 / std::max(time(3) / 3, 1e-7)), 3, 2000);
    std::vector<double> all;
    for (int64_t r = 0; r < rounds; ++r) all.push_back(time(times) / static_cast<double>(times));
    std::nth_element(all.begin(), all.begin() + static_cast<std::ptrdiff_t>(all.size() / 2), all.end());
    return all[all.size() / 2];
}

constexpr int64_t C = 2048, F = 8192, H = 16, D = 128, V = 50257, P = 50304, positions = 2048;

void pointwise_cases(std::vector<Case>& cases, DType act, int64_t N) {
    const int64_t b = size_of(act);
    const DType f32 = DType::f32;
    const auto add = [&](const std::string& name, std::function<Work(Operands&)> make) { cases.push_back({name + "." + name_of(act), std::move(make)}); };
    const auto memory = [](int64_t bytes, std::function<void(Stream&)> run) { return Work{Bound::memory, static_cast<double>(bytes), std::move(run)}; };
    add("embedding_forward", [=](Operands& m) {
        const EmbeddingForward a{.token_N = m.integers(N, V), .position_N = m.counting(N, positions), .wte_VC = m.floats(act, P * C), .wpe_TC = m.floats(act, positions * C),
                                 .x_NC = m.empty(act, N * C), .N = N, .C = C, .V = P};
        return memory(3 * N * C * b, [=](Stream& s) { embedding_forward(s, a); });
    });
    add("embedding_backward", [=](Operands& m) {
        const EmbeddingBackward a{.token_N = m.integers(N, V), .position_N = m.counting(N, positions), .dx_NC = m.floats(act, N * C), .dwte_VC = m.empty(f32, P * C),
                                  .dwpe_TC = m.empty(f32, positions * C), .workspace = m.empty(DType::u8, cuda::embedding_backward_workspace(N, P)), .N = N, .C = C, .V = P,
                                  .positions = positions};
        return memory(2 * N * C * b + (P + positions) * C * 4, [=](Stream& s) { embedding_backward(s, a); });
    });
    for (const NormKind kind : {NormKind::layernorm, NormKind::rmsnorm}) {
        const std::string name = kind == NormKind::layernorm ? "layernorm" : "rmsnorm";
        const bool layernorm = kind == NormKind::layernorm;
        add(name + "_forward", [=](Operands& m) {
            const NormForward a{.x_NC = m.floats(act, N * C), .delta_NC = m.floats(act, N * C), .sum_NC = m.empty(act, N * C), .weight_C = m.floats(act, C),
                                .bias_C = layernorm ? m.floats(act, C) : Tensor{}, .y_NC = m.empty(act, N * C), .mean_N = layernorm ? m.empty(f32, N) : Tensor{},
                                .rstd_N = m.empty(f32, N), .kind = kind, .N = N, .C = C};
            return memory(4 * N * C * b, [=](Stream& s) { norm_forward(s, a); });
        });
        add(name + "_backward", [=](Operands& m) {
            const NormBackward a{.dy_NC = m.floats(act, N * C), .x_NC = m.floats(act, N * C), .weight_C = m.floats(act, C), .mean_N = layernorm ? m.floats(f32, N) : Tensor{},
                                 .rstd_N = m.floats(f32, N), .dresidual_NC = m.floats(act, N * C), .dx_NC = m.empty(act, N * C), .dweight_C = m.empty(f32, C),
                                 .dbias_C = layernorm ? m.empty(f32, C) : Tensor{}, .workspace = m.empty(DType::u8, cuda::norm_backward_workspace(N, C)), .kind = kind,
                                 .N = N, .C = C};
            return memory(4 * N * C * b, [=](Stream& s) { norm_backward(s, a); });
        });
    }
    add("head_norm_forward", [=](Operands& m) {
        const HeadNormForward a{.x_NS = m.floats(act, 3 * N * C), .saved_NHD = m.empty(act, N * C), .rstd_NH = m.empty(f32, N * H), .weight_D = m.floats(act, D),
                                .N = N, .heads = H, .D = D, .stride = 3 * C};
        return memory(3 * N * C * b, [=](Stream& s) { head_norm_forward(s, a); });
    });
    add("head_norm_backward", [=](Operands& m) {
        const HeadNormBackward a{.dx_NS = m.floats(act, 3 * N * C), .saved_NHD = m.floats(act, N * C), .rstd_NH = m.floats(f32, N * H), .weight_D = m.floats(act, D),
                                 .dweight_D = m.empty(f32, D), .workspace = m.empty(DType::u8, cuda::norm_backward_workspace(N * H, D)), .N = N, .heads = H, .D = D,
                                 .stride = 3 * C};
        return memory(3 * N * C * b, [=](Stream& s) { head_norm_backward(s, a); });
    });
    add("rotary", [=](Operands& m) {
        const Rotary a{.x_NS = m.floats(act, 3 * N * C), .position_N = m.counting(N, positions), .cos_TR = m.floats(f32, positions * D / 2),
                       .sin_TR = m.floats(f32, positions * D / 2), .N = N, .heads = 2 * H, .D = D, .stride = 3 * C};
        return memory(4 * N * C * b, [=](Stream& s) { rotary(s, a); });
    });
    for (const auto& [name, kind] : {std::pair{"gelu_tanh", ActivationKind::gelu_tanh}, std::pair{"gelu_erf", ActivationKind::gelu_erf}, std::pair{"swiglu", ActivationKind::swiglu}}) {
        const int64_t width = kind == ActivationKind::swiglu ? 2 : 1;
        add(std::string(name) + "_forward", [=, kind = kind](Operands& m) {
            const ActivationForward a{.x_NF = m.floats(act, N * F * width), .y_NF = m.empty(act, N * F), .kind = kind, .N = N, .F = F};
            return memory((width + 1) * N * F * b, [=](Stream& s) { activation_forward(s, a); });
        });
        add(std::string(name) + "_backward", [=, kind = kind](Operands& m) {
            const ActivationBackward a{.x_NF = m.floats(act, N * F * width), .dy_NF = m.floats(act, N * F), .dx_NF = m.empty(act, N * F * width), .kind = kind, .N = N, .F = F};
            return memory((2 * width + 1) * N * F * b, [=](Stream& s) { activation_backward(s, a); });
        });
    }
    add("cross_entropy", [=](Operands& m) {
        const int64_t rows = N / 4;
        const CrossEntropy a{.logits_NP = m.floats(act, rows * P), .target_N = m.integers(rows, V), .loss_N = m.empty(f32, rows), .dlogits_NP = m.empty(act, rows * P),
                             .N = rows, .V = V, .P = P};
        return memory(2 * rows * P * b, [=](Stream& s) { cross_entropy(s, a); });
    });
}

void optimizer_cases(std::vector<Case>& cases) {
    constexpr int64_t n = 100'000'000;
    const DType f32 = DType::f32;
    const auto memory = [](int64_t bytes, std::function<void(Stream&)> run) { return Work{Bound::memory, static_cast<double>(bytes), std::move(run)}; };
    std::vector<Segment> segments;
    for (int64_t offset = 0; offset < n; offset += 4 * C * C + 64) segments.push_back({offset, std::min<int64_t>(4 * C * C, n - offset), 0.1f, true});
    const int64_t count = static_cast<int64_t>(segments.size());
    const auto table = [=](Operands& m) { return static_cast<const Segment*>(m.upload(DType::u8, count * static_cast<int64_t>(sizeof(Segment)), segments.data()).data); };
    const auto control = [](Operands& m) {
        const float values[2] = {1, 1};
        return m.upload(DType::f32, 2, values);
    };
    cases.push_back({"adamw.bf16", [=](Operands& m) {
        const AdamW a{.master = m.floats(f32, n), .m = m.empty(f32, n), .v = m.empty(f32, n), .grad = m.floats(f32, n), .control = control(m), .param = m.empty(DType::bf16, n),
                      .segments = table(m), .segment_count = count, .lr = 1e-6f};
        return memory(30 * n, [=](Stream& s) { adamw(s, a); });
    }});
    cases.push_back({"lamb_direction", [=](Operands& m) {
        const LambDirection a{.master = m.floats(f32, n), .control = control(m), .m = m.empty(f32, n), .v = m.empty(f32, n), .grad = m.floats(f32, n),
                              .norms = m.empty(DType::f64, 2 * count), .workspace = m.empty(DType::u8, cuda::segment_sums_workspace(n, count)), .segments = table(m),
                              .segment_count = count};
        return memory(28 * n, [=](Stream& s) { lamb_direction(s, a); });
    }});
    cases.push_back({"lamb_update.bf16", [=](Operands& m) {
        const LambUpdate a{.master = m.floats(f32, n), .direction = m.floats(f32, n), .norms = m.empty(DType::f64, 2 * count), .control = control(m),
                           .param = m.empty(DType::bf16, n), .segments = table(m), .segment_count = count, .lr = 1e-6f};
        return memory(14 * n, [=](Stream& s) { lamb_update(s, a); });
    }});
    cases.push_back({"squared_norm", [=](Operands& m) {
        const SquaredNorm a{.grad = m.floats(f32, n), .sums = m.empty(DType::f64, 1), .workspace = m.empty(DType::u8, cuda::segment_sums_workspace(n, count)),
                            .segments = table(m), .segment_count = count};
        return memory(4 * n, [=](Stream& s) { squared_norm(s, a); });
    }});
    cases.push_back({"add_into.fp32", [=](Operands& m) {
        const AddInto a{.x = m.floats(f32, n), .y = m.floats(f32, n)};
        return memory(12 * n, [=](Stream& s) { add_into(s, a); });
    }});
}

void matrix_cases(std::vector<Case>& cases, DType act, int64_t N) {
    const auto add = [&](const std::string& name, std::function<Work(Operands&)> make) { cases.push_back({name + "." + name_of(act), std::move(make)}); };
    const auto matrix = [](double flops, std::function<void(Stream&)> run) { return Work{Bound::matrix, flops, std::move(run)}; };
    for (const auto& [tag, I, O] : {std::tuple{"qkv", C, 3 * C}, std::tuple{"up", C, F}, std::tuple{"down", F, C}}) {
        const double flops = 2.0 * static_cast<double>(N * I * O);
        add(std::string("linear_forward ") + tag, [=, I = I, O = O](Operands& m) {
            const LinearForward a{.x_NI = m.floats(act, N * I), .w_OI = m.floats(act, O * I), .bias_O = m.floats(act, O), .y_NO = m.empty(act, N * O),
                                  .workspace = m.empty(DType::u8, cuda::linear_workspace(N, O)), .N = N, .I = I, .O = O};
            return matrix(flops, [=](Stream& s) { linear_forward(s, a); });
        });
        add(std::string("linear_backward_input ") + tag, [=, I = I, O = O](Operands& m) {
            const LinearBackwardInput a{.dy_NO = m.floats(act, N * O), .w_OI = m.floats(act, O * I), .dx_NI = m.empty(act, N * I),
                                        .workspace = m.empty(DType::u8, cuda::linear_workspace(N, O)), .N = N, .I = I, .O = O};
            return matrix(flops, [=](Stream& s) { linear_backward_input(s, a); });
        });
        add(std::string("linear_backward_weight ") + tag, [=, I = I, O = O](Operands& m) {
            const LinearBackwardWeight a{.dy_NO = m.floats(act, N * O), .x_NI = m.floats(act, N * I), .dw_OI = m.floats(DType::f32, O * I), .dbias_O = m.floats(DType::f32, O),
                                         .workspace = m.empty(DType::u8, cuda::linear_workspace(N, O)), .accumulate = Accumulate::add, .N = N, .I = I, .O = O};
            return matrix(flops, [=](Stream& s) { linear_backward_weight(s, a); });
        });
    }
    for (const int64_t head : {int64_t{64}, int64_t{128}}) {
        const int64_t T = 4096, B = std::max<int64_t>(1, N / T), heads = C / head, S = 3 * C;
        const double flops = 4.0 * static_cast<double>(B * heads * head) * static_cast<double>(T) * static_cast<double>(T) / 2;
        const std::string tag = fmt::format(" T{} D{}", T, head);
        const float scale = 1.0f / std::sqrt(static_cast<float>(head));
        const auto forward = [=](Operands& m, AttentionChoice by) {
            const Tensor qkv = m.floats(act, B * T * S);
            AttentionForward a{.q_NHD = qkv, .k_NKD = qkv.from(C), .v_NKD = qkv.from(2 * C), .doc_start_N = {}, .o_NHD = m.empty(act, B * T * C),
                               .lse_BHT = m.empty(DType::f32, B * heads * T), .workspace = {}, .B = B, .Tq = T, .Tk = T, .H = heads, .K = heads, .D = head,
                               .q_stride = S, .kv_stride = S, .q_batch_stride = T * S, .kv_batch_stride = T * S, .scale = scale, .by = by};
            a.workspace = m.empty(DType::u8, cuda::attention_workspace(a));
            return a;
        };
        const auto add_forward = [=](const std::string& who, AttentionChoice by) {
            add(who + "attention_forward" + tag, [=](Operands& m) {
                const AttentionForward a = forward(m, by);
                return matrix(flops, [=](Stream& s) { attention_forward(s, a); });
            });
        };
        const auto add_backward = [=](const std::string& who, AttentionChoice by) { add(who + "attention_backward" + tag, [=](Operands& m) {
            const AttentionForward f = forward(m, by);
            const Tensor dqkv = m.empty(act, B * T * S);
            AttentionBackward a{.q_NHD = f.q_NHD, .k_NKD = f.k_NKD, .v_NKD = f.v_NKD, .o_NHD = f.o_NHD, .do_NHD = m.floats(act, B * T * C), .lse_BHT = f.lse_BHT,
                                .doc_start_N = {}, .dq_NHD = dqkv, .dk_NKD = dqkv.from(C), .dv_NKD = dqkv.from(2 * C), .workspace = {}, .B = B, .T = T, .H = heads, .K = heads,
                                .D = head, .q_stride = S, .kv_stride = S, .q_batch_stride = T * S, .kv_batch_stride = T * S, .scale = scale, .by = by};
            a.workspace = m.empty(DType::u8, cuda::attention_workspace(a));
            bool first = true;
            return matrix(2.5 * flops, [=](Stream& s) mutable {
                if (std::exchange(first, false)) attention_forward(s, f);
                attention_backward(s, a);
            });
        }); };
        add_forward("", {}), add_backward("", {});
        if (act != DType::bf16 || !cuda::cudnn_problem().empty()) continue;
        add_forward("cudnn_", {AttentionProvider::cudnn, true});
        add_backward("cudnn_repeatable_", {AttentionProvider::cudnn, true});
        add_backward("cudnn_", {AttentionProvider::cudnn, false});
    }
}

double copy_bandwidth(Stream& s, int64_t rounds) {
    Operands m(s);
    const int64_t bytes = int64_t{1} << 30;
    const Copy a{.x = m.empty(DType::u8, bytes), .y = m.empty(DType::u8, bytes)};
    return 2.0 * static_cast<double>(bytes) / seconds_of(s, {Bound::memory, 0, [=](Stream& on) { copy(on, a); }}, rounds);
}

int run(const Options& o) {
    cuda::select(0, cuda::Sharing::refused);
    StreamEngine engine(StreamMode::normal, Device::cuda);
    Stream& s = engine.add("compute", StreamKind::compute);
    const double bandwidth = copy_bandwidth(s, o.rounds), bf16_rate = measure_gpu_rate(s, DType::bf16), fp32_rate = measure_gpu_rate(s, DType::f32);
    fmt::print("{}\ncopy {:.0f} GB/s, matrix products {:.1f} TFLOP/s in bf16 and {:.1f} in fp32, measured now\n\n{:<36} {:>10} {:>14} {:>7}\n", cuda::probe().text,
               bandwidth * 1e-9, bf16_rate * 1e-12, fp32_rate * 1e-12, "operation", "us", "rate", "share");
    std::vector<Case> cases;
    for (const DType act : {DType::bf16, DType::f32}) pointwise_cases(cases, act, o.tokens);
    optimizer_cases(cases);
    for (const DType act : {DType::bf16, DType::f32}) matrix_cases(cases, act, o.tokens);
    nlohmann::json all = {{"gpu", cuda::probe().text}, {"copy_bytes_per_s", bandwidth}, {"bf16_flops", bf16_rate}, {"fp32_flops", fp32_rate}, {"operations", nlohmann::json::array()}};
    for (const Case& c : cases) {
        if (c.name.find(o.only) == std::string::npos) continue;
        Operands operands(s);
        Work work;
        try {
            work = c.make(operands);
        } catch (const Problem& p) {
            if (p.code() != Exit::usage) throw;
            fmt::print("{:<36} {}\n", c.name, p.what());
            continue;
        }
        const double seconds = seconds_of(s, work, o.rounds), rate = work.amount / seconds;
        const bool memory = work.bound == Bound::memory;
        const double share = rate / (memory ? bandwidth : c.name.ends_with("bf16") ? bf16_rate : fp32_rate);
        fmt::print("{:<36} {:>10.1f} {:>9.1f} {} {:>6.0f}%\n", c.name, seconds * 1e6, rate * (memory ? 1e-9 : 1e-12), memory ? "GB/s" : "TF/s", 100 * share);
        std::fflush(stdout);
        all["operations"].push_back({{"name", c.name}, {"seconds", seconds}, {memory ? "bytes_per_s" : "flops", rate}, {"share", share}});
    }
    if (const std::string problem = cuda::cudnn_problem(); !problem.empty()) fmt::print("\ncuDNN's attention was not measured: {}\n", problem);
    fmt::print("\nproducts and their algorithms:\n");
    for (const std::string& line : cuda::matmul_choices()) fmt::print("  {}\n", line);
    all["matmul_choices"] = cuda::matmul_choices();
    if (!o.json.empty()) std::ofstream(o.json) << all.dump(1) << "\n";
    return 0;
}

}  // namespace

int main(int argc, char** argv) {
    try {
        return run(parse(argc, argv));
    } catch (const Problem& p) {
        std::fprintf(stderr, "%s\n", p.what());
        return static_cast<int>(p.code());
    }
}
