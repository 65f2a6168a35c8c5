// model/flops.h   What a model costs: parameters and floating-point operations per token, in closed form.
#pragma once
#include <cstdint>
#include <string>

#include "model/config.h"

namespace trifold {

// All functions take a model whose derived values are filled in (resolve).

// Logical parameters; a tied head counts once, padding of the vocabulary not at all. Equal to ParameterTable::count().
int64_t parameter_count(const ModelConfig& model);

// Entries of the weight matrices that a token is multiplied with: all linear layers and the head (tied or not), not the
// input embedding, which is a look-up.
int64_t matrix_parameters(const ModelConfig& model);

// Keys that a query sees, averaged over the positions of one sequence: causal, within the window (0: none).
double mean_visible_keys(int64_t seq, int64_t window);

// One multiply-add is two operations. Forward: 2 per matrix parameter, and per layer 4 * heads * head_dim per visible
// key (scores, and the weighted sum of values). Backward costs twice as much. Norms, activations, biases, softmax and
// recomputation are left out.
double forward_flops_per_token(const ModelConfig& model, int64_t seq);
double flops_per_token(const ModelConfig& model, int64_t seq);  // forward and backward

// The same in words, to stand beside every number.
std::string flops_convention();

}  // namespace trifold
