// parallel/schedule_check.cpp   Every action exactly once, and in an order that all stages together can play.
//
// F of part k follows F of part k-1 of its micro-batch; B of part k follows B of part k+1 and its own F; W follows its own B.
#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <optional>

#include "parallel/schedule.h"
#include "parallel/schedule_waits.h"

namespace trifold {
namespace {

// What is done, or where it stands in its list: one number per (act, chunk, micro) of one stage.
class Table {
public:
    Table(int virtual_stages, int micros)
        : micros_(micros), size_(static_cast<size_t>(virtual_stages) * micros), cells_(3 * size_, -1) {}
    int& operator[](const Action& a) {
        return cells_[size_ * static_cast<size_t>(a.act) + static_cast<size_t>(a.chunk) * micros_ + a.micro];
    }
    int operator[](const Action& a) const { return const_cast<Table&>(*this)[a]; }

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

struct Needed {
    int stage = 0;
    Action action;
};

// What must be done before; at most two others.
struct Needs {
    std::array<Needed, 2> needed;
    int count = 0;
    void add(int stage, const Action& action) { needed[static_cast<size_t>(count++)] = {stage, action}; }
};

Needs needs_of(int stage, const Action& a, int stages, int virtual_stages) {
    Needs needs;
    const int part = a.chunk * stages + stage;
    const auto at = [&](int k, Act act) { needs.add(k % stages, {act, k / stages, a.micro}); };
    if (a.act == Act::F && part > 0) at(part - 1, Act::F);
    if (a.act == Act::B) at(part, Act::F);
    if (a.act == Act::B && part + 1 < stages * virtual_stages) at(part + 1, Act::B);
    if (a.act == Act::W) at(part, Act::B);
    return needs;
}

std::string play(const std::vector<Program>& programs, int virtual_stages, const std::vector<Table>& places) {
    const int stages = static_cast<int>(programs.size());
    std::vector<int> next(programs.size(), 0);  // everything before it is done
    const auto first_missing = [&](int stage) -> std::optional<Needed> {
        const Needs needs = needs_of(stage, programs[stage][next[stage]], stages, virtual_stages);
        for (int i = 0; i < needs.count; ++i)
            if (const Needed& n = needs.needed[i]; places[n.stage][n.action] >= next[n.stage]) return n;
        return std::nullopt;
    };
    const auto finished = [&](int stage) { return next[stage] == static_cast<int>(programs[stage].size()); };
    for (bool moved = true; moved;) {
        moved = false;
        for (int s = 0; s < stages; ++s)
            for (; !finished(s) && !first_missing(s); ++next[s]) moved = true;
    }
    std::vector<Wait> waits(programs.size());
    bool stuck = false;
    for (int s = 0; s < stages; ++s) {
        if (finished(s)) continue;
        const Needed n = *first_missing(s);
        const std::string where = n.stage == s ? fmt::format("chunk {}", n.action.chunk)
                                               : fmt::format("part {} on stage {}", n.action.chunk * stages + n.stage, n.stage);
        waits[s] = {.stuck = true,
                    .position = next[s],
                    .action = programs[s][next[s]],
                    .waits_for = fmt::format("{} of {}", text_of(n.action, 1), where),
                    .stage = n.stage,
                    .place = places[n.stage][n.action]};
        stuck = true;
    }
    return stuck ? sentence_of(waits) : "";
}

}  // namespace

std::string check_schedule(const std::vector<Program>& programs, int virtual_stages, int micros) {
    const bool training =
        std::any_of(programs.begin(), programs.end(), [](const Program& p) { return has(p, Act::B) || has(p, Act::W); });
    std::vector<Table> places(programs.size(), Table(virtual_stages, micros));
    for (size_t s = 0; s < programs.size(); ++s)
        if (std::string said = check_list(static_cast<int>(s), programs[s], training, virtual_stages, micros, places[s]);
            !said.empty())
            return said;
    return play(programs, virtual_stages, places);
}

}  // namespace trifold
