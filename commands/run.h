// commands/run.h   One training run around its steps: weights, data, logs, checkpoints, signals.
//
// train.cu drives it: while (run.next()) { step; run.record(...); evaluation; checkpoint }. What a step computes is in
// train.cu; what is printed, saved and counted is here.
#pragma once
#include <array>
#include <chrono>
#include <optional>
#include <string>
#include <vector>

#include "checkpoint/async_saver.h"
#include "checkpoint/load.h"
#include "commands/loading.h"
#include "commands/peak.h"
#include "model/trainer.h"
#include "parallel/signals.h"
#include "parallel/telemetry.h"
#include "parallel/trace.h"

namespace trifold {

struct StepResult {
    double loss = 0;         // mean over the valid tokens of the global batch
    float grad_norm = 0;     // of the mean loss, before clipping
    double lr = 0;
    bool applied = false;    // false: loss or gradients were not finite, nothing was changed
    int64_t tokens = 0;      // valid ones
    StopRequest stop = StopRequest::none;  // some rank was asked to stop
};

class Run {
public:
    // Checks and creates the run directory, allocates, loads or makes the weights, opens the data. Everything that can be
    // refused is refused here, before step 0.
    Run(const Config& config, World& world);

    Trainer& trainer() { return trainer_; }
    // True: there is a step to do; its batch is in batch(). False: all done, or a signal asks to stop.
    bool next();
    const GlobalBatch& batch() const { return batch_; }
    // Counts the step, writes metrics. Throws Problem(Exit::gave_up) after resilience.max_skips bad steps in a row.
    void record(const StepResult& result);

    bool evaluation_due() const;
    void begin_validation();                                   // the same ones every time: data.eval_batches, once through the set at most
    std::optional<std::vector<MicroBatch>> next_validation();  // this rank's next ones, perhaps none; nothing when all are done
    void record_evaluation(double loss);

    bool checkpoint_due() const;
    void save();       // in the background when checkpoint.async
    void save_last();  // the present step, unless it is saved already; done on return
    // What was learnt before bad data or too many bad steps is kept, where all ranks have met the same and can still save.
    void save_after(const Problem& problem);

    // A signal has asked this rank to stop; all stop together.
    StopRequest stop_requested() const { return signals_.requested(); }

    // debug.*: what train_step calls between backward and update of the first step; planted faults.
    void after_backward(float unit);

    // The last checkpoint, final words. Returns the exit code.
    Exit finish();

private:
    using Clock = std::chrono::steady_clock;

    // run_start.cpp
    FoundCheckpoint checkpoint_to_resume() const;
    bool is_own_checkpoint(const std::string& path) const;
    FoundCheckpoint agreed_checkpoint() const;
    void load_weights();
    void check_same_samples(const FoundCheckpoint& found) const;
    void resume(const FoundCheckpoint& found);
    void start_logs();
    void print_start() const;
    // run.cpp
    bool leads() const { return world_.rank() == 0; }  // prints and logs
    void event(const std::string& kind, const std::vector<EventField>& fields);
    void say(const std::string& line);
    std::array<double, 4> waited() const;
    ExposedSeconds exposed(double step_s, double& bubble_s);
    TrainingState state() const;
    void report(const std::optional<SaveOutcome>& outcome);
    void dump(const std::string& path, const std::vector<StateSlice>& slices);

    // Made in this order, and ended in the reverse one.
    std::string attention_reason_;  // found while config_ is made
    const Config config_;
    World& world_;
    const Coordinates place_;
    SignalHandlers signals_;
    Trace trace_;
    Loader train_;
    Trainer trainer_;
    CheckpointStore store_;
    std::optional<Loader> validation_;
    std::optional<Telemetry> log_;
    std::optional<AsyncSaver> saver_;
    std::vector<std::string> damaged_;  // checkpoints that could not be used, for the log

    GlobalBatch batch_;
    std::string data_hash_, origin_of_weights_ = "random initial values";
    Peak peak_;
    int64_t resumed_step_ = 0, saved_step_ = -1, steps_here_ = 0, tokens_ = 0;
    bool last_save_failed_ = false;
    StopRequest stop_ = StopRequest::none;   // agreed by all ranks
    std::array<double, 4> waited_before_{};  // tp, dp, pp, cp at the start of the step
    double bubble_ = 0;                      // of the schedule: idle over ideal time
    int64_t validated_ = 0;                  // rounds of micro-batches of this evaluation
    Clock::time_point step_start_, started_ = Clock::now();
};

}  // namespace trifold
