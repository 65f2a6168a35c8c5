// test/emulation/test_emulator_faults.cpp   Faults planted in ordinary kernels: which schedule, and which build, catches which.
#include "test/catch.h"

#include <algorithm>
#include <cmath>
#include <string>
#include <vector>

#include "test/emulation/child.h"
#include "test/emulation/device_array.h"
#include "test/emulation/faulty_kernels.h"

using namespace trifold;
using namespace trifold::test;
using emulation::Schedule;

namespace {

constexpr int right = 0, wrong = 1;

float number(int64_t i) { return static_cast<float>((i * 7919 + 13) % 257 - 128) / 64.0f; }

int verdict(const DeviceArray<float>& got, const std::vector<double>& want, double tolerance) {
    for (int64_t i = 0; i < got.elems(); ++i)
        if (!(std::abs(got[i] - want[static_cast<size_t>(i)]) <= tolerance)) return wrong;
    return right;
}

template <Fault planted>
int run_row_norms() {
    const int rows = 3, C = 333;
    const DeviceArray<float> x(rows * C, number), y(rows * C, [](int64_t) { return NAN; });
    cuda::launch(nullptr, {.blocks = dim3(rows), .threads = dim3(128)}, row_norms<planted>, y.data(), x.data(), C);
    cudaDeviceSynchronize();
    std::vector<double> want;
    for (int i = 0; i < rows * C; ++i) {
        double squares = 0;
        for (int c = 0; c < C; ++c) squares += static_cast<double>(x[i / C * C + c]) * x[i / C * C + c];
        want.push_back(x[i] / std::sqrt(squares));
    }
    return verdict(y, want, 1e-5);
}

template <Fault planted>
int run_in_place() {
    const int rows = 2, C = 517;
    const DeviceArray<float> x(rows * C, number), kept(rows, [](int64_t) { return NAN; });
    const DeviceArray<int> target(rows, [](int64_t i) { return static_cast<int>(40 + i * 300); });
    std::vector<double> want_kept, want;
    for (int r = 0; r < rows; ++r) want_kept.push_back(x[r * C + target[r]]);
    for (int i = 0; i < rows * C; ++i) want.push_back(std::exp(static_cast<double>(x[i])));
    cuda::launch(nullptr, {.blocks = dim3(rows), .threads = dim3(128)}, in_place<planted>, x.data(), kept.data(), target.data(), C);
    cudaDeviceSynchronize();
    return std::max(verdict(kept, want_kept, 0), verdict(x, want, 1e-4));
}

template <Fault planted>
int run_multiply() {
    const int M = 32, N = 24, K = 80;
    const DeviceArray<__nv_bfloat16> a(M * K, [](int64_t i) { return __float2bfloat16_rn(number(i)); }),
        b(K * N, [](int64_t i) { return __float2bfloat16_rn(number(5 * i + 1)); });
    const DeviceArray<float> c(M * N, [](int64_t) { return NAN; });
    cuda::launch(nullptr, {.blocks = dim3(N / 8, M / 16), .threads = dim3(32)}, multiply<planted>, c.data(), a.data(), b.data(), N, K);
    cudaDeviceSynchronize();
    std::vector<double> want;
    for (int i = 0; i < M * N; ++i) {
        double sum = 0;
        for (int k = 0; k < K; ++k) sum += static_cast<double>(__bfloat162float(a[i / N * K + k])) * __bfloat162float(b[k * N + i % N]);
        want.push_back(sum);
    }
    return verdict(c, want, 1e-3);
}

// How often the wrong numbers, or the emulator's own checks, show a fault under a schedule.
enum class Caught { never, sometimes, always };

struct Plant {
    const char* name;
    int (*run)();
    Caught random, warp_priority, fifo, lifo;
    bool race;  // the race detector reports it; else its build shows wrong numbers or dies like the others
};
constexpr Caught never = Caught::never, sometimes = Caught::sometimes, always = Caught::always;
const Plant plants[] = {
    {"row_norms", run_row_norms<Fault::none>, never, never, never, never, false},
    {"in_place", run_in_place<Fault::none>, never, never, never, never, false},
    {"multiply", run_multiply<Fault::none>, never, never, never, never, false},
    {"no barrier after a write", run_row_norms<Fault::no_barrier_after_write>, always, always, always, always, true},
    {"no barrier before shared memory is reused", run_row_norms<Fault::no_barrier_before_reuse>, never, always, never, always, true},
    {"no barrier before an input is overwritten", run_in_place<Fault::no_barrier_before_in_place>, sometimes, sometimes, never, always, true},
    {"no __syncwarp after cp.async.wait", run_multiply<Fault::no_warp_sync_after_wait>, never, never, never, never, true},
    {"no __syncwarp before a stage is refilled", run_multiply<Fault::no_warp_sync_before_stage>, never, never, never, never, true},
    {"wait for too few groups", run_multiply<Fault::wait_for_too_few_groups>, always, always, always, always, false},
    {"shared index off by one", run_row_norms<Fault::shared_index_off_by_one>, always, always, always, always, false},
    {"barrier in a divergent branch", run_row_norms<Fault::divergent_barrier>, always, always, always, always, false},
};

Caught outcome_of(const Plant& plant, Schedule schedule) {
    const bool seeded = schedule == Schedule::random || schedule == Schedule::warp_priority;
    const int tries = seeded ? 12 : 1;
    int caught = 0;
    for (int seed = 1; seed <= tries; ++seed) {
        const Outcome o = in_child([&] {
            emulation::configure({schedule, static_cast<uint64_t>(seed)});
            return plant.run();
        });
        caught += o.exit_code != right;
    }
    return caught == 0 ? never : caught == tries ? always : sometimes;
}

}  // namespace

TEST_CASE("each schedule shows the planted faults that it can show") {
    if (emulation::detects_races() || address_sanitizer) return;  // these catch more, or do not fill shared memory with NaN
    for (const Plant& p : plants) {
        INFO(p.name);
        CHECK(outcome_of(p, Schedule::random) == p.random);
        CHECK(outcome_of(p, Schedule::warp_priority) == p.warp_priority);
        CHECK(outcome_of(p, Schedule::fifo) == p.fifo);
        CHECK(outcome_of(p, Schedule::lifo) == p.lifo);
    }
}

TEST_CASE("the race detector reports every missing barrier under every schedule") {
    if (!emulation::detects_races()) return;
    for (const Plant& p : plants) {
        for (const Schedule schedule : {Schedule::random, Schedule::fifo, Schedule::lifo, Schedule::warp_priority}) {
            const Outcome o = in_child([&] {
                emulation::configure({schedule, 1});
                return p.run();
            });
            INFO(p.name << "\n" << o.errors);
            CHECK((o.exit_code == emulation::race_exit_code) == p.race);
            if (p.random == always) CHECK(o.exit_code != right);
            if (p.race) {
                CHECK(o.says("race in "));
                CHECK(o.says("faulty_kernels.h:"));
            } else if (p.lifo == never) {
                CHECK(o.exit_code == right);
            }
        }
    }
}

TEST_CASE("kernels without a fault pass under the address sanitizer too") {
    CHECK(run_row_norms<Fault::none>() == right);
    CHECK(run_in_place<Fault::none>() == right);
    CHECK(run_multiply<Fault::none>() == right);
}
