// parallel/schedule_links.cpp   Proves that both ends of every link agree, and that no stage waits for ever.
#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "parallel/schedule_traffic.h"
#include "parallel/schedule_waits.h"

namespace trifold {
namespace {

constexpr std::array payloads = {Payload::activation, Payload::gradient};
size_t index(Payload payload) { return static_cast<size_t>(payload); }
bool carries(const Action& a, Payload payload) { return a.act == (payload == Payload::activation ? Act::F : Act::B); }
int next_stage(int stage, int stages, Payload payload) {
    return (stage + (payload == Payload::activation ? 1 : stages - 1)) % stages;
}

std::string check_link(const StageTraffic& from, const StageTraffic& to, int stages, int virtual_stages, Payload payload) {
    const std::vector<Transfer>&sends = from.sent(payload), &receives = to.received(payload);
    const std::string link = fmt::format("{}s from stage {} to stage {}", name_of(payload), from.stage, to.stage);
    const int step = payload == Payload::activation ? 1 : -1;
    for (size_t i = 0; i < std::min(sends.size(), receives.size()); ++i) {
        const Transfer &sent = sends[i], &received = receives[i];
        const int part = sent.chunk * stages + from.stage + step, expected = received.chunk * stages + to.stage;
        if (sent.peer_stage != to.stage || received.peer_stage != from.stage)
            return fmt::format("{}: message {} is sent to stage {} and received from stage {}", link, i, sent.peer_stage,
                               received.peer_stage);
        if (part != expected || sent.micro != received.micro)
            return fmt::format("{}: message {} is micro-batch {} for part {} where it is sent, and micro-batch {} for part {} where "
                               "it is received",
                               link, i, sent.micro, part, received.micro, expected);
        if (part < 0 || part >= stages * virtual_stages)
            return fmt::format("{}: message {} is for part {}, which does not exist", link, i, part);
    }
    if (sends.size() != receives.size())
        return fmt::format("{}: {} are sent, {} are received", link, sends.size(), receives.size());
    return "";
}

// The steps of one stage against its own channels.
std::string check_steps(const StageTraffic& stage, Payload payload) {
    const size_t p = index(payload);
    const std::vector<Transfer>&receives = stage.receives[p], &sends = stage.sends[p];
    const int posted_at_end = stage.steps.empty() ? 0 : stage.steps.back().posted[p];
    std::vector<int> user(static_cast<size_t>(std::max(stage.receive_buffers[p], 0)), -1);  // which receive is in the buffer
    int posted = 0, sent = 0, taken = 0;
    for (size_t i = 0; i < stage.steps.size(); ++i) {
        const Step& step = stage.steps[i];
        const auto wrong = [&](const std::string& what) {
            return fmt::format("stage {}, {}: {}", stage.stage, name_of(static_cast<int>(i), step.action), what);
        };
        if (step.posted[p] > static_cast<int>(receives.size()))
            return wrong(fmt::format("{} {}s are posted, but there are {}", step.posted[p], name_of(payload), receives.size()));
        for (; posted < step.posted[p]; ++posted) {
            const int buffer = receives[posted].buffer;
            if (buffer < 0 || buffer >= stage.receive_buffers[p])
                return wrong(
                    fmt::format("{} {} has buffer {} of {}", name_of(payload), posted, buffer, stage.receive_buffers[p]));
            if (user[buffer] >= 0)
                return wrong(
                    fmt::format("{}s {} and {} are in buffer {} at a time", name_of(payload), user[buffer], posted, buffer));
            user[buffer] = posted;
        }
        if (!carries(step.action, payload)) continue;
        if (step.receive >= 0) {
            if (step.receive >= posted)
                return wrong(fmt::format("waits for {} {}, but only {} are posted", name_of(payload), step.receive, posted));
            const Transfer& r = receives[step.receive];
            if (r.chunk != step.action.chunk || r.micro != step.action.micro || r.action != static_cast<int>(i))
                return wrong(fmt::format("takes in {} {}, which is micro-batch {} of chunk {} for action {}", name_of(payload),
                                         step.receive, r.micro, r.chunk, r.action));
            user[r.buffer] = -1;
            ++taken;
        }
        if (step.send >= 0) {
            if (step.send != sent++ || step.send >= static_cast<int>(sends.size()) ||
                sends[step.send].action != static_cast<int>(i))
                return wrong(fmt::format("sends {} {} out of turn", name_of(payload), step.send));
        }
    }
    if (posted_at_end < static_cast<int>(receives.size()) || taken != static_cast<int>(receives.size()) ||
        sent != static_cast<int>(sends.size()))
        return fmt::format("stage {}: of its {} {}s to receive {} are posted and {} taken in, of {} to send {} are sent",
                           stage.stage, receives.size(), name_of(payload), posted_at_end, taken, sends.size(), sent);
    return "";
}

// All stages at once; who stands where.
class Play {
public:
    explicit Play(const std::vector<StageTraffic>& traffic) : traffic_(traffic), next_(traffic.size(), 0) {}

    bool finished(int s) const { return next_[s] == static_cast<int>(traffic_[s].steps.size()); }
    // Receives of stage s that are posted: those of the step at which it stands; at the end, all that ever were.
    int posted(int s, size_t p) const {
        const std::vector<Step>& steps = traffic_[s].steps;
        return steps.empty() ? 0 : steps[std::min(next_[s], static_cast<int>(steps.size()) - 1)].posted[p];
    }

    // What the action at which stage s stands waits for, if anything.
    Wait wait_of(int s) const {
        const Step& step = traffic_[s].steps[next_[s]];
        Wait wait{.position = next_[s], .action = step.action};
        const auto stuck = [&](int stage, int place, std::string what) {
            wait.stuck = true, wait.waits_for = std::move(what), wait.stage = stage, wait.place = place;
            return wait;
        };
        for (const Payload payload : payloads) {
            if (!carries(step.action, payload)) continue;
            const size_t p = index(payload);
            if (step.receive >= 0) {
                const Transfer& receive = traffic_[s].receives[p][step.receive];
                const int from = receive.peer_stage, place = traffic_[from].sends[p][step.receive].action;
                if (place >= next_[from])
                    return stuck(from, place,
                                 fmt::format("the {} of micro-batch {} from stage {}", name_of(payload), receive.micro, from));
            }
            // The send that used its buffer before must be complete, so its receive posted.
            const int before = step.send - traffic_[s].send_buffers[p];
            if (step.send >= 0 && before >= 0) {
                const int to = traffic_[s].sends[p][before].peer_stage;
                if (posted(to, p) <= before)
                    return stuck(to, posting_step(to, p, before),
                                 fmt::format("the receive of {} {} to be posted on stage {}", name_of(payload), before, to));
            }
        }
        return wait;
    }

    void advance(int s) { ++next_[s]; }

private:
    int posting_step(int s, size_t p, int receive) const {
        const std::vector<Step>& steps = traffic_[s].steps;
        return static_cast<int>(
            std::find_if(steps.begin(), steps.end(), [&](const Step& step) { return step.posted[p] > receive; }) - steps.begin());
    }

    const std::vector<StageTraffic>& traffic_;
    std::vector<int> next_;
};

}  // namespace

std::string check_links(const std::vector<StageTraffic>& traffic, int virtual_stages) {
    const int stages = static_cast<int>(traffic.size());
    for (const Payload payload : payloads)
        for (const StageTraffic& from : traffic) {
            const StageTraffic& to = traffic[next_stage(from.stage, stages, payload)];
            if (std::string said = check_link(from, to, stages, virtual_stages, payload); !said.empty()) return said;
        }
    for (const Payload payload : payloads)
        for (const StageTraffic& stage : traffic)
            if (std::string said = check_steps(stage, payload); !said.empty()) return said;
    return "";
}

std::string check_rendezvous(const std::vector<StageTraffic>& traffic) {
    const int stages = static_cast<int>(traffic.size());
    Play play(traffic);
    std::vector<Wait> waits(traffic.size());
    bool moved = true, stuck = true;
    while (moved) {
        moved = stuck = false;
        for (int s = 0; s < stages; ++s) {
            waits[s] = {};
            for (; !play.finished(s); moved = true) {
                waits[s] = play.wait_of(s);
                if (waits[s].stuck) break;
                play.advance(s);
            }
            stuck |= waits[s].stuck;
        }
    }
    return stuck ? sentence_of(waits) : "";
}

}  // namespace trifold
