// test/emulation/cudnn_attention.h   The stand-in for kernels/cuda/cudnn_attention.cpp in emulated builds: the CPU's attention, queued on the emulated
// stream, with the workspace that cuDNN asks for on Hopper. Absent unless EMULATION_CUDNN=1 or a test says otherwise.
#pragma once
#include <cstdint>

namespace trifold::emulation {

enum class CudnnFault : uint8_t { none, window, scale, key_gradient, refuses };  // what it does wrong
struct Cudnn {
    bool present = false;
    CudnnFault fault = CudnnFault::none;
    int64_t forward_calls = 0, backward_calls = 0;
};
Cudnn& cudnn();

}  // namespace trifold::emulation
