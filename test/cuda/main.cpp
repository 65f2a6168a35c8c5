// test/cuda/main.cpp   Runs the tests of test/cuda on the GPU of this machine; without one it says so and exits with 77.
#define CATCH_CONFIG_RUNNER
#include "test/catch.h"

#include <cstdio>

#include "kernels/cuda/runtime.h"

int main(int argc, char** argv) {
    const trifold::cuda::Gpu gpu = trifold::cuda::probe();
    if (gpu.state != trifold::cuda::GpuState::found) {
        std::fprintf(stderr, "gpu_tests: %s; nothing was tested\n", gpu.text.c_str());
        return 77;
    }
    std::printf("%s\n", gpu.text.c_str());
    return Catch::Session().run(argc, argv);
}
