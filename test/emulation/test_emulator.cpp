// test/emulation/test_emulator.cpp   The emulated words of CUDA mean what the CUDA C++ and PTX manuals say.
#include "test/catch.h"

#include <cmath>
#include <set>
#include <tuple>
#include <vector>

#include "kernels/cuda/launch.h"
#include "kernels/cuda/ptx.h"
#include "test/emulation/device_array.h"

using namespace trifold;
using namespace trifold::test;
using emulation::Schedule;
namespace ptx = cuda::ptx;

namespace {

template <class... P>
void run(void (*kernel)(P...), dim3 blocks, dim3 threads, P... args) {
    cuda::launch(nullptr, {.blocks = blocks, .threads = threads, .shared_bytes = 4096}, kernel, args...);
    cudaDeviceSynchronize();
}

constexpr auto zero = [](int64_t) { return 0; };

// Every schedule, two seeds each.
template <class F>
void under_all_schedules(F f) {
    const emulation::Settings before = emulation::settings();
    for (const Schedule schedule : {Schedule::random, Schedule::fifo, Schedule::lifo, Schedule::warp_priority}) {
        for (uint64_t seed = 1; seed <= 2; ++seed) {
            emulation::configure({schedule, seed});
            f();
        }
    }
    emulation::configure(before);
}

__global__ void places(int* out) {
    const unsigned thread = (threadIdx.z * blockDim.y + threadIdx.y) * blockDim.x + threadIdx.x;
    const unsigned block = (blockIdx.z * gridDim.y + blockIdx.y) * gridDim.x + blockIdx.x;
    out[block * blockDim.x * blockDim.y * blockDim.z + thread] += 1 + static_cast<int>(threadIdx.y * 10 + blockIdx.z * 100);
}

__global__ void shuffles(int* out) {
    const int lane = static_cast<int>(threadIdx.x), mine = 100 + lane;
    int* to = out + 8 * lane;
    to[0] = __shfl_sync(~0u, mine, 5);
    to[1] = __shfl_sync(~0u, mine, 5, 8);
    to[2] = __shfl_xor_sync(~0u, mine, 3);
    to[3] = __shfl_down_sync(~0u, mine, 4);
    to[4] = __shfl_up_sync(~0u, mine, 2, 16);
    if (lane < 16) to[5] = __shfl_xor_sync(0xffff, mine, 1);
    else to[5] = __shfl_xor_sync(0xffff0000, mine, 2);
    to[6] = static_cast<int>(__shfl_xor_sync(~0u, static_cast<double>(mine), 16));
    to[7] = static_cast<int>(__shfl_xor_sync(~0u, make_float2(0, static_cast<float>(mine)), 1).y);
}

__global__ void votes(int* out) {
    const int lane = static_cast<int>(threadIdx.x);
    int* to = out + 10 * lane;
    to[0] = static_cast<int>(__ballot_sync(~0u, lane % 3 == 0));
    to[1] = __any_sync(~0u, lane == 7);
    to[2] = __any_sync(~0u, 0);
    to[3] = __all_sync(~0u, lane >= 0);
    to[4] = __all_sync(~0u, lane != 7);
    to[5] = __reduce_add_sync(~0u, lane - 16);
    to[6] = __reduce_min_sync(~0u, lane - 16);
    to[7] = static_cast<int>(__reduce_max_sync(~0u, static_cast<unsigned>(lane)));
    to[8] = static_cast<int>(__reduce_xor_sync(~0u, static_cast<unsigned>(lane) * 3));
    to[9] = static_cast<int>(__match_any_sync(~0u, lane / 8));
}

__global__ void block_votes(int* out) {
    const int thread = static_cast<int>(threadIdx.x);
    if (thread >= 70) return;  // ended threads take no part
    int* to = out + 4 * thread;
    to[0] = __syncthreads_count(thread % 2);
    to[1] = __syncthreads_or(thread == 69);
    to[2] = __syncthreads_and(thread < 70);
    to[3] = __syncthreads_and(thread != 3);
}

__global__ void integer_atomics(int* out, unsigned long long* wide) {
    atomicAdd(&out[0], 1);
    atomicMax(&out[1], static_cast<int>(threadIdx.x));
    atomicMin(&out[2], -static_cast<int>(threadIdx.x));
    atomicOr(&out[3], 1 << threadIdx.x % 8);
    atomicCAS(&out[4], 0, 7);
    atomicExch(&out[5], 9);
    atomicSub(&out[6], 2);
    atomicAdd(wide, 1ull << 40);
}

// out[lane * 12 ...]: x4, x4.trans, x2, x2.trans of 8x8 matrices whose element (i, j) of matrix m is 64 m + 8 i + j.
__global__ void matrices(uint32_t* out) {
    DYNAMIC_SHARED(uint16_t, tile);
    const unsigned lane = threadIdx.x;
    for (unsigned i = lane; i < 256; i += 32) tile[i] = static_cast<uint16_t>(i);
    __syncwarp();
    uint32_t a[4], b[4], c[2], d[2];
    ptx::ldmatrix_x4(a, tile + 8 * lane);
    ptx::ldmatrix_x4_trans(b, tile + 8 * lane);
    ptx::ldmatrix_x2(c, lane < 16 ? tile + 8 * lane : nullptr);
    ptx::ldmatrix_x2_trans(d, tile + 8 * (lane % 16));
    for (unsigned m = 0; m < 4; ++m) out[12 * lane + m] = a[m], out[12 * lane + 4 + m] = b[m];
    for (unsigned m = 0; m < 2; ++m) out[12 * lane + 8 + m] = c[m], out[12 * lane + 10 + m] = d[m];
}

__global__ void asynchronous_copies(float* out, const float* in) {
    DYNAMIC_SHARED(float, tile);
    const unsigned lane = threadIdx.x;
    ptx::cp_async_16(tile + 4 * lane, in + 4 * lane);
    ptx::cp_async_commit();
    ptx::cp_async_16_or_zero(tile + 128 + 4 * lane, in + 4 * lane, lane % 2 == 0);
    ptx::cp_async_commit();
    ptx::cp_async_wait<1>();
    for (unsigned i = 0; i < 4; ++i) out[4 * lane + i] = tile[4 * lane + i];
    out[256 + lane] = tile[128 + 4 * lane];  // too early
    ptx::cp_async_wait<0>();
    for (unsigned i = 0; i < 4; ++i) out[128 + 4 * lane + i] = tile[128 + 4 * lane + i];
}

// out[thread] = place in the order in which the threads of the block passed the barrier.
__global__ void order(int* out, int* counter) {
    __syncthreads();
    out[threadIdx.x] = atomicAdd(counter, 1);
}

}  // namespace

TEST_CASE("every thread of every block runs once, with its own place") {
    under_all_schedules([] {
        const DeviceArray<int> out(24 * 30, zero);
        run(places, dim3(2, 3, 4), dim3(5, 2, 3), out.data());
        for (int i = 0; i < 24 * 30; ++i) CHECK(out[i] == 1 + i % 10 / 5 * 10 + i / 30 / 6 * 100);
    });
}

TEST_CASE("shuffles") {
    under_all_schedules([] {
        const DeviceArray<int> out(32 * 8, zero);
        run(shuffles, dim3(1), dim3(32), out.data());
        for (int lane = 0; lane < 32; ++lane) {
            const std::vector<int> got(out.data() + 8 * lane, out.data() + 8 * lane + 8);
            CHECK(got == std::vector<int>{105, 100 + lane / 8 * 8 + 5, 100 + (lane ^ 3), 100 + (lane < 28 ? lane + 4 : lane),
                                          100 + (lane % 16 < 2 ? lane : lane - 2), 100 + (lane ^ (lane < 16 ? 1 : 2)), 100 + (lane ^ 16),
                                          100 + (lane ^ 1)});
        }
    });
}

TEST_CASE("votes, reductions and matches") {
    under_all_schedules([] {
        const DeviceArray<int> out(32 * 10, zero);
        run(votes, dim3(1), dim3(32), out.data());
        for (int lane = 0; lane < 32; ++lane) {
            const std::vector<int> got(out.data() + 10 * lane, out.data() + 10 * lane + 10);
            CHECK(got == std::vector<int>{0x49249249, 1, 0, 1, 0, -16, -16, 31, 32, static_cast<int>(0xffu << lane / 8 * 8)});
        }
    });
}

TEST_CASE("block votes; threads that have ended do not count") {
    under_all_schedules([] {
        const DeviceArray<int> out(70 * 4, zero);
        run(block_votes, dim3(1), dim3(96), out.data());
        for (int thread = 0; thread < 70; ++thread) {
            CHECK(std::vector<int>(out.data() + 4 * thread, out.data() + 4 * thread + 4) == std::vector<int>{35, 1, 1, 0});
        }
    });
}

TEST_CASE("integer atomics") {
    const DeviceArray<int> out(7, zero);
    const DeviceArray<unsigned long long> wide(1, zero);
    run(integer_atomics, dim3(3), dim3(64), out.data(), wide.data());
    CHECK(std::vector<int>(out.data(), out.data() + 7) == std::vector<int>{192, 63, -63, 255, 7, 9, -384});
    CHECK(wide[0] == 192ull << 40);
}

TEST_CASE("ldmatrix gives each lane its fragment") {
    const DeviceArray<uint32_t> out(32 * 12, zero);
    run(matrices, dim3(1), dim3(32), out.data());
    const auto pair = [](unsigned low, unsigned high) { return low | high << 16; };
    for (unsigned lane = 0; lane < 32; ++lane) {
        const unsigned g = lane / 4, t = lane % 4;
        for (unsigned m = 0; m < 4; ++m) {
            const unsigned straight = pair(64 * m + 8 * g + 2 * t, 64 * m + 8 * g + 2 * t + 1), transposed = pair(64 * m + 16 * t + g, 64 * m + 16 * t + 8 + g);
            CHECK(out[12 * lane + m] == straight);
            CHECK(out[12 * lane + 4 + m] == transposed);
            if (m < 2) CHECK(out[12 * lane + 8 + m] == straight);
            if (m < 2) CHECK(out[12 * lane + 10 + m] == transposed);
        }
    }
}

TEST_CASE("asynchronous copies land at the wait that covers them, and not before") {
    const DeviceArray<float> in(128, [](int64_t i) { return static_cast<float>(i); }), out(288, [](int64_t) { return -1.0f; });
    run(asynchronous_copies, dim3(1), dim3(32), out.data(), static_cast<const float*>(in.data()));
    for (int i = 0; i < 128; ++i) {
        CHECK(out[i] == static_cast<float>(i));
        CHECK(out[128 + i] == (i / 4 % 2 == 0 ? static_cast<float>(i) : 0.0f));
    }
    for (int i = 256; i < 288; ++i) CHECK(std::isnan(out[i]));
}

TEST_CASE("schedules differ, and each repeats itself with the same seed") {
    const auto order_of = [](Schedule schedule, uint64_t seed) {
        const emulation::Settings before = emulation::settings();
        emulation::configure({schedule, seed});
        const DeviceArray<int> out(128, zero), counter(1, zero);
        run(order, dim3(1), dim3(128), out.data(), counter.data());
        emulation::configure(before);
        return std::vector<int>(out.data(), out.data() + 128);
    };
    std::set<std::vector<int>> orders;
    for (const auto& [schedule, seed] : std::vector<std::tuple<Schedule, uint64_t>>{
             {Schedule::random, 1}, {Schedule::random, 2}, {Schedule::fifo, 1}, {Schedule::lifo, 1}, {Schedule::warp_priority, 1}, {Schedule::warp_priority, 2}}) {
        CHECK(order_of(schedule, seed) == order_of(schedule, seed));
        orders.insert(order_of(schedule, seed));
    }
    CHECK(orders.size() == 6);
}

TEST_CASE("intrinsics") {
    CHECK(__byte_perm(0x33221100, 0x77665544, 0x7410) == 0x77441100u);
    CHECK(__byte_perm(0x800000ff, 0, 0x8b80) == 0xffffffffu - 0x0000ff00u - 0x000000ffu + 0x0000ff00u + 0xffu);
    CHECK(__funnelshift_l(0x80000000u, 1u, 1) == 3u);
    CHECK(__funnelshift_r(0x1u, 0x3u, 1) == 0x80000000u);
    CHECK(__popc(0xf0f0u) == 8);
    CHECK(__ffs(8) == 4);
    CHECK(__clz(1) == 31);
    CHECK(std::abs(__expf(-3.5f) - std::exp(-3.5f)) < 1e-7f);
    CHECK(ptx::exp2_approx(-INFINITY) == 0.0f);
    CHECK(ptx::exp2_approx(-130.0f) == 0.0f);
    CHECK(max(NAN, 1.0f) == 1.0f);
    CHECK(__saturatef(NAN) == 0.0f);
    CHECK(rsqrtf(4.0f) == 0.5f);
}
