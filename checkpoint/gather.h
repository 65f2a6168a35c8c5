// checkpoint/gather.h   Whole tensors at rank 0 from the slices of all ranks, for dumps. Goes through the control plane: for models that fit one host.
#pragma once
#include <vector>

#include "model/parameters.h"
#include "parallel/world.h"

namespace trifold {

// At rank 0: the flat buffer of ParameterTable(model) with every slice's master values in its place; empty elsewhere.
std::vector<float> gather_tensors(World& world, const ModelConfig& model, const std::vector<StateSlice>& slices);

}  // namespace trifold
