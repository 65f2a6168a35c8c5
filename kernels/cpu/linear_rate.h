// kernels/cpu/linear_rate.h   How fast this machine multiplies matrices: the peak that MFU refers to on the CPU.
#pragma once
#include "kernels/tensor.h"

namespace trifold {

// FLOP/s of a [2048, 1024] x [1024, 1024] product of fp32 or bf16 inputs with the present number of threads: by oneDNN
// (0 where it has no such product on this processor) and by our own kernels.
struct MatmulRates {
    double onednn = 0, own = 0;
};
MatmulRates measure_matmul_rates(DType type);

// The better of the two. Takes 0.2 to 0.3 s.
double measure_matmul_rate(DType type);

}  // namespace trifold
