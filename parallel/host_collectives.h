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

// Connects rank `index` of `members` with the others (net.h). `stall_s`: a collective fails when nothing moves for so long.
std::unique_ptr<Collectives> connect_host_collectives(Listener& listener, uint64_t job_key, const std::string& name,
                                                      int generation, int index, const std::vector<PeerAddress>& members,
                                                      double connect_s, double stall_s);

// Scratch memory of a group of `ranks`.
int64_t host_collectives_bytes(int ranks);

// Over a Net that is there already.
std::unique_ptr<Collectives> make_host_collectives(std::unique_ptr<Net> net, double stall_s);

}  // namespace trifold
