// parallel/schedule_traffic.cpp   The four channels of each stage, from the programs of all.
#include "parallel/schedule_traffic.h"

#include <algorithm>

#include "base/error.h"

namespace trifold {
namespace {

Payload payload_of(Act act) { return act == Act::F ? Payload::activation : Payload::gradient; }
size_t index(Payload payload) { return static_cast<size_t>(payload); }

struct Shape {
    int stages = 1, virtual_stages = 1;
    int part(int stage, int chunk) const { return chunk * stages + stage; }
    // The part that F of this part sends to, or B of it; -1: none (an end of the model, a W, or the same stage).
    int receiver(int stage, const Action& a) const {
        const int to = part(stage, a.chunk) + (a.act == Act::F ? 1 : -1);
        return a.act == Act::W || stages == 1 || to < 0 || to >= stages * virtual_stages ? -1 : to;
    }
};

// Every send at the end of its channel at both stages. The receiver's position is not known yet.
void connect(int stage, const Program& program, const Shape& shape, std::vector<StageTraffic>& traffic) {
    for (size_t i = 0; i < program.size(); ++i) {
        const Action& a = program[i];
        Step& step = traffic[stage].steps.emplace_back(Step{.action = a});
        const int to = shape.receiver(stage, a);
        if (to < 0) continue;
        const size_t p = index(payload_of(a.act));
        StageTraffic& peer = traffic[to % shape.stages];
        step.send = static_cast<int>(traffic[stage].sends[p].size());
        traffic[stage].sends[p].push_back(
            {.peer_stage = peer.stage, .chunk = a.chunk, .micro = a.micro, .action = static_cast<int>(i)});
        peer.receives[p].push_back({.peer_stage = stage, .chunk = to / shape.stages, .micro = a.micro});
    }
}

// Tells each step which element of its channel it takes in.
void find_receivers(StageTraffic& stage, int virtual_stages, int micros) {
    for (const Payload payload : {Payload::activation, Payload::gradient}) {
        std::vector<Transfer>& receives = stage.receives[index(payload)];
        std::vector<int> number(static_cast<size_t>(virtual_stages) * micros, -1);
        for (size_t i = 0; i < receives.size(); ++i)
            number[static_cast<size_t>(receives[i].chunk) * micros + receives[i].micro] = static_cast<int>(i);
        for (size_t i = 0; i < stage.steps.size(); ++i) {
            Step& step = stage.steps[i];
            if (step.action.act == Act::W || payload_of(step.action.act) != payload) continue;
            step.receive = number[static_cast<size_t>(step.action.chunk) * micros + step.action.micro];
            if (step.receive >= 0) receives[step.receive].action = static_cast<int>(i);
        }
    }
}

// How many receives are posted before each step: those that it needs, and `lookahead` more than have been taken in.
void place_receives(StageTraffic& stage, const TrafficOptions& options) {
    std::array<int, 2> taken{}, posted{};
    for (Step& step : stage.steps) {
        const size_t own = index(payload_of(step.action.act));
        for (size_t p = 0; p < 2; ++p) {
            const int all = static_cast<int>(stage.receives[p].size());
            posted[p] = std::max(posted[p], std::min(all, taken[p] + options.lookahead));
        }
        posted[own] = std::max(posted[own], step.receive + 1);
        step.posted = posted;
        if (step.receive >= 0) ++taken[own];
    }
}

// The smallest free buffer at posting, free again after the action that takes the message in.
void assign_receive_buffers(StageTraffic& stage) {
    struct Buffer {
        bool taken = false;
        int after = -1;
    };
    for (size_t p = 0; p < 2; ++p) {
        std::vector<Transfer>& receives = stage.receives[p];
        std::vector<Buffer> buffers;
        int posted = 0;
        for (const Step& step : stage.steps) {
            for (; posted < step.posted[p]; ++posted) {
                size_t b = 0;
                while (b < buffers.size() && buffers[b].taken) ++b;
                if (b == buffers.size()) buffers.emplace_back();
                buffers[b].taken = true;
                receives[posted].buffer = static_cast<int>(b);
                receives[posted].after = buffers[b].after;
            }
            if (step.receive < 0 || index(payload_of(step.action.act)) != p) continue;
            const Transfer& taken_in = receives[step.receive];
            buffers[taken_in.buffer] = {.taken = false, .after = taken_in.action};
        }
        stage.receive_buffers[p] = static_cast<int>(buffers.size());
    }
}

void assign_send_buffers(StageTraffic& stage, const TrafficOptions& options) {
    for (size_t p = 0; p < 2; ++p) {
        const int count = static_cast<int>(stage.sends[p].size());
        stage.send_buffers[p] = std::min(count, options.send_buffers);
        for (int i = 0; i < count; ++i) stage.sends[p][i].buffer = i % options.send_buffers;
    }
}

}  // namespace

const char* name_of(Payload payload) { return payload == Payload::activation ? "activation" : "gradient"; }

std::vector<StageTraffic> derive_traffic(const std::vector<Program>& programs, int virtual_stages,
                                         const TrafficOptions& options) {
    TRIFOLD_ASSERT(options.lookahead >= 1 && options.send_buffers >= 1);
    const Shape shape{static_cast<int>(programs.size()), virtual_stages};
    int micros = 0;
    for (const Program& program : programs)
        for (const Action& a : program) micros = std::max(micros, a.micro + 1);
    std::vector<StageTraffic> traffic(programs.size());
    for (int s = 0; s < shape.stages; ++s) traffic[s].stage = s;
    for (int s = 0; s < shape.stages; ++s) connect(s, programs[s], shape, traffic);
    for (StageTraffic& stage : traffic) {
        find_receivers(stage, virtual_stages, micros);
        place_receives(stage, options);
        assign_receive_buffers(stage);
        assign_send_buffers(stage, options);
    }
    return traffic;
}

}  // namespace trifold
