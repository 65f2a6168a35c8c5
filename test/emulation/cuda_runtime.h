// test/emulation/cuda_runtime.h   The emulated CUDA runtime: what the host side of kernels/cuda/ calls, without a GPU.
//
// Streams are lanes of the adversarial engine of kernels/stream.h: nothing runs before the host waits for it, then only what must,
// and the latest first; so a missing event wait shows in the results, and each pair of accesses that nothing orders is
// reported. Accesses come from the operation that is being issued (begin_operation), those of copies from their arguments.
// Device memory is host memory of exactly the size that was asked for, filled with NaN patterns.
#pragma once
#include <span>
#include <string>
#include <vector>

#include "kernels/stream.h"

namespace trifold::emulation {

// Launches between these two belong to one operation with these accesses.
void begin_operation(const char* name, std::span<const BufferAccess> accesses);
void end_operation();

// NVTX ranges of models: those that were opened so far, and how many are open now.
void begin_range(const char* name);
void end_range();
struct Ranges {
    std::vector<std::string> names;
    int open = 0;
};
const Ranges& ranges();

// One sentence for each pair of accesses that nothing orders, uses after free included.
std::vector<std::string> unordered_accesses();
// Copies that may have held the host on a real machine, by the name of their operation: from and to host memory that is not page-locked, while
// the stream had work left. A few bytes to the device travel with the call.
const std::vector<std::string>& holding_copies();
// Bytes of device memory that were allocated and not freed.
int64_t device_bytes();

}  // namespace trifold::emulation
