// model/pipeline.h   Walks through one stage's list of actions: messages, slots, and what the stage computes (DESIGN 5).
//
// A receive is posted early, into a buffer of its channel; the action that needs it copies it into its slot. What an action leaves goes to a
// send buffer, and on its way while the next action runs. compute never waits for a send before its buffer is needed again, and only
// for the receive that the next action takes in. Off-twin (overlap.pp=off): after each action compute waits until its message has arrived
// and for the next receive, both posted together.
#pragma once
#include <array>
#include <vector>

#include "kernels/arena.h"
#include "model/config.h"
#include "model/stage.h"
#include "parallel/group.h"
#include "parallel/schedule_traffic.h"

namespace trifold {

// One stage's part of a schedule.
struct StageProgram {
    Program actions;
    StageTraffic traffic;    // no messages with one stage
    Slots slots;
    int micros = 0;
};
ScheduleShape schedule_shape(const Config& c, int micros);
StageProgram training_program(const Config& c, int stage, int micros);
StageProgram evaluation_program(const Config& c, int stage, int micros);

// By Payload. Each link is a group of two, sender first.
struct Channels {
    std::array<const Group*, 2> out = {nullptr, nullptr}, in = {nullptr, nullptr};
};

class Pipeline {
public:
    // Buffers hold `elems` elements: n rows of C.
    Pipeline(const Config& config, int stage, const StageProgram& training, Stage& compute, const Channels& channels, int64_t elems, Arena& arena);

    // All micro-batches of a step, forward and backward.
    void train(Stream& compute, const std::vector<TokenBatch>& micros, float grad_scale);
    // Losses of these micro-batches; the same number on all stages.
    void evaluate(Stream& compute, const std::vector<TokenBatch>& micros);

private:
    struct Channel {
        const Group* group = nullptr;
        std::vector<Tensor> buffers;
        std::vector<Ticket> tickets;  // of the messages of this run
        std::vector<Ticket> last_use; // of each buffer in the run before: by the stream that must be waited for
    };
    template <class RunAction> void run(Stream& compute, const StageProgram& program, RunAction action);
    void post(const StageProgram& program, size_t step, const std::vector<Ticket>& done);
    Ticket deliver(Stream& compute, const StageProgram& program, const Step& step);

    const Config& config_;
    int stage_;
    StageProgram training_;
    Stage& work_;
    Fold fold_;
    std::array<Channel, 2> in_, out_;
};

}  // namespace trifold
