// base/error.h   The two kinds of failure: a *problem* (user or machine: a sentence and an exit code) and a *bug* (ours: file and line).
#pragma once
#include <stdexcept>
#include <string>

namespace trifold {

// Documented exit codes (README, "Exit codes"). Scripts rely on them.
enum class Exit : int {
    ok = 0,
    usage = 2,        // usage, configuration, launch, or ranks that do not match
    data = 3,         // token files, tokenizers, text
    checkpoint = 4,   // the final save failed, or what was asked for cannot be loaded
    bug = 70,         // an assertion of ours failed
    fault = 75,       // a fault of the machine; a restart is worthwhile
    fenced = 76,      // this process was replaced by a newer generation
    gave_up = 77,     // too many skipped steps, or no progress over several restarts
    interrupted = 130,  // SIGINT, after a clean stop
    terminated = 143,   // SIGTERM, after a clean stop
};

// A problem: `what()` is one or two sentences that say what, where and what to do next.
class Problem : public std::runtime_error {
public:
    Problem(Exit code, const std::string& sentence) : std::runtime_error(sentence), code_(code) {}
    Exit code() const { return code_; }

private:
    Exit code_;
};

// Reports a broken invariant of the program itself and ends the process with Exit::bug.
[[noreturn]] void bug(const char* file, int line, const char* condition, const std::string& detail = "");

}  // namespace trifold

#define TRIFOLD_ASSERT(cond) \
    do { if (!(cond)) ::trifold::bug(__FILE__, __LINE__, #cond); } while (false)
