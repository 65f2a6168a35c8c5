// kernels/cuda/check.h   Every call of the CUDA runtime is checked; a failure names the call and the place.
#pragma once
#include <cuda_runtime_api.h>

namespace trifold::cuda {

// Throws Problem(Exit::fault) with the call, its error and what to do next; nothing happens on cudaSuccess.
void check(cudaError_t error, const char* call, const char* file, int line);

}  // namespace trifold::cuda

#define CUDA_CHECK(call) ::trifold::cuda::check((call), #call, __FILE__, __LINE__)
