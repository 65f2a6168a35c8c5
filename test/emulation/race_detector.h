// test/emulation/race_detector.h   What the emulator tells the race detector. Internal.
#pragma once
#include <cstddef>
#include <cstdint>

#include "test/emulation/block.h"

namespace trifold::emulation::races {

void grid_begins();
void block_begins();
void block_barrier();
void warp_barrier(int warp, unsigned mask);
// A release store and an acquire load of a word that says how far blocks are.
void release(const Thread& by, const void* at);
void acquire(const Thread& by, const void* at);

// Atomics do not race with each other.
enum class Kind : uint8_t { read, write, atomic };
// An access by the instruction at `place`, or at a site where the instruction would say nothing.
void record(const Thread& by, const void* begin, size_t bytes, Kind kind, const Site& site);
void record(const Thread& by, const void* begin, size_t bytes, Kind kind, const void* place);
void misaligned(const Thread& by, const void* begin, size_t bytes, Kind kind, const void* place);

}  // namespace trifold::emulation::races
