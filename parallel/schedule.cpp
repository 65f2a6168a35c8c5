// parallel/schedule.cpp   1F1B, interleaved 1F1B and ZB-H1 as lists, their slots and their text.
#include "parallel/schedule.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <utility>

#include "base/error.h"

namespace trifold {
namespace {

// The order of forward passes, the same on every stage: `stages` micro-batches go through chunk 0, then the same ones through
// chunk 1, and so on. When chunk 0 has seen the last of a group, its first has come round the ring and can enter chunk 1.
Program forward_order(int stages, int virtual_stages, int micros) {
    Program order;
    for (int first = 0; first < micros; first += stages)
        for (int chunk = 0; chunk < virtual_stages; ++chunk)
            for (int micro = first; micro < std::min(first + stages, micros); ++micro) order.push_back({Act::F, chunk, micro});
    return order;
}

// Fills the pipeline with `fill` forward passes, then alternates, then drains it. Backward passes come in the order of the
// forward passes, with the chunks reversed. Micro-batches from `micros` on are left out.
Program fill_alternate_drain(const Program& forwards, int virtual_stages, int fill, int micros) {
    Program program;
    const auto add = [&](Act act, int chunk, int micro) {
        if (micro < micros) program.push_back({act, chunk, micro});
    };
    const size_t passes = forwards.size(), ahead = std::min(static_cast<size_t>(fill), passes);
    for (size_t k = 0; k < passes + ahead; ++k) {
        if (k < passes) add(Act::F, forwards[k].chunk, forwards[k].micro);
        if (k >= ahead) add(Act::B, virtual_stages - 1 - forwards[k - ahead].chunk, forwards[k - ahead].micro);
    }
    return program;
}

// Stage s starts p-s-1 micro-batches ahead of its first backward pass, or a multiple of that.
Program one_f_one_b(int stage, const ScheduleShape& shape) {
    return fill_alternate_drain(forward_order(shape.stages, 1, shape.micros), 1, (1 + shape.ahead) * (shape.stages - stage - 1), shape.micros);
}

// On one stage nothing is in flight elsewhere: each micro-batch goes through all chunks and back.
Program there_and_back(int virtual_stages, int micros) {
    Program program;
    for (int micro = 0; micro < micros; ++micro) {
        for (int chunk = 0; chunk < virtual_stages; ++chunk) program.push_back({Act::F, chunk, micro});
        for (int chunk = virtual_stages - 1; chunk >= 0; --chunk) program.push_back({Act::B, chunk, micro});
    }
    return program;
}

// Megatron-LM's order. Where p does not divide m, the list is that of the next multiple of p without the micro-batches that do
// not exist: what is left of an order that works still works. Megatron's numbers with a smaller last group would block (it
// refuses them), and a larger one (p + m mod p) is faster but keeps (v-1) (m mod p) chunks more alive.
Program interleaved(int stage, const ScheduleShape& shape) {
    const int p = shape.stages, v = shape.virtual_stages;
    if (p == 1) return there_and_back(v, shape.micros);
    const int whole = (shape.micros + p - 1) / p * p;
    return fill_alternate_drain(forward_order(p, v, whole), v, 2 * (p - stage - 1) + (v - 1) * p, shape.micros);
}

// 1F1B with the weight gradients apart, each of them s micro-batches late on stage s: input gradients come earlier to the stages
// before, the late W fill the end, and every stage keeps min(m, p) micro-batches, as many as the first stage of 1F1B.
Program zero_bubble(int stage, const ScheduleShape& shape) {
    Program program;
    int next = 0;
    for (const Action& action : one_f_one_b(stage, shape)) {
        program.push_back(action);
        if (action.act == Act::B && action.micro >= stage) program.push_back({Act::W, 0, next++});
    }
    while (next < shape.micros) program.push_back({Act::W, 0, next++});
    return program;
}

}  // namespace

const char* name_of(ScheduleKind kind) {
    constexpr std::array names{"1f1b", "interleaved", "zero_bubble"};
    return names.at(static_cast<size_t>(kind));
}

void check_shape(const ScheduleShape& shape) {
    if (shape.virtual_stages > 1 && shape.kind != ScheduleKind::interleaved)
        throw Problem(
            Exit::usage,
            fmt::format("mesh.schedule={} runs one part of the model per stage, but mesh.virtual_stages={}: choose mesh.schedule="
                        "interleaved, or mesh.virtual_stages=1",
                        name_of(shape.kind), shape.virtual_stages));
    if (shape.virtual_stages > 1 && shape.ahead > 0)
        throw Problem(Exit::usage, fmt::format("overlap.pp_ahead={}: the order of mesh.schedule=interleaved would block; choose mesh.schedule=1f1b or zero_bubble, or "
                                               "overlap.pp_ahead=0", shape.ahead));
}

std::vector<Program> make_schedule(const ScheduleShape& shape) {
    TRIFOLD_ASSERT(shape.stages >= 1 && shape.virtual_stages >= 1 && shape.micros >= 1 && shape.ahead >= 0);
    check_shape(shape);
    std::vector<Program> programs;
    for (int stage = 0; stage < shape.stages; ++stage) {
        const bool late_weights = shape.kind == ScheduleKind::zero_bubble;
        programs.push_back(late_weights ? zero_bubble(stage, shape) : shape.virtual_stages > 1 ? interleaved(stage, shape) : one_f_one_b(stage, shape));
    }
    return programs;
}

std::vector<Program> make_forward_schedule(int stages, int virtual_stages, int micros) {
    TRIFOLD_ASSERT(stages >= 1 && virtual_stages >= 1 && micros >= 1);
    return std::vector<Program>(static_cast<size_t>(stages), forward_order(stages, virtual_stages, micros));
}

int micros_of(const std::vector<Program>& programs) {
    int micros = 0;
    for (const Program& program : programs)
        for (const Action& a : program) micros = std::max(micros, a.micro + 1);
    return micros;
}

Slots assign_slots(const Program& program, int virtual_stages, int micros) {
    Act last = Act::F;
    for (const Action& a : program) last = std::max(last, a.act);
    std::vector<int> slots(static_cast<size_t>(virtual_stages) * micros, -1), count;
    std::vector<std::vector<bool>> taken(static_cast<size_t>(virtual_stages));
    for (const Action& a : program) {
        std::vector<bool>& of_chunk = taken[a.chunk];
        int& slot = slots[static_cast<size_t>(a.chunk) * micros + a.micro];
        if (a.act == Act::F) {
            const auto free = std::find(of_chunk.begin(), of_chunk.end(), false);
            slot = static_cast<int>(free - of_chunk.begin());
            if (free == of_chunk.end()) of_chunk.push_back(false);
            of_chunk[slot] = true;
        }
        TRIFOLD_ASSERT(slot >= 0);  // F comes first
        if (a.act == last) of_chunk[slot] = false;
    }
    for (const std::vector<bool>& of_chunk : taken) count.push_back(static_cast<int>(of_chunk.size()));
    return {std::move(slots), std::move(count)};
}

std::string text_of(const Action& action, int virtual_stages) {
    std::string text = "FBW"[static_cast<size_t>(action.act)] + std::to_string(action.micro);
    if (virtual_stages > 1) text += "." + std::to_string(action.chunk);
    return text;
}

std::vector<std::string> text_of(const std::vector<Program>& programs, int virtual_stages) {
    std::vector<std::string> lines;
    for (size_t stage = 0; stage < programs.size(); ++stage) {
        std::string line = fmt::format("stage {}:", stage);
        for (const Action& action : programs[stage]) line += " " + text_of(action, virtual_stages);
        lines.push_back(std::move(line));
    }
    return lines;
}

}  // namespace trifold
