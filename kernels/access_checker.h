// kernels/access_checker.h   Finds accesses to the same bytes that nothing orders, whatever order they happen to run
// in.
//
// Every operation comes with a vector clock: for each stream, the number of its operations that are ordered before. For
// each range of bytes the checker keeps the accesses that a later one could still conflict with: those that no newer
// conflicting access is ordered after. So each race is reported at its latest earlier access, and the memory stays
// small.
#pragma once
#include <cstdint>
#include <map>
#include <span>
#include <string>
#include <vector>

#include "kernels/stream.h"

namespace trifold {

// Entry s: that many operations of stream s come before. Missing entries are 0.
class VectorClock {
public:
    uint64_t operator[](int stream) const;
    bool covers(Ticket t) const { return (*this)[t.stream] >= t.number; }
    void advance(Ticket t);
    void join(const VectorClock& other);
    int streams() const { return static_cast<int>(counts_.size()); }

private:
    std::vector<uint64_t> counts_;
};

class AccessChecker {
public:
    // One operation as a sentence names it: "all_gather (#3 on 'dp')". The pointers outlive the checker.
    struct Operation {
        Ticket ticket;
        const char* name = "";
        const std::string* stream = nullptr;
    };

    // An operation ordered after `before` makes these accesses.
    void record(const Operation& op, const VectorClock& before, std::span<const BufferAccess> accesses);
    // The same for giving the memory back.
    void release(const Operation& op, const VectorClock& before, const void* begin, int64_t bytes);
    // Forgets what was known of these bytes.
    void allocate(const void* begin, int64_t bytes);
    const std::vector<std::string>& findings() const { return findings_; }

private:
    struct Use {
        Operation op;
        Access access;
        bool operator==(const Use& o) const { return op.ticket == o.op.ticket && access == o.access; }
    };
    struct Range {
        uintptr_t end = 0;
        std::vector<Use> uses;
        Operation released_by;  // number 0: not released
        bool operator==(const Range& o) const { return uses == o.uses && released_by.ticket == o.released_by.ticket; }
    };
    struct Conflict {
        Use earlier;
        Access mine;
        uintptr_t begin, end;
        bool released;
    };
    using Ranges = std::map<uintptr_t, Range>;  // by first byte; disjoint

    void use(const Use& mine, const VectorClock& before, uintptr_t begin, Range& range,
             std::vector<Conflict>& conflicts);
    void report(const Operation& op, const std::vector<Conflict>& conflicts);
    Ranges::iterator first_of(uintptr_t begin, uintptr_t end);
    void split(uintptr_t at);
    void merge(uintptr_t begin, uintptr_t end);

    Ranges ranges_;
    std::vector<std::string> findings_;
};

}  // namespace trifold
