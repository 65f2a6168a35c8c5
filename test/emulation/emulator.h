// test/emulation/emulator.h   Runs CUDA kernels on the CPU and checks them while they run: what the host side of a test sees.
//
// A kernel is a .cu file compiled as C++ against cuda_language.h. Every CUDA thread is a fiber; blocks run one after
// another. Found in every build: divergent barriers, collectives that do not match, deadlock, lanes that have exited,
// asynchronous copies nobody waited for; uninitialised shared memory reads as NaN (clang builds). The build with the race
// detector also reports accesses that nothing orders, and accesses outside what the operation declared. Files:
//
//   cuda_language.h, intrinsics.h   the words of CUDA C++                  ptx.h, ptx.cpp     kernels/cuda/ptx.h, emulated
//   block.h, block.cpp              threads, barriers, schedules           warp.cpp           collectives of a warp
//   fiber.h, fiber.cpp              stacks and the switch between them     symbols.h, .cpp    names for messages
//   race_detector.h, .cpp, block_order.h   happens-before (no_race_detector.cpp in the other builds)
//   instrumentation.cpp             each load and store of a kernel tells the race detector
//
// Environment: EMULATION_SCHEDULE=random|fifo|lifo|warp_priority, EMULATION_SEED=n.
#pragma once
#include <vector_types.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <vector>

#include "kernels/stream.h"

struct CUstream_st;

namespace trifold::emulation {

// Which of the threads that could run goes next. No schedule finds every missing barrier: random keeps warps level, FIFO
// even lockstep; warp priority and LIFO let one warp lap the others.
enum class Schedule : uint8_t { random, fifo, lifo, warp_priority };
struct Settings {
    Schedule schedule = Schedule::warp_priority;
    uint64_t seed = 1;
    int shared_bytes = 227 * 1024;  // that a block may have: those of sm_90
};
void configure(const Settings&);
Settings settings();

struct Launch {
    const char* kernel = "";  // lives for ever
    dim3 blocks, threads;
    size_t shared_bytes = 0;
    std::function<void()> thread;         // what one CUDA thread does
    std::vector<BufferAccess> declared;  // empty: unknown
};
// Runs all blocks, now.
void run_grid(const Launch&);
// Checks the launch's limits, adds what was declared and hands it to submit().
void enqueue(CUstream_st* stream, Launch launch);
// Runs `run` when the stream reaches it. The emulated runtime defines it; without one it runs at once.
void submit(CUstream_st* stream, const char* kernel, std::function<void()> run);

// What kernels launched from now on may touch of device memory; empty: anything. Kept until the next call.
void declare_accesses(std::span<const BufferAccess> accesses);
// Memory that is device memory from now on, and no longer. The race detector looks at nothing else but shared memory.
void device_memory_added(const void* begin, size_t bytes);
void device_memory_removed(const void* begin);

// Reports of the race detector so far; a program with reports exits with `race_exit_code` instead of 0.
int64_t race_reports();
bool detects_races();
// Switches between threads so far: the unit of emulated time.
int64_t stops();

constexpr int death_exit_code = 66, race_exit_code = 67;
// Prints what, and if a kernel runs which kernel, block and thread; ends the process with death_exit_code.
[[noreturn]] void die(const std::string& what);

}  // namespace trifold::emulation
