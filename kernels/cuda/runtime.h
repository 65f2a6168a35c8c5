// kernels/cuda/runtime.h   The CUDA runtime as the rest of the trainer sees it: which GPU, its memory, its streams. No CUDA headers.
#pragma once
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>

#include "kernels/stream.h"

struct CUstream_st;

namespace trifold::cuda {

// absent: no driver, no GPU, or a build without CUDA. unusable: the driver is too old, or the GPU is none that this build can use.
enum class GpuState : uint8_t { found, absent, unusable };
struct Gpu {
    GpuState state = GpuState::absent;
    std::string text;  // "NVIDIA H200, 139.8 GiB, compute capability 9.0", or why there is none
    double bf16_flops = 0, fp32_flops = 0;  // peaks by the data sheet, bf16 on tensor cores without sparsity; 0: not in our table
};
Gpu probe();
// Whether this build has a CUDA half at all: without one not even memory can be planned.
bool compiled_in();
bool has_code_for_this_gpu();

// NCCL refuses two processes on one GPU; those that send through the host may share them.
enum class Sharing : uint8_t { refused, allowed };
// This process computes on GPU `index` of its node from now on, where they are shared modulo their number. Throws Problem(Exit::usage)
// when it cannot.
void select(int index, Sharing sharing);
// The same, but nothing is refused: to be called before probe() by one of several ranks, so that it leaves no context on
// the first GPU.
void prefer(int index);

// Zeroed device memory, null when there is not enough of it. Nothing may still use what is released.
void* allocate(int64_t bytes);
void release(void* memory);
int64_t available_memory();
// Page-locks host memory, so that copies from and to it are asynchronous; to be unpinned before it is freed. False where the
// system does not allow it: copies are slower then.
bool pin(void* memory, int64_t bytes);
void unpin(void* memory);

// Copies between host and device memory that are done when copy() returns, on a stream of its own.
class Copier {
public:
    Copier();
    ~Copier();
    Copier(const Copier&) = delete;
    Copier& operator=(const Copier&) = delete;
    void copy(void* to, const void* from, int64_t bytes) const;

private:
    CUstream_st* stream_ = nullptr;
};

// A named stretch of operations in profilers (NVTX).
void push_range(const char* name);
void pop_range();

// The CUDA streams of one engine, numbered as the engine numbers them. A ticket becomes an event: on communication streams
// after every operation, so that waiting for one collective never waits for the next; on compute streams only when somebody
// asks for the ticket, so that the event may cover later work as well.
class Streams {
public:
    Streams();
    ~Streams();
    Streams(const Streams&) = delete;
    Streams& operator=(const Streams&) = delete;

    void add(const Stream& stream, int index, StreamKind kind);
    CUstream_st* handle(int index) const;
    // Before and after the calls that put one operation on a stream: an NVTX range, in the emulator its declared accesses.
    void begin(int index, const char* name, std::span<const BufferAccess> accesses);
    void end(Ticket ticket);
    void follow(int index, Ticket ticket);
    void wait(Ticket ticket);
    // The same for another thread: the function returns when the GPU has come so far.
    std::function<void()> waiting_for(Ticket ticket);
    // To be called first by each thread that uses this GPU: a new thread's is the first of the node.
    void enter_thread() const;
    // Whether the GPU ends what is on these streams in time; also when it has failed.
    bool done_within(double limit_s) noexcept;
    // Seconds for which compute streams were held up by operations of this stream so far, as far as the GPU has come.
    double waited_s(int index);
    // Called by all threads that wait; to be set before they do.
    void watch(StreamEngine::Watch watch);
    // From now on operations are timed by the GPU; the observer hears of them when the host waits for something.
    void observe(const StreamObserver& observer);

private:
    struct State;
    std::unique_ptr<State> state_;
};

}  // namespace trifold::cuda
