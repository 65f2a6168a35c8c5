// commands/run.h   One training run around its steps: weights, data, logs, checkpoints, signals.
//
// train.cu drives it: while (run.next()) { step; run.record(...); evaluation; checkpoint }. What a step computes is in
// train.cu; what is printed, saved and counted is here.
#pragma once
#include <memory>
#include <optional>
#include <string>

#include "data/loader.h"
#include "model/options.h"
#include "model/trainer.h"
#include "parallel/signals.h"
#include "parallel/world.h"

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
    ~Run();

    Trainer& trainer();
    // True: there is a step to do; its batch is in batch(). False: all done, or a signal asks to stop.
    bool next();
    const GlobalBatch& batch() const;
    // Counts the step, writes metrics. Throws Problem(Exit::gave_up) after resilience.max_skips bad steps in a row.
    void record(const StepResult& result);

    bool evaluation_due() const;
    int64_t validation_batches() const;           // micro-batches: data.eval_batches, or fewer: once through the set at most
    void begin_validation();                      // the same ones every time
    std::optional<std::vector<MicroBatch>> next_validation();  // this rank's next ones, perhaps none; nothing when all are done
    void record_evaluation(double loss);

    bool checkpoint_due() const;
    void save();       // in the background when checkpoint.async
    void save_last();  // the present step, unless it is saved already; done on return
    // What was learnt before bad data or too many bad steps is kept, where all ranks have met the same and can still save.
    void save_after(const Problem& problem);

    // A signal has asked this rank to stop; all stop together.
    StopRequest stop_requested() const;

    // debug.*: what train_step calls between backward and update of the first step; planted faults.
    void after_backward(float unit);

    // The last checkpoint, final words. Returns the exit code.
    Exit finish();

private:
    struct Parts;
    std::unique_ptr<Parts> parts_;
};

}  // namespace trifold
