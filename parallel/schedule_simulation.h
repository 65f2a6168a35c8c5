// parallel/schedule_simulation.h   How long a schedule takes: the lists of schedule.h played with seconds.
//
// An action starts when the one before it in its stage's list has ended and what it needs has arrived; a message takes transfer_s
// from the end of the action that sends it, and never holds up its sender (sends and receives are posted early,
// schedule_traffic.h). In lists without W, B takes backward_s + weight_s, so that the same costs compare all schedules.
//
// With the same costs F, B, W for all parts and no transfer (asserted for 1 to 16 stages and 1 to 64 micro-batches):
//   1f1b, interleaved  bubble = (p-1) / (v m) where p | m or v = 1; else interleaved is still not slower than 1f1b
//   zero_bubble        makespan = m (F+B+W) + (p-1) max(F, B, F+B-W) for m >= p, which is the published (p-1)(F+B-W) for W <= F, B;
//                      m (F+B+W) + (p-1)(F+B) - (m-1) W for m < p and W <= F, B; never slower than 1f1b
#pragma once
#include <vector>

#include "parallel/schedule.h"

namespace trifold {

// Of one micro-batch in one part of the model.
struct PartCost {
    double forward_s = 1, backward_s = 1, weight_s = 1;
};

struct ScheduleCosts {
    std::vector<PartCost> parts = {{}};  // one per part, or one for all
    double transfer_s = 0;               // between two stages, either direction
};

struct Timing {
    double makespan_s = 0;
    double bubble = 0;                                // idle time over working time, all stages together
    std::vector<double> idle_s;                       // per stage
    std::vector<std::vector<double>> start_s, end_s;  // per stage and action
};

// For programs in which every action can start.
Timing simulate(const std::vector<Program>& programs, int virtual_stages, const ScheduleCosts& costs);

}  // namespace trifold
