// test/emulation/test_emulator_checks.cpp   Misuse that the emulator or a sanitizer must name, each in a kernel of a few lines.
#include "test/catch.h"

#include <cmath>
#include <string>
#include <vector>

#include "kernels/cuda/launch.h"
#include "kernels/cuda/ptx.h"
#include "test/emulation/child.h"
#include "test/emulation/device_array.h"

using namespace trifold;
using namespace trifold::test;
namespace ptx = cuda::ptx;

namespace {

template <class... P>
Outcome outcome_of(void (*kernel)(P...), unsigned threads, P... args) {
    return in_child([&] {
        cuda::launch(nullptr, {.blocks = dim3(1), .threads = dim3(threads), .shared_bytes = 1024}, kernel, args...);
        cudaDeviceSynchronize();
        return 0;
    });
}

// ---------------------------------------------------------------- barriers and collectives

__global__ void barrier_in_both_branches() {
    if (threadIdx.x < 40) __syncthreads();
    else __syncthreads();
}
__global__ void barrier_and_warp_barrier() {
    if (threadIdx.x < 16) __syncthreads();
    else __syncwarp();
}
__global__ void lane_not_in_mask() { __syncwarp(0x0000fffe); }
__global__ void different_masks() { __syncwarp(threadIdx.x < 16 ? 0xffffffffu : 0xffff0001u | 1u << threadIdx.x); }
__global__ void different_collectives(int* out) {
    if (threadIdx.x % 2) out[threadIdx.x] = __shfl_xor_sync(~0u, 1, 1);
    else out[threadIdx.x] = __shfl_xor_sync(~0u, 1, 2);
}
__global__ void lane_has_ended() {
    if (threadIdx.x == 3) return;
    __syncwarp();
}
__global__ void lane_outside_mask(int* out) {
    if (threadIdx.x < 16) out[threadIdx.x] = __shfl_sync(0xffff, 1, 20);
}
__global__ void incomplete_warp(int* out) { out[threadIdx.x] = __shfl_xor_sync(~0u, 1, 1); }

// ---------------------------------------------------------------- asynchronous copies and matrices

__global__ void copy_in_flight_at_the_end(const float* in) {
    DYNAMIC_SHARED(float, tile);
    if (threadIdx.x == 5) ptx::cp_async_16(tile, in);
    ptx::cp_async_commit();
}
__global__ void misaligned_copy(const float* in) {
    DYNAMIC_SHARED(float, tile);
    ptx::cp_async_16(tile, in + 1);
}
__global__ void copy_past_the_end() {
    DYNAMIC_SHARED(float, tile);
    ptx::cp_async_16_or_zero(tile + 256, nullptr, false);
    ptx::cp_async_commit();
    ptx::cp_async_wait<0>();
}
__global__ void misaligned_matrix(uint32_t* out) {
    DYNAMIC_SHARED(uint32_t, tile);
    uint32_t r[4];
    ptx::ldmatrix_x4(r, tile + threadIdx.x);
    out[threadIdx.x] = r[0];
}

// ---------------------------------------------------------------- memory

__global__ void static_overflow(float* out, int n) {
    __shared__ float a[32];
    a[threadIdx.x + n] = 1.0f;
    out[threadIdx.x] = a[threadIdx.x + n];
}
__global__ void dynamic_overflow(float* out, int n) {
    DYNAMIC_SHARED(float, a);
    a[threadIdx.x + n] = 1.0f;
    out[threadIdx.x] = a[threadIdx.x + n];
}
__global__ void device_overflow(float* out, int n) { out[threadIdx.x + n] = 1.0f; }
__global__ void misaligned_vector(float* out, int n) { *reinterpret_cast<float4*>(out + n) = make_float4(1, 2, 3, 4); }
__global__ void uninitialised(float* out, int) {
    __shared__ float a[32];
    DYNAMIC_SHARED(float, b);
    out[threadIdx.x] = a[threadIdx.x];
    out[threadIdx.x + 32] = b[threadIdx.x];
    a[threadIdx.x] = b[threadIdx.x] = 1.0f;  // does not help the next block
}

}  // namespace

TEST_CASE("barriers and collectives that do not match end the test with both places") {
    const DeviceArray<int> out(64, [](int64_t) { return 0; });
    const auto dies = [](const Outcome& o, std::initializer_list<const char*> texts) {
        INFO(o.errors);
        CHECK(o.exit_code == emulation::death_exit_code);
        for (const char* text : texts) CHECK(o.says(text));
    };
    const std::string here = "test_emulator_checks.cpp:";
    dies(outcome_of(barrier_in_both_branches, 64), {"different barriers", "__syncthreads at", here.c_str(), "in barrier_in_both_branches, block (0,0,0), thread ("});
    dies(outcome_of(barrier_and_warp_barrier, 64), {"deadlock", "16 threads (first: number 0) wait in __syncthreads at", "16 threads (first: number 16) wait in __syncwarp at", here.c_str()});
    dies(outcome_of(lane_not_in_mask, 32), {"is not in its own mask 0x0000fffe", "__syncwarp at", here.c_str()});
    dies(outcome_of(different_masks, 32), {"different masks", "0xffffffff", here.c_str()});
    dies(outcome_of(different_collectives, 32, out.data()), {"different collectives", "__shfl_xor_sync at", here.c_str()});
    dies(outcome_of(lane_has_ended, 32), {"end", "__syncwarp at", here.c_str()});
    dies(outcome_of(lane_outside_mask, 32, out.data()), {"lane 20 is read but not in the mask 0x0000ffff", "__shfl_sync at", here.c_str()});
    dies(outcome_of(incomplete_warp, 16, out.data()), {"names lanes that have ended: 0xffff0000", here.c_str()});
}

TEST_CASE("misused copies and matrix loads end the test") {
    const DeviceArray<float> in(64, [](int64_t i) { return static_cast<float>(i); });
    const DeviceArray<uint32_t> out(64, [](int64_t) { return 0u; });
    const auto dies = [](const Outcome& o, const char* text) {
        INFO(o.errors);
        CHECK(o.exit_code == emulation::death_exit_code);
        CHECK(o.says(text));
    };
    const float* from = in.data();
    dies(outcome_of(copy_in_flight_at_the_end, 32, from), "cp.async copies that it has not waited for");
    dies(outcome_of(misaligned_copy, 32, from), "misaligned address (cp.async at");
    if (!address_sanitizer) dies(outcome_of(copy_past_the_end, 32), "not shared memory of this block (cp.async at");
    dies(outcome_of(misaligned_matrix, 32, out.data()), "misaligned row (ldmatrix.x4 at");
}

TEST_CASE("limits of a launch are checked") {
    const auto launched = [](dim3 blocks, dim3 threads, size_t bytes) {
        return in_child([=] {
            cuda::launch(nullptr, {.blocks = blocks, .threads = threads, .shared_bytes = bytes}, lane_not_in_mask);
            return 0;
        });
    };
    CHECK(launched(dim3(1), dim3(1025), 0).says("lane_not_in_mask cannot be launched with (1,1,1) blocks of (1025,1,1) threads"));
    CHECK(launched(dim3(1), dim3(32, 0), 0).says("nothing may be empty"));
    CHECK(launched(dim3(1, 65536), dim3(32), 0).says("65535 in y"));
    CHECK(launched(dim3(1), dim3(32), 300000).says("300000 bytes of shared memory"));
}

TEST_CASE("accesses out of bounds and misaligned ones are caught") {
    const DeviceArray<float> out(32, [](int64_t) { return 0.0f; });
    if (address_sanitizer) {
        const auto reported = [&](void (*kernel)(float*, int), int n, const char* text) {
            const Outcome o = outcome_of(kernel, 32, out.data(), n);
            INFO(o.errors);
            CHECK(o.exit_code != 0);
            CHECK(o.says(text));
            CHECK(o.says("test_emulator_checks.cpp:"));
        };
        CHECK(outcome_of(static_overflow, 32, out.data(), 0).exit_code == 0);
        reported(static_overflow, 1, "index 32 out of bounds");
        reported(dynamic_overflow, 225, "heap-buffer-overflow");
        reported(device_overflow, 1, "heap-buffer-overflow");
        reported(misaligned_vector, 1, "misaligned address");
    }
    if (emulation::detects_races()) {
        const Outcome o = outcome_of(misaligned_vector, 1, out.data(), 1);
        CHECK((o.exit_code == emulation::race_exit_code || o.exit_code == 128 + SIGSEGV));
        CHECK((o.says("misaligned access") || o.exit_code == 128 + SIGSEGV));
    }
}

TEST_CASE("shared memory holds NaN when a block begins") {
    if (address_sanitizer) return;
    const DeviceArray<float> out(64, [](int64_t) { return 0.0f; });
    cuda::launch(nullptr, {.blocks = dim3(1), .threads = dim3(32), .shared_bytes = 128}, uninitialised, out.data(), 0);
    cudaDeviceSynchronize();
    for (int i = 0; i < 64; ++i) CHECK(std::isnan(out[i]));
}
