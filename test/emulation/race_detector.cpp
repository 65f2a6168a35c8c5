// test/emulation/race_detector.cpp   Finds accesses to the same bytes that no barrier orders, whatever order they ran in.
//
// Looked at are shared memory and device allocations; instrumentation.cpp reports the accesses.
//
// Order      Of two accesses by different threads the earlier one happens before the later one iff a block barrier lies
//            between them, or both are of one warp and a chain of __syncwarp leads from one to the other. Shuffles, votes,
//            ldmatrix and mma order nothing, neither do atomics. Blocks of a grid are ordered by a release store that an
//            acquire load reads (block_order.h), launches always: the stream engine looks after those.
// Shadow     Time is cut into intervals: a new one begins with each block and each block barrier. For each 16 bytes a cell
//            holds all accesses of the current interval (in lists), and of the same launch's earlier blocks which bytes
//            they read and wrote. Within a warp, vector clocks count each lane's __syncwarp calls. So no race is missed
//            for want of memory. One may be reported that is none where blocks without an order among them touched the
//            same 16 bytes before a block that comes after them all.
// Declared   What an operation declared (declare_accesses) is checked against what its kernels touch of device memory.
#include "test/emulation/race_detector.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <map>
#include <set>
#include <tuple>
#include <vector>

#include "test/emulation/block_order.h"
#include "test/emulation/symbols.h"

extern "C" std::byte __start_emulation_shared[] __attribute__((weak)), __stop_emulation_shared[] __attribute__((weak));
extern "C" const char __executable_start;  // the linker's

namespace trifold::emulation {
namespace {

using races::Kind;

constexpr uintptr_t cell_bytes = 16;
using Bytes = uint16_t;  // mask of the bytes of a cell

// An instruction, relative to the program's start; or, from `first_site` on, an index into `sites`.
using Place = uint32_t;
constexpr Place first_site = 0x80000000u;
std::vector<Site> sites;

// One access of the current interval to some bytes of a cell.
struct Use {
    uint32_t next;   // in `uses`; 0 ends the list
    uint32_t clock;  // of its lane
    Place place;
    uint16_t thread;
    Bytes bytes;
    Kind kind;
};
std::vector<Use> uses(1);

// Which bytes of a cell a block, or several, accessed, by kind; when and where it last did.
struct Summary {
    Bytes bytes[3] = {};
    bool unordered[3] = {};  // blocks that do not come after one another
    uint32_t interval[3] = {};
    Place place[3] = {};
};
struct Cell {
    uint32_t interval = 0;
    uint32_t reads = 0, writes = 0;  // lists of that interval; atomics are among the writes
    Summary block, earlier_blocks;   // of device memory
};

// A piece of memory and its cells. The pages of a large shadow exist once touched.
class Region {
public:
    Region() = default;
    Region(const void* begin, size_t bytes) { place(begin, bytes); }
    Region(const Region&) = delete;
    Region& operator=(const Region&) = delete;
    ~Region() {
        if (cells_) munmap(cells_, shadow_bytes_);
    }
    // Moves to other memory. Old cells need no cleaning: their intervals have passed.
    void place(const void* begin, size_t bytes) {
        begin_ = reinterpret_cast<uintptr_t>(begin);
        end_ = begin_ + bytes;
        const size_t needed = (bytes / cell_bytes + 2) * sizeof(Cell);
        if (needed <= shadow_bytes_) return;
        if (cells_) munmap(cells_, shadow_bytes_);
        void* memory = mmap(nullptr, needed, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (memory == MAP_FAILED) die("no memory for the race detector");
        cells_ = static_cast<Cell*>(memory);
        shadow_bytes_ = needed;
    }
    bool contains(uintptr_t p) const { return p - begin_ < end_ - begin_; }
    uintptr_t begin() const { return begin_; }
    uintptr_t end() const { return end_; }
    Cell& cell(uintptr_t p) { return cells_[p / cell_bytes - begin_ / cell_bytes]; }

private:
    uintptr_t begin_ = 0, end_ = 0;
    Cell* cells_ = nullptr;
    size_t shadow_bytes_ = 0;
};

Region static_shared, dynamic_shared;
std::map<uintptr_t, Region> device;  // by last byte
Region* last_device = nullptr;
uintptr_t device_begin = UINTPTR_MAX, device_end = 0;

uint32_t interval = 1, first_of_block = 1, first_of_launch = 1;

// clocks[w][a][b]: how many of lane b's calls of __syncwarp lane a of warp w comes after; [a][a] is its own time.
uint32_t clocks[max_warps][warp_lanes][warp_lanes];
uint32_t& own_clock(const Thread& t) { return clocks[t.warp][t.lane][t.lane]; }

races::BlockOrder block_order;

int64_t reports = 0;
std::map<std::string, int> printed;  // by kernel
std::set<std::tuple<std::string, Place, Place>> reported;

// ---------------------------------------------------------------- reports

struct Access {
    const Thread& by;
    uintptr_t begin;  // of the whole access
    Bytes bytes;      // those inside the cell
    Kind kind;
    Place place;
    const Region& region;
    bool shared() const { return &region == &static_shared || &region == &dynamic_shared; }
};

std::string describe(Place place) {
    if (place >= first_site) return sites[place - first_site].text() + "\n";
    return source_of(reinterpret_cast<uintptr_t>(&__executable_start) + place);
}

const char* verb(Kind kind) {
    constexpr const char* verbs[] = {"reads", "writes", "changes atomically"};
    return verbs[static_cast<size_t>(kind)];
}

std::string sentence(const Access& a) {
    char offset[32];
    std::snprintf(offset, sizeof offset, "%#zx", static_cast<size_t>(a.begin - a.region.begin()));
    return "thread " + std::to_string(a.by.number) + " " + verb(a.kind) + (a.shared() ? " shared memory (+" : " a device buffer (+") + offset + ")";
}

// One report for each pair of places; the first ones of each kernel are printed.
void report(const char* what, const Access& mine, const std::string& more, Place other = 0) {
    if (!reported.emplace(what, std::min(mine.place, other), std::max(mine.place, other)).second) return;
    ++reports;
    constexpr int most_printed = 5;
    if (++printed[block.launch->kernel] > most_printed) return;
    const uint3 b = block.index;
    std::fprintf(stderr, "emulation: %s in %s, block (%u,%u,%u): %s%s\n    %s", what, block.launch->kernel, b.x, b.y, b.z,
                 sentence(mine).c_str(), more.c_str(), describe(mine.place).c_str());
    if (other && other != mine.place) std::fprintf(stderr, "    %s", describe(other).c_str());
}

// ---------------------------------------------------------------- races

bool conflict(Kind a, Kind b) { return !(a == Kind::read && b == Kind::read) && !(a == Kind::atomic && b == Kind::atomic); }

bool ordered(const Use& earlier, const Thread& now) {
    if (earlier.thread / warp_lanes != now.warp) return false;
    const int lane = earlier.thread % warp_lanes;
    return lane == now.lane || clocks[now.warp][now.lane][lane] >= earlier.clock;
}

void check_list(uint32_t list, const Access& a) {
    for (; list; list = uses[list].next) {
        const Use& u = uses[list];
        if (!(u.bytes & a.bytes) || !conflict(u.kind, a.kind) || ordered(u, a.by)) continue;
        report("race", a, ", thread " + std::to_string(u.thread) + " of the block " + verb(u.kind) + " it; no barrier orders them", u.place);
        return;
    }
}

void check_earlier_blocks(const Summary& s, const Access& a) {
    for (const Kind kind : {Kind::read, Kind::write, Kind::atomic}) {
        const size_t k = static_cast<size_t>(kind);
        if (!(s.bytes[k] & a.bytes) || !conflict(kind, a.kind)) continue;
        if (!s.unordered[k] && block_order.knows(a.by, s.interval[k])) continue;
        report("race", a, std::string(", another block ") + verb(kind) + " it; nothing orders the blocks", s.place[k]);
        return;
    }
}

void bring_up_to_date(Cell& c, bool shared) {
    if (!shared && c.interval < first_of_launch) {
        c.block = c.earlier_blocks = {};
    } else if (!shared && c.interval < first_of_block) {
        for (int k = 0; k < 3; ++k) {
            if (!c.block.bytes[k]) continue;
            c.earlier_blocks.bytes[k] |= c.block.bytes[k];
            c.earlier_blocks.unordered[k] |= c.block.unordered[k];
            c.earlier_blocks.interval[k] = c.block.interval[k];
            c.earlier_blocks.place[k] = c.block.place[k];
        }
        c.block = {};
    }
    c.interval = interval;
    c.reads = c.writes = 0;
}

void add(uint32_t& list, const Access& a) {
    const Use mine{list, own_clock(a.by), a.place, static_cast<uint16_t>(a.by.number), a.bytes, a.kind};
    Use& latest = uses[list];
    if (list && latest.thread == mine.thread && latest.bytes == mine.bytes && latest.kind == mine.kind) {
        latest.clock = mine.clock;  // the later access of a thread stands for its earlier ones
        latest.place = mine.place;
    } else {
        list = static_cast<uint32_t>(uses.size());
        uses.push_back(mine);
    }
}

void access_cell(Cell& c, const Access& a) {
    const bool shared = a.shared();
    if (c.interval != interval) bring_up_to_date(c, shared);
    check_list(c.writes, a);
    if (a.kind != Kind::read) check_list(c.reads, a);
    add(a.kind == Kind::read ? c.reads : c.writes, a);
    if (shared) return;
    check_earlier_blocks(c.earlier_blocks, a);
    const size_t k = static_cast<size_t>(a.kind);
    if (c.earlier_blocks.bytes[k] && !block_order.knows(a.by, c.earlier_blocks.interval[k])) c.block.unordered[k] = true;
    c.block.bytes[k] |= a.bytes;
    c.block.interval[k] = interval;
    c.block.place[k] = a.place;
}

// ---------------------------------------------------------------- what operations declared

void check_declared(const Access& a, uintptr_t end) {
    const std::vector<BufferAccess>& declared = block.launch->declared;
    if (declared.empty()) return;
    const bool write = a.kind != Kind::read;
    for (const BufferAccess& d : declared) {
        const uintptr_t from = reinterpret_cast<uintptr_t>(d.begin);
        if (a.begin >= from && end <= from + static_cast<uintptr_t>(d.bytes) && !(write && d.access == trifold::Access::read)) return;
    }
    report(write ? "undeclared write" : "undeclared read", a, write ? ", which the operation has not declared as written" : ", which the operation has not declared");
}

// ---------------------------------------------------------------- every access

Region* region_of(uintptr_t p) {
    if (static_shared.contains(p)) return &static_shared;
    if (dynamic_shared.contains(p)) return &dynamic_shared;
    if (p < device_begin || p >= device_end) return nullptr;
    if (last_device && last_device->contains(p)) return last_device;
    const auto found = device.lower_bound(p);
    if (found == device.end() || !found->second.contains(p)) return nullptr;
    return last_device = &found->second;
}

void access(const Thread& by, Region& region, uintptr_t begin, size_t bytes, Kind kind, Place place) {
    const uintptr_t end = begin + bytes;
    const Access whole{by, begin, 0, kind, place, region};
    if (end > region.end()) return report("out of bounds", whole, " and beyond its end");
    if (!whole.shared()) check_declared(whole, end);
    constexpr unsigned all = 0xffff;
    for (uintptr_t at = begin & ~(cell_bytes - 1); at < end; at += cell_bytes) {
        const unsigned before = begin > at ? static_cast<unsigned>(begin - at) : 0;
        const unsigned after = end < at + cell_bytes ? static_cast<unsigned>(at + cell_bytes - end) : 0;
        access_cell(region.cell(at), {by, begin, static_cast<Bytes>(all << before & all >> after), kind, place, region});
    }
}

Place place_of(const void* instruction) {
    return static_cast<Place>(static_cast<const char*>(instruction) - &__executable_start - 1);  // -1: inside the call
}

struct ExitCode {
    ~ExitCode() {
        if (reports == 0) return;
        std::fprintf(stderr, "emulation: %lld reports of the race detector\n", static_cast<long long>(reports));
        std::fflush(nullptr);
        _exit(race_exit_code);
    }
} exit_code;

}  // namespace

bool detects_races() { return true; }
int64_t race_reports() { return reports; }

void device_memory_added(const void* begin, size_t bytes) {
    if (bytes == 0) return;
    const uintptr_t first = reinterpret_cast<uintptr_t>(begin), end = first + bytes;
    device.try_emplace(end - 1, begin, bytes);
    device_begin = std::min(device_begin, first);
    device_end = std::max(device_end, end);
}

void device_memory_removed(const void* begin) {
    const auto found = device.lower_bound(reinterpret_cast<uintptr_t>(begin));
    if (found == device.end() || found->second.begin() != reinterpret_cast<uintptr_t>(begin)) return;
    last_device = nullptr;
    device.erase(found);
}

namespace races {
namespace {
void next_interval() {
    ++interval;
    uses.resize(1);
}
}  // namespace

void grid_begins() {
    if (__start_emulation_shared && !static_shared.end())
        static_shared.place(__start_emulation_shared, static_cast<size_t>(__stop_emulation_shared - __start_emulation_shared));
    dynamic_shared.place(block.dynamic_shared, block.launch->shared_bytes);
    first_of_launch = interval + 1;
    block_order.grid_begins();
}

void block_begins() {
    next_interval();
    first_of_block = interval;
    block_order.block_begins(interval);
    for (int i = 0; i < block.threads; ++i) ++clocks[i / warp_lanes][i % warp_lanes][i % warp_lanes];
}

void block_barrier() {
    next_interval();
    block_order.barrier();
}

void release(const Thread& by, const void* at) { block_order.release(by, at, interval); }
void acquire(const Thread& by, const void* at) { block_order.acquire(by, at); }

void warp_barrier(int warp, unsigned mask) {
    uint32_t joined[warp_lanes] = {};
    const auto lanes = [&](auto f) {
        for (int l = 0; l < warp_lanes; ++l)
            if (mask >> l & 1) f(clocks[warp][l], l);
    };
    lanes([&](const uint32_t(&clock)[warp_lanes], int) {
        for (int l = 0; l < warp_lanes; ++l) joined[l] = std::max(joined[l], clock[l]);
    });
    lanes([&](uint32_t(&clock)[warp_lanes], int lane) {
        std::copy(std::begin(joined), std::end(joined), clock);
        ++clock[lane];
    });
}

void record(const Thread& by, const void* begin, size_t bytes, Kind kind, const Site& site) {
    size_t i = 0;
    while (i < sites.size() && !(sites[i] == site)) ++i;
    if (i == sites.size()) sites.push_back(site);
    const uintptr_t first = reinterpret_cast<uintptr_t>(begin);
    if (Region* region = region_of(first)) access(by, *region, first, bytes, kind, first_site + static_cast<Place>(i));
}

void record(const Thread& by, const void* begin, size_t bytes, Kind kind, const void* place) {
    const uintptr_t first = reinterpret_cast<uintptr_t>(begin);
    if (Region* region = region_of(first)) access(by, *region, first, bytes, kind, place_of(place));
}

void misaligned(const Thread& by, const void* begin, size_t bytes, Kind kind, const void* place) {
    const uintptr_t first = reinterpret_cast<uintptr_t>(begin);
    if (Region* region = region_of(first))
        report("misaligned access", {by, first, 0, kind, place_of(place), *region}, " with " + std::to_string(bytes) + " bytes");
}

}  // namespace races
}  // namespace trifold::emulation
