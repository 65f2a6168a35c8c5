// parallel/schedule.h   Pipeline schedules are data: one list of actions per stage (DESIGN 5).
//
//   part   The model is cut into stages * virtual_stages parts; chunk c of stage s is part c * stages + s. Activations go from
//          part k to part k + 1 after F, gradients from part k to part k - 1 after B; both go round the ring of stages.
//   moves  schedule_traffic.h derives what each stage sends and receives, and when receives are posted.
//   times  schedule_simulation.h plays the same lists with seconds.
//   check  test/unit/schedule_check.h plays all stages together: every action runs exactly once and can start, both ends of every link
//          agree, and sends that wait for their receives never block for ever. The schedules below pass for every shape; a new one must.
//
// p stages, m micro-batches, v chunks per stage; F, B, W: seconds per stage and micro-batch. "Alive" is what stage s holds at most,
// in micro-batches of one chunk. The first column is exact where p | m (zero_bubble: m >= p, W <= F, W <= B).
//
//                idle time      alive on stage s                          source
//   1f1b         (p-1)(F+B+W)   min(m, p-s)                               Narayanan et al. 2019 (PipeDream-Flush)
//   interleaved  (p-1)(F+B+W)/v min(m v, 2(p-s-1) + (v-1)p + 1)           Narayanan et al. 2021, section 2.2
//   zero_bubble  (p-1)(F+B-W)   min(m, p); before its B: min(m, p-s)      Qi et al. 2023, ZB-H1
//
// These lists hide messages only while a stage has something else to do: between F and B of a micro-batch lie two messages for each stage behind,
// which take no time in the table above. With `ahead` = 1 there is room for messages as long as the computation (Zhuang et al. 2022,
// arXiv 2211.05322, eager 1F1B); it keeps up to ahead (p-s-1) more micro-batches alive,
// and needs as many receives posted (TrafficOptions::lookahead).
#pragma once
#include <cstdint>
#include <string>
#include <vector>

namespace trifold {

// F forward, B backward (input gradient; with the weight gradient where the list has no W), W weight gradient.
enum class Act : uint8_t { F, B, W };

struct Action {
    Act act = Act::F;
    int chunk = 0;  // of this stage: virtual stage 0, 1, ... ; chunk c of stage s is part c * stages + s of the model
    int micro = 0;
    bool operator==(const Action&) const = default;
};
using Program = std::vector<Action>;

enum class ScheduleKind : uint8_t { one_f_one_b, interleaved, zero_bubble };
const char* name_of(ScheduleKind kind);  // 1f1b, interleaved, zero_bubble

struct ScheduleShape {
    ScheduleKind kind = ScheduleKind::one_f_one_b;
    int stages = 1, virtual_stages = 1, micros = 1;
    int ahead = 0;  // more micro-batches that a stage starts before its first backward pass, for each stage behind it
};

// 1f1b and zero_bubble have one part of the model per stage, interleaved no `ahead`; else Problem(Exit::usage).
void check_shape(const ScheduleShape& shape);

// One program per stage, for any number of micro-batches. Checks the shape.
std::vector<Program> make_schedule(const ScheduleShape& shape);
// Forward passes only (evaluation), any number of virtual stages.
std::vector<Program> make_forward_schedule(int stages, int virtual_stages, int micros);

// The number of micro-batches in it.
int micros_of(const std::vector<Program>& programs);

// Where each micro-batch keeps what it needs between F and its last action: W where the list has any, else B, else (evaluation) F itself.
struct Slots {
    std::vector<int> of;     // chunk * micros + micro: a slot of that chunk, the smallest one free at its F
    std::vector<int> count;  // by chunk: the most micro-batches that need one at any time
};
Slots assign_slots(const Program& program, int virtual_stages, int micros);

// "F3", or "F3.1" for chunk 1 when the stages have several chunks.
std::string text_of(const Action& action, int virtual_stages);
// One line per stage: "stage 0: F0 F1 B0 B1".
std::vector<std::string> text_of(const std::vector<Program>& programs, int virtual_stages);

}  // namespace trifold
