// test/unit/schedule_check.cpp   Every action exactly once, in an order that all stages together can play; links whose ends agree.
//
// F of part k follows F of part k-1 of its micro-batch; B of part k follows B of part k+1 and its own F; W follows its own B.
#include "test/unit/schedule_check.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cstdio>
#include <sstream>
#include <stdexcept>
#include <utility>

namespace trifold::schedule_test {
namespace {

// "action 7 (B3 of chunk 0)"
std::string name_of(int position, const Action& action) {
    return fmt::format("action {} ({} of chunk {})", position, text_of(action, 1), action.chunk);
}

// ---- who waits for whom when lists do not go on

// What the action at which a stage stands waits for.
struct Wait {
    std::string waits_for;  // "B3 of part 5 on stage 1"
    int stage = 0;          // where that is: this stage, or another one that is stuck
    int place = 0;          // and its position in the list of that stage
};

// All stages at once: who stands where. A stage that has come to the end of its list waits for nothing.
struct Play {
    const std::vector<Program>& programs;
    std::vector<int> next;  // by stage: everything before it is done

    explicit Play(const std::vector<Program>& p) : programs(p), next(p.size(), 0) {}
    int stages() const { return static_cast<int>(programs.size()); }
    bool finished(int s) const { return next[s] == static_cast<int>(programs[s].size()); }
    const Action& action(int s) const { return programs[s][next[s]]; }

    // Empty, or what there is to say when no stage goes on. can_start(s): whether the action at which stage s stands can; wait_of(s): why not.
    template <class CanStart, class WaitOf>
    std::string run(CanStart can_start, WaitOf wait_of) {
        for (bool moved = true; moved;) {
            moved = false;
            for (int s = 0; s < stages(); ++s)
                for (; !finished(s) && can_start(s); ++next[s]) moved = true;
        }
        std::vector<Wait> waits(programs.size());
        int stuck = -1;  // the lowest
        for (int s = stages() - 1; s >= 0; --s)
            if (!finished(s)) waits[s] = wait_of(s), stuck = s;
        return stuck < 0 ? "" : sentence_of(waits, stuck);
    }

    // One sentence that begins at the cause: the lowest stage of the circle that the lowest stuck stage waits for.
    std::string sentence_of(const std::vector<Wait>& waits, int at) const {
        constexpr int most_links = 4;
        // After as many steps as there are stages the walk is on the circle; once more round finds its lowest stage and its length.
        for (size_t i = 0; i < waits.size(); ++i) at = waits[at].stage;
        int first = at, links = 1;
        for (int s = waits[at].stage; s != at; s = waits[s].stage, ++links) first = std::min(first, s);

        std::string text = fmt::format("stage {}, {} waits for {}", first, name_of(next[first], action(first)), waits[first].waits_for);
        if (waits[first].stage == first)
            return text + fmt::format(", which comes later in the same list (action {})", waits[first].place);
        int told = 1;
        for (int from = first; waits[from].stage != first && told < most_links; ++told) {
            const int there = waits[from].stage;
            if (waits[from].place > next[there])
                text += fmt::format(", which comes only after {} there", name_of(next[there], action(there)));
            text += ", which waits for " + waits[there].waits_for;
            from = there;
        }
        if (told < links) return text + fmt::format(", and so on through {} stages back to stage {}", links, first);
        return text + fmt::format(", which comes only after action {} there", next[first]);
    }
};

// What is done, or where it stands in its list: one number per (act, chunk, micro) of one stage.
class Table {
public:
    Table(int virtual_stages, int micros)
        : micros_(micros), size_(static_cast<size_t>(virtual_stages) * micros), cells_(3 * size_, -1) {}
    int& operator[](const Action& a) {
        return cells_[size_ * static_cast<size_t>(a.act) + static_cast<size_t>(a.chunk) * micros_ + a.micro];
    }

private:
    int micros_;
    size_t size_;
    std::vector<int> cells_;
};

// ---- one stage alone

bool has(const Program& program, Act act) {
    return std::any_of(program.begin(), program.end(), [act](const Action& a) { return a.act == act; });
}

// Fills `places`; returns the first sentence there is to say.
std::string check_list(int stage, const Program& program, bool training, int virtual_stages, int micros, Table& places) {
    for (size_t i = 0; i < program.size(); ++i) {
        const Action& a = program[i];
        if (a.chunk < 0 || a.chunk >= virtual_stages || a.micro < 0 || a.micro >= micros)
            return fmt::format("stage {}, {} does not exist: micro-batches go from 0 to {}, chunks from 0 to {}", stage,
                               name_of(static_cast<int>(i), a), micros - 1, virtual_stages - 1);
        if (places[a] >= 0)
            return fmt::format("stage {}, {} was there before, as action {}", stage, name_of(static_cast<int>(i), a), places[a]);
        places[a] = static_cast<int>(i);
    }
    const std::array<bool, 3> wanted = {true, training, has(program, Act::W)};
    for (const Act act : {Act::F, Act::B, Act::W})
        for (int chunk = 0; wanted[static_cast<size_t>(act)] && chunk < virtual_stages; ++chunk)
            for (int micro = 0; micro < micros; ++micro)
                if (const Action a{act, chunk, micro}; places[a] < 0)
                    return fmt::format("stage {}: {} of chunk {} is missing from its {} actions{}", stage, text_of(a, 1), chunk,
                                       program.size(), act == Act::W ? "; a list with any W must have all of them" : "");
    return "";
}

// ---- all stages together

// What must be done before this action of stage s, and where; at most two others.
std::vector<std::pair<int, Action>> needs_of(int s, const Action& a, int stages, int virtual_stages) {
    std::vector<std::pair<int, Action>> needs;
    const int part = a.chunk * stages + s;
    const auto at = [&](int k, Act act) { needs.push_back({k % stages, {act, k / stages, a.micro}}); };
    if (a.act == Act::F && part > 0) at(part - 1, Act::F);
    if (a.act == Act::B) at(part, Act::F);
    if (a.act == Act::B && part + 1 < stages * virtual_stages) at(part + 1, Act::B);
    if (a.act == Act::W) at(part, Act::B);
    return needs;
}

// ---- links

constexpr std::array payloads = {Payload::activation, Payload::gradient};
size_t index(Payload payload) { return static_cast<size_t>(payload); }
const char* name_of(Payload payload) { return payload == Payload::activation ? "activation" : "gradient"; }
bool carries(const Action& a, Payload payload) { return a.act == (payload == Payload::activation ? Act::F : Act::B); }
int next_stage(int stage, int stages, Payload payload) {
    return (stage + (payload == Payload::activation ? 1 : stages - 1)) % stages;
}

std::string check_link(const std::vector<StageTraffic>& traffic, int from, int virtual_stages, Payload payload) {
    const int stages = static_cast<int>(traffic.size()), to = next_stage(from, stages, payload);
    const std::vector<Transfer>&sends = traffic[from].sends[index(payload)], &receives = traffic[to].receives[index(payload)];
    const std::string link = fmt::format("{}s from stage {} to stage {}", name_of(payload), from, to);
    const int step = payload == Payload::activation ? 1 : -1;
    for (size_t i = 0; i < std::min(sends.size(), receives.size()); ++i) {
        const Transfer &sent = sends[i], &received = receives[i];
        const int part = sent.chunk * stages + from + step, expected = received.chunk * stages + to;
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
std::string check_steps(const StageTraffic& stage, int s, Payload payload) {
    const size_t p = index(payload);
    const std::vector<Transfer>&receives = stage.receives[p], &sends = stage.sends[p];
    const int posted_at_end = stage.steps.empty() ? 0 : stage.steps.back().posted[p];
    std::vector<int> user(static_cast<size_t>(std::max(stage.receive_buffers[p], 0)), -1);  // which receive is in the buffer
    int posted = 0, sent = 0, taken = 0;
    for (size_t i = 0; i < stage.steps.size(); ++i) {
        const Step& step = stage.steps[i];
        const auto wrong = [&](const std::string& what) {
            return fmt::format("stage {}, {}: {}", s, name_of(static_cast<int>(i), step.action), what);
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
                           s, receives.size(), name_of(payload), posted_at_end, taken, sends.size(), sent);
    return "";
}

}  // namespace

std::string check_schedule(const std::vector<Program>& programs, int virtual_stages, int micros) {
    const bool training =
        std::any_of(programs.begin(), programs.end(), [](const Program& p) { return has(p, Act::B) || has(p, Act::W); });
    const int stages = static_cast<int>(programs.size());
    std::vector<Table> places(programs.size(), Table(virtual_stages, micros));
    for (int s = 0; s < stages; ++s)
        if (std::string said = check_list(s, programs[s], training, virtual_stages, micros, places[s]); !said.empty()) return said;

    Play play(programs);
    const auto is_done = [&](const auto& needed) { return places[needed.first][needed.second] < play.next[needed.first]; };
    const auto needs = [&](int s) { return needs_of(s, play.action(s), stages, virtual_stages); };
    return play.run([&](int s) { return std::ranges::all_of(needs(s), is_done); },
                    [&](int s) {
                        const auto all = needs(s);
                        const auto& [there, action] = *std::ranges::find_if_not(all, is_done);
                        const std::string where = there == s ? fmt::format("chunk {}", action.chunk)
                                                             : fmt::format("part {} on stage {}", action.chunk * stages + there, there);
                        return Wait{fmt::format("{} of {}", text_of(action, 1), where), there, places[there][action]};
                    });
}

int most_in_flight(const Program& program, int chunk) {
    Act last = Act::F;
    for (const Action& a : program) last = std::max(last, a.act);
    int alive = 0, highest = 0;
    for (const Action& a : program) {
        if (chunk >= 0 && a.chunk != chunk) continue;
        if (a.act == Act::F) highest = std::max(highest, ++alive);
        if (a.act == last) --alive;
    }
    return highest;
}

std::string check_links(const std::vector<StageTraffic>& traffic, int virtual_stages) {
    const int stages = static_cast<int>(traffic.size());
    for (const Payload payload : payloads)
        for (int s = 0; s < stages; ++s)
            if (std::string said = check_link(traffic, s, virtual_stages, payload); !said.empty()) return said;
    for (const Payload payload : payloads)
        for (int s = 0; s < stages; ++s)
            if (std::string said = check_steps(traffic[s], s, payload); !said.empty()) return said;
    return "";
}

std::string check_rendezvous(const std::vector<StageTraffic>& traffic) {
    std::vector<Program> programs(traffic.size());
    for (size_t s = 0; s < traffic.size(); ++s)
        for (const Step& step : traffic[s].steps) programs[s].push_back(step.action);
    Play play(programs);
    const auto receiver = [&](int s, size_t p) { return next_stage(s, play.stages(), payloads[p]); };
    const auto sender = [&](int s, size_t p) { return next_stage(s, play.stages(), payloads[1 - p]); };
    // Receives of stage s that are posted: those of the step at which it stands; at the end, all that ever were.
    const auto posted = [&](int s, size_t p) {
        const std::vector<Step>& steps = traffic[s].steps;
        return steps.empty() ? 0 : steps[std::min(play.next[s], static_cast<int>(steps.size()) - 1)].posted[p];
    };
    const auto posting_step = [&](int s, size_t p, int receive) {
        const std::vector<Step>& steps = traffic[s].steps;
        return static_cast<int>(std::ranges::find_if(steps, [&](const Step& step) { return step.posted[p] > receive; }) - steps.begin());
    };
    // The message that the action at which stage s stands needs has not been sent; or the send that has the buffer it needs is not complete.
    const auto step_of = [&](int s) { return std::pair(traffic[s].steps[play.next[s]], channel_of(play.action(s).act)); };
    const auto unsent = [&](int s) {
        const auto& [step, p] = step_of(s);
        if (step.receive < 0) return false;
        const int from = sender(s, p);
        return traffic[from].sends[p][step.receive].action >= play.next[from];
    };
    const auto in_buffer = [&](int s) {
        const auto& [step, p] = step_of(s);
        const int before = step.send - traffic[s].send_buffers[p];
        return step.send >= 0 && before >= 0 && posted(receiver(s, p), p) <= before ? before : -1;
    };
    return play.run([&](int s) { return !unsent(s) && in_buffer(s) < 0; },
                    [&](int s) {
                        const auto& [step, p] = step_of(s);
                        const std::string payload = name_of(payloads[p]);
                        if (unsent(s)) {
                            const int from = sender(s, p), micro = traffic[s].receives[p][step.receive].micro;
                            return Wait{fmt::format("the {} of micro-batch {} from stage {}", payload, micro, from), from,
                                        traffic[from].sends[p][step.receive].action};
                        }
                        const int before = in_buffer(s), to = receiver(s, p);
                        return Wait{fmt::format("the receive of {} {} to be posted on stage {}", payload, before, to), to,
                                    posting_step(to, p, before)};
                    });
}

std::vector<Program> parse_schedule(const std::string& text) {
    std::vector<Program> programs;
    std::istringstream lines(text);
    for (std::string line, word; std::getline(lines, line);) {
        std::istringstream words(line);
        if (!(words >> word >> word)) continue;  // "stage 0:"
        Program& program = programs.emplace_back();
        while (words >> word) {
            char act = ' ';
            Action& a = program.emplace_back();
            if (std::sscanf(word.c_str(), "%c%d.%d", &act, &a.micro, &a.chunk) < 2) throw std::invalid_argument(word);
            a.act = static_cast<Act>(std::string("FBW").find(act));
        }
    }
    return programs;
}

}  // namespace trifold::schedule_test
