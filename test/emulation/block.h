// test/emulation/block.h   One running block: its threads, what each waits for, and who goes next. Internal to the emulator.
#pragma once
#include <array>
#include <cstdint>
#include <string>
#include <vector>

#include "test/emulation/emulator.h"
#include "test/emulation/fiber.h"

namespace trifold::emulation {

constexpr int max_threads = 1024, warp_lanes = 32, max_warps = max_threads / warp_lanes;

// Where a thread calls something that others must call too. Two scalar default arguments fetch the place: GCC 12 evaluates
// a braced Site as default argument where it is declared.
struct Site {
    const char* call = "";
    const char* file = "";
    int line = 0;
    bool operator==(const Site&) const;
    std::string text() const;  // "__syncthreads at norm.cu:17"
};
#define TRIFOLD_EMULATION_HERE const char *file_here = __builtin_FILE(), int line_here = __builtin_LINE()
#define TRIFOLD_EMULATION_SITE(call) (::trifold::emulation::Site{call, file_here, line_here})

// A cp.async that has not landed; the global side is null where zeros are to be written.
struct AsyncCopy {
    Site site;
    void* shared;
    const void* global;
    int64_t group;
};

enum class Wait : uint8_t { none, block, warp, ended };

struct Thread {
    Fiber fiber;
    uint3 index{};
    int number = 0, warp = 0, lane = 0;
    Wait wait = Wait::none;
    Site site;                // where it waits
    void* operand = nullptr;  // what it brings to a warp collective; the result is left there
    std::vector<AsyncCopy> copies;
    int64_t open_group = 0;
};

// A collective that some lanes of its mask have reached and others have not.
struct Collective {
    unsigned mask = 0, arrived = 0;
    Site site;
};

struct Warp {
    unsigned ended = 0;  // lanes
    int open = 0;
    std::array<Collective, warp_lanes> collectives;  // the first `open` of them; no lane has arrived at two
};

// The threads that could run, and the schedule.
class ReadyThreads {
public:
    void clear(Schedule schedule, int warps);
    bool empty() const { return count_ == 0; }
    void push(int thread);
    int pop();

private:
    int pop_of_highest_warp();

    Schedule schedule_ = Schedule::random;
    int count_ = 0, first_ = 0, warps_ = 0;
    std::array<uint16_t, max_threads> ring_{};
    std::array<unsigned, max_warps> lanes_{};  // warp priority: ready lanes of each warp ...
    std::array<uint8_t, max_warps> order_{};   // ... and the warps, highest priority first
};

struct Block {
    const Launch* launch = nullptr;
    dim3 dim, grid;
    uint3 index{};
    int threads = 0, live = 0;
    // The barrier: how many wait, how many came with a true predicate; the latter of the last one completed.
    int arrived = 0, votes = 0, completed_arrivals = 0, completed_votes = 0;
    Site barrier;
    std::byte* dynamic_shared = nullptr;
    ReadyThreads ready;
    std::array<Warp, max_warps> warps;
    std::array<Thread, max_threads> thread;
};

inline Block block;                 // one at a time
inline Thread* current = nullptr;   // the running thread; null: the host

struct Votes {
    int arrived, votes;
};
// Waits for all threads of the block that have not ended (the rule since Volta).
Votes block_barrier(int vote, const Site& site);

// All lanes of the mask meet; the last one to come runs `complete` on what they brought, then all go on.
using Operands = std::array<void*, warp_lanes>;
using Complete = void (*)(const Operands& operands, unsigned mask);
void warp_collective(const Site& site, unsigned mask, void* operand, Complete complete);
void warp_barrier(const Site& site, unsigned mask);

// Collectives of warp.cpp. `value` of at most 16 bytes is replaced by that of lane `from`.
void shuffle(const Site& site, unsigned mask, void* value, size_t bytes, int from);
unsigned ballot(const Site& site, unsigned mask, bool vote);
enum class Reduction : uint8_t { add, min, max, bit_and, bit_or, bit_xor };
int64_t reduce(const Site& site, unsigned mask, int64_t value, Reduction reduction);
unsigned match_any(const Site& site, unsigned mask, uint64_t value);

void pause();            // until wake() and the schedule's choice
void wake(Thread& t);
uint32_t random_below(uint32_t n);
bool is_shared(const void* p, size_t bytes);

}  // namespace trifold::emulation
