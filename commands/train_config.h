// commands/train_config.h   From the options of one rank to the resolved configuration that all ranks of a job share.
#pragma once
#include "model/config.h"
#include "parallel/world.h"

namespace trifold {

// Everybody calls it. Throws Problem(Exit::usage), also where the options of two ranks differ, with the differences.
Config train_config(const Config& parsed, World& world);

}  // namespace trifold
