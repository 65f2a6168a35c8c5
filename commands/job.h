// commands/job.h   A command that runs on several ranks: options, launch, and one voice for all of them when something goes wrong.
#pragma once
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "model/config.h"
#include "parallel/world.h"

namespace trifold {

// The exception that is being handled, as a sentence and an exit code.
Problem caught();

// Throws Problem(Exit::usage) where a launcher has started several ranks of a command that works in one process; one of them says so.
void refuse_launcher(const std::string& command);

class Job {
public:
    // Reads the options; what is wrong with them is said in run(), by one rank.
    explicit Job(const std::vector<std::string>& args);
    // Meets the other ranks and calls `body` on each. Returns the exit code; what was thrown is printed by one rank of the job.
    int run(const std::function<Exit(const Config& parsed, World&)>& body);
    // Inside `body`, for what was just caught and is about to be thrown on: tells the other ranks and ends their collectives, before objects
    // that wait for them are destroyed. One rank prints the cause.
    void fail();

private:
    Config parsed_;
    std::optional<Problem> refusal_;
    std::optional<World> world_;
    bool others_know_ = false;
};

}  // namespace trifold
