#include "model/pipeline.h"

#include <algorithm>

namespace trifold {
namespace {

StageProgram stage_program(const Config& c, int stage, const std::vector<Program>& programs, int micros) {
    const int virtual_stages = static_cast<int>(c.mesh.virtual_stages);
    StageProgram p{.actions = programs[static_cast<size_t>(stage)], .micros = micros};
    p.slots = assign_slots(p.actions, virtual_stages, micros);
    // Stages that run further ahead than receives are posted would wait for each other when sends wait for receives.
    const TrafficOptions options{.lookahead = std::max(1, static_cast<int>(c.overlap.pp_ahead))};
    p.traffic = derive_traffic(programs, virtual_stages, options)[static_cast<size_t>(stage)];
    return p;
}

}  // namespace

ScheduleShape schedule_shape(const Config& c, int micros) {
    return {c.mesh.schedule, static_cast<int>(c.mesh.pp), static_cast<int>(c.mesh.virtual_stages), micros, static_cast<int>(c.overlap.pp_ahead)};
}

StageProgram training_program(const Config& c, int stage, int micros) {
    return stage_program(c, stage, make_schedule(schedule_shape(c, micros)), micros);
}

StageProgram evaluation_program(const Config& c, int stage, int micros) {
    return stage_program(c, stage, make_forward_schedule(static_cast<int>(c.mesh.pp), static_cast<int>(c.mesh.virtual_stages), micros), micros);
}

Pipeline::Pipeline(const Config& config, int stage, const StageProgram& training, Stage& work, const Channels& channels, int64_t elems, Arena& arena)
    : config_(config), stage_(stage), training_(training), work_(work), fold_(config.overlap.pp ? Fold::on : Fold::off) {
    if (config.mesh.pp == 1) return;
    // Evaluation goes in windows of at most one micro-batch per stage.
    std::array<int, 2> receives = training_.traffic.receive_buffers, sends = training_.traffic.send_buffers;
    for (int micros = 1; micros <= config.mesh.pp; ++micros) {
        const StageTraffic t = evaluation_program(config, stage, micros).traffic;
        for (size_t p = 0; p < 2; ++p) receives[p] = std::max(receives[p], t.receive_buffers[p]), sends[p] = std::max(sends[p], t.send_buffers[p]);
    }
    const auto channel = [&](const Group* group, int buffers) {
        Channel c{.group = group};
        for (int i = 0; i < buffers; ++i) c.buffers.push_back(arena.reserve(MemoryClass::workspace, config.train.dtype, elems));
        c.last_use.resize(c.buffers.size());
        return c;
    };
    for (size_t p = 0; p < 2; ++p) {
        in_[p] = channel(channels.in[p], receives[p]);
        out_[p] = channel(channels.out[p], sends[p]);
    }
}

// Posts the receives that belong before this step. A buffer is free when the action that took in its last message is done.
void Pipeline::post(const StageProgram& program, size_t step, const std::vector<Ticket>& done) {
    if (step >= program.traffic.steps.size()) return;
    for (size_t p = 0; p < 2; ++p) {
        Channel& channel = in_[p];
        while (static_cast<int>(channel.tickets.size()) < program.traffic.steps[step].posted[p]) {
            const Transfer& t = program.traffic.receives[p][channel.tickets.size()];
            const auto buffer = static_cast<size_t>(t.buffer);
            channel.group->follow(t.after >= 0 ? done[static_cast<size_t>(t.after)] : channel.last_use[buffer]);
            channel.tickets.push_back(channel.group->receive(0, channel.buffers[buffer]));
            if (fold_ == Fold::off) channel.group->send(0, {});
        }
    }
}

// Sends what the action left in its buffer. Without folding an empty answer says that it arrived: a send is done when the kernel has taken it, and
// the kernel's buffers would go on folding.
Ticket Pipeline::deliver(Stream& compute, const StageProgram& program, const Step& step) {
    if (step.send < 0) return {};
    const size_t p = channel_of(step.action.act);
    const Transfer& t = program.traffic.sends[p][static_cast<size_t>(step.send)];
    out_[p].group->follow(compute.last());
    Ticket sent = out_[p].group->send(1, out_[p].buffers[static_cast<size_t>(t.buffer)]);
    if (fold_ == Fold::off) sent = out_[p].group->receive(1, {});
    out_[p].last_use[static_cast<size_t>(t.buffer)] = sent;
    return sent;
}

// action(a, slot, in, out): computes one action; `in` and `out` are empty where the model begins or ends.
template <class RunAction>
void Pipeline::run(Stream& compute, const StageProgram& program, RunAction action) {
    const auto& steps = program.traffic.steps;
    std::vector<Ticket> done(steps.size());
    for (Channel& c : in_) c.tickets.clear();
    const auto receive = [&](const Step& step) {
        if (step.receive < 0) return Tensor{};
        const size_t p = channel_of(step.action.act);
        compute.follow(in_[p].tickets[static_cast<size_t>(step.receive)]);
        return in_[p].buffers[static_cast<size_t>(program.traffic.receives[p][static_cast<size_t>(step.receive)].buffer)];
    };
    for (size_t i = 0; i < steps.size(); ++i) {
        const Step& step = steps[i];
        post(program, i, done);
        const Tensor in = receive(step);
        Tensor out;
        if (step.send >= 0) {
            const size_t p = channel_of(step.action.act);
            const auto buffer = static_cast<size_t>(program.traffic.sends[p][static_cast<size_t>(step.send)].buffer);
            compute.follow(out_[p].last_use[buffer]);
            out = out_[p].buffers[buffer];
        }
        const int slot = program.slots.of[static_cast<size_t>(step.action.chunk * program.micros + step.action.micro)];
        action(step.action, slot, in, out);
        done[i] = compute.last();
        const Ticket sent = deliver(compute, program, step);
        if (fold_ == Fold::on) continue;
        post(program, i + 1, done);
        compute.follow(sent);
        if (i + 1 < steps.size()) receive(steps[i + 1]);
    }
    for (Channel& c : in_) std::fill(c.last_use.begin(), c.last_use.end(), compute.last());
}

void Pipeline::train(Stream& compute, const std::vector<TokenBatch>& micros, float grad_scale) {
    TRIFOLD_ASSERT(static_cast<int>(micros.size()) == training_.micros);
    run(compute, training_, [&](const Action& a, int slot, const Tensor& in, const Tensor& out) {
        if (a.act == Act::F) work_.forward(compute, a.chunk, slot, micros[static_cast<size_t>(a.micro)], in, out);
        if (a.act == Act::B) work_.backward(compute, a.chunk, slot, grad_scale, in, out);
        if (a.act == Act::W) work_.backward_weights(compute, a.chunk, slot);
    });
}

void Pipeline::evaluate(Stream& compute, const std::vector<TokenBatch>& micros) {
    const size_t window = static_cast<size_t>(config_.mesh.pp);
    for (size_t first = 0; first < micros.size(); first += window) {
        const size_t count = std::min(window, micros.size() - first);
        run(compute, evaluation_program(config_, stage_, static_cast<int>(count)), [&](const Action& a, int slot, const Tensor& in, const Tensor& out) {
            work_.forward(compute, a.chunk, slot, micros[first + static_cast<size_t>(a.micro)], in, out);
            if (!out) work_.loss(compute, slot);
        });
    }
}

}  // namespace trifold
