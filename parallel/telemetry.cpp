// parallel/telemetry.cpp   One record, four places: metrics.jsonl, TensorBoard, the console, and events beside them.
#include "parallel/telemetry.h"

#include <fcntl.h>
#include <fmt/chrono.h>
#include <fmt/format.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <mutex>
#include <nlohmann/json.hpp>
#include <optional>

#include "base/error.h"
#include "parallel/append_file.h"
#include "parallel/console.h"
#include "parallel/tensorboard.h"

namespace trifold {
namespace {

using Json = nlohmann::ordered_json;  // keeps the documented order of the fields

std::string line_of(const Json& object) {
    return object.dump(-1, ' ', false, Json::error_handler_t::replace) + "\n";  // a path need not be UTF-8
}

std::string utc_now() {
    const auto now = std::chrono::system_clock::now().time_since_epoch();
    const auto ms = std::chrono::duration_cast<std::chrono::milliseconds>(now).count();
    return fmt::format("{:%Y-%m-%dT%H:%M:%S}.{:03}Z", fmt::gmtime(static_cast<std::time_t>(ms / 1000)), ms % 1000);
}

std::string make_folder(const std::string& path) {
    std::error_code error;
    std::filesystem::create_directories(path, error);
    if (error) {
        throw Problem(Exit::usage, fmt::format("cannot create the run directory {}: {}; choose another --run.dir", path,
                                               error.message()));
    }
    return path;
}

// What of metrics.jsonl does not belong to the run any more.
struct Superseded {
    int64_t offset = 0;  // it begins here
    std::string text;
    int64_t lines = 0;
};

// Everything from the first line of a later step on, or else a last line that was cut off.
Superseded find_superseded(const std::string& path, int64_t step) {
    Superseded found;
    std::ifstream in(path, std::ios::binary);
    for (std::string line; std::getline(in, line);) {
        const bool whole = !in.eof();
        if (found.lines == 0) {
            const Json object = Json::parse(line, nullptr, false);
            const bool has_step = object.is_object() && object.contains("step") && object["step"].is_number_integer();
            if (whole && !(has_step && object["step"].get<int64_t>() > step)) {
                found.offset += static_cast<int64_t>(line.size()) + 1;
                continue;
            }
        }
        found.text += line + "\n";
        ++found.lines;
    }
    return found;
}

// Returns what went wrong, or nothing. The copy is on disk before the original is cut, so nothing is lost in between.
std::string move_lines(const std::string& from, const Superseded& lines, const std::string& to) {
    const int fd = ::open(to.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0644);
    errno = fd < 0 ? errno : ENOSPC;  // what a short write means
    const bool copied = fd >= 0 && ::write(fd, lines.text.data(), lines.text.size()) == std::ssize(lines.text);
    const bool moved = copied && ::fsync(fd) == 0 && ::truncate(from.c_str(), lines.offset) == 0;
    const std::string error = moved ? "" : std::strerror(errno);
    if (fd >= 0) ::close(fd);
    return error;
}

struct Moved {
    int64_t lines = 0;
    std::string error;
};

Moved supersede_metrics(const std::string& dir, int64_t resumed_step) {
    const Superseded lines = find_superseded(dir + "/metrics.jsonl", resumed_step);
    if (lines.lines == 0) return {};
    return {lines.lines, move_lines(dir + "/metrics.jsonl", lines, dir + "/metrics.superseded.jsonl")};
}

}  // namespace

struct Telemetry::State {
    const std::string dir;
    const TelemetryOptions options;
    const Moved superseded;  // before metrics.jsonl is opened
    mutable std::mutex mutex;
    AppendFile metrics, events;
    std::optional<TensorboardFile> tensorboard;
    Console console;

    State(const std::string& run_dir, const TelemetryOptions& o)
        : dir(make_folder(run_dir)),
          options(o),
          superseded(supersede_metrics(dir, o.resumed_step)),
          metrics(dir + "/metrics.jsonl", AppendFile::Start::next_line, o.complaints),
          events(dir + "/events.jsonl", AppendFile::Start::next_line, o.complaints),
          console(o) {
        if (o.tensorboard) tensorboard.emplace(make_folder(dir + "/tensorboard"), o.resumed_step + 1, o.complaints);
    }
};

Telemetry::Telemetry(const std::string& run_dir, const TelemetryOptions& options)
    : state_(std::make_unique<State>(run_dir, options)) {
    const auto& [lines, error] = state_->superseded;
    if (lines == 0) return;
    const std::string outcome = error.empty() ? "moved to metrics.superseded.jsonl" : "not moved: " + error;
    event("metrics_superseded", {{"resumed_step", options.resumed_step}, {"lines", lines}, {"outcome", outcome}});
    if (error.empty()) return;
    const std::string text =
        fmt::format("{}/metrics.jsonl: {} lines after step {} {}\n", run_dir, lines, options.resumed_step, outcome);
    std::fputs(text.c_str(), options.complaints);
}

Telemetry::~Telemetry() = default;

void Telemetry::step(const StepRecord& r) {
    const ExposedSeconds& e = r.exposed_s;
    const Json exposed = {{"dp", e.dp}, {"tp", e.tp}, {"pp", e.pp}, {"ep", e.ep}, {"cp", e.cp}};
    const Json object = {
        {"step", r.step},       {"loss", r.loss},         {"grad_norm", r.grad_norm},       {"lr", r.lr},
        {"tokens", r.tokens},   {"step_s", r.step_s},     {"tokens_per_s", r.tokens_per_s}, {"mfu", r.mfu},
        {"exposed_s", exposed}, {"bubble_s", r.bubble_s}, {"mem_bytes", r.mem_bytes}};
    const std::lock_guard lock(state_->mutex);
    state_->metrics.append(line_of(object));
    if (state_->tensorboard) {
        state_->tensorboard->scalars(r.step, {{"loss", r.loss},
                                              {"grad_norm", r.grad_norm},
                                              {"lr", r.lr},
                                              {"tokens_per_s", r.tokens_per_s},
                                              {"mfu", r.mfu}});
    }
    state_->console.step(r);
}

void Telemetry::evaluation(int64_t step, double val_loss) {
    const std::lock_guard lock(state_->mutex);
    state_->metrics.append(line_of({{"step", step}, {"val_loss", val_loss}}));
    if (state_->tensorboard) state_->tensorboard->scalars(step, {{"val_loss", val_loss}});
    state_->console.evaluation(step, val_loss);
}

void Telemetry::event(const std::string& kind, const std::vector<EventField>& fields) {
    Json object = {{"time", utc_now()}, {"kind", kind}};
    for (const EventField& f : fields) std::visit([&](const auto& value) { object[f.key] = value; }, f.value);
    const std::lock_guard lock(state_->mutex);
    state_->events.append(line_of(object));
}

void Telemetry::say(const std::string& line) {
    const std::lock_guard lock(state_->mutex);
    state_->console.line(line);
}

int64_t Telemetry::failed_writes() const {
    const std::lock_guard lock(state_->mutex);
    const int64_t board = state_->tensorboard ? state_->tensorboard->failures() : 0;
    return state_->metrics.failures() + state_->events.failures() + board + state_->console.failures();
}

}  // namespace trifold
