// parallel/console.h   The run as a person watches it: a table of steps, and on a terminal a progress bar below it.
#pragma once
#include <chrono>
#include <string>

#include "parallel/telemetry.h"

namespace trifold {

class Console {
public:
    explicit Console(const TelemetryOptions& options);
    ~Console();  // the bar disappears, the lines stay
    Console(const Console&) = delete;
    Console& operator=(const Console&) = delete;

    void step(const StepRecord& record);
    void evaluation(int64_t step, double val_loss);
    void line(const std::string& text);

private:
    std::string position(int64_t step) const;
    std::string time_left() const;
    void draw_bar();
    void write(const std::string& text);

    const TelemetryOptions options_;
    const bool bar_;
    bool header_written_ = false, complained_ = false;
    int64_t step_ = 0, records_ = 0;
    double typical_step_s_ = 0;  // moving average
    std::chrono::steady_clock::time_point drawn_;
};

// 0.35 -> "0.35 s", 95 -> "1m35s", 7260 -> "2h01m", 200000 -> "2d07h"
std::string human_seconds(double seconds);

}  // namespace trifold
