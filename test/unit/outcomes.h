// test/unit/outcomes.h   What came of a rank: as text, from threads and from processes.
#pragma once
#include "test/catch.h"

#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <functional>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "test/unit/run_ranks.h"

namespace trifold {

// Code and sentence of the Problem that `act` throws; "0" when it throws none.
inline std::string outcome_of(const std::function<void()>& act) {
    try {
        act();
        return "0";
    } catch (const QuietProblem& p) {
        return "quiet " + std::to_string(static_cast<int>(p.code())) + ": " + p.what();
    } catch (const Problem& p) {
        return std::to_string(static_cast<int>(p.code())) + ": " + p.what();
    }
}

// What each rank says, gathered by threads.
class Sayings {
public:
    explicit Sayings(int ranks) : said_(static_cast<size_t>(ranks)) {}
    void add(int rank, const std::string& text) {
        const std::lock_guard lock(mutex_);
        said_[static_cast<size_t>(rank)] += text;
    }
    const std::vector<std::string>& all() const { return said_; }
    int with(const std::string& part) const {
        return static_cast<int>(std::ranges::count_if(said_, [&](const std::string& s) { return s.find(part) != std::string::npos; }));
    }

private:
    std::mutex mutex_;
    std::vector<std::string> said_;
};

inline const LaunchOptions patient{.start_s = 30, .stall_s = 30, .build = "test"};

// Waits as the main program does, and says what came of it: "speaks" on the rank that prints, then the cause.
inline std::string last_words(World& world, const std::function<void()>& wait) {
    try {
        wait();
        return "went on";
    } catch (const Problem& p) {
        const bool speaks = world.fail(p);
        return std::string(speaks ? "speaks " : "silent ") + std::to_string(static_cast<int>(world.cause()->code())) + ": " + world.cause()->what();
    }
}

// `body` in one process per rank; the text that it returns, or how the process ended.
inline std::vector<std::string> run_processes(int ranks, const LaunchOptions& options, const std::function<std::string(World&)>& body) {
    std::vector<Launch> launches = launches_on_this_host(ranks);
    std::vector<std::pair<pid_t, int>> children;
    for (const Launch& launch : launches) {
        std::array<int, 2> ends{};
        REQUIRE(::pipe(ends.data()) == 0);
        const pid_t child = ::fork();
        if (child == 0) {
            if (launch.rank != 0) launches[0].store_socket.reset();
            std::string said;
            try {
                World world(launch, options);
                said = body(world);
            } catch (const std::exception& e) {
                said = std::string("threw ") + e.what();
            }
            const ssize_t written = ::write(ends[1], said.data(), said.size());
            ::_exit(written == static_cast<ssize_t>(said.size()) ? 0 : 1);
        }
        ::close(ends[1]);
        children.emplace_back(child, ends[0]);
    }
    launches[0].store_socket.reset();
    std::vector<std::string> outcomes;
    for (const auto& [child, pipe] : children) {
        std::string said(8192, '\0');
        const ssize_t got = ::read(pipe, said.data(), said.size());
        said.resize(got > 0 ? static_cast<size_t>(got) : 0);
        ::close(pipe);
        int status = 0;
        ::waitpid(child, &status, 0);
        outcomes.push_back(WIFSIGNALED(status) ? "signal " + std::to_string(WTERMSIG(status)) : said);
    }
    return outcomes;
}

inline int count(const std::vector<std::string>& texts, const std::string& part) {
    return static_cast<int>(std::ranges::count_if(texts, [&](const std::string& s) { return s.find(part) != std::string::npos; }));
}

}  // namespace trifold
