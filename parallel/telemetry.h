// parallel/telemetry.h   What a run writes about itself; rank 0 only (DESIGN 12).
//
//   metrics.jsonl   one object per step and one per evaluation, on disk as soon as it is known
//   events.jsonl    one object per event: {"time": UTC, "kind": ..., fields of the kind}
//   tensorboard/    one event file per start of the process
//   stdout          a line every `log_every` steps; on a terminal a progress bar below
//
// Nothing here throws or stops training after construction (append_file.h says what a full disk does).
//
// Resume       The lines of metrics.jsonl from the first one newer than the resumed step on are moved to the end of
//              metrics.superseded.jsonl, which an event notes: metrics.jsonl then has each step once, and what led to a
//              roll-back can still be looked at. TensorBoard is told to drop the same steps.
#pragma once
#include <cstdint>
#include <cstdio>
#include <memory>
#include <string>
#include <utility>
#include <variant>
#include <vector>

namespace trifold {

// Seconds in which compute waited for an axis, the maximum over ranks.
struct ExposedSeconds {
    double dp = 0, tp = 0, pp = 0, ep = 0, cp = 0;
};

// Values that do not exist or are not finite are NaN here and null in metrics.jsonl.
struct StepRecord {
    int64_t step = 0;  // 1 for the first
    double loss = 0;   // mean over the valid tokens of the global batch
    double grad_norm = 0;
    double lr = 0;
    int64_t tokens = 0;  // of this step, over all ranks
    double step_s = 0;
    double tokens_per_s = 0;
    double mfu = 0;  // 0.45 = 45 %
    ExposedSeconds exposed_s;
    double bubble_s = 0;
    int64_t mem_bytes = 0;
};

using EventField = std::pair<std::string, std::variant<bool, int64_t, double, std::string>>;

enum class ConsoleStyle : uint8_t { automatic, lines, bar };  // automatic: a bar when the output is a terminal

struct TelemetryOptions {
    int64_t steps = 0;         // of the whole run
    int64_t resumed_step = 0;  // the last step that is kept; 0: a fresh run
    int64_t log_every = 1;
    bool tensorboard = true;
    std::string mfu_convention;  // which FLOPs and which peak, for the header
    ConsoleStyle console = ConsoleStyle::automatic;
    std::FILE* out = stdout;
    std::FILE* complaints = stderr;
};

class Telemetry {
public:
    // Creates the files and the folder. Throws Problem(Exit::usage) when that is impossible.
    Telemetry(const std::string& run_dir, const TelemetryOptions& options);
    ~Telemetry();
    Telemetry(const Telemetry&) = delete;
    Telemetry& operator=(const Telemetry&) = delete;

    // These may be called from several threads.
    void step(const StepRecord& record);
    void evaluation(int64_t step, double val_loss);
    void event(const std::string& kind, const std::vector<EventField>& fields = {});
    void say(const std::string& line);  // one line on stdout, above the progress bar

private:
    struct State;
    std::unique_ptr<State> state_;
};

}  // namespace trifold
