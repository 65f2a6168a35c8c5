// parallel/schedule_slots.cpp   How long micro-batches stay, and where.
#include <algorithm>

#include "base/error.h"
#include "parallel/schedule.h"

namespace trifold {
namespace {

// The last action of a micro-batch in this list: W where the list has any, else B, else (evaluation) F itself.
Act last_act(const Program& program) {
    Act last = Act::F;
    for (const Action& a : program) last = std::max(last, a.act);
    return last;
}

template <class Counts>
int most(const Program& program, Counts counts) {
    const Act last = last_act(program);
    int alive = 0, highest = 0;
    for (const Action& a : program) {
        if (!counts(a)) continue;
        if (a.act == Act::F) highest = std::max(highest, ++alive);
        if (a.act == last) --alive;
    }
    return highest;
}

}  // namespace

int most_in_flight(const Program& program, int chunk) {
    return most(program, [chunk](const Action& a) { return a.chunk == chunk; });
}
int most_in_flight(const Program& program) {
    return most(program, [](const Action&) { return true; });
}

std::vector<int> assign_slots(const Program& program, int virtual_stages, int micros) {
    const Act last = last_act(program);
    std::vector<int> slots(static_cast<size_t>(virtual_stages) * micros, -1);
    std::vector<std::vector<bool>> taken(static_cast<size_t>(virtual_stages));
    for (const Action& a : program) {
        std::vector<bool>& of_chunk = taken[a.chunk];
        int& slot = slots[static_cast<size_t>(a.chunk) * micros + a.micro];
        if (a.act == Act::F) {
            const auto free = std::find(of_chunk.begin(), of_chunk.end(), false);
            slot = static_cast<int>(free - of_chunk.begin());
            if (free == of_chunk.end()) of_chunk.push_back(false);
            of_chunk[slot] = true;
        }
        TRIFOLD_ASSERT(slot >= 0);  // check_schedule refuses lists in which F does not come first
        if (a.act == last) of_chunk[slot] = false;
    }
    return slots;
}

}  // namespace trifold
