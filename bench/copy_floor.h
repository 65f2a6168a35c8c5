// bench/copy_floor.h   Measures an operation against a plain copy that moves as many bytes.
//
// Both alternate in one run, go round through more memory than caches hold, and count with their best time. A copy also
// fetches the lines it overwrites, so what mostly reads or updates in place can exceed a share of 1.
#pragma once
#include <time.h>

#include <algorithm>
#include <cstdio>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "kernels/cpu/parallel.h"

namespace trifold::bench {

enum class Clock { wall, cpu };  // cpu: processor time, for one thread on a machine shared with other work

struct Options {
    std::string only;  // part of the names of the operations that are wanted
    bool json = false;
    Clock clock = Clock::wall;
    int64_t rounds = 3;
};

// Owns the operands. Every page is touched by the threads that will use it; floats lie in [-1, 1), integers in [0,
// below).
class Memory {
public:
    Tensor floats(DType type, int64_t elems) {
        const Tensor t = reserve(type, elems);
        cpu::with_act(type, [&](auto tag) {
            using T = decltype(tag);
            cpu::parallel_elems(elems, [&](int64_t begin, int64_t end) {
                for (int64_t i = begin; i < end; ++i) t.as<T>()[i] = T(static_cast<float>(hash(i)) * 0x1p-15f - 1.0f);
            });
        });
        return t;
    }
    Tensor integers(int64_t elems, int64_t below) {
        const Tensor t = reserve(DType::i32, elems);
        for (int64_t i = 0; i < elems; ++i) t.as<int32_t>()[i] = static_cast<int32_t>(hash(i) % below);
        return t;
    }
    Tensor reserve(DType type, int64_t elems) {
        blocks_.emplace_back(new (std::align_val_t{64}) std::byte[static_cast<size_t>(elems * size_of(type))]);
        bytes_ += elems * size_of(type);
        return {blocks_.back().get(), type, elems};
    }

    int64_t bytes() const { return bytes_; }

private:
    static int64_t hash(int64_t i) {
        return static_cast<int64_t>((static_cast<uint64_t>(i) * 0x9e3779b97f4a7c15u) >> 48);
    }
    struct Free {
        void operator()(std::byte* p) const { ::operator delete[](p, std::align_val_t{64}); }
    };
    std::vector<std::unique_ptr<std::byte[], Free>> blocks_;
    int64_t bytes_ = 0;
};

// One way to run an operation, and the compulsory bytes of one run.
struct Case {
    int64_t bytes;
    std::function<void()> run;
};

class Bench {
public:
    explicit Bench(const Options& options) : options_(options) {}

    // `make` reserves the operands and says what to run; nothing is allocated for cases that are not wanted.
    void add(const std::string& name, const std::function<Case(Memory&)>& make) {
        if (name.find(options_.only) == std::string::npos) return;
        constexpr int64_t round_trip = 512 << 20;  // bytes
        Memory memory;
        std::vector<Case> cases{make(memory)};
        const int64_t bytes = cases[0].bytes, elems = std::min(bytes, round_trip) / 8;
        while (memory.bytes() < round_trip) cases.push_back(make(memory));
        const Tensor from = memory.floats(DType::f32, round_trip / 8), to = memory.floats(DType::f32, round_trip / 8);
        double op_s = 1e30, copy_s = 1e30;
        for (int64_t r = 0; r < options_.rounds; ++r) {
            int64_t first = 0;
            for (const Case& c : cases) {
                op_s = std::min(op_s, seconds(c.run));
                first = first + elems <= from.elems ? first : 0;
                const AddInto copy{
                    .x = from.slice(first, elems), .y = to.slice(first, elems), .accumulate = Accumulate::overwrite};
                copy_s = std::min(copy_s, seconds([&] { cpu::add_into(copy); }));
                first += elems;
            }
        }
        report(name, static_cast<double>(bytes) / op_s * 1e-9, 8.0 * static_cast<double>(elems) / copy_s * 1e-9, op_s);
    }

private:
    double seconds(const std::function<void()>& work) const {
        const bool cpu = options_.clock == Clock::cpu;
        const auto now = [&] {
            timespec t{};
            clock_gettime(cpu ? CLOCK_PROCESS_CPUTIME_ID : CLOCK_MONOTONIC, &t);
            return static_cast<double>(t.tv_sec) + 1e-9 * static_cast<double>(t.tv_nsec);
        };
        const double start = now();
        work();
        return now() - start;
    }
    void report(const std::string& name, double rate, double floor, double seconds) const {
        const char* line =
            options_.json ? "{\"op\":\"%s\",\"seconds\":%.6f,\"gb_per_s\":%.2f,\"copy_gb_per_s\":%.2f,\"share\":%.3f}\n"
                          : "%-34s %9.3f ms  %7.2f GB/s   copy %7.2f GB/s   share %.2f\n";
        std::printf(line, name.c_str(), options_.json ? seconds : seconds * 1e3, rate, floor, rate / floor);
        std::fflush(stdout);
    }
    Options options_;
};

}  // namespace trifold::bench
