// kernels/access_checker.cpp   A map of byte ranges, split where accesses begin and end, with the uses that still
// matter.
#include "kernels/access_checker.h"

#include <fmt/format.h>

#include <algorithm>

namespace trifold {
namespace {

// One missing follow in a loop gives a finding in every turn; nobody reads more than these.
constexpr size_t max_findings = 1000;

constexpr bool reads(Access a) { return (static_cast<int>(a) & static_cast<int>(Access::read)) != 0; }
constexpr bool writes(Access a) { return (static_cast<int>(a) & static_cast<int>(Access::write)) != 0; }
constexpr Access both(Access a, Access b) { return static_cast<Access>(static_cast<int>(a) | static_cast<int>(b)); }
const char* verb(Access a) { return !writes(a) ? "reads" : reads(a) ? "reads and writes" : "writes"; }

std::string named(const AccessChecker::Operation& op) {
    return fmt::format("{} (#{} on '{}')", op.name, op.ticket.number, *op.stream);
}

}  // namespace

uint64_t VectorClock::operator[](int stream) const {
    return stream >= 0 && stream < streams() ? counts_[static_cast<size_t>(stream)] : 0;
}

void VectorClock::advance(Ticket t) {
    if (t.stream >= streams()) counts_.resize(static_cast<size_t>(t.stream) + 1, 0);
    uint64_t& count = counts_[static_cast<size_t>(t.stream)];
    count = std::max(count, t.number);
}

void VectorClock::join(const VectorClock& other) {
    for (int s = 0; s < other.streams(); ++s) advance({s, other[s]});
}

void AccessChecker::record(const Operation& op, const VectorClock& before, std::span<const BufferAccess> accesses) {
    std::vector<Conflict> conflicts;
    for (const BufferAccess& a : accesses) {
        if (a.bytes <= 0) continue;
        const auto begin = reinterpret_cast<uintptr_t>(a.begin), end = begin + static_cast<uintptr_t>(a.bytes);
        for (auto r = first_of(begin, end); r != ranges_.end() && r->first < end; ++r) {
            use({op, a.access}, before, r->first, r->second, conflicts);
        }
        merge(begin, end);
    }
    report(op, conflicts);
}

// Compares one access with the uses kept for one range, then keeps what a later access must still be compared with.
void AccessChecker::use(const Use& mine, const VectorClock& before, uintptr_t begin, Range& range,
                        std::vector<Conflict>& conflicts) {
    const auto add = [&](const Use& earlier, bool released) {
        conflicts.push_back({earlier, mine.access, begin, range.end, released});
    };
    if (range.released_by.ticket.number > 0) return add({range.released_by, Access::write}, true);
    Use kept = mine;
    std::erase_if(range.uses, [&](const Use& u) {
        if (u.op.ticket == mine.op.ticket) {  // an operation may use a buffer twice
            kept.access = both(kept.access, u.access);
            return true;
        }
        if (!before.covers(u.op.ticket)) {
            if (writes(u.access) || writes(mine.access)) add(u, false);
            return false;
        }
        return writes(mine.access) || !writes(u.access);
    });
    range.uses.push_back(kept);
}

// One sentence for each earlier operation, about the first bytes where the two meet.
void AccessChecker::report(const Operation& op, const std::vector<Conflict>& conflicts) {
    std::vector<Conflict> pairs;
    for (const Conflict& c : conflicts) {
        const auto same = [&](const Conflict& p) { return p.earlier.op.ticket == c.earlier.op.ticket; };
        const auto known = std::find_if(pairs.begin(), pairs.end(), same);
        if (known == pairs.end()) {
            pairs.push_back(c);
        } else if (known->end == c.begin && known->mine == c.mine) {
            known->end = c.end;
        }
    }
    for (const Conflict& p : pairs) {
        if (findings_.size() >= max_findings) return;
        const std::string start =
            fmt::format("{} {} {} bytes at {:#x} ", named(op), verb(p.mine), p.end - p.begin, p.begin);
        if (p.released) {
            findings_.push_back(start + fmt::format("that were released before by {}", named(p.earlier.op)));
        } else {
            findings_.push_back(start +
                                fmt::format("that {} {}, and nothing orders the two: follow the earlier ticket, "
                                            "or wait for it on the host",
                                            named(p.earlier.op), verb(p.earlier.access)));
        }
    }
}

void AccessChecker::release(const Operation& op, const VectorClock& before, const void* begin, int64_t bytes) {
    const BufferAccess access{static_cast<const std::byte*>(begin), bytes, Access::write};
    record(op, before, {&access, 1});
    const auto from = reinterpret_cast<uintptr_t>(begin), to = from + static_cast<uintptr_t>(bytes);
    for (auto r = first_of(from, to); r != ranges_.end() && r->first < to; ++r) {
        r->second.uses.clear();
        r->second.released_by = op;
    }
    merge(from, to);
}

void AccessChecker::allocate(const void* begin, int64_t bytes) {
    const auto from = reinterpret_cast<uintptr_t>(begin), to = from + static_cast<uintptr_t>(bytes);
    split(from);
    split(to);
    ranges_.erase(ranges_.lower_bound(from), ranges_.lower_bound(to));
}

// Makes [begin, end) a sequence of whole ranges without gaps and gives the first one.
AccessChecker::Ranges::iterator AccessChecker::first_of(uintptr_t begin, uintptr_t end) {
    split(begin);
    split(end);
    uintptr_t at = begin;
    for (auto r = ranges_.lower_bound(begin); at < end; ++r) {
        const uintptr_t next = r == ranges_.end() ? end : std::min(end, r->first);
        if (at < next) r = ranges_.emplace(at, Range{next, {}, {}}).first;
        at = r->second.end;
    }
    return ranges_.lower_bound(begin);
}

// No range contains `at` in its inside afterwards.
void AccessChecker::split(uintptr_t at) {
    auto r = ranges_.lower_bound(at);
    if (r == ranges_.begin()) return;
    --r;
    if (r->second.end <= at) return;
    ranges_.emplace(at, r->second);
    r->second.end = at;
}

// Joins equal neighbours, from the one before `begin` to the one after `end`.
void AccessChecker::merge(uintptr_t begin, uintptr_t end) {
    auto r = ranges_.lower_bound(begin);
    if (r != ranges_.begin()) --r;
    while (r != ranges_.end() && r->first <= end) {
        const auto next = std::next(r);
        if (next != ranges_.end() && next->first == r->second.end && next->second == r->second) {
            r->second.end = next->second.end;
            ranges_.erase(next);
        } else {
            r = next;
        }
    }
}

}  // namespace trifold
