// parallel/telemetry.cpp   One record, four places: metrics.jsonl, TensorBoard, the console, and events beside them.
#include "parallel/telemetry.h"

#include <fcntl.h>
#include <fmt/chrono.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <mutex>
#include <nlohmann/json.hpp>
#include <optional>

#include "base/fd.h"
#include "base/refuse.h"
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
    if (error) refuse(Exit::usage, "cannot create the run directory {}: {}; choose another --run.dir", path, error.message());
    return path;
}

// What of metrics.jsonl did not belong to the run any more.
struct Superseded {
    int64_t offset = 0;  // it began here
    std::string text;
    int64_t lines = 0;
    std::string error;  // why it is still there
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

// The copy is on disk before the original is cut, so nothing is lost in between.
Superseded move_superseded(const std::string& dir, int64_t resumed_step) {
    const std::string from = dir + "/metrics.jsonl", to = dir + "/metrics.superseded.jsonl";
    Superseded found = find_superseded(from, resumed_step);
    if (found.lines == 0) return found;
    const Fd fd(::open(to.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0644));
    errno = fd ? ENOSPC : errno;  // what a short write means
    const bool copied = fd && ::write(fd.get(), found.text.data(), found.text.size()) == std::ssize(found.text);
    const bool moved = copied && ::fsync(fd.get()) == 0 && ::truncate(from.c_str(), found.offset) == 0;
    if (!moved) found.error = std::strerror(errno);
    found.text.clear();
    return found;
}

}  // namespace

struct Telemetry::State {
    const std::string dir;
    const TelemetryOptions options;
    const Superseded superseded;  // before metrics.jsonl is opened
    std::mutex mutex;
    AppendFile metrics, events;
    std::optional<AppendFile> tensorboard;
    Console console;

    State(const std::string& run_dir, const TelemetryOptions& o)
        : dir(make_folder(run_dir)),
          options(o),
          superseded(move_superseded(dir, o.resumed_step)),
          metrics(dir + "/metrics.jsonl", AppendFile::Start::next_line, o.complaints),
          events(dir + "/events.jsonl", AppendFile::Start::next_line, o.complaints),
          console(o) {
        if (!o.tensorboard) return;
        tensorboard.emplace(make_folder(dir + "/tensorboard") + "/" + tensorboard_file_name(), AppendFile::Start::empty, o.complaints);
        tensorboard->append(tensorboard_start(o.resumed_step + 1));
    }
    void to_tensorboard(int64_t step, const std::vector<Scalar>& values) {
        if (tensorboard) tensorboard->append(tensorboard_scalars(step, values));
    }
};

Telemetry::Telemetry(const std::string& run_dir, const TelemetryOptions& options)
    : state_(std::make_unique<State>(run_dir, options)) {
    const auto& [offset, text, lines, error] = state_->superseded;
    if (lines == 0) return;
    const std::string outcome = error.empty() ? "moved to metrics.superseded.jsonl" : "not moved: " + error;
    event("metrics_superseded", {{"resumed_step", options.resumed_step}, {"lines", lines}, {"outcome", outcome}});
    if (!error.empty())
        std::fputs(fmt::format("{}/metrics.jsonl: {} lines after step {} {}\n", run_dir, lines, options.resumed_step, outcome).c_str(), options.complaints);
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
    state_->to_tensorboard(r.step, {{"loss", r.loss}, {"grad_norm", r.grad_norm}, {"lr", r.lr}, {"tokens_per_s", r.tokens_per_s}, {"mfu", r.mfu}});
    state_->console.step(r);
}

void Telemetry::evaluation(int64_t step, double val_loss) {
    const std::lock_guard lock(state_->mutex);
    state_->metrics.append(line_of({{"step", step}, {"val_loss", val_loss}}));
    state_->to_tensorboard(step, {{"val_loss", val_loss}});
    state_->console.evaluation(step, val_loss);
}

void Telemetry::event(const std::string& kind, const std::vector<EventField>& fields) {
    Json object = {{"time", utc_now()}, {"kind", kind}};
    for (const auto& [key, field] : fields) std::visit([&](const auto& value) { object[key] = value; }, field);
    const std::lock_guard lock(state_->mutex);
    state_->events.append(line_of(object));
}

void Telemetry::say(const std::string& line) {
    const std::lock_guard lock(state_->mutex);
    state_->console.line(line);
}

}  // namespace trifold
