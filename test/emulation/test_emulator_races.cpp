// test/emulation/test_emulator_races.cpp   What the race detector must report, and what it must not; nearly empty in the other builds.
#include "test/catch.h"

#include <array>
#include <string>

#include "kernels/cuda/launch.h"
#include "kernels/cuda/ptx.h"
#include "test/emulation/child.h"
#include "test/emulation/device_array.h"

using namespace trifold;
using namespace trifold::test;
namespace ptx = cuda::ptx;

namespace {

template <class... P>
Outcome outcome_of(dim3 blocks, dim3 threads, void (*kernel)(P...), P... args) {
    return in_child([&] {
        cuda::launch(nullptr, {.blocks = blocks, .threads = threads, .shared_bytes = 8192}, kernel, args...);
        cudaDeviceSynchronize();
        return 0;
    });
}

// ---------------------------------------------------------------- races

__global__ void two_blocks_write(int* out) { out[threadIdx.x] = static_cast<int>(blockIdx.x); }
__global__ void block_reads_what_another_writes(int* out) {
    if (threadIdx.x == 0) out[blockIdx.x] = out[gridDim.x - 1 - blockIdx.x] + 1;
}
__global__ void last_reader_of_many(int* out, int writer) {
    __shared__ int word;
    if (threadIdx.x == 0) word = 1;
    __syncthreads();
    out[threadIdx.x] = word;
    if (threadIdx.x < 32) __syncwarp();  // orders the first warp's reads, not the others'
    if (static_cast<int>(threadIdx.x) == writer) word = 2;
}
__global__ void sync_of_other_lanes(int* out) {
    __shared__ int words[32];
    const unsigned lane = threadIdx.x, low = 0x0000ffff;
    words[lane] = 1;
    __syncwarp(lane < 16 ? low : ~low);
    out[lane] = words[31 - lane];
}
__global__ void shuffles_do_not_order(int* out) {
    __shared__ int words[32];
    words[threadIdx.x] = 1;
    const int zero = __shfl_xor_sync(~0u, 0, 1);
    out[threadIdx.x] = words[31 - threadIdx.x] + zero;
}
struct Wide {
    std::array<int, 12> at;  // 48 bytes: compilers copy it with memcpy
};
__global__ void wide_copy(Wide* out) {
    DYNAMIC_SHARED(Wide, wide);
    wide[threadIdx.x] = out[threadIdx.x];
    out[threadIdx.x] = wide[blockDim.x - 1 - threadIdx.x];
}
__global__ void plain_read_of_an_atomic(int* out) {
    __shared__ int count;
    if (threadIdx.x == 0) count = 0;
    __syncthreads();
    atomicAdd(&count, 1);
    out[threadIdx.x] = count;
}
__global__ void copy_over_what_others_read(const int* in, int* out) {
    __shared__ __align__(16) int words[4];
    if (threadIdx.x < 4) words[threadIdx.x] = 0;
    __syncthreads();
    out[threadIdx.x] = words[threadIdx.x % 4];
    if (threadIdx.x == 40) ptx::cp_async_16(words, in);
    ptx::cp_async_commit();
    ptx::cp_async_wait<0>();
}

// ---------------------------------------------------------------- no races

__global__ void atomics(int* out) {
    __shared__ int count;
    if (threadIdx.x == 0) count = 0;
    __syncthreads();
    atomicAdd(&count, 1);
    __syncthreads();
    if (threadIdx.x == 0) atomicMax(out, count);
}
__global__ void halves_and_bytes(unsigned short* halves, unsigned char* bytes) {
    halves[blockIdx.x * blockDim.x + threadIdx.x] = 1;
    bytes[blockIdx.x * blockDim.x + threadIdx.x] = 1;
}
__global__ void chain_of_warp_barriers(int* out) {
    __shared__ int word;
    const unsigned lane = threadIdx.x;
    if (lane == 0) word = 1;
    if (lane < 2) __syncwarp(0x3);
    if (lane == 1 || lane == 2) __syncwarp(0x6);
    if (lane == 2) out[0] = word;  // after lane 0, by way of lane 1
}
__global__ void everybody_reads(int* out, const int* in) { out[blockIdx.x * blockDim.x + threadIdx.x] = in[0]; }

// ---------------------------------------------------------------- blocks that take turns

enum class Turns { right, no_acquire, no_barrier_before_release, no_barrier_after_acquire };

// Every block adds to the same words, in the order of its tickets.
template <Turns kind>
__global__ void take_turns(int* ticket, int* turns, int* sums) {
    __shared__ int turn;
    if (threadIdx.x == 0) {
        turn = atomicAdd(ticket, 1);
        while (kind != Turns::no_acquire && ptx::load_acquire(turns) < turn) {
        }
    }
    if constexpr (kind != Turns::no_barrier_after_acquire) __syncthreads();
    sums[threadIdx.x] += 1;
    if constexpr (kind != Turns::no_barrier_before_release) __syncthreads();
    if (threadIdx.x == 0) ptx::store_release(turns, turn + 1);
}
__global__ void wait_for_ever(int* turns) {
    while (ptx::load_acquire(turns) < 1) {
    }
}

// ---------------------------------------------------------------- what operations declare

__global__ void copy_one(float* out, const float* in) { out[0] = in[0]; }

}  // namespace

TEST_CASE("races that a schedule cannot show are reported with both places") {
    if (!emulation::detects_races()) return;
    const DeviceArray<int> out(1024, [](int64_t) { return 0; });
    const DeviceArray<Wide> wide(32, [](int64_t) { return Wide{}; });
    const auto races = [](const Outcome& o, std::initializer_list<const char*> texts) {
        INFO(*texts.begin() << ": " << o.errors);
        CHECK(o.exit_code == emulation::race_exit_code);
        CHECK(o.says("test_emulator_races.cpp:"));
        for (const char* text : texts) CHECK(o.says(text));
    };
    races(outcome_of(2, 32, two_blocks_write, out.data()), {"race in two_blocks_write", "writes a device buffer (+0x", "another block writes it"});
    races(outcome_of(2, 32, block_reads_what_another_writes, out.data()), {"another block"});
    races(outcome_of(1, 1024, last_reader_of_many, out.data(), 0), {"writes shared memory", "reads it; no barrier"});
    races(outcome_of(1, 1024, last_reader_of_many, out.data(), 1023), {"writes shared memory"});
    races(outcome_of(1, 32, sync_of_other_lanes, out.data()), {"race in sync_of_other_lanes"});
    races(outcome_of(1, 32, shuffles_do_not_order, out.data()), {"race in shuffles_do_not_order"});
    races(outcome_of(1, 32, wide_copy, wide.data()), {"race in wide_copy"});
    races(outcome_of(1, 64, plain_read_of_an_atomic, out.data()), {"changes"});
    races(outcome_of(1, 64, copy_over_what_others_read, static_cast<const int*>(out.data()), out.data() + 64), {"cp.async at"});
}

TEST_CASE("ordered accesses are not reported") {
    if (!emulation::detects_races()) return;
    const DeviceArray<int> out(1024, [](int64_t) { return 0; });
    const DeviceArray<unsigned short> halves(64, [](int64_t) { return 0; });
    const DeviceArray<unsigned char> bytes(64, [](int64_t) { return 0; });
    const auto clean = [](const Outcome& o) {
        INFO(o.errors);
        CHECK(o.exit_code == 0);
        CHECK(o.errors.empty());
    };
    clean(outcome_of(3, 64, atomics, out.data()));
    clean(outcome_of(2, 32, halves_and_bytes, halves.data(), bytes.data()));
    clean(outcome_of(1, 32, chain_of_warp_barriers, out.data()));
    clean(outcome_of(2, 64, everybody_reads, out.data() + 1, static_cast<const int*>(out.data())));
    // Launches of one stream are ordered; the stream engine checks the others.
    clean(in_child([&] {
        for (int i = 0; i < 2; ++i) cuda::launch(nullptr, {.blocks = dim3(1), .threads = dim3(32)}, two_blocks_write, out.data());
        cudaDeviceSynchronize();
        return 0;
    }));
}

TEST_CASE("blocks are ordered by a release that an acquire reads, with barriers round them") {
    const DeviceArray<int> words(100, [](int64_t) { return 0; });
    const auto outcome = [&](void (*kernel)(int*, int*, int*)) { return outcome_of(5, 64, kernel, words.data(), words.data() + 1, words.data() + 32); };
    const auto reported = [&](const Outcome& o) {
        INFO(o.errors);
        CHECK(o.exit_code == (emulation::detects_races() ? emulation::race_exit_code : 0));
        if (emulation::detects_races()) CHECK(o.says("race in take_turns<"));
    };
    const Outcome right = outcome(take_turns<Turns::right>);
    INFO(right.errors);
    CHECK(right.exit_code == 0);
    reported(outcome(take_turns<Turns::no_acquire>));
    reported(outcome(take_turns<Turns::no_barrier_before_release>));
    reported(outcome(take_turns<Turns::no_barrier_after_acquire>));
    CHECK(outcome_of(1, 1, wait_for_ever, words.data() + 1).says("ld.acquire at"));
}

TEST_CASE("kernels touch only what their operation declared") {
    if (!emulation::detects_races()) return;
    const DeviceArray<float> in(8, [](int64_t) { return 1.0f; }), out(8, [](int64_t) { return 0.0f; });
    const auto bytes = [](const DeviceArray<float>& a, int64_t n, Access access) {
        return BufferAccess{reinterpret_cast<const std::byte*>(a.data()), n, access};
    };
    const auto outcome = [&](std::vector<BufferAccess> declared) {
        return in_child([&] {
            emulation::declare_accesses(declared);
            cuda::launch(nullptr, {.blocks = dim3(1), .threads = dim3(1)}, copy_one, out.data(), static_cast<const float*>(in.data()));
            emulation::declare_accesses({});
            cudaDeviceSynchronize();
            return 0;
        });
    };
    CHECK(outcome({bytes(in, 4, Access::read), bytes(out, 4, Access::write)}).exit_code == 0);
    CHECK(outcome({bytes(in, 32, Access::read_write), bytes(out, 32, Access::read_write)}).exit_code == 0);
    CHECK(outcome({}).exit_code == 0);
    const Outcome read = outcome({bytes(out, 4, Access::write)}), write = outcome({bytes(in, 4, Access::read), bytes(out, 4, Access::read)}),
                  beyond = outcome({bytes(in, 3, Access::read), bytes(out, 4, Access::write)});
    INFO(read.errors << write.errors << beyond.errors);
    CHECK(read.exit_code == emulation::race_exit_code);
    CHECK(read.says("undeclared read in copy_one"));
    CHECK(write.exit_code == emulation::race_exit_code);
    CHECK(write.says("undeclared write in copy_one"));
    CHECK(beyond.exit_code == emulation::race_exit_code);
}
