// commands/peak.h   What MFU refers to.
#pragma once
#include <string>

#include "kernels/stream.h"
#include "model/config.h"
#include "parallel/world.h"

namespace trifold {

struct Peak {
    double flops = 0;    // per second, of all ranks together
    std::string origin;  // in words
};

// The data sheet of a GPU that we know, else what matrix products reach here and now: on CPUs rank 0 measures with all CPUs that it may
// use, and other sets of CPUs count as equal. Only rank 0's answer means something then.
Peak find_peak(const Config& c, const World& world, Stream& compute);

}  // namespace trifold
