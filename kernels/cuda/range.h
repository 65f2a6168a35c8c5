// kernels/cuda/range.h   NVTX ranges for profilers: one round the calls of each operation, which tells the emulator what the operation
// may touch, and those that models open round their layers.
#pragma once
#include <span>

#include "kernels/stream.h"

#if defined(TRIFOLD_EMULATION)
#include "test/emulation/cuda_runtime.h"
#else
#include <nvtx3/nvToolsExt.h>
#endif

namespace trifold::cuda {

inline void operation_begin(const char* name, [[maybe_unused]] std::span<const BufferAccess> accesses) {
#if defined(TRIFOLD_EMULATION)
    emulation::begin_operation(name, accesses);
#else
    nvtxRangePushA(name);
#endif
}
inline void operation_end() {
#if defined(TRIFOLD_EMULATION)
    emulation::end_operation();
#else
    nvtxRangePop();
#endif
}

inline void range_begin(const char* name) {
#if defined(TRIFOLD_EMULATION)
    emulation::begin_range(name);
#else
    nvtxRangePushA(name);
#endif
}
inline void range_end() {
#if defined(TRIFOLD_EMULATION)
    emulation::end_range();
#else
    nvtxRangePop();
#endif
}

}  // namespace trifold::cuda
