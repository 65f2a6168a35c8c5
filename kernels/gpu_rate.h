// kernels/gpu_rate.h   How fast the GPU multiplies matrices: the peak that MFU refers to where we know no data sheet.
#pragma once
#include "kernels/stream.h"
#include "kernels/tensor.h"

namespace trifold {

// FLOP/s of linear_forward on [4096, 4096] x [4096, 4096], fp32 or bf16, on that stream. Takes a few tenths of a second and
// 0.2 GiB of memory that is free again afterwards.
double measure_gpu_rate(Stream&, DType);

}  // namespace trifold
