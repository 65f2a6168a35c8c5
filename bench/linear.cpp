// bench/linear.cpp   The linear operations against oneDNN on the shapes of GPT-2 124M.
//
// For every shape, product and type: GFLOP/s of our operation, and of the floor, which is the best of what oneDNN
// offers without changing how the operands lie in memory: a matrix product, one with weights that it first packs itself
// (the packing counts), and its fp32 sgemm. All take turns in the same run; best of all rounds. Operands are in huge
// pages, as in training.
//   linear [--json] [--only TEXT] [--rounds R] [--threads T] [--clock wall|cpu]
// cpu: processor time per thread, for machines shared with other work (waiting at barriers counts, being preempted does
// not).
#include <omp.h>
#include <time.h>

#include <algorithm>
#include <cstdio>
#include <functional>
#include <memory>
#include <oneapi/dnnl/dnnl.hpp>
#include <stdexcept>
#include <string>
#include <unordered_map>
#include <vector>

#include "kernels/arena.h"
#include "kernels/cpu/gemm.h"
#include "kernels/cpu/onednn.h"
#include "kernels/ops.h"

using namespace trifold;

namespace {

struct Options {
    bool json = false;
    std::string only, clock = "wall";
    int rounds = 5, threads = 2;
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
            o.rounds = std::stoi(value);
        else if (arg == "--threads")
            o.threads = std::stoi(value);
        else
            throw std::invalid_argument("unknown option " + arg);
        ++i;
    }
    return o;
}

// Tokens, inputs, outputs. The head (50304 outputs) also in chunks of tokens.
struct Shape {
    int64_t N, I, O;
};
constexpr Shape shapes[] = {{1024, 768, 2304},  {1024, 768, 768},  {1024, 768, 3072}, {1024, 3072, 768},
                            {4096, 768, 2304},  {4096, 768, 768},  {4096, 768, 3072}, {4096, 3072, 768},
                            {1024, 768, 50304}, {512, 768, 50304}, {256, 768, 50304}, {1, 768, 3072},
                            {8, 768, 3072}};

struct Buffers {
    Tensor x, w, y, dy, dx, dw;
    Buffers(Arena& arena, const Shape& s, DType type) {
        const auto reserve = [&](DType t, int64_t elems) { return arena.reserve(MemoryClass::workspace, t, elems); };
        x = reserve(type, s.N * s.I), w = reserve(type, s.O * s.I), y = reserve(type, s.N * s.O);
        dy = reserve(type, s.N * s.O), dx = reserve(type, s.N * s.I), dw = reserve(DType::f32, s.O * s.I);
    }
    void fill() {
        for (const Tensor& t : {x, w, dy}) {
            uint32_t state = 1;  // products of zeros would be faster than real ones
            for (int64_t i = 0; i < t.elems; ++i) {
                state = state * 1664525u + 1013904223u;
                const float value = static_cast<float>(static_cast<int32_t>(state)) * 0x1p-31f;
                if (t.dtype == DType::f32)
                    t.as<float>()[i] = value;
                else
                    t.as<bf16>()[i] = bf16(value);
            }
        }
    }
};

// A product with weights in oneDNN's own layout; each run packs them first. Empty where the library has none.
class PackedProduct {
public:
    explicit PackedProduct(const cpu::Gemm& g) {
        using dnnl::memory;
        const auto type = [](const Tensor& t) {
            return t.dtype == DType::f32 ? memory::data_type::f32 : memory::data_type::bf16;
        };
        const auto strides = [](const cpu::GemmOperand& m, bool row_major) {
            return row_major ? memory::dims{m.stride, 1} : memory::dims{1, m.stride};
        };
        const memory::desc a({g.rows, g.depth}, type(g.a.data), strides(g.a, g.a.along == cpu::Along::depth));
        const memory::desc plain({g.depth, g.cols}, type(g.b.data), strides(g.b, g.b.along == cpu::Along::outer));
        const memory::desc any({g.depth, g.cols}, type(g.b.data), memory::format_tag::any);
        const memory::desc c({g.rows, g.cols}, type(g.c_RC), memory::dims{g.cols, 1});
#if DNNL_VERSION_MAJOR >= 3
        const dnnl::matmul::primitive_desc about(engine_, a, any, c);
#else
        const dnnl::matmul::primitive_desc about(dnnl::matmul::desc(a, any, c), engine_);
#endif
        from_ = memory(plain, engine_, g.b.data.data);
        to_ = memory(about.weights_desc(), engine_);
        pack_ = dnnl::reorder(from_, to_);
        product_ = dnnl::matmul(about);
        arguments_ = {{DNNL_ARG_SRC, memory(a, engine_, g.a.data.data)},
                      {DNNL_ARG_WEIGHTS, to_},
                      {DNNL_ARG_DST, memory(c, engine_, g.c_RC.data)}};
    }
    void run() {
        pack_.execute(stream_, from_, to_);
        product_.execute(stream_, arguments_);
        stream_.wait();
    }

private:
    dnnl::engine engine_{dnnl::engine::kind::cpu, 0};
    dnnl::stream stream_{engine_};
    dnnl::memory from_, to_;
    dnnl::reorder pack_;
    dnnl::matmul product_;
    std::unordered_map<int, dnnl::memory> arguments_;
};

void sgemm(const cpu::Gemm& g) {
    const bool a_rows = g.a.along == cpu::Along::depth, b_rows = g.b.along == cpu::Along::outer;
    dnnl_sgemm(a_rows ? 'N' : 'T', b_rows ? 'N' : 'T', g.rows, g.cols, g.depth, 1.0f, g.a.data.as<float>(), g.a.stride,
               g.b.data.as<float>(), g.b.stride, 0.0f, g.c_RC.as<float>(), g.cols);
}

struct Way {
    std::string name;
    std::function<void()> run;
    double best_s = 1e30;
};

class Bench {
public:
    explicit Bench(const Options& options) : options_(options) {
        if (!options_.json)
            std::printf("%-44s %8s %8s %6s   %s\n", "product, tokens x inputs x outputs", "GFLOP/s", "floor", "ratio",
                        "oneDNN");
    }
    void measure(const std::string& name, const cpu::Gemm& g, const std::function<void()>& operation) {
        if (name.find(options_.only) == std::string::npos) return;
        std::vector<Way> ways = floors(g);
        ways.push_back({"ours", operation});
        for (Way& w : ways) w.run();
        for (int round = 0; round < options_.rounds; ++round)
            for (Way& w : ways) {
                const double begin = now();
                w.run();
                w.best_s = std::min(w.best_s, now() - begin);
            }
        print(name, 2e-9 * static_cast<double>(g.rows * g.cols * g.depth), ways);
    }

private:
    std::vector<Way> floors(const cpu::Gemm& g) {
        std::vector<Way> ways;
        if (!products_.run(g)) return ways;  // no such product on this processor
        ways.push_back({"plain", [this, g] { products_.run(g); }});
        ways.push_back({"packed", [packed = std::make_shared<PackedProduct>(g)] { packed->run(); }});
        if (g.a.data.dtype == DType::f32) ways.push_back({"sgemm", [g] { sgemm(g); }});
        return ways;
    }
    double now() const {
        timespec t;
        clock_gettime(options_.clock == "cpu" ? CLOCK_PROCESS_CPUTIME_ID : CLOCK_MONOTONIC, &t);
        const double seconds = static_cast<double>(t.tv_sec) + 1e-9 * static_cast<double>(t.tv_nsec);
        return options_.clock == "cpu" ? seconds / options_.threads : seconds;
    }
    void print(const std::string& name, double gflop, const std::vector<Way>& ways) const {
        const double ours = gflop / ways.back().best_s;
        double floor = 0;
        std::string all;
        for (size_t i = 0; i + 1 < ways.size(); ++i) {
            floor = std::max(floor, gflop / ways[i].best_s);
            char text[64];
            std::snprintf(text, sizeof text, options_.json ? ", \"%s\": %.1f" : "%s %.0f  ", ways[i].name.c_str(),
                          gflop / ways[i].best_s);
            all += text;
        }
        if (options_.json)
            std::printf(
                "{\"name\": \"%s\", \"threads\": %d, \"clock\": \"%s\", \"gflops\": %.1f, \"floor_gflops\": %.1f%s}\n",
                name.c_str(), options_.threads, options_.clock.c_str(), ours, floor, all.c_str());
        else
            std::printf("%-44s %8.1f %8.1f %6.2f   %s\n", name.c_str(), ours, floor, floor > 0 ? ours / floor : 0,
                        all.c_str());
        std::fflush(stdout);
    }
    Options options_;
    cpu::OnednnProducts products_;
};

void measure(Bench& bench, const Shape& s, DType type) {
    Arena plan;
    Buffers(plan, s, type);
    Arena arena(plan, "bench/linear");
    Buffers m(arena, s, type);
    m.fill();
    const auto name = [&](const char* product) {
        return std::string(product) + "." + name_of(type) + " " + std::to_string(s.N) + "x" + std::to_string(s.I) +
               "x" + std::to_string(s.O);
    };
    using cpu::Along;
    bench.measure(name("forward"),
                  {.a = {m.x, s.I, Along::depth},
                   .b = {m.w, s.I, Along::depth},
                   .c_RC = m.y,
                   .rows = s.N,
                   .cols = s.O,
                   .depth = s.I},
                  [=] { cpu::linear_forward({.x_NI = m.x, .w_OI = m.w, .y_NO = m.y, .N = s.N, .I = s.I, .O = s.O}); });
    if (s.N <= 8) return;  // sampling has no backward pass
    bench.measure(
        name("backward_input"),
        {.a = {m.dy, s.O, Along::depth},
         .b = {m.w, s.I, Along::outer},
         .c_RC = m.dx,
         .rows = s.N,
         .cols = s.I,
         .depth = s.O},
        [=] { cpu::linear_backward_input({.dy_NO = m.dy, .w_OI = m.w, .dx_NI = m.dx, .N = s.N, .I = s.I, .O = s.O}); });
    bench.measure(
        name("backward_weight"),
        {.a = {m.dy, s.O, Along::outer},
         .b = {m.x, s.I, Along::outer},
         .c_RC = m.dw,
         .rows = s.O,
         .cols = s.I,
         .depth = s.N},
        [=] {
            cpu::linear_backward_weight({.dy_NO = m.dy, .x_NI = m.x, .dw_OI = m.dw, .N = s.N, .I = s.I, .O = s.O});
        });
}

}  // namespace

int main(int argc, char** argv) try {
    const Options options = parse(argc, argv);
    omp_set_num_threads(options.threads);
    Bench bench(options);
    for (const DType type : {DType::f32, DType::bf16})
        for (const Shape& s : shapes) measure(bench, s, type);
} catch (const std::exception& e) {
    std::fprintf(stderr,
                 "linear: %s\nusage: linear [--json] [--only TEXT] [--rounds R] [--threads T] [--clock wall|cpu]\n",
                 e.what());
    return 2;
}
