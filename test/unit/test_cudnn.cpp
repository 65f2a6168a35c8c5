// test/unit/test_cudnn.cpp   cuDNN's attention without a GPU: the library makes, and compiles, the plans of our graphs for GPUs that are described to it.
#include "test/catch.h"

#include <dlfcn.h>
#include <fmt/format.h>

#include <cstdio>

#include "kernels/cuda/cudnn_attention.h"
#include "test/unit/problems.h"

using namespace trifold;

namespace {

struct Gpu {
    const char* name;
    int compute_capability, sms, shared_kib, l2_mib;
    std::string description() const {
        return fmt::format(
            R"({{"deviceName":"{}","deviceVer":{},"multiProcessorCount":{},"maxSharedMemoryPerBlockOptin":{},"l2CacheSize":{},"cudaDeviceId":0,"driverVer":13000,)"
            R"("isTccDriver":0,"maxCtasPerSM":32,"maxRegistersPerSM":65536,"maxSharedMemoryPerBlock":49152,"maxThreadsPerBlock":1024,"maxThreadsPerSM":2048,)"
            R"("memClockRateKHz":3000000,"pciDeviceId":0,"regsPerBlock":65536,"reservedSharedMemoryPerBlock":1024,"smClockRateKHz":1900000,"supportCoopLaunch":1,)"
            R"("totalGlobalMem":85899345920,"warpSize":32,"maxGridSize":[2147483647,65535,65535],"maxBlockSize":[1024,1024,64]}})",
            name, 10 * compute_capability, sms, shared_kib * 1024, l2_mib << 20);
    }
};
constexpr Gpu a100{"A100", 80, 108, 163, 40}, l40s{"L40S", 89, 142, 99, 96}, h200{"H200", 90, 132, 227, 60}, b200{"B200", 100, 148, 227, 126};

struct Sizes {
    int64_t B, T, H, K, D, window;
};
template <class Args> Args arguments(const Sizes& s, bool repeatable) {
    Args a;
    const int64_t width = (s.H + 2 * s.K) * s.D;
    a.q_NHD = Tensor{nullptr, DType::bf16, s.B * s.T * width};
    a.B = s.B, a.H = s.H, a.K = s.K, a.D = s.D, a.window = s.window, a.scale = 0.125f;
    a.q_stride = a.kv_stride = width, a.q_batch_stride = a.kv_batch_stride = s.T * width;
    a.by = {AttentionProvider::cudnn, repeatable};
    return a;
}
int64_t forward_workspace(const Gpu& gpu, const Sizes& s) {
    auto a = arguments<AttentionForward>(s, true);
    a.Tq = a.Tk = s.T;
    return cuda::cudnn_attention_workspace_on(gpu.description(), gpu.compute_capability, a);
}
int64_t backward_workspace(const Gpu& gpu, const Sizes& s, bool repeatable) {
    auto a = arguments<AttentionBackward>(s, repeatable);
    a.T = s.T;
    return cuda::cudnn_attention_workspace_on(gpu.description(), gpu.compute_capability, a);
}

// The fake driver must be the first libcuda.so.1 of this process. False, and said, where there is no cuDNN.
bool ready() {
    static void* const driver = dlopen(TRIFOLD_FAKE_DRIVER, RTLD_NOW | RTLD_GLOBAL);
    REQUIRE(driver);
    const std::string problem = cuda::cudnn_problem();
    if (!problem.empty()) std::printf("nothing tested: %s\n", problem.c_str());
    return problem.empty();
}

}  // namespace

TEST_CASE("cuDNN makes plans for the attention of our models", "[cudnn]") {
    if (!ready()) return;
    const Sizes gpt2{4, 1024, 12, 12, 64, 0}, llama{1, 2048, 32, 8, 128, 0}, windowed{2, 515, 6, 2, 96, 100}, short_one{3, 9, 2, 1, 64, 0};
    for (const Gpu& gpu : {a100, h200, b200})
        for (const Sizes& s : {gpt2, llama, windowed, short_one}) {
            CAPTURE(gpu.name, s.T, s.H, s.K, s.D, s.window);
            const int64_t elems = s.B * s.T * s.H * s.D;
            CHECK(forward_workspace(gpu, s) <= 4096);
            // An fp32 dQ, of grouped heads dK and dV for each query head as well, and a few numbers a row; nothing that grows with T squared,
            // but for dP in bf16 where gradients repeat.
            const int64_t linear = 4 * elems * 3 + 1024 * s.B * s.H * (s.T + 128), padded = (s.T + 127) / 128 * 128;
            CHECK(backward_workspace(gpu, s, false) <= linear);
            CHECK(backward_workspace(gpu, s, true) <= linear + 2 * s.B * s.H * padded * padded);
        }
}

TEST_CASE("repeatable gradients of cuDNN cost memory that grows with the square of the sequence", "[cudnn]") {
    if (!ready()) return;
    const Sizes s{1, 4096, 32, 8, 128, 0};
    const int64_t square = 2 * s.B * s.H * s.T * s.T;
    for (const Gpu& gpu : {a100, l40s, h200}) CHECK(backward_workspace(gpu, s, true) >= square);
    CHECK(backward_workspace(b200, s, true) < square / 4);
}

TEST_CASE("what cuDNN cannot do is one sentence", "[cudnn]") {
    if (!ready()) return;
    const std::string said = problem_of([] { forward_workspace(h200, {1, 64, 2, 2, 65, 0}); }, Exit::usage);
    CHECK(said.find("cuDNN's attention: ") == 0);
    CHECK(said.ends_with("; --run.attention=own computes with our own"));
    CHECK(said.find('\n') == std::string::npos);
    auto a = arguments<AttentionForward>({1, 64, 2, 2, 64, 0}, true);
    a.Tq = a.Tk = 64;
    CHECK_THROWS_AS(cuda::cudnn_attention_workspace_on("{}", 90, a), Problem);
}
