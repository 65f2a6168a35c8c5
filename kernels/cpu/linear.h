// kernels/cpu/linear.h   Memory of the CPU's linear layers outside the arena: packed blocks of one product (gemm.h).
#pragma once
#include <cstdint>

namespace trifold {

// Bytes that linear layers need for the present number of OpenMP threads: the planner's number. Nothing is allocated by
// asking.
int64_t linear_scratch_bytes();
// Allocates them now; otherwise the first product does, and again when there are more threads than ever before.
void linear_prepare();

}  // namespace trifold
