// parallel/staged_collectives.h   Collectives between GPUs through host memory: --run.comm=host.
//
// For machines without NCCL, and for several processes on one GPU, which NCCL refuses. Each call copies what it reads from the device,
// lets the host's collectives work on the copy, and copies what it writes back. Sums are those of the host plane: in rank order, the
// same bits on every rank and from run to run. Runs in the thread of a host_communication stream, while the GPU computes.
#pragma once
#include <memory>

#include "parallel/group.h"

namespace trifold {

// `host` is the group's, and this process is its rank `rank`. To be made on the thread that selected the GPU.
std::unique_ptr<Collectives> stage_through_host(std::unique_ptr<Collectives> host, int rank);

}  // namespace trifold
