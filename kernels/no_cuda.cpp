// kernels/no_cuda.cpp   Stands in for kernels/cuda/ in builds without a CUDA toolkit: there is no GPU, so nothing else is ever called.
#include "kernels/cuda/cudnn_attention.h"
#include "kernels/cuda/runtime.h"
#include "kernels/ops.h"

namespace trifold::cuda {

#define TRIFOLD_NEVER bug(__FILE__, __LINE__, "a CUDA call in a build without CUDA")

bool compiled_in() { return false; }
bool has_code_for_this_gpu() { return false; }
Gpu probe() { return {GpuState::absent, "this build has no CUDA half (no CUDA toolkit was found when it was made)"}; }
void select(int, Sharing) { throw Problem(Exit::usage, "--run.device=cuda: " + probe().text + "; --run.device=cpu computes on the processor"); }
void prefer(int) {}
void* allocate(int64_t) { TRIFOLD_NEVER; }
void release(void*) { TRIFOLD_NEVER; }
int64_t available_memory() { TRIFOLD_NEVER; }
bool pin(void*, int64_t) { TRIFOLD_NEVER; }
void unpin(void*) { TRIFOLD_NEVER; }

Copier::Copier() { TRIFOLD_NEVER; }
Copier::~Copier() = default;
void Copier::copy(void*, const void*, int64_t) const { TRIFOLD_NEVER; }

void push_range(const char*) { TRIFOLD_NEVER; }
void pop_range() { TRIFOLD_NEVER; }

struct Streams::State {};
Streams::Streams() { TRIFOLD_NEVER; }
Streams::~Streams() = default;
void Streams::add(const Stream&, int, StreamKind) { TRIFOLD_NEVER; }
CUstream_st* Streams::handle(int) const { TRIFOLD_NEVER; }
void Streams::begin(int, const char*, std::span<const BufferAccess>) { TRIFOLD_NEVER; }
void Streams::end(Ticket) { TRIFOLD_NEVER; }
void Streams::follow(int, Ticket) { TRIFOLD_NEVER; }
void Streams::wait(Ticket) { TRIFOLD_NEVER; }
std::function<void()> Streams::waiting_for(Ticket) { TRIFOLD_NEVER; }
void Streams::enter_thread() const { TRIFOLD_NEVER; }
bool Streams::done_within(double) noexcept { TRIFOLD_NEVER; }
double Streams::waited_s(int) { TRIFOLD_NEVER; }
void Streams::watch(StreamEngine::Watch) { TRIFOLD_NEVER; }
void Streams::observe(const StreamObserver&) { TRIFOLD_NEVER; }

#define X(op, Args) \
    void op(CUstream_st*, const Args&) { TRIFOLD_NEVER; }
TRIFOLD_OPS(X)
#undef X
std::string cudnn_problem() { return probe().text; }
std::string cudnn_version() { return ""; }

int64_t attention_workspace(const AttentionForward&) { TRIFOLD_NEVER; }
int64_t attention_workspace(const AttentionBackward&) { TRIFOLD_NEVER; }
int64_t linear_workspace(int64_t, int64_t) { TRIFOLD_NEVER; }
int64_t norm_backward_workspace(int64_t, int64_t) { TRIFOLD_NEVER; }
int64_t embedding_backward_workspace(int64_t, int64_t) { TRIFOLD_NEVER; }
int64_t segment_sums_workspace(int64_t, int64_t) { TRIFOLD_NEVER; }

}  // namespace trifold::cuda
