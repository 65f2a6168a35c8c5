// parallel/schedule_traffic.cpp   The four channels of each stage, from the programs of all.
#include "parallel/schedule_traffic.h"

#include <algorithm>

#include "base/error.h"

namespace trifold {
namespace {

// Every send at the end of its channel at both stages. The receiver's position is not known yet.
void connect(int stage, const Program& program, int virtual_stages, std::vector<StageTraffic>& traffic) {
    const int stages = static_cast<int>(traffic.size());
    for (size_t i = 0; i < program.size(); ++i) {
        const Action& a = program[i];
        Step& step = traffic[stage].steps.emplace_back(Step{.action = a});
        const int to = a.chunk * stages + stage + (a.act == Act::F ? 1 : -1);  // the part that it sends to
        if (a.act == Act::W || stages == 1 || to < 0 || to >= stages * virtual_stages) continue;
        const size_t p = channel_of(a.act);
        step.send = static_cast<int>(traffic[stage].sends[p].size());
        traffic[stage].sends[p].push_back({.chunk = a.chunk, .micro = a.micro, .action = static_cast<int>(i)});
        traffic[to % stages].receives[p].push_back({.chunk = to / stages, .micro = a.micro});
    }
}

// One walk over the steps of a stage for each of its channels. Before a step those receives are posted that it needs, and `lookahead` more than
// have been taken in; each goes to the smallest buffer that is free, which it is again after the action that takes the message in.
void place_messages(StageTraffic& stage, size_t p, int virtual_stages, int micros, const TrafficOptions& options) {
    struct Buffer {
        bool taken = false;
        int after = -1;
    };
    std::vector<Transfer>&receives = stage.receives[p], &sends = stage.sends[p];
    const int all = static_cast<int>(receives.size());
    std::vector<int> number(static_cast<size_t>(virtual_stages) * micros, -1);  // of the receive for a chunk's micro-batch
    for (int i = 0; i < all; ++i) number[static_cast<size_t>(receives[i].chunk) * micros + receives[i].micro] = i;
    std::vector<Buffer> buffers;
    int posted = 0, taken = 0;
    for (size_t i = 0; i < stage.steps.size(); ++i) {
        Step& step = stage.steps[i];
        const Action& a = step.action;
        const bool own = a.act != Act::W && channel_of(a.act) == p;
        const int needed = own ? number[static_cast<size_t>(a.chunk) * micros + a.micro] : -1;
        for (; posted < std::max(needed + 1, std::min(all, taken + options.lookahead)); ++posted) {
            const auto free = std::ranges::find(buffers, false, &Buffer::taken);
            receives[posted].buffer = static_cast<int>(free - buffers.begin());
            if (free == buffers.end()) buffers.emplace_back();
            receives[posted].after = buffers[receives[posted].buffer].after;
            buffers[receives[posted].buffer].taken = true;
        }
        step.posted[p] = posted;
        if (needed < 0) continue;
        step.receive = needed;
        receives[needed].action = static_cast<int>(i);
        buffers[receives[needed].buffer] = {.taken = false, .after = static_cast<int>(i)};
        ++taken;
    }
    stage.receive_buffers[p] = static_cast<int>(buffers.size());
    stage.send_buffers[p] = std::min(static_cast<int>(sends.size()), options.send_buffers);
    for (size_t i = 0; i < sends.size(); ++i) sends[i].buffer = static_cast<int>(i) % options.send_buffers;
}

}  // namespace

std::vector<StageTraffic> derive_traffic(const std::vector<Program>& programs, int virtual_stages,
                                         const TrafficOptions& options) {
    TRIFOLD_ASSERT(options.lookahead >= 1 && options.send_buffers >= 1);
    const int micros = micros_of(programs);
    std::vector<StageTraffic> traffic(programs.size());
    for (size_t s = 0; s < programs.size(); ++s) connect(static_cast<int>(s), programs[s], virtual_stages, traffic);
    for (StageTraffic& stage : traffic)
        for (size_t p = 0; p < 2; ++p) place_messages(stage, p, virtual_stages, micros, options);
    return traffic;
}

}  // namespace trifold
