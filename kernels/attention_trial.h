// kernels/attention_trial.h   Whose attention a training run computes with on this GPU: cuDNN's where its results agree with ours and it is faster.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

#include "kernels/ops.h"

namespace trifold {

// The attention of `layers` layers, all in one: q, k and v in one buffer of rows.
struct AttentionCase {
    int64_t B = 0, T = 0, H = 0, K = 0, D = 0, window = 0, layers = 1;
};

struct AttentionVerdict {
    AttentionProvider provider = AttentionProvider::own;
    std::string reason;  // for people: "1.42 times as fast as our own, results agree to 0.002"
};

// What was seen of both. Seconds of both passes over all layers; `difference` is the largest relative distance (Frobenius) of an output or a
// gradient, NaN included.
struct AttentionMeasured {
    double own_s = 0, cudnn_s = 0, difference = 0;
};
constexpr double attention_tolerance = 0x1p-7;   // both round P, dS and results to bf16: honest versions are within a third of it
constexpr double attention_gain = 1.05;          // less is not worth another library, nor surely measured
AttentionVerdict judge(const AttentionMeasured&);

// Computes each case in bf16 with both, cuDNN's without repeating bits, on random values, on the GPU that is selected. Takes a few seconds, mostly for
// cuDNN to make its plans, and the memory of one layer, which is free again afterwards; cuDNN's own stays. `watch` as in StreamEngine. What keeps
// cuDNN out is a reason for ours, not an error. Throws Problem(Exit::fault) when the GPU has failed meanwhile.
AttentionVerdict try_attention(const std::vector<AttentionCase>&, StreamEngine::Watch watch = {});

}  // namespace trifold
