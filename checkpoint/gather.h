// checkpoint/gather.h   Whole tensors at rank 0 from the slices of all ranks.
#pragma once
#include <vector>

#include "model/parameters.h"
#include "parallel/world.h"

namespace trifold {

// For dumps: the flat buffer of ParameterTable(model) with the master values of all ranks' slices in their places;
// empty elsewhere. Goes through the control plane: for models that fit one host.
std::vector<float> gather_tensors(World& world, const ModelConfig& model, const std::vector<StateSlice>& slices);

}  // namespace trifold
