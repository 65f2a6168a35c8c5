// kernels/cuda/cudnn_attention.h   cuDNN's fused attention behind the entry of our own, where it is asked for (AttentionChoice).
//
// What it does here   the calls of training in bf16: all queries of joined sequences, with a window or without. All else is ours.
// Numerics            as ours: scores, statistics and sums in fp32, P and dS rounded to bf16; lse is the natural logarithm that ours
//                     saves. Repeatable backward passes keep dP in memory, 2 B H T^2 bytes, but for the Blackwell of data centers.
// Plans               one for each shape, pass and kind of sums, built by cuDNN when the workspace is asked for, so before step 0;
//                     a second or two each. libcudnn.so.9 is loaded then, and by nobody who does not ask for it.
// Errors              Problem(Exit::usage) where cuDNN is missing or knows no way, Problem(Exit::fault) where a call fails.
//
// test/unit/test_cudnn.cpp has cuDNN build these plans for GPUs that are only described to it; test/emulation/ has a stand-in for the rest.
#pragma once
#include <string>

#include "kernels/ops.h"

namespace trifold::cuda {

// Empty where cuDNN can be used. Else why not: this build has no front end, or this machine no library.
std::string cudnn_problem();
std::string cudnn_version();  // "9.19.0"; empty where there is none

int64_t cudnn_attention_workspace(const AttentionForward&);
int64_t cudnn_attention_workspace(const AttentionBackward&);
void cudnn_attention_forward(CUstream_st*, const AttentionForward&);
void cudnn_attention_backward(CUstream_st*, const AttentionBackward&);

// What cuDNN makes of a call on a GPU that is described in its own words (JSON) and need not be there: the workspace in bytes.
// Throws as above. For tests.
int64_t cudnn_attention_workspace_on(const std::string& device, int compute_capability, const AttentionForward&);
int64_t cudnn_attention_workspace_on(const std::string& device, int compute_capability, const AttentionBackward&);

// Whether a call is for cuDNN.
inline bool is_for_cudnn(const AttentionForward& a) {
    return a.by.provider == AttentionProvider::cudnn && a.q_NHD.dtype == DType::bf16 && !a.doc_start_N && a.Tq == a.Tk && a.q_offset == 0;
}
inline bool is_for_cudnn(const AttentionBackward& a) {
    return a.by.provider == AttentionProvider::cudnn && a.q_NHD.dtype == DType::bf16 && !a.doc_start_N;
}

}  // namespace trifold::cuda
