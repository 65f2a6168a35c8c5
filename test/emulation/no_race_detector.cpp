// test/emulation/no_race_detector.cpp   Stands in for race_detector.cpp where memory accesses are not instrumented.
#include "test/emulation/race_detector.h"

namespace trifold::emulation {

bool detects_races() { return false; }
int64_t race_reports() { return 0; }
void device_memory_added(const void*, size_t) {}
void device_memory_removed(const void*) {}

namespace races {
void grid_begins() {}
void block_begins() {}
void block_barrier() {}
void warp_barrier(int, unsigned) {}
void release(const Thread&, const void*) {}
void acquire(const Thread&, const void*) {}
void record(const Thread&, const void*, size_t, Kind, const Site&) {}
void record(const Thread&, const void*, size_t, Kind, const void*) {}
}  // namespace races
}  // namespace trifold::emulation
