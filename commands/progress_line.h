// commands/progress_line.h   How far a long command is, on standard error.
#pragma once
#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <functional>
#include <string>

namespace trifold {

// One line on standard error: a bar that is redrawn on a terminal, else a line every 10 seconds.
class ProgressLine {
public:
    explicit ProgressLine(std::string what) : what_(std::move(what)), terminal_(::isatty(STDERR_FILENO) == 1) {}
    ~ProgressLine() {
        if (terminal_ && shown_) fmt::print(stderr, "\r\033[K");
    }
    // `amount` says how much is done; rate(seconds) says it per second.
    void show(double share, const std::string& amount, const std::function<std::string(double)>& rate) {
        const double elapsed = std::chrono::duration<double>(Clock::now() - start_).count();
        if (elapsed < next_) return;
        next_ = elapsed + (terminal_ ? 0.1 : 10.0);
        share = std::clamp(share, 0.0, 1.0);
        const double left = share > 0 ? elapsed / share - elapsed : 0;
        const std::string text =
            fmt::format("{} {:3.0f} %  {}  {}  {} left", what_, 100 * share, amount, rate(elapsed), minutes(left));
        if (terminal_) {
            const auto full = static_cast<size_t>(24 * share);
            fmt::print(stderr, "\r\033[K[{:<24}] {}", std::string(full, '#'), text);
        } else {
            fmt::print(stderr, "{}\n", text);
        }
        std::fflush(stderr);
        shown_ = true;
    }
    double elapsed() const { return std::chrono::duration<double>(Clock::now() - start_).count(); }

private:
    using Clock = std::chrono::steady_clock;
    static std::string minutes(double seconds) {
        const auto s = static_cast<int64_t>(seconds);
        return s >= 3600 ? fmt::format("{}:{:02}:{:02}", s / 3600, s / 60 % 60, s % 60)
                         : fmt::format("{}:{:02}", s / 60, s % 60);
    }
    std::string what_;
    bool terminal_, shown_ = false;
    Clock::time_point start_ = Clock::now();
    double next_ = terminal_ ? 0.5 : 5.0;  // nothing is shown for what takes less
};

}  // namespace trifold
