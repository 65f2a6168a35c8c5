// test/cuda/with_cudnn.h   Tests of cuDNN's attention: the real library where this GPU's machine has it, its stand-in in the emulator.
#pragma once
#include <cstdio>
#include <string>

#include "kernels/cuda/cudnn_attention.h"
#if defined(TRIFOLD_EMULATION)
#include "test/emulation/cudnn_attention.h"
#endif

namespace trifold::test {

// While one of these lives, cuDNN is there if it can be; if not, that is said.
class WithCudnn {
public:
    WithCudnn() {
#if defined(TRIFOLD_EMULATION)
        emulation::cudnn().present = true;
#endif
        if (!here()) std::printf("not tested: %s\n", cuda::cudnn_problem().c_str());
    }
    ~WithCudnn() {
#if defined(TRIFOLD_EMULATION)
        emulation::cudnn() = before_;
#endif
    }
    WithCudnn(const WithCudnn&) = delete;
    bool here() const { return cuda::cudnn_problem().empty(); }

private:
#if defined(TRIFOLD_EMULATION)
    const emulation::Cudnn before_ = emulation::cudnn();
#endif
};

}  // namespace trifold::test
