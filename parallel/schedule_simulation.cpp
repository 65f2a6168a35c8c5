// parallel/schedule_simulation.cpp   Plays the lists of all stages with seconds.
#include "parallel/schedule_simulation.h"

#include <algorithm>
#include <limits>

#include "base/error.h"

namespace trifold {
Timing simulate(const std::vector<Program>& programs, int virtual_stages, const ScheduleCosts& costs) {
    constexpr double never = std::numeric_limits<double>::infinity();
    const int stages = static_cast<int>(programs.size()), parts = stages * virtual_stages;
    TRIFOLD_ASSERT(costs.parts.size() == 1 || std::ssize(costs.parts) == parts);
    const int micros = micros_of(programs);

    // When it ended; never: it is not done yet.
    std::vector<double> ends(3 * static_cast<size_t>(parts) * micros, never);
    const auto ended = [&](Act act, int part, int micro) -> double& {
        return ends[(static_cast<size_t>(act) * parts + static_cast<size_t>(part)) * micros + static_cast<size_t>(micro)];
    };
    // When what the action needs is there.
    const double transfer_s = stages > 1 ? costs.transfer_s : 0;
    const auto ready = [&](const Action& a, int part) {
        if (a.act == Act::F) return part == 0 ? 0 : ended(Act::F, part - 1, a.micro) + transfer_s;
        if (a.act == Act::W) return ended(Act::B, part, a.micro);
        const double own = ended(Act::F, part, a.micro);
        return part + 1 == parts ? own : std::max(own, ended(Act::B, part + 1, a.micro) + transfer_s);
    };
    const auto seconds = [&](const Program& program, Act act, int part) {
        const PartCost& cost = costs.parts[costs.parts.size() == 1 ? 0 : static_cast<size_t>(part)];
        if (act != Act::B) return act == Act::F ? cost.forward_s : cost.weight_s;
        const bool split = program.back().act == Act::W;  // a list with any W ends with one
        return split ? cost.backward_s : cost.backward_s + cost.weight_s;
    };

    using Times = std::vector<std::vector<double>>;
    Timing timing{.idle_s = std::vector<double>(programs.size()), .start_s = Times(programs.size()), .end_s = Times(programs.size())};
    const auto start_next = [&](int s) {
        const size_t i = timing.end_s[s].size();
        if (i == programs[s].size()) return false;
        const Action& a = programs[s][i];
        const int part = a.chunk * stages + s;
        const double at = std::max(ready(a, part), i ? timing.end_s[s].back() : 0);
        if (at == never) return false;
        timing.start_s[s].push_back(at);
        timing.end_s[s].push_back(ended(a.act, part, a.micro) = at + seconds(programs[s], a.act, part));
        return true;
    };
    for (bool moved = true; moved;) {
        moved = false;
        for (int s = 0; s < stages; ++s)
            while (start_next(s)) moved = true;
    }
    for (int s = 0; s < stages; ++s) {
        TRIFOLD_ASSERT(timing.end_s[s].size() == programs[s].size());  // else stages wait for each other for ever
        if (!programs[s].empty()) timing.makespan_s = std::max(timing.makespan_s, timing.end_s[s].back());
    }
    double idle = 0;
    for (int s = 0; s < stages; ++s) {
        timing.idle_s[s] = timing.makespan_s;
        for (size_t i = 0; i < programs[s].size(); ++i) timing.idle_s[s] -= timing.end_s[s][i] - timing.start_s[s][i];
        idle += timing.idle_s[s];
    }
    const double work = timing.makespan_s * stages - idle;
    timing.bubble = work > 0 ? idle / work : 0;
    return timing;
}

}  // namespace trifold
