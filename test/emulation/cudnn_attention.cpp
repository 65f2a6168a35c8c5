#include "test/emulation/cudnn_attention.h"

#include <cstdlib>
#include <cstring>
#include <memory>
#include <new>
#include <string>

#include "kernels/cuda/cudnn_attention.h"
#include "test/emulation/emulator.h"

namespace trifold::emulation {

Cudnn& cudnn() {
    static Cudnn instance = [] {
        const char* wanted = std::getenv("EMULATION_CUDNN");
        return Cudnn{.present = wanted && std::string(wanted) == "1"};
    }();
    return instance;
}

namespace {

void require_presence() {
    if (!cudnn().present) throw Problem(Exit::usage, "cuDNN's attention: " + cuda::cudnn_problem() + "; --run.attention=own computes with our own");
    if (cudnn().fault == CudnnFault::refuses) throw Problem(Exit::usage, "cuDNN's attention: no engine for this; --run.attention=own computes with our own");
}

template <class Args> Args with_fault(Args a) {
    a.by = {};
    if (cudnn().fault == CudnnFault::window) ++a.window;
    if (cudnn().fault == CudnnFault::scale) a.scale *= 1.02f;
    return a;
}

// What the library would leave there, and nothing that may be relied upon.
void spoil(const Tensor& workspace) { std::memset(workspace.data, 0xff, static_cast<size_t>(workspace.bytes())); }

template <class Args> void run_on_cpu(void (*operation)(const Args&), Args a) {
    spoil(a.workspace);
    const int64_t bytes = cpu::attention_workspace(a);
    struct Free {
        void operator()(std::byte* p) const { ::operator delete[](p, std::align_val_t{64}); }
    };
    const std::unique_ptr<std::byte[], Free> scratch(new (std::align_val_t{64}) std::byte[static_cast<size_t>(bytes)]);
    a.workspace = Tensor{scratch.get(), DType::u8, bytes};
    operation(a);
}

}  // namespace
}  // namespace trifold::emulation

namespace trifold::cuda {

using namespace emulation;

std::string cudnn_problem() { return cudnn().present ? "" : "the emulated cuDNN is off (EMULATION_CUDNN=1 turns it on)"; }
std::string cudnn_version() { return cudnn().present ? "emulated" : ""; }

int64_t cudnn_attention_workspace(const AttentionForward&) { return require_presence(), 256; }
int64_t cudnn_attention_workspace(const AttentionBackward& a) {
    require_presence();
    return a.by.repeatable ? 2 * a.B * a.H * a.T * a.T : 4 * a.B * a.T * a.H * a.D;
}

void cudnn_attention_forward(CUstream_st* stream, const AttentionForward& a) {
    require_presence();
    TRIFOLD_ASSERT(a.lse_BHT && a.workspace.bytes() >= cudnn_attention_workspace(a));
    ++cudnn().forward_calls;
    submit(stream, "cudnn attention forward", [args = with_fault(a)] { run_on_cpu(cpu::attention_forward, args); });
}
void cudnn_attention_backward(CUstream_st* stream, const AttentionBackward& a) {
    require_presence();
    TRIFOLD_ASSERT(a.workspace.bytes() >= cudnn_attention_workspace(a));
    ++cudnn().backward_calls;
    submit(stream, "cudnn attention backward", [args = with_fault(a), fault = cudnn().fault] {
        run_on_cpu(cpu::attention_backward, args);
        if (fault == CudnnFault::key_gradient) static_cast<bf16*>(args.dk_NKD.data)[0] = bf16(1000.0f);
    });
}

}  // namespace trifold::cuda
