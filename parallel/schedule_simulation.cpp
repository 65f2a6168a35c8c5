// parallel/schedule_simulation.cpp   Plays the lists of all stages with seconds.
#include "parallel/schedule_simulation.h"

#include <algorithm>
#include <limits>

#include "base/error.h"

namespace trifold {
namespace {

constexpr double never = std::numeric_limits<double>::infinity();

class Clock {
public:
    Clock(const std::vector<Program>& programs, int virtual_stages, const ScheduleCosts& costs)
        : programs_(programs),
          stages_(static_cast<int>(programs.size())),
          parts_(stages_ * virtual_stages),
          costs_(costs),
          split_(programs.size()) {
        TRIFOLD_ASSERT(costs.parts.size() == 1 || costs.parts.size() == static_cast<size_t>(parts_));
        for (const Program& program : programs)
            for (const Action& a : program) {
                micros_ = std::max(micros_, a.micro + 1);
                split_[&program - programs.data()] |= a.act == Act::W;
            }
        ended_.assign(3 * static_cast<size_t>(parts_) * micros_, never);
    }

    Timing run() {
        Timing timing;
        timing.start_s.resize(programs_.size());
        timing.end_s.resize(programs_.size());
        std::vector<double> worked(programs_.size(), 0);
        for (bool moved = true; moved;) {
            moved = false;
            for (int s = 0; s < stages_; ++s)
                while (start_next(s, timing, worked[s])) moved = true;
        }
        double work = 0, idle = 0;
        for (int s = 0; s < stages_; ++s) {
            TRIFOLD_ASSERT(timing.end_s[s].size() == programs_[s].size());  // check_schedule refuses others
            if (!timing.end_s[s].empty()) timing.makespan_s = std::max(timing.makespan_s, timing.end_s[s].back());
        }
        for (const double w : worked) {
            timing.idle_s.push_back(timing.makespan_s - w);
            work += w;
            idle += timing.idle_s.back();
        }
        timing.bubble = work > 0 ? idle / work : 0;
        return timing;
    }

private:
    double& ended(Act act, int part, int micro) {
        return ended_[(static_cast<size_t>(act) * parts_ + static_cast<size_t>(part)) * micros_ + static_cast<size_t>(micro)];
    }
    double seconds(Act act, int part) const {
        const PartCost& cost = costs_.parts[costs_.parts.size() == 1 ? 0 : static_cast<size_t>(part)];
        if (act == Act::F) return cost.forward_s;
        if (act == Act::W) return cost.weight_s;
        return split_[part % stages_] ? cost.backward_s : cost.backward_s + cost.weight_s;
    }
    // When what the action needs is there; never: not known yet.
    double ready(const Action& a, int part) {
        const double transfer = stages_ > 1 ? costs_.transfer_s : 0;
        if (a.act == Act::F) return part == 0 ? 0 : ended(Act::F, part - 1, a.micro) + transfer;
        if (a.act == Act::W) return ended(Act::B, part, a.micro);
        const double own = ended(Act::F, part, a.micro);
        return part + 1 == parts_ ? own : std::max(own, ended(Act::B, part + 1, a.micro) + transfer);
    }
    bool start_next(int s, Timing& timing, double& worked) {
        const size_t i = timing.end_s[s].size();
        if (i == programs_[s].size()) return false;
        const Action& a = programs_[s][i];
        const int part = a.chunk * stages_ + s;
        const double at = std::max(ready(a, part), i ? timing.end_s[s].back() : 0), takes = seconds(a.act, part);
        if (at == never) return false;
        timing.start_s[s].push_back(at);
        timing.end_s[s].push_back(ended(a.act, part, a.micro) = at + takes);
        worked += takes;
        return true;
    }

    const std::vector<Program>& programs_;
    const int stages_, parts_;
    const ScheduleCosts& costs_;
    int micros_ = 0;
    std::vector<char> split_;  // whether the stage's list has W
    std::vector<double> ended_;
};

}  // namespace

Timing simulate(const std::vector<Program>& programs, int virtual_stages, const ScheduleCosts& costs) {
    return Clock(programs, virtual_stages, costs).run();
}

}  // namespace trifold
