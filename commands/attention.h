// commands/attention.h   Whose attention a run computes with (run.attention), where the options leave it open.
#pragma once
#include <string>

#include "model/config.h"
#include "parallel/world.h"

namespace trifold {

// Sets config.run.attention: where cuDNN is on all hosts, rank 0 tries both on its GPU and the others follow. Returns the reason, empty where the options
// had decided. Throws Problem(Exit::usage) where they ask for a cuDNN that is not here. To be called by all ranks once the GPU is selected.
std::string settle_attention(Config& config, World& world);

}  // namespace trifold
