// test/unit/test_schedule_broken.cpp   What the checkers of schedules say about lists that cannot run.
#include "test/catch.h"

#include <string>
#include <vector>

#include "test/unit/schedule_check.h"

using namespace trifold;
using namespace trifold::schedule_test;

namespace {

std::string said(const std::string& text, int virtual_stages, int micros) {
    return check_schedule(parse_schedule(text), virtual_stages, micros);
}

const std::string three_stages =
    "stage 0: F0 F1 F2 B0 F3 B1 B2 B3\n"
    "stage 1: F0 F1 B0 F2 B1 F3 B2 B3\n"
    "stage 2: F0 B0 F1 B1 F2 B2 F3 B3\n";

std::string replaced(std::string text, const std::string& old, const std::string& by) {
    const size_t at = text.find(old);
    REQUIRE(at != std::string::npos);
    return text.replace(at, old.size(), by);
}

std::string broken(const std::string& old, const std::string& by) { return said(replaced(three_stages, old, by), 1, 4); }

}  // namespace

TEST_CASE("a list that is right is accepted", "[schedule]") { CHECK(said(three_stages, 1, 4) == ""); }

TEST_CASE("missing, duplicate and wrong actions are named", "[schedule]") {
    CHECK(broken("stage 1: F0 F1 B0 F2 B1", "stage 1: F0 F1 B0 F2") == "stage 1: B1 of chunk 0 is missing from its 7 actions");
    CHECK(broken("stage 1: F0 F1 B0", "stage 1: F0 F1 B0 B0") ==
          "stage 1, action 3 (B0 of chunk 0) was there before, as action 2");
    CHECK(broken("stage 2: F0 B0 F1", "stage 2: F0 B0 F4") ==
          "stage 2, action 2 (F4 of chunk 0) does not exist: micro-batches go from 0 to 3, chunks from 0 to 0");
    CHECK(broken("stage 2: F0 B0 F1", "stage 2: F0 B0 F1.1") ==
          "stage 2, action 2 (F1 of chunk 1) does not exist: micro-batches go from 0 to 3, chunks from 0 to 0");
    CHECK(broken("stage 2: F0 B0 F1", "stage 2: F0 B0 F2") == "stage 2, action 4 (F2 of chunk 0) was there before, as action 2");
    CHECK(said("stage 0:\nstage 1: F0 B0", 1, 1) == "stage 0: F0 of chunk 0 is missing from its 0 actions");
    // All lists without B are an evaluation, one list is not.
    CHECK(said("stage 0: F0 F1\nstage 1: F0 F1", 1, 2) == "");
    CHECK(said("stage 0: F0 F1\nstage 1: F0 B0 F1 B1", 1, 2) == "stage 0: B0 of chunk 0 is missing from its 2 actions");
}

TEST_CASE("actions in an order that cannot start are named with what they wait for", "[schedule]") {
    // B0 before F0 of the same stage
    CHECK(broken("stage 1: F0 F1 B0", "stage 1: B0 F1 F0") ==
          "stage 1, action 0 (B0 of chunk 0) waits for F0 of chunk 0, which comes later in the same list (action 2)");
    // stage 0 waits for the gradient of a micro-batch that it has not sent yet
    CHECK(broken("stage 0: F0 F1 F2 B0 F3 B1 B2 B3", "stage 0: F0 F1 F2 B1 F3 B0 B2 B3") == "");  // only another order
    CHECK(broken("stage 0: F0 F1 F2 B0 F3 B1 B2 B3", "stage 0: F1 F2 F3 B1 F0 B0 B2 B3") ==
          "stage 0, action 3 (B1 of chunk 0) waits for B1 of part 1 on stage 1, which comes only after action 0 (F0 of chunk 0) "
          "there, "
          "which waits for F0 of part 0 on stage 0, which comes only after action 3 there");
    // the two stages wait for each other: stage 2 wants F1 first, stage 1 wants the gradient of F0 before it
    CHECK(broken("stage 1: F0 F1 B0 F2", "stage 1: F0 B0 F1 F2") == "");
    CHECK(said("stage 0: F0 F1 B0 B1\nstage 1: F0 B0 F1 B1\nstage 2: F1 B1 F0 B0", 1, 2) ==
          "stage 1, action 1 (B0 of chunk 0) waits for B0 of part 2 on stage 2, which comes only after action 0 (F1 of chunk 0) "
          "there, "
          "which waits for F1 of part 1 on stage 1, which comes only after action 1 there");
}

TEST_CASE("the cause is named, not the stages that wait for it", "[schedule]") {
    // Everybody waits in the end; the mistake is on stage 2.
    CHECK(broken("stage 2: F0 B0 F1 B1", "stage 2: F0 B1 F1 B0") ==
          "stage 2, action 1 (B1 of chunk 0) waits for F1 of chunk 0, which comes later in the same list (action 2)");
}

TEST_CASE("W comes after its B, and all of them or none", "[schedule]") {
    const std::string good = "stage 0: F0 F1 B0 W0 B1 W1\nstage 1: F0 B0 F1 B1 W0 W1\n";
    CHECK(said(good, 1, 2) == "");
    CHECK(said(replaced(good, "B0 W0 B1", "W0 B0 B1"), 1, 2) ==
          "stage 0, action 2 (W0 of chunk 0) waits for B0 of chunk 0, which comes later in the same list (action 3)");
    CHECK(said(replaced(good, " W0 W1\n", " W1\n"), 1, 2) ==
          "stage 1: W0 of chunk 0 is missing from its 5 actions; a list with any W must have all of them");
    CHECK(said("stage 0: F0 F1 B0 B1\nstage 1: F0 B0 F1 B1 W0 W1\n", 1, 2) == "");  // the first stage may keep them together
}

TEST_CASE("interleaved lists name parts", "[schedule]") {
    CHECK(said("stage 0: F0.0 F0.1 B0.1 B0.0\nstage 1: F0.0 F0.1 B0.0 B0.1", 2, 1) ==
          "stage 0, action 2 (B0 of chunk 1) waits for B0 of part 3 on stage 1, which comes only after action 2 (B0 of chunk 0) "
          "there, "
          "which waits for B0 of part 2 on stage 0, which comes only after action 2 there");
    CHECK(said("stage 0: F0.1 F0.0 B0.1 B0.0\nstage 1: F0.0 F0.1 B0.1 B0.0", 2, 1) ==
          "stage 0, action 0 (F0 of chunk 1) waits for F0 of part 1 on stage 1, which waits for F0 of part 0 on stage 0, "
          "which comes only after action 0 there");
}

TEST_CASE("interleaving with a small last group needs more than the formula", "[schedule]") {
    // p 4, v 3, m 5: Megatron's numbers of forward passes ahead, with a last group of one micro-batch.
    std::vector<Action> order;
    for (const auto& [first, last] : {std::pair(0, 4), std::pair(4, 5)})
        for (int chunk = 0; chunk < 3; ++chunk)
            for (int micro = first; micro < last; ++micro) order.push_back({Act::F, chunk, micro});
    std::vector<Program> programs(4);
    for (size_t stage = 0; stage < 4; ++stage)
        for (size_t k = 0, ahead = 2 * (4 - stage - 1) + 2 * 4; k < order.size() + ahead; ++k) {
            if (k < order.size()) programs[stage].push_back(order[k]);
            if (k >= ahead) programs[stage].push_back({Act::B, 2 - order[k - ahead].chunk, order[k - ahead].micro});
        }
    CHECK(check_schedule(programs, 3, 5) ==
          "stage 0, action 14 (F4 of chunk 2) waits for F4 of part 7 on stage 3, which comes only after action 17 (B0 of chunk "
          "1) there, "
          "which waits for B0 of part 8 on stage 0, which comes only after action 14 there");
    CHECK(check_schedule(make_schedule({ScheduleKind::interleaved, 4, 3, 5}), 3, 5) == "");
}

TEST_CASE("links that disagree are named", "[schedule]") {
    const auto good = derive_traffic(make_schedule({ScheduleKind::one_f_one_b, 3, 1, 4}), 1);
    REQUIRE(check_links(good, 1) == "");
    auto bad = good;
    std::swap(bad[1].receives[0][1], bad[1].receives[0][2]);
    CHECK(check_links(bad, 1) ==
          "activations from stage 0 to stage 1: message 1 is micro-batch 1 for part 1 where it is sent, and micro-batch 2 for "
          "part 1 where it is received");
    bad = good;
    bad[0].receives[1].pop_back();
    CHECK(check_links(bad, 1) == "gradients from stage 1 to stage 0: 4 are sent, 3 are received");
    bad = good;
    bad[1].receives[0][2].chunk = 1;
    CHECK(check_links(bad, 1) ==
          "activations from stage 0 to stage 1: message 2 is micro-batch 2 for part 1 where it is sent, and micro-batch 2 for "
          "part 4 where it is received");
}

TEST_CASE("steps that do not fit their channels are named", "[schedule]") {
    // stage 1: F0 F1 B0 F2 B1 F3 B2 B3
    const auto good = derive_traffic(make_schedule({ScheduleKind::one_f_one_b, 3, 1, 4}), 1);
    auto bad = good;
    for (Step& step : bad[1].steps) step.posted[0] = std::min(step.posted[0], 2);
    CHECK(check_links(bad, 1) == "stage 1, action 3 (F2 of chunk 0): waits for activation 2, but only 2 are posted");
    bad = good;
    std::swap(bad[1].steps[0].receive, bad[1].steps[1].receive);
    CHECK(check_links(bad, 1) == "stage 1, action 0 (F0 of chunk 0): waits for activation 1, but only 1 are posted");
    bad = good;
    bad[1].steps[1].receive = 0;
    CHECK(check_links(bad, 1) ==
          "stage 1, action 1 (F1 of chunk 0): takes in activation 0, which is micro-batch 0 of chunk 0 for action 0");
    bad = good;
    bad[1].steps[0].posted[0] = 2;
    CHECK(check_links(bad, 1) == "stage 1, action 0 (F0 of chunk 0): activations 0 and 1 are in buffer 0 at a time");
    bad = good;
    std::swap(bad[1].steps[0].send, bad[1].steps[1].send);
    CHECK(check_links(bad, 1) == "stage 1, action 0 (F0 of chunk 0): sends activation 1 out of turn");
    bad = good;
    bad[1].steps[7].receive = -1;
    CHECK(check_links(bad, 1) == "stage 1: of its 4 gradients to receive 4 are posted and 3 taken in, of 4 to send 4 are sent");
}

TEST_CASE("receivers keep the order of the sender, whatever they need first", "[schedule]") {
    // Stage 1 wants micro-batch 1 first: it posts both, in the order in which they are sent, and needs a second buffer.
    const auto traffic = derive_traffic(parse_schedule("stage 0: F0 F1 B1 B0\nstage 1: F1 B1 F0 B0"), 1);
    CHECK(check_links(traffic, 1) == "");
    CHECK(check_rendezvous(traffic) == "");
    REQUIRE(traffic[1].receives[0].size() == 2);
    CHECK(traffic[1].receives[0][0].micro == 0);
    CHECK(traffic[1].steps[0].posted[0] == 2);
    CHECK(traffic[1].steps[0].receive == 1);
    CHECK(traffic[1].receive_buffers[0] == 2);
}

TEST_CASE("sends that wait for ever are found where the lists alone are right", "[schedule]") {
    // Stage 1 waits at B0.0 for a gradient that stage 0 sends only after F3.0; that waits until F2.0 has left, whose receive
    // stage 1 posts only after B0.0.
    const auto programs = parse_schedule(
        "stage 0: F0.0 F0.1 F1.0 F2.0 F3.0 B0.1 F1.1 F2.1 F3.1 B1.1 B2.1 B3.1 B0.0 B1.0 B2.0 B3.0\n"
        "stage 1: F0.0 F0.1 B0.1 B0.0 F1.0 F2.0 F3.0 F1.1 F2.1 F3.1 B1.1 B2.1 B3.1 B1.0 B2.0 B3.0\n");
    REQUIRE(check_schedule(programs, 2, 4) == "");
    const auto traffic = derive_traffic(programs, 2, {.lookahead = 1, .send_buffers = 1});
    CHECK(check_links(traffic, 2) == "");
    CHECK(check_rendezvous(traffic) ==
          "stage 0, action 4 (F3 of chunk 0) waits for the receive of activation 3 to be posted on stage 1, which comes only "
          "after action 3 "
          "(B0 of chunk 0) there, which waits for the gradient of micro-batch 0 from stage 0, which comes only after action 4 "
          "there");
    // One buffer more at either end is the way out.
    CHECK(check_rendezvous(derive_traffic(programs, 2, {.lookahead = 2, .send_buffers = 1})) == "");
    CHECK(check_rendezvous(derive_traffic(programs, 2, {.lookahead = 1, .send_buffers = 2})) == "");
    // A message that is never posted is as bad.
    auto bad = derive_traffic(make_schedule({ScheduleKind::one_f_one_b, 2, 1, 3}), 1);
    for (Step& step : bad[1].steps) step.posted[0] = std::min(step.posted[0], 1);
    CHECK(check_rendezvous(bad).find("waits for the receive of activation 1 to be posted on stage 1") != std::string::npos);
}
