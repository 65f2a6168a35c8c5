// bench/attention.cpp   Attention on the CPU against what the machine can do, measured alternately in the same run.
//
// Forward and backward: GFLOP/s over the pairs that are visible (4 D per pair forward, 10 D backward; what is
// recomputed is not counted), and the share of the peak of a loop of multiply-adds on registers. Decoding: bytes of the
// key/value cache per second, and the share of a plain read of the same bytes. Medians over the rounds; `best` is the
// fastest round of each.
//   attention [--json] [--only TEXT] [--rounds R] [--threads T] [--clock wall|cpu]
// cpu: processor time per thread, for machines shared with other work (waiting at barriers counts, being preempted does
// not).
#include <omp.h>
#include <time.h>

#include <algorithm>
#include <cstdio>
#include <functional>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "kernels/cpu/parallel.h"

using namespace trifold;

namespace {

struct Options {
    bool json = false;
    std::string only, clock = "wall";
    int64_t rounds = 11, threads = 2;
};

Options parse(int argc, char** argv) {
    Options o;
    for (int i = 1; i < argc; ++i) {
        const std::string arg = argv[i], value = i + 1 < argc ? argv[i + 1] : "";
        if (arg == "--json") {
            o.json = true;
            continue;
        }
        if (arg == "--only")
            o.only = value;
        else if (arg == "--clock")
            o.clock = value;
        else if (arg == "--rounds")
            o.rounds = std::stoll(value);
        else if (arg == "--threads")
            o.threads = std::stoll(value);
        else
            throw std::invalid_argument("unknown option " + arg);
        ++i;
    }
    return o;
}

// Owns memory; floats are in [-1, 1).
class Memory {
public:
    Tensor floats(DType type, int64_t elems) {
        const Tensor t = reserve(type, elems);
        cpu::with_act(type, [&](auto tag) {
            using T = decltype(tag);
            for (int64_t i = 0; i < elems; ++i) {
                const uint64_t hash = (static_cast<uint64_t>(i) * 0x9e3779b97f4a7c15u) >> 48;
                t.as<T>()[i] = T(static_cast<float>(hash) * 0x1p-15f - 1.0f);
            }
        });
        return t;
    }
    Tensor reserve(DType type, int64_t elems) {
        blocks_.emplace_back(new (std::align_val_t{64}) std::byte[static_cast<size_t>(elems * size_of(type))]);
        return {blocks_.back().get(), type, elems};
    }

private:
    struct Free {
        void operator()(std::byte* p) const { ::operator delete[](p, std::align_val_t{64}); }
    };
    std::vector<std::unique_ptr<std::byte[], Free>> blocks_;
};

class Clock {
public:
    explicit Clock(const Options& o) : cpu_(o.clock == "cpu"), threads_(static_cast<double>(o.threads)) {}
    // Of one run of `work`, on average over as many as take 40 ms: processor time of other cores is known late.
    double seconds(const std::function<void()>& work) const {
        const double start = now();
        double runs = 0, end = start;
        for (; end - start < 0.04 * (cpu_ ? threads_ : 1.0); end = now(), ++runs) work();
        return (end - start) / runs / (cpu_ ? threads_ : 1.0);
    }

private:
    double now() const {
        timespec t{};
        clock_gettime(cpu_ ? CLOCK_PROCESS_CPUTIME_ID : CLOCK_MONOTONIC, &t);
        return static_cast<double>(t.tv_sec) + 1e-9 * static_cast<double>(t.tv_nsec);
    }
    bool cpu_;
    double threads_;
};

double median(std::vector<double> v) {
    std::nth_element(v.begin(), v.begin() + static_cast<int64_t>(v.size() / 2), v.end());
    return v[v.size() / 2];
}
double least(const std::vector<double>& v) { return *std::min_element(v.begin(), v.end()); }

// The compiler may neither drop nor move what computes v.
template <class Register>
void keep_in_register(Register& v) {
#if defined(__x86_64__)
    asm volatile("" : "+x"(v));
#else
    asm volatile("" : "+w"(v));
#endif
}

// Independent chains of multiply-adds on registers, on every thread; returns their FLOPs.
double multiply_adds() {
    using Register = simd::f32x16::Register;
    constexpr int64_t steps = 3'000'000, chains = 12;
#pragma omp parallel
    {
        Register sum[chains], factor = Register{} + 0.999f, term = Register{} + 1e-3f;
#pragma GCC unroll 12
        for (int64_t c = 0; c < chains; ++c) sum[c] = Register{};
        for (int64_t i = 0; i < steps; ++i)
#pragma GCC unroll 12
            for (int64_t c = 0; c < chains; ++c) {
                sum[c] = sum[c] * factor + term;
                keep_in_register(sum[c]);
            }
#pragma GCC unroll 12
        for (int64_t c = 0; c < chains; ++c) keep_in_register(sum[c]);
    }
    return 2.0 * steps * chains * (simd::register_bytes / 4) * omp_get_max_threads();
}

// Adds up the bytes as fp32 on every thread.
void read(const Tensor& t) {
    cpu::parallel_elems(t.bytes() / 4, [&](int64_t begin, int64_t end) {
        simd::f32x16 sum = 0.0f;
        for (int64_t i = begin; i + simd::lanes <= end; i += simd::lanes)
            sum += simd::load(static_cast<float*>(t.data) + i, simd::Full{});
        volatile float keep = simd::sum(sum);
        (void)keep;
    });
}

struct Shape {
    const char* name;
    int64_t B, T, H, K, D, window;
};

class Bench {
public:
    explicit Bench(const Options& o) : options_(o), clock_(o) {}

    void train(const Shape& s, DType act) const {
        const std::string name = std::string(s.name) + "." + name_of(act);
        if (name.find(options_.only) == std::string::npos) return;
        Memory m;
        const int64_t N = s.B * s.T, S = (s.H + 2 * s.K) * s.D;
        const Tensor qkv = m.floats(act, N * S), dqkv = m.floats(act, N * S);
        AttentionForward f{.q_NHD = qkv,
                           .k_NKD = qkv.from(s.H * s.D),
                           .v_NKD = qkv.from((s.H + s.K) * s.D),
                           .doc_start_N = {},
                           .o_NHD = m.floats(act, N * s.H * s.D),
                           .lse_BHT = m.floats(DType::f32, N * s.H),
                           .workspace = {},
                           .B = s.B,
                           .Tq = s.T,
                           .Tk = s.T,
                           .H = s.H,
                           .K = s.K,
                           .D = s.D,
                           .q_stride = S,
                           .kv_stride = S,
                           .q_batch_stride = s.T * S,
                           .kv_batch_stride = s.T * S,
                           .window = s.window,
                           .scale = 0.125f};
        AttentionBackward g{.q_NHD = f.q_NHD,
                            .k_NKD = f.k_NKD,
                            .v_NKD = f.v_NKD,
                            .o_NHD = f.o_NHD,
                            .do_NHD = m.floats(act, N * s.H * s.D),
                            .lse_BHT = f.lse_BHT,
                            .doc_start_N = {},
                            .dq_NHD = dqkv,
                            .dk_NKD = dqkv.from(s.H * s.D),
                            .dv_NKD = dqkv.from((s.H + s.K) * s.D),
                            .workspace = {},
                            .B = s.B,
                            .T = s.T,
                            .H = s.H,
                            .K = s.K,
                            .D = s.D,
                            .q_stride = S,
                            .kv_stride = S,
                            .q_batch_stride = s.T * S,
                            .kv_batch_stride = s.T * S,
                            .window = s.window,
                            .scale = 0.125f};
        f.workspace = m.reserve(DType::u8, cpu::attention_workspace(f));
        g.workspace = m.reserve(DType::u8, cpu::attention_workspace(g));
        double pairs = 0, peak_flops = 0;
        for (int64_t t = 0; t < s.T; ++t)
            pairs += static_cast<double>(s.B * s.H * (s.window ? std::min(t + 1, s.window) : t + 1));
        std::vector<double> peak_s, forward_s, backward_s;
        for (int64_t r = 0; r < options_.rounds; ++r) {
            peak_s.push_back(clock_.seconds([&] { peak_flops = multiply_adds(); }));
            forward_s.push_back(clock_.seconds([&] { cpu::attention_forward(f); }));
            backward_s.push_back(clock_.seconds([&] { cpu::attention_backward(g); }));
        }
        const double D = static_cast<double>(s.D);
        report(name + ".forward", "GFLOP/s", 4 * D * pairs, forward_s, peak_flops, peak_s);
        report(name + ".backward", "GFLOP/s", 10 * D * pairs, backward_s, peak_flops, peak_s);
    }

    // One new token after T - 1 others, for as many layers' caches as the L2 does not hold.
    void decode(const Shape& s, DType act) const {
        const std::string name = std::string(s.name) + "." + name_of(act) + ".decode";
        if (name.find(options_.only) == std::string::npos) return;
        Memory m;
        const int64_t elems = s.T * s.K * s.D, layers = std::max<int64_t>(1, (48 << 20) / (2 * elems * size_of(act)));
        AttentionForward f{.q_NHD = m.floats(act, s.H * s.D),
                           .k_NKD = {},
                           .v_NKD = {},
                           .doc_start_N = {},
                           .o_NHD = m.floats(act, s.H * s.D),
                           .lse_BHT = {},
                           .workspace = {},
                           .B = 1,
                           .Tq = 1,
                           .Tk = s.T,
                           .q_offset = s.T - 1,
                           .H = s.H,
                           .K = s.K,
                           .D = s.D,
                           .q_stride = s.H * s.D,
                           .kv_stride = s.K * s.D,
                           .q_batch_stride = s.H * s.D,
                           .kv_batch_stride = elems,
                           .scale = 0.125f};
        f.workspace = m.reserve(DType::u8, cpu::attention_workspace(f));
        const Tensor cache = m.floats(act, layers * 2 * elems);
        std::vector<double> read_s, decode_s;
        for (int64_t r = 0; r < options_.rounds; ++r) {
            read_s.push_back(clock_.seconds([&] { read(cache); }));
            decode_s.push_back(clock_.seconds([&] {
                for (int64_t l = 0; l < layers; ++l) {
                    f.k_NKD = cache.slice(2 * l * elems, elems);
                    f.v_NKD = cache.slice((2 * l + 1) * elems, elems);
                    cpu::attention_forward(f);
                }
            }));
        }
        report(name, "GB/s", static_cast<double>(cache.bytes()), decode_s, static_cast<double>(cache.bytes()), read_s);
    }

private:
    void report(const std::string& name, const char* unit, double work, const std::vector<double>& seconds,
                double floor_work, const std::vector<double>& floor_seconds) const {
        const double rate = work / median(seconds) * 1e-9, best = work / least(seconds) * 1e-9;
        const double floor = floor_work / median(floor_seconds) * 1e-9,
                     floor_best = floor_work / least(floor_seconds) * 1e-9;
        const char* line = options_.json
                               ? "{\"op\":\"%s\",\"seconds\":%.6f,\"unit\":\"%s\",\"rate\":%.2f,\"best\":%.2f,"
                                 "\"peak\":%.2f,\"share\":%.3f,\"share_best\":%.3f}\n"
                               : "%-40s %9.3f ms  %7s %7.1f (best %7.1f)   peak %7.1f   share %.2f (best %.2f)\n";
        std::printf(line, name.c_str(), options_.json ? median(seconds) : median(seconds) * 1e3, unit, rate, best,
                    floor, rate / floor, best / floor_best);
        std::fflush(stdout);
    }
    Options options_;
    Clock clock_;
};

}  // namespace

int main(int argc, char** argv) try {
    const Options options = parse(argc, argv);
    omp_set_num_threads(static_cast<int>(options.threads));
    const Bench bench(options);
    for (const DType act : {DType::f32, DType::bf16}) {
        bench.train({"gpt2-4x256", 4, 256, 12, 12, 64, 0}, act);
        bench.train({"gpt2-4x1024", 4, 1024, 12, 12, 64, 0}, act);
        bench.train({"d128-1x2048", 1, 2048, 16, 16, 128, 0}, act);
        bench.train({"gqa-d128-1x2048", 1, 2048, 16, 4, 128, 0}, act);
        bench.train({"window512-1x4096", 1, 4096, 12, 12, 64, 512}, act);
        bench.decode({"gpt2-1024", 1, 1024, 12, 12, 64, 0}, act);
        bench.decode({"gqa-d128-4096", 1, 4096, 32, 8, 128, 0}, act);
    }
} catch (const std::exception& e) {
    std::fprintf(
        stderr,
        "attention: %s\nusage: attention [--json] [--only TEXT] [--rounds R] [--threads T] [--clock wall|cpu]\n",
        e.what());
    return 2;
}
