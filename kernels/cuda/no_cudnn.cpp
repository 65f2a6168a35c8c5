// kernels/cuda/no_cudnn.cpp   Stands in for cuDNN's attention in builds without its front end.
#include "kernels/cuda/cudnn_attention.h"

namespace trifold::cuda {
namespace {

[[noreturn]] void refuse() { throw Problem(Exit::usage, "run.attention=cudnn: " + cudnn_problem() + "; --run.attention=own computes with our own"); }

}  // namespace

std::string cudnn_problem() { return "this build has no cuDNN (when it was made it was not wanted, or cudnn.h 9 or cudnn_frontend.h 1.14 were not found: scripts/install_cudnn_frontend.sh)"; }
std::string cudnn_version() { return ""; }
int64_t cudnn_attention_workspace(const AttentionForward&) { refuse(); }
int64_t cudnn_attention_workspace(const AttentionBackward&) { refuse(); }
void cudnn_attention_forward(CUstream_st*, const AttentionForward&) { refuse(); }
void cudnn_attention_backward(CUstream_st*, const AttentionBackward&) { refuse(); }
int64_t cudnn_attention_workspace_on(const std::string&, int, const AttentionForward&) { refuse(); }
int64_t cudnn_attention_workspace_on(const std::string&, int, const AttentionBackward&) { refuse(); }

}  // namespace trifold::cuda
