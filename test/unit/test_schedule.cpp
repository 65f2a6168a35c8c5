// test/unit/test_schedule.cpp   Every schedule of up to 16 stages, 64 micro-batches and 4 chunks: it plays, its channels agree,
// and memory and bubble are those of the literature. What the checkers refuse is in test_schedule_broken.cpp.
#include "test/catch.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <string>
#include <vector>

#include "base/error.h"
#include "parallel/schedule.h"
#include "parallel/schedule_simulation.h"
#include "parallel/schedule_traffic.h"
#include "test/unit/schedule_check.h"

using namespace trifold;
using namespace trifold::schedule_test;

namespace {

constexpr int most_stages = 16, most_micros = 64, most_chunks = 4;
constexpr ScheduleKind kinds[] = {ScheduleKind::one_f_one_b, ScheduleKind::interleaved, ScheduleKind::zero_bubble};

std::string said_of(const ScheduleShape& s) {
    return std::string(name_of(s.kind)) + ", stages " + std::to_string(s.stages) + ", chunks " +
           std::to_string(s.virtual_stages) + ", micro-batches " + std::to_string(s.micros) + ": ";
}

// Calls check(shape, programs) for all of them; it returns what is wrong, if anything. One assertion for all, of thousands.
void for_all(const std::function<std::string(const ScheduleShape&, const std::vector<Program>&)>& check) {
    std::vector<std::string> wrong;
    int schedules = 0;
    for (const ScheduleKind kind : kinds)
        for (int stages = 1; stages <= most_stages; ++stages)
            for (int micros = 1; micros <= most_micros; ++micros)
                for (int chunks = 1; chunks <= (kind == ScheduleKind::interleaved ? most_chunks : 1); ++chunks) {
                    const ScheduleShape shape{kind, stages, chunks, micros};
                    const std::string said = check(shape, make_schedule(shape));
                    if (!said.empty() && wrong.size() < 5) wrong.push_back(said_of(shape) + said);
                    ++schedules;
                }
    CHECK(schedules == 6 * most_stages * most_micros);
    CHECK(wrong == std::vector<std::string>());
}

std::string unequal(const std::string& what, double is, double wanted) {
    return std::abs(is - wanted) <= 1e-9 * std::max(1.0, std::abs(wanted))
               ? ""
               : what + " is " + std::to_string(is) + " instead of " + std::to_string(wanted);
}

std::string lines(ScheduleShape shape) {
    std::string text;
    for (const std::string& line : text_of(make_schedule(shape), shape.virtual_stages)) text += line + "\n";
    return text;
}

// The published number of micro-batch parts that are alive on a stage (schedule.h).
int published_in_flight(const ScheduleShape& s, int stage) {
    const int p = s.stages, v = s.virtual_stages, m = s.micros;
    if (s.kind == ScheduleKind::zero_bubble) return std::min(m, p);
    if (v == 1) return std::min(m, p - stage);
    return p == 1 ? v : std::min(m * v, 2 * (p - stage - 1) + (v - 1) * p + 1);
}

double makespan(const ScheduleShape& shape, const PartCost& cost) {
    return simulate(make_schedule(shape), shape.virtual_stages, {.parts = {cost}}).makespan_s;
}

}  // namespace

TEST_CASE("schedules are those of the papers", "[schedule]") {
    CHECK(lines({ScheduleKind::one_f_one_b, 4, 1, 5}) ==
          "stage 0: F0 F1 F2 F3 B0 F4 B1 B2 B3 B4\n"
          "stage 1: F0 F1 F2 B0 F3 B1 F4 B2 B3 B4\n"
          "stage 2: F0 F1 B0 F2 B1 F3 B2 F4 B3 B4\n"
          "stage 3: F0 B0 F1 B1 F2 B2 F3 B3 F4 B4\n");
    CHECK(lines({ScheduleKind::interleaved, 2, 2, 4}) ==
          "stage 0: F0.0 F1.0 F0.1 F1.1 F2.0 B0.1 F3.0 B1.1 F2.1 B0.0 F3.1 B1.0 B2.1 B3.1 B2.0 B3.0\n"
          "stage 1: F0.0 F1.0 F0.1 B0.1 F1.1 B1.1 F2.0 B0.0 F3.0 B1.0 F2.1 B2.1 F3.1 B3.1 B2.0 B3.0\n");
    // Qi et al. 2023, figure 3 (counted from 0)
    CHECK(lines({ScheduleKind::zero_bubble, 4, 1, 8}) ==
          "stage 0: F0 F1 F2 F3 B0 W0 F4 B1 W1 F5 B2 W2 F6 B3 W3 F7 B4 W4 B5 W5 B6 W6 B7 W7\n"
          "stage 1: F0 F1 F2 B0 F3 B1 W0 F4 B2 W1 F5 B3 W2 F6 B4 W3 F7 B5 W4 B6 W5 B7 W6 W7\n"
          "stage 2: F0 F1 B0 F2 B1 F3 B2 W0 F4 B3 W1 F5 B4 W2 F6 B5 W3 F7 B6 W4 B7 W5 W6 W7\n"
          "stage 3: F0 B0 F1 B1 F2 B2 F3 B3 W0 F4 B4 W1 F5 B5 W2 F6 B6 W3 F7 B7 W4 W5 W6 W7\n");
}

TEST_CASE("one stage accumulates, and few micro-batches work", "[schedule]") {
    CHECK(lines({ScheduleKind::one_f_one_b, 1, 1, 3}) == "stage 0: F0 B0 F1 B1 F2 B2\n");
    CHECK(lines({ScheduleKind::zero_bubble, 1, 1, 2}) == "stage 0: F0 B0 W0 F1 B1 W1\n");
    CHECK(lines({ScheduleKind::interleaved, 1, 3, 2}) ==
          "stage 0: F0.0 F0.1 F0.2 B0.2 B0.1 B0.0 F1.0 F1.1 F1.2 B1.2 B1.1 B1.0\n");
    CHECK(lines({ScheduleKind::one_f_one_b, 3, 1, 1}) == "stage 0: F0 B0\nstage 1: F0 B0\nstage 2: F0 B0\n");
    CHECK(lines({ScheduleKind::interleaved, 2, 2, 1}) == "stage 0: F0.0 F0.1 B0.1 B0.0\nstage 1: F0.0 F0.1 B0.1 B0.0\n");
    CHECK(lines({ScheduleKind::interleaved, 2, 1, 2}) == lines({ScheduleKind::one_f_one_b, 2, 1, 2}));
}

TEST_CASE("1f1b and zero_bubble have no virtual stages", "[schedule]") {
    for (const ScheduleKind kind : {ScheduleKind::one_f_one_b, ScheduleKind::zero_bubble}) {
        try {
            make_schedule({kind, 4, 2, 8});
            FAIL("accepted");
        } catch (const Problem& problem) {
            CHECK(problem.code() == Exit::usage);
            CHECK(std::string(problem.what()) ==
                  std::string("mesh.schedule=") + name_of(kind) +
                      " runs one part of the model per stage, but mesh.virtual_stages=2: choose mesh.schedule="
                      "interleaved, or mesh.virtual_stages=1");
        }
    }
}

TEST_CASE("all schedules play to their end", "[schedule]") {
    for_all([](const ScheduleShape& s, const std::vector<Program>& programs) {
        return check_schedule(programs, s.virtual_stages, s.micros);
    });
}

TEST_CASE("evaluation's schedules play to their end, and their channels agree", "[schedule]") {
    std::vector<std::string> wrong;
    for (int stages = 1; stages <= most_stages; ++stages)
        for (int chunks = 1; chunks <= most_chunks; ++chunks)
            for (const int micros : {1, 2, 3, 7, 8, 16, 31, 64}) {
                const auto programs = make_forward_schedule(stages, chunks, micros);
                const auto traffic = derive_traffic(programs, chunks);
                for (const std::string& said :
                     {check_schedule(programs, chunks, micros), check_links(traffic, chunks), check_rendezvous(traffic)})
                    if (!said.empty()) wrong.push_back(said);
                if (most_in_flight(programs[0]) != 1) wrong.push_back("something stays after its forward pass");
            }
    CHECK(wrong == std::vector<std::string>());
    CHECK(text_of(make_forward_schedule(2, 2, 3), 2)[1] == "stage 1: F0.0 F1.0 F0.1 F1.1 F2.0 F2.1");
}

TEST_CASE("as many micro-batches are alive as published", "[schedule]") {
    for_all([](const ScheduleShape& s, const std::vector<Program>& programs) -> std::string {
        for (int stage = 0; stage < s.stages; ++stage) {
            const int alive = most_in_flight(programs[stage]), published = published_in_flight(s, stage);
            // Where p does not divide m, the smaller last group of interleaved 1F1B may leave room.
            const bool exact = s.virtual_stages == 1 || s.micros % s.stages == 0;
            if (exact ? alive != published : alive > published)
                return "stage " + std::to_string(stage) + " holds " + std::to_string(alive) + " instead of " +
                       std::to_string(published);
        }
        return "";
    });
    // Before B, zero_bubble holds what 1F1B holds: leaving out W leaves 1F1B.
    for (const int micros : {1, 3, 8}) {
        auto programs = make_schedule({ScheduleKind::zero_bubble, 4, 1, micros});
        for (Program& program : programs) std::erase_if(program, [](const Action& a) { return a.act == Act::W; });
        CHECK(programs == make_schedule({ScheduleKind::one_f_one_b, 4, 1, micros}));
    }
    // Megatron's factor L (1 + (p-1)/(pv)) on the first stage, in chunks of L/(pv): p v + p - 1
    CHECK(most_in_flight(make_schedule({ScheduleKind::interleaved, 8, 3, 64})[0]) == 8 * 3 + 8 - 1);
}

TEST_CASE("further ahead, schedules play, keep so many more alive, and sum gradients in the same order", "[schedule]") {
    CHECK(lines({ScheduleKind::one_f_one_b, 3, 1, 6, 1}) ==
          "stage 0: F0 F1 F2 F3 F4 B0 F5 B1 B2 B3 B4 B5\n"
          "stage 1: F0 F1 F2 B0 F3 B1 F4 B2 F5 B3 B4 B5\n"
          "stage 2: F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 F5 B5\n");
    std::vector<std::string> wrong;
    const auto backwards = [](Program program) {
        std::erase_if(program, [](const Action& a) { return a.act != Act::B; });
        return program;
    };
    for (const ScheduleKind kind : {ScheduleKind::one_f_one_b, ScheduleKind::zero_bubble})
        for (const int stages : {1, 2, 4, 7})
            for (const int micros : {1, 3, 8, 32})
                for (const int ahead : {1, 2, 4}) {
                    ScheduleShape s{kind, stages, 1, micros};
                    const auto before = make_schedule(s);
                    s.ahead = ahead;
                    const auto programs = make_schedule(s);
                    const auto traffic = derive_traffic(programs, s.virtual_stages, {.lookahead = ahead});
                    for (const std::string& said :
                         {check_schedule(programs, s.virtual_stages, micros), check_links(traffic, s.virtual_stages), check_rendezvous(traffic)})
                        if (!said.empty()) wrong.push_back(said_of(s) + said);
                    for (int stage = 0; stage < stages; ++stage) {
                        if (backwards(programs[stage]) != backwards(before[stage])) wrong.push_back(said_of(s) + "another order of gradients");
                        const ScheduleShape many{kind, stages, 1, 1000};
                        if (most_in_flight(programs[stage]) != std::min(micros, published_in_flight(many, stage) + ahead * (stages - stage - 1)))
                            wrong.push_back(said_of(s) + "another number of micro-batches alive");
                    }
                }
    CHECK(wrong == std::vector<std::string>());
    try {
        make_schedule({ScheduleKind::interleaved, 4, 2, 8, 1});
        FAIL("accepted");
    } catch (const Problem& problem) {
        CHECK(std::string(problem.what()).find("overlap.pp_ahead=1: the order of mesh.schedule=interleaved would block") == 0);
    }
}

TEST_CASE("slots are as many as micro-batches are alive, and nobody shares one", "[schedule]") {
    for_all([](const ScheduleShape& s, const std::vector<Program>& programs) -> std::string {
        for (const Program& program : programs) {
            const auto [slots, count] = assign_slots(program, s.virtual_stages, s.micros);
            const Act last = s.kind == ScheduleKind::zero_bubble ? Act::W : Act::B;
            for (int chunk = 0; chunk < s.virtual_stages; ++chunk) {
                const auto begin = slots.begin() + chunk * s.micros;
                if (*std::max_element(begin, begin + s.micros) + 1 != most_in_flight(program, chunk) || count[chunk] != most_in_flight(program, chunk))
                    return "the number of slots is wrong";
                std::vector<int> owner(static_cast<size_t>(most_in_flight(program, chunk)), -1);
                for (const Action& a : program) {
                    if (a.chunk != chunk) continue;
                    int& o = owner[begin[a.micro]];
                    if (o != (a.act == Act::F ? -1 : a.micro))
                        return "slot " + std::to_string(begin[a.micro]) + " has two owners";
                    o = a.act == last ? -1 : a.micro;
                }
            }
        }
        return "";
    });
}

TEST_CASE("channels agree, sends that wait for their receives never block for ever, and one buffer each is enough",
          "[schedule]") {
    for_all([](const ScheduleShape& s, const std::vector<Program>& programs) -> std::string {
        const auto traffic = derive_traffic(programs, s.virtual_stages, {.lookahead = 1, .send_buffers = 1});
        std::string said = check_links(traffic, s.virtual_stages);
        if (said.empty()) said = check_rendezvous(traffic);
        size_t messages = 0;
        for (const StageTraffic& stage : traffic)
            for (size_t p = 0; p < 2; ++p) {
                messages += stage.sends[p].size();
                if (said.empty() && std::max(stage.receive_buffers[p], stage.send_buffers[p]) > 1)
                    said = "a channel needs more than one buffer";
            }
        const size_t boundaries = s.stages == 1 ? 0 : static_cast<size_t>(s.stages * s.virtual_stages - 1);
        return said.empty() ? unequal("the number of messages", static_cast<double>(messages),
                                      2.0 * static_cast<double>(boundaries) * s.micros)
                            : said;
    });
}

TEST_CASE("channels agree with more receives posted and more sends underway", "[schedule]") {
    std::vector<std::string> wrong;
    for (const ScheduleShape& s : {ScheduleShape{ScheduleKind::one_f_one_b, 2, 1, 9},
                                   {ScheduleKind::interleaved, 2, 3, 8},
                                   {ScheduleKind::interleaved, 4, 2, 11},
                                   {ScheduleKind::zero_bubble, 5, 1, 12}})
        for (const int lookahead : {1, 2, 3, 100})
            for (const int send_buffers : {1, 2, 100}) {
                const auto traffic = derive_traffic(make_schedule(s), s.virtual_stages, {lookahead, send_buffers});
                for (const std::string& said : {check_links(traffic, s.virtual_stages), check_rendezvous(traffic)})
                    if (!said.empty()) wrong.push_back(said_of(s) + said);
                for (const StageTraffic& stage : traffic)
                    for (size_t p = 0; p < 2; ++p)
                        if (stage.receive_buffers[p] != std::min(lookahead, static_cast<int>(stage.receives[p].size())))
                            wrong.push_back(said_of(s) + "buffers");
            }
    CHECK(wrong == std::vector<std::string>());
}

TEST_CASE("with two stages both neighbours are one peer, and interleaving uses all four links", "[schedule]") {
    const auto traffic = derive_traffic(make_schedule({ScheduleKind::interleaved, 2, 2, 2}), 2, {.lookahead = 2});
    const auto list = [](const std::vector<Transfer>& transfers) {
        std::string text;
        for (const Transfer& t : transfers)
            text += (text.empty() ? "" : " ") + std::to_string(t.micro) + "." + std::to_string(t.chunk) + "@" + std::to_string(t.action);
        return text;
    };
    // stage 0: F0.0 F1.0 F0.1 F1.1 B0.1 B1.1 B0.0 B1.0
    // stage 1: F0.0 F1.0 F0.1 B0.1 F1.1 B1.1 B0.0 B1.0
    CHECK(list(traffic[0].sends[0]) == "0.0@0 1.0@1 0.1@2 1.1@3");
    CHECK(list(traffic[1].receives[0]) == "0.0@0 1.0@1 0.1@2 1.1@4");
    CHECK(list(traffic[1].sends[0]) == "0.0@0 1.0@1");
    CHECK(list(traffic[0].receives[0]) == "0.1@2 1.1@3");
    CHECK(list(traffic[1].sends[1]) == "0.1@3 1.1@5 0.0@6 1.0@7");
    CHECK(list(traffic[0].sends[1]) == "0.1@4 1.1@5");
    CHECK(list(traffic[1].receives[1]) == "0.0@6 1.0@7");
    // What a runner on stage 1 does around B0.1 (action 3): both gradients are posted from the start, the third activation has
    // been taken in and the fourth is posted; the last part receives no gradient; its own is the first that is sent.
    const Step& step = traffic[1].steps[3];
    CHECK(step.action == Action{Act::B, 1, 0});
    CHECK(step.posted == std::array<int, 2>{4, 2});
    CHECK(step.receive == -1);
    CHECK(step.send == 0);
    // The third activation lies where the first did, which action 0 took in.
    CHECK(traffic[1].receives[0][2].buffer == traffic[1].receives[0][0].buffer);
    CHECK(traffic[1].receives[0][2].after == 0);
    CHECK(traffic[1].receives[0][1].after == -1);
}

TEST_CASE("the bubble is (p-1)/(vm)", "[schedule]") {
    for_all([](const ScheduleShape& s, const std::vector<Program>& programs) -> std::string {
        if (s.kind == ScheduleKind::zero_bubble) return "";
        const double published = static_cast<double>(s.stages - 1) / (s.virtual_stages * s.micros);
        const bool whole = s.virtual_stages == 1 || s.micros % s.stages == 0;
        for (const PartCost& cost : {PartCost{1, 1, 1}, PartCost{0.5, 1.25, 0.75}}) {
            const Timing timing = simulate(programs, s.virtual_stages, {.parts = {cost}});
            if (whole) {
                if (std::string said = unequal("bubble", timing.bubble, published); !said.empty()) return said;
            } else if (timing.bubble > static_cast<double>(s.stages - 1) / s.micros + 1e-9) {
                return "a last group that is not full costs more than not interleaving: " + std::to_string(timing.bubble);
            }
        }
        return "";
    });
    // MegaScale 175B on 12,288 GPUs: p 8, v 6, m 32 (facts of the paper): 3.6 %
    CHECK(unequal("it", simulate(make_schedule({ScheduleKind::interleaved, 8, 6, 32}), 6, {}).bubble, 7.0 / (6 * 32)) == "");
}

TEST_CASE("zero_bubble takes m(F+B+W) + (p-1)(F+B-W)", "[schedule]") {
    std::vector<std::string> wrong;
    const auto check = [&](int p, int m, const PartCost& c) {
        const double F = c.forward_s, B = c.backward_s, W = c.weight_s, work = m * (F + B + W);
        const double takes = makespan({ScheduleKind::zero_bubble, p, 1, m}, c);
        std::string said;
        // A W longer than F or B cannot hide: the longer of F and B bounds it.
        if (m >= p) said = unequal("makespan", takes, work + (p - 1) * std::max({F, B, F + B - W}));
        if (m < p && W <= F && W <= B) said = unequal("makespan", takes, work + (p - 1) * (F + B) - (m - 1) * W);
        if (takes > makespan({ScheduleKind::one_f_one_b, p, 1, m}, c) + 1e-9) said = "slower than 1f1b";
        if (!said.empty() && wrong.size() < 5) wrong.push_back(said_of({ScheduleKind::zero_bubble, p, 1, m}) + said);
    };
    for (int p = 1; p <= most_stages; ++p)
        for (int m = 1; m <= most_micros; ++m)
            for (const PartCost& c : {PartCost{1, 1, 1}, {1, 1.25, 0.75}, {2, 1, 0.5}, {1, 1, 2}, {1, 0.75, 2}, {1, 2, 1.5}})
                check(p, m, c);
    CHECK(wrong == std::vector<std::string>());
}

TEST_CASE("a simulation knows uneven parts, transfers and idle stages", "[schedule]") {
    // Two stages, one micro-batch: F 1, transfer 0.5, F 2, B+W 4, transfer 0.5, B+W 3.
    const auto programs = make_schedule({ScheduleKind::one_f_one_b, 2, 1, 1});
    const Timing timing = simulate(programs, 1, {.parts = {{1, 2, 1}, {2, 3, 1}}, .transfer_s = 0.5});
    CHECK(unequal("it", timing.makespan_s, 11) == "");
    CHECK(timing.idle_s == std::vector<double>{7, 5});
    CHECK(unequal("it", timing.bubble, 12.0 / 10) == "");
    CHECK(timing.start_s == std::vector<std::vector<double>>{{0, 8}, {1.5, 3.5}});
    CHECK(timing.end_s == std::vector<std::vector<double>>{{1, 11}, {3.5, 7.5}});
    // The last stage's head makes it the slow one: everybody waits for it.
    const Timing head = simulate(make_schedule({ScheduleKind::one_f_one_b, 4, 1, 8}), 1, {.parts = {{}, {}, {}, {1.5, 1.5, 1}}});
    CHECK(unequal("it", head.makespan_s, 3 * 1 + 8 * 4 + 3 * 2) == "");
}

TEST_CASE("schedules are read as they are written", "[schedule]") {
    for (const ScheduleShape& shape : {ScheduleShape{ScheduleKind::one_f_one_b, 3, 1, 12},
                                       {ScheduleKind::interleaved, 3, 2, 7},
                                       {ScheduleKind::zero_bubble, 1, 1, 2}})
        CHECK(parse_schedule(lines(shape)) == make_schedule(shape));
}
