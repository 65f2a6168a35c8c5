// parallel/schedule_waits.cpp   Follows a chain of waiting stages to its cause.
#include "parallel/schedule_waits.h"

#include <fmt/format.h>

#include <algorithm>

namespace trifold {

std::string name_of(int position, const Action& action) {
    return fmt::format("action {} ({} of chunk {})", position, text_of(action, 1), action.chunk);
}

std::string sentence_of(const std::vector<Wait>& waits) {
    constexpr int most_links = 4;
    int at = 0;
    while (!waits[at].stuck) ++at;
    // After as many steps as there are stages the walk is on the circle; once more round finds its lowest stage and its length.
    for (size_t i = 0; i < waits.size(); ++i) at = waits[at].stage;
    int first = at, links = 1;
    for (int s = waits[at].stage; s != at; s = waits[s].stage, ++links) first = std::min(first, s);

    std::string text = fmt::format("stage {}, {} waits for {}", first, name_of(waits[first].position, waits[first].action),
                                   waits[first].waits_for);
    if (waits[first].stage == first)
        return text + fmt::format(", which comes later in the same list (action {})", waits[first].place);
    int told = 1;
    for (int from = first; waits[from].stage != first && told < most_links; ++told) {
        const Wait& there = waits[waits[from].stage];
        if (waits[from].place > there.position)
            text += fmt::format(", which comes only after {} there", name_of(there.position, there.action));
        text += ", which waits for " + there.waits_for;
        from = waits[from].stage;
    }
    if (told < links) return text + fmt::format(", and so on through {} stages back to stage {}", links, first);
    return text + fmt::format(", which comes only after action {} there", waits[first].position);
}

}  // namespace trifold
