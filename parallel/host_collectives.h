// parallel/host_collectives.h   Collectives between host memories over a Net.
//
// Sums are taken in rank order, in fp32 (fp64 for fp64, int32 for int32), and rounded once to the type of the tensor: the same bits
// on every rank and in every run. bf16, fp32, fp64 and int32 can be summed; uint8 only moved and compared.
#pragma once
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "parallel/group.h"
#include "parallel/net.h"

namespace trifold {

// Connects a rank with the other members (net.h). `stall_s`: a collective fails when nothing moves for so long.
std::unique_ptr<Collectives> connect_host_collectives(Listener& listener, const NetOptions& options, double stall_s);

// Scratch memory of a group of `ranks`.
int64_t host_collectives_bytes(int ranks);

}  // namespace trifold
