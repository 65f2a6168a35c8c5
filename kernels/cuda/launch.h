// kernels/cuda/launch.h   The one seam between a CUDA compiler and the emulator: how a kernel starts, and how calls are checked.
//
// Files of kernels/cuda/ are ordinary CUDA. Under nvcc they are compiled for GPUs; the test suite compiles the same files with
// a C++ compiler, TRIFOLD_EMULATION defined, against test/emulation/cuda_language.h, which executes them on the CPU.
#pragma once
#include <utility>

#if defined(TRIFOLD_EMULATION)
#include "test/emulation/cuda_language.h"
#else
#include <cuda_runtime.h>
#endif

#include "kernels/cuda/check.h"

// Dynamic shared memory: DYNAMIC_SHARED(float, tile) declares `float* tile`, aligned to 128 bytes.
#if !defined(TRIFOLD_EMULATION)
#define DYNAMIC_SHARED(T, name)                                      \
    extern __shared__ __align__(128) unsigned char dynamic_shared[]; \
    T* const name = reinterpret_cast<T*>(dynamic_shared)
#endif

namespace trifold::cuda {

struct Grid {
    dim3 blocks, threads;
    size_t shared_bytes = 0;
};

// Puts `kernel` on the stream. More than 48 KiB of shared memory, static ones included (at most 8 here), are asked for first.
template <class... P, class... A>
void launch(cudaStream_t stream, const Grid& grid, void (*kernel)(P...), A&&... args) {
#if defined(TRIFOLD_EMULATION)
    emulation::launch(stream, grid.blocks, grid.threads, grid.shared_bytes, kernel, P(std::forward<A>(args))...);
#else
    if (grid.shared_bytes > 40 * 1024)
        CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(grid.shared_bytes)));
    cudaLaunchConfig_t config{};
    config.gridDim = grid.blocks;
    config.blockDim = grid.threads;
    config.dynamicSmemBytes = grid.shared_bytes;
    config.stream = stream;
    CUDA_CHECK(cudaLaunchKernelEx(&config, kernel, P(std::forward<A>(args))...));
#endif
}

}  // namespace trifold::cuda
