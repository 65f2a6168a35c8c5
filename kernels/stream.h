// kernels/stream.h   Streams, tickets and declared buffers: how the order of asynchronous work is stated (DESIGN 4).
//
// An operation is put on a stream with the buffers it reads and writes and gives a ticket. Operations of one stream run
// in the order in which they were put there; between streams only `follow(ticket)` orders; the host waits with
// `wait(ticket)`, and what it submits after a wait comes after what it waited for.
//
// Four engines run the same program:
//   inline       the compute stream of a CPU: an operation is done when the call returns
//   worker       a communication axis on a CPU: a thread executes the queue
//   CUDA         streams and events of the GPU (kernels/cuda/runtime.h); a stream for communication by the host is a worker here too: its
//                operations wait for events, and what follows one of them is put on the GPU's streams when it is done
//   adversarial  every stream is a queue and nothing runs before the host waits: then what the awaited ticket depends on,
//                and, because other ranks wait for it, all communication submitted so far (in a thread of each axis). A
//                vector-clock checker reports every pair of accesses to the same bytes that nothing orders.
//
// Failures     What an inline operation throws reaches the caller at once. What a queued one throws is kept: neither the
//              rest of its stream nor anything that follows it is run, and each wait for one of them throws it again.
// Threads      All calls come from one host thread; operations themselves submit nothing and wait for no ticket.
#pragma once
#include <array>
#include <chrono>
#include <cstdint>
#include <functional>
#include <initializer_list>
#include <memory>
#include <span>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "kernels/device.h"
#include "kernels/tensor.h"

struct CUstream_st;  // what a cudaStream_t points to

namespace trifold {

namespace cuda {
class Streams;
}

struct BufferAccess {
    const std::byte* begin = nullptr;
    int64_t bytes = 0;
    Access access = Access::read;
};

template <Access A>
BufferAccess declare(const View<A>& v) {
    return {static_cast<const std::byte*>(v.data), v.bytes(), A};
}

// All that an operation reads and writes: its views, and its table of segments where it has one.
template <class Args>
auto accesses_of(const Args& args) {
    if constexpr (requires { args.segments; }) {
        const BufferAccess table{reinterpret_cast<const std::byte*>(args.segments), args.segment_count * static_cast<int64_t>(sizeof *args.segments), Access::read};
        return std::apply([&](const auto&... v) { return std::array{table, declare(v)...}; }, args.views());
    } else {
        return std::apply([](const auto&... v) { return std::array{declare(v)...}; }, args.views());
    }
}

enum class StreamMode : uint8_t { normal, adversarial };
// host_communication: what the CPU sends and receives, on a GPU from and to copies of device memory; on a CPU the same as communication.
enum class StreamKind : uint8_t { compute, communication, host_communication };

class StreamEngine;
class Stream;

// Names one operation on one stream. Cheap to copy; a default ticket is already done.
struct Ticket {
    int stream = -1;
    uint64_t number = 0;

    bool operator==(const Ticket&) const = default;
};

// Told after each operation when it ran (tracing), and with the name `waiting` when the host, and so inline compute, was blocked by a
// stream. Called on the thread that ran it, so on several at once.
inline constexpr const char* waiting = "waiting";
using StreamTime = std::chrono::steady_clock::time_point;
using StreamObserver = std::function<void(const Stream&, const char* name, StreamTime begin, StreamTime end)>;

class Stream {
public:
    // Puts `work` (copyable, no arguments) at the end of this stream. `name` must outlive the engine (a literal). What
    // the work uses must live until its ticket is done. An inline stream neither copies `work` nor looks at `accesses`.
    template <class Work>
    Ticket submit(const char* name, std::span<const BufferAccess> accesses, Work&& work) {
        return inline_ ? run_here(name, work) : enqueue(name, accesses, std::forward<Work>(work));
    }
    template <class Work>
    Ticket submit(const char* name, std::initializer_list<BufferAccess> accesses, Work&& work) {
        return submit(name, std::span(accesses.begin(), accesses.size()), std::forward<Work>(work));
    }
    // The same for an operation, given by its two versions, and its argument struct, which lists its views. A queue keeps a
    // copy of the arguments.
    template <class Args>
    Ticket launch(const char* name, void (*on_cpu)(const Args&), void (*on_gpu)(CUstream_st*, const Args&), const Args& args) {
        if (inline_) return run_here(name, [&] { on_cpu(args); });
        const auto accesses = accesses_of(args);
        if (cuda_) return issue(name, accesses, [&](CUstream_st* stream) { on_gpu(stream, args); });
        return enqueue(name, accesses, [on_cpu, args] { on_cpu(args); });
    }
    // Everything submitted to this stream from now on runs after the ticket's operation. An inline stream waits for it
    // here.
    void follow(Ticket ticket);
    // All that was submitted to this stream or followed by it so far.
    Ticket last() { return followed_ ? join() : Ticket{index_, submitted_}; }
    StreamEngine& engine() const { return *engine_; }
    const std::string& name() const { return name_; }
    // Inline streams need neither a queue nor declared accesses.
    bool runs_inline() const { return inline_; }
    // Where its operations run.
    Device device() const { return cuda_ ? Device::cuda : Device::cpu; }

private:
    friend class StreamEngine;
    Stream(StreamEngine* engine, int index, std::string name, bool runs_inline, cuda::Streams* cuda, const StreamObserver* observer)
        : engine_(engine), index_(index), name_(std::move(name)), inline_(runs_inline), cuda_(cuda), observer_(observer) {}

    template <class Work>
    Ticket run_here(const char* name, Work&& work) {
        if (*observer_) {
            const StreamTime begin = std::chrono::steady_clock::now();
            work();
            (*observer_)(*this, name, begin, std::chrono::steady_clock::now());
        } else {
            work();
        }
        return {index_, ++submitted_};
    }
    Ticket join();
    Ticket enqueue(const char* name, std::span<const BufferAccess> accesses, std::function<void()> work);
    Ticket issue(const char* name, std::span<const BufferAccess> accesses, const std::function<void(CUstream_st*)>& launches);

    StreamEngine* engine_;
    int index_;
    std::string name_;
    bool inline_;
    cuda::Streams* cuda_;             // null on a CPU
    const StreamObserver* observer_;  // the engine's; empty: nobody watches
    uint64_t submitted_ = 0;
    bool followed_ = false;             // something, after the last operation
    std::vector<uint64_t> orders_;      // by stream: this stream comes after so many of its operations anyway
};

// Of one device. The adversarial mode is the CPU's; on a GPU the emulated runtime of the tests does the same.
class StreamEngine {
public:
    explicit StreamEngine(StreamMode mode = StreamMode::normal, Device device = Device::cpu);
    // abandon()
    ~StreamEngine();
    StreamEngine(const StreamEngine&) = delete;
    StreamEngine& operator=(const StreamEngine&) = delete;

    Stream& add(const std::string& name, StreamKind kind);
    // The host waits until the ticket's operation is done; what the operation threw is thrown here.
    void wait(Ticket ticket);
    // All streams are empty afterwards, also when something failed: the first stream's failure is then thrown.
    void wait_all();
    // The same for destructors of what the streams use; failures were reported before, or the process ends because of them.
    void drain() noexcept;
    // Joins the workers: what they run is finished, what they have not begun never runs, and nothing may be submitted any more. What is on a
    // GPU is waited for; where that does not end, the process does, with the code of a fault, since nobody can take the memory back.
    void abandon() noexcept;
    // To be called when all streams are there, before anything is submitted.
    void observe(StreamObserver observer);
    // Called with the seconds waited again and again while the host or a thread of host communication waits for a GPU, and once when the wait
    // is over: what it throws ends the wait. Collectives of a GPU have no deadline of their own, and a failed one looks finished.
    using Watch = std::function<void(double waited_s, bool over)>;
    void watch(Watch watch);

    // The rest is for the checker and costs nothing in normal mode.
    // The host reads or writes memory directly: checked like an operation of its own stream. `what` is a literal.
    void host_access(const std::vector<BufferAccess>& accesses, const char* what);
    // The host frees memory: everything that used it must come before, and any later use is reported ...
    void buffer_released(const void* begin, int64_t bytes, const char* what);
    // ... until the same addresses are handed out again.
    void buffer_allocated(const void* begin, int64_t bytes);
    // The unordered accesses seen so far, one sentence for each pair of operations.
    const std::vector<std::string>& findings() const;
    StreamMode mode() const;
    // How many times a stream was told to follow another one, or the host waited, so far; and a planted fault for tests: the
    // n-th of them (1 for the first) is left out, and the first unordered access is thrown where it is submitted.
    int64_t orderings() const;
    void leave_out_ordering(int64_t n);

    // Seconds for which the host, and with it inline compute, was blocked by a stream's operations so far; on a GPU those for
    // which the compute stream was (for host communication there: the host, while the GPU may have had work left).
    double waited_s(const Stream& stream) const;

private:
    friend class Stream;
    struct State;
    std::unique_ptr<State> state_;
};

// Gives what is submitted during its life a common name in profilers of the GPU (NVTX); nothing on a CPU.
class StreamRange {
public:
    StreamRange(const Stream& stream, const char* name);
    ~StreamRange();
    StreamRange(const StreamRange&) = delete;
    StreamRange& operator=(const StreamRange&) = delete;

private:
    bool on_gpu_;
};

}  // namespace trifold
