// parallel/schedule_waits.h   Who waits for whom when lists do not go on; shared by the checkers of schedules.
#pragma once
#include <string>
#include <vector>

#include "parallel/schedule.h"

namespace trifold {

// "action 7 (B3 of chunk 0)"
std::string name_of(int position, const Action& action);

// The action at which a stage stands, and what it waits for.
struct Wait {
    bool stuck = false;  // false: this stage has finished its list
    int position = 0;    // of the action in the stage's list
    Action action;
    std::string waits_for;  // "B3 of part 5 on stage 1"
    int stage = 0;          // where that is: this stage, or another one that is stuck
    int place = 0;          // and its position in the list of that stage
};

// One sentence that begins at the cause: the lowest stage of the circle that the lowest stuck stage waits for. One element per
// stage.
std::string sentence_of(const std::vector<Wait>& waits);

}  // namespace trifold
