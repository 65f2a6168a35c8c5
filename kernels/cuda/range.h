// kernels/cuda/range.h   What surrounds the calls of one operation: an NVTX range for profilers; in the emulator, its declared accesses.
#pragma once
#include <span>

#include "kernels/stream.h"

#if defined(TRIFOLD_EMULATION)
#include "test/emulation/cuda_runtime.h"
#else
#include <nvtx3/nvToolsExt.h>
#endif

namespace trifold::cuda {

inline void range_push(const char* name, [[maybe_unused]] std::span<const BufferAccess> accesses) {
#if defined(TRIFOLD_EMULATION)
    emulation::begin_operation(name, accesses);
#else
    nvtxRangePushA(name);
#endif
}
inline void range_pop() {
#if defined(TRIFOLD_EMULATION)
    emulation::end_operation();
#else
    nvtxRangePop();
#endif
}

}  // namespace trifold::cuda
