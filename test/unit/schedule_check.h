// test/unit/schedule_check.h   Proves that schedules run: they are generated, and nobody can give the program another one.
#pragma once
#include <string>
#include <vector>

#include "parallel/schedule.h"
#include "parallel/schedule_traffic.h"

namespace trifold::schedule_test {

// Plays all stages together. Empty: every action runs exactly once and can start. Else one sentence about the first that cannot:
// stage, position in the list (counted from 0), action, what it waits for. A list with any W must have all; lists without any B
// are an evaluation.
std::string check_schedule(const std::vector<Program>& programs, int virtual_stages, int micros);

// The most micro-batches of one chunk (-1: of all together) that are between F and the end of their last action (B, or W) at any time.
int most_in_flight(const Program& program, int chunk = -1);

// Both ends of each directed link have the same messages in the same order, each step takes in what was sent for it after it was
// posted, and no buffer is used twice at a time. Empty, or one sentence about the first link, message or step that is wrong.
std::string check_links(const std::vector<StageTraffic>& traffic, int virtual_stages);

// Plays all stages with sends that complete only at their receives. A receive is posted as late as its step allows: when all
// actions before that step are done. Empty, or one sentence about stages that wait for each other for ever.
std::string check_rendezvous(const std::vector<StageTraffic>& traffic);

// Text as text_of() writes it, back to programs. Throws std::invalid_argument.
std::vector<Program> parse_schedule(const std::string& text);

}  // namespace trifold::schedule_test
