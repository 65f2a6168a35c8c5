// commands/run_parts.h   What a run keeps, for the two files that are one class: run_start.cpp up to the first step, run.cpp from there on.
#pragma once
#include <array>
#include <chrono>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "checkpoint/async_saver.h"
#include "checkpoint/load.h"
#include "commands/loading.h"
#include "commands/peak.h"
#include "commands/run.h"
#include "parallel/telemetry.h"
#include "parallel/trace.h"

namespace trifold {

using Clock = std::chrono::steady_clock;

// Everything of a run beside the numbers. Members are made in this order and end in the reverse one.
struct Run::Parts {
    Parts(const Config& config, World& world)
        : config(config),
          world(world),
          place(mesh_of(config).at(world.rank())),
          trace(make_trace(config, world)),
          train(open_data(config.data.train, training_data(config, place.dp), world)),
          trainer(config, world),
          store(store_options(config, world)) {}

    static Trace make_trace(const Config& c, const World& world) {
        return c.run.trace ? Trace(c.run.dir, world.rank(), world.clock_offset_ns()) : Trace();
    }
    static StoreOptions store_options(const Config& c, World& world) {
        return {.dir = c.checkpoint.dir, .keep = c.checkpoint.keep, .keep_every = c.checkpoint.keep_every,
                .threads = static_cast<int>(c.run.threads), .tool = std::string("trifold ") + TRIFOLD_VERSION,
                .world = world.size() > 1 ? &world : nullptr};
    }
    bool leads() const { return world.rank() == 0; }  // prints and logs
    void event(const std::string& kind, const std::vector<EventField>& fields) {
        if (log) log->event(kind, fields);
    }
    void say(const std::string& line) {
        if (log) log->say(line);
    }
    std::array<double, 4> waited() const { return {trainer.waited_s(Axis::tp), trainer.waited_s(Axis::dp), trainer.waited_s(Axis::pp), trainer.waited_s(Axis::cp)}; }

    FoundCheckpoint checkpoint_to_resume() const;
    bool is_own_checkpoint(const std::string& path) const;
    void dump(const std::string& path, const std::vector<StateSlice>& slices);
    FoundCheckpoint agreed_checkpoint() const;
    void load_weights();
    void check_same_samples(const FoundCheckpoint& found) const;
    void resume(const FoundCheckpoint& found);
    void start_logs();
    void print_start() const;
    size_t hosts() const {
        std::set<std::string> names;
        for (int r = 0; r < world.size(); ++r) names.insert(world.host_of(r));
        return names.size();
    }
    TrainingState state() const;
    ExposedSeconds exposed(double step_s, double& bubble_s);
    void report(const std::optional<SaveOutcome>& outcome);

    const Config config;
    World& world;
    const Coordinates place;
    SignalHandlers signals;
    Trace trace;
    Loader train;
    Trainer trainer;
    CheckpointStore store;
    std::optional<Loader> validation;
    std::optional<Telemetry> log;
    std::optional<AsyncSaver> saver;
    std::vector<std::string> damaged;   // checkpoints that could not be used, for the log

    GlobalBatch batch;
    std::string data_hash, origin_of_weights = "random initial values";
    Peak peak;
    int64_t resumed_step = 0, saved_step = -1, steps_here = 0, tokens = 0;
    bool last_save_failed = false;
    StopRequest stop = StopRequest::none;  // agreed by all ranks
    std::array<double, 4> waited_before{};  // tp, dp, pp, cp at the start of the step
    double bubble = 0;                     // of the schedule: idle over ideal time
    int64_t validated = 0;                 // rounds of micro-batches of this evaluation
    Clock::time_point step_start, started = Clock::now();
};

}  // namespace trifold
