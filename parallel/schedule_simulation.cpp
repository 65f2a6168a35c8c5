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
        : programs_(programs), stages_(static_cast<int>(programs.size())), parts_(stages_ * virtual_stages), costs_(costs) {
        TRIFOLD_ASSERT(costs.parts.size() == 1 || costs.parts.size() == static_cast<size_t>(parts_));
        for (const Program& program : programs)
            for (const Action& a : program) micros_ = std::max(micros_, a.micro + 1);
        ended_.assign(3 * static_cast<size_t>(parts_) * micros_, never);
    }

    Timing run() {
        Timing timing;
        timing.start_s.resize(programs_.size());
        timing.end_s.resize(programs_.size());
        timing.idle_s.resize(programs_.size());
        for (bool moved = true; moved;) {
            moved = false;
            for (int s = 0; s < stages_; ++s)
                while (start_next(s, timing)) moved = true;
        }
        double idle = 0;
        for (int s = 0; s < stages_; ++s) {
            TRIFOLD_ASSERT(timing.end_s[s].size() == programs_[s].size());  // else stages wait for each other for ever
            if (!timing.end_s[s].empty()) timing.makespan_s = std::max(timing.makespan_s, timing.end_s[s].back());
        }
        for (int s = 0; s < stages_; ++s) {
            double worked = 0;
            for (size_t i = 0; i < programs_[s].size(); ++i) worked += timing.end_s[s][i] - timing.start_s[s][i];
            idle += timing.idle_s[s] = timing.makespan_s - worked;
        }
        const double work = timing.makespan_s * stages_ - idle;
        timing.bubble = work > 0 ? idle / work : 0;
        return timing;
    }

private:
    double& ended(Act act, int part, int micro) {
        return ended_[(static_cast<size_t>(act) * parts_ + static_cast<size_t>(part)) * micros_ + static_cast<size_t>(micro)];
    }
    double seconds(int s, const Action& a, int part) const {
        const PartCost& cost = costs_.parts[costs_.parts.size() == 1 ? 0 : static_cast<size_t>(part)];
        if (a.act == Act::F) return cost.forward_s;
        if (a.act == Act::W) return cost.weight_s;
        const bool split = programs_[s].back().act == Act::W;  // a list with any W ends with one
        return split ? cost.backward_s : cost.backward_s + cost.weight_s;
    }
    // When what the action needs is there; never: not known yet.
    double ready(const Action& a, int part) {
        const double transfer = stages_ > 1 ? costs_.transfer_s : 0;
        if (a.act == Act::F) return part == 0 ? 0 : ended(Act::F, part - 1, a.micro) + transfer;
        if (a.act == Act::W) return ended(Act::B, part, a.micro);
        const double own = ended(Act::F, part, a.micro);
        return part + 1 == parts_ ? own : std::max(own, ended(Act::B, part + 1, a.micro) + transfer);
    }
    bool start_next(int s, Timing& timing) {
        const size_t i = timing.end_s[s].size();
        if (i == programs_[s].size()) return false;
        const Action& a = programs_[s][i];
        const int part = a.chunk * stages_ + s;
        const double at = std::max(ready(a, part), i ? timing.end_s[s].back() : 0);
        if (at == never) return false;
        timing.start_s[s].push_back(at);
        timing.end_s[s].push_back(ended(a.act, part, a.micro) = at + seconds(s, a, part));
        return true;
    }

    const std::vector<Program>& programs_;
    const int stages_, parts_;
    const ScheduleCosts& costs_;
    int micros_ = 0;
    std::vector<double> ended_;
};

}  // namespace

Timing simulate(const std::vector<Program>& programs, int virtual_stages, const ScheduleCosts& costs) {
    return Clock(programs, virtual_stages, costs).run();
}

}  // namespace trifold
