// test/emulation/child.h   Runs something that may end the process in a forked child, and tells how it ended.
#pragma once
#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <functional>
#include <string>

#include "test/emulation/emulator.h"

namespace trifold::test {

#if defined(__SANITIZE_ADDRESS__)
constexpr bool address_sanitizer = true;
#else
constexpr bool address_sanitizer = false;
#endif

struct Outcome {
    int exit_code = 0;  // 128 + signal when one ended it
    std::string errors;
    bool says(const std::string& text) const { return errors.find(text) != std::string::npos; }
};

// What `work` returns is the exit code, unless the race detector has more to report than before.
inline Outcome in_child(const std::function<int()>& work) {
    std::fflush(nullptr);
    int ends[2];
    if (pipe(ends) != 0) return {-1, "no pipe"};
    const pid_t child = fork();
    if (child == 0) {
        dup2(ends[1], STDERR_FILENO);
        close(ends[0]);
        close(ends[1]);
        const int64_t before = emulation::race_reports();
        const int code = work();
        _exit(emulation::race_reports() > before ? emulation::race_exit_code : code);
    }
    close(ends[1]);
    Outcome outcome;
    char part[4096];
    for (ssize_t n; (n = read(ends[0], part, sizeof part)) > 0;) outcome.errors.append(part, static_cast<size_t>(n));
    close(ends[0]);
    int status = 0;
    waitpid(child, &status, 0);
    outcome.exit_code = WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
    return outcome;
}

}  // namespace trifold::test
