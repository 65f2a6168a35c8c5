// kernels/cuda/runtime.cpp   Devices, memory, streams and events through the CUDA runtime. The driver is never linked.
#include "kernels/cuda/runtime.h"

#include <fmt/format.h>

#include <algorithm>
#include <cctype>
#include <cstdio>
#include <cstring>
#include <deque>
#include <map>
#include <thread>
#include <vector>

#include "kernels/cuda/check.h"
#include "kernels/cuda/range.h"
#include "kernels/cuda/room.h"

namespace trifold::cuda {
namespace {

double gib(size_t bytes) { return static_cast<double>(bytes) / (1 << 30); }

// FLOP/s by NVIDIA's data sheets: bf16 on tensor cores, dense, with fp32 sums; fp32 without tensor cores. The first match counts.
struct DataSheet {
    const char* name;
    double bf16_flops, fp32_flops;
};
constexpr DataSheet data_sheets[] = {
    {"B200", 2250e12, 80e12},        {"GH200", 989.4e12, 66.9e12},  {"H200 NVL", 835e12, 60e12}, {"H200", 989.4e12, 66.9e12},
    {"H100 PCIe", 756e12, 51.2e12},  {"H100 NVL", 835e12, 60e12},   {"H100", 989.4e12, 66.9e12}, {"A100", 312e12, 19.5e12},
    {"L40S", 362e12, 91.6e12},       {"RTX 4090", 165.2e12, 82.6e12}};

// The name as whole words: an "A1000" is no A100. Laptop versions are others.
DataSheet data_sheet(const std::string& name) {
    const auto inside = [&](size_t i) { return i < name.size() && std::isalnum(static_cast<unsigned char>(name[i])); };
    for (const DataSheet& d : data_sheets) {
        const size_t at = name.find(d.name);
        if (at == std::string::npos || (at > 0 && inside(at - 1)) || inside(at + std::strlen(d.name)) || name.find("Laptop") != std::string::npos) continue;
        return d;
    }
    return {"", 0, 0};
}

}  // namespace

void check(cudaError_t error, const char* call, const char* file, int line) {
    if (error == cudaSuccess) return;
    throw Problem(Exit::fault, fmt::format("CUDA: {} ({}) in {} at {}:{}; if `nvidia-smi` shows a healthy GPU, run once more with CUDA_LAUNCH_BLOCKING=1 "
                                           "to learn which kernel it was", cudaGetErrorString(error), cudaGetErrorName(error), call, file, line));
}

bool compiled_in() { return true; }

Gpu probe() {
    int count = 0, driver = 0;
    const cudaError_t error = cudaGetDeviceCount(&count);
    cudaDriverGetVersion(&driver);
    if (driver == 0) return {GpuState::absent, "no NVIDIA driver on this machine"};
    if (error == cudaErrorNoDevice || (error == cudaSuccess && count == 0)) return {GpuState::absent, "the NVIDIA driver sees no GPU (CUDA_VISIBLE_DEVICES?)"};
    if (error == cudaErrorInsufficientDriver)
        return {GpuState::unusable, fmt::format("the NVIDIA driver supports CUDA {}.{}, this build needs {}.{}: update the driver", driver / 1000, driver / 10 % 100,
                                                CUDART_VERSION / 1000, CUDART_VERSION / 10 % 100)};
    if (error != cudaSuccess) return {GpuState::unusable, fmt::format("the NVIDIA driver reports: {}", cudaGetErrorString(error))};
    int device = 0;
    cudaDeviceProp properties;
    CUDA_CHECK(cudaGetDevice(&device));
    CUDA_CHECK(cudaGetDeviceProperties(&properties, device));
    const std::string text = fmt::format("{}, {:.1f} GiB, compute capability {}.{}", properties.name, gib(properties.totalGlobalMem), properties.major, properties.minor);
    if (properties.major < 8 || properties.sharedMemPerBlockOptin < size_t{small_room})
        return {GpuState::unusable, fmt::format("{}, {} KiB of shared memory for a block: compute capability 8.0 and {} KiB are the least that will do here", text,
                                                properties.sharedMemPerBlockOptin / 1024, small_room / 1024)};
    if (!has_code_for_this_gpu())
        return {GpuState::unusable, fmt::format("{}: this build holds no code for it; build with make ARCHS={}{}{}", text, properties.major, properties.minor,
                                                properties.major >= 9 ? "a" : "")};
    const DataSheet sheet = data_sheet(properties.name);
    return {GpuState::found, text, sheet.bf16_flops, sheet.fp32_flops};
}

void select(int index, Sharing sharing) {
    const Gpu gpu = probe();
    if (gpu.state != GpuState::found) throw Problem(Exit::usage, fmt::format("--run.device=cuda: {}; --run.device=cpu computes on the processor", gpu.text));
    int count = 0;
    CUDA_CHECK(cudaGetDeviceCount(&count));
    if (index >= count && sharing == Sharing::refused)
        throw Problem(Exit::usage, fmt::format("this node shows {} GPU{}, but process {} of it needs one of its own: start fewer processes per node, or let them share "
                                               "with --run.comm=host", count, count == 1 ? "" : "s", index));
    CUDA_CHECK(cudaSetDevice(index % count));
}

void* allocate(int64_t bytes) {
    void* memory = nullptr;
    const cudaError_t error = cudaMalloc(&memory, static_cast<size_t>(bytes));
    if (error == cudaErrorMemoryAllocation) {
        cudaGetLastError();  // forgotten: the caller reports it
        return nullptr;
    }
    CUDA_CHECK(error);
    CUDA_CHECK(cudaMemset(memory, 0, static_cast<size_t>(bytes)));
    CUDA_CHECK(cudaDeviceSynchronize());
    return memory;
}

void release(void* memory) { cudaFree(memory); }

int64_t available_memory() {
    size_t available = 0, total = 0;
    CUDA_CHECK(cudaMemGetInfo(&available, &total));
    return static_cast<int64_t>(available);
}

void prefer(int index) {
    int count = 0;
    if (cudaGetDeviceCount(&count) == cudaSuccess && count > 0) cudaSetDevice(index % count);
    cudaGetLastError();  // probe() and select() say what is wrong
}

bool pin(void* memory, int64_t bytes) {
    const cudaError_t error = cudaHostRegister(memory, static_cast<size_t>(bytes), cudaHostRegisterDefault);
    if (error != cudaSuccess) cudaGetLastError();  // forgotten: copies work all the same, only slower
    return error == cudaSuccess;
}
void unpin(void* memory) { cudaHostUnregister(memory); }

Copier::Copier() {
    CUDA_CHECK(cudaStreamCreateWithPriority(&stream_, cudaStreamNonBlocking, 0));
}
Copier::~Copier() { cudaStreamDestroy(stream_); }
void Copier::copy(void* to, const void* from, int64_t bytes) const {
    CUDA_CHECK(cudaMemcpyAsync(to, from, static_cast<size_t>(bytes), cudaMemcpyDefault, stream_));
    CUDA_CHECK(cudaStreamSynchronize(stream_));
}

void push_range(const char* name) { range_begin(name); }
void pop_range() { range_end(); }

// ---------------------------------------------------------------- streams

namespace {

constexpr size_t marks_kept = 64;  // of the latest operations; an older ticket is answered by the oldest mark, which comes after it

struct Mark {
    uint64_t number = 0;  // this operation and all before it on the stream
    cudaEvent_t event = nullptr;
};

struct Timed {
    const Stream* stream;
    const char* name;
    cudaEvent_t begin, end;
};

struct HeldUp {  // a compute stream, between two events round its wait
    cudaEvent_t begin, end;
};

struct CudaStream {
    const Stream* stream = nullptr;
    StreamKind kind = StreamKind::compute;
    cudaStream_t handle = nullptr;
    uint64_t submitted = 0;
    std::deque<Mark> marks;  // numbers ascend
    std::deque<HeldUp> held_up;  // by this stream
    double waited_s = 0;
};

}  // namespace

struct Streams::State {
    std::map<int, CudaStream> streams;
    int device = 0;
    StreamObserver observer;
    StreamEngine::Watch watch;
    cudaEvent_t origin = nullptr;  // and what the host's clock said then
    StreamTime origin_time;
    std::deque<Timed> timed;
    std::vector<cudaEvent_t> timers;  // free ones

    cudaEvent_t timer() {
        cudaEvent_t event;
        if (timers.empty()) {
            CUDA_CHECK(cudaEventCreate(&event));
        } else {
            event = timers.back();
            timers.pop_back();
        }
        return event;
    }
    void mark(CudaStream& s);
    cudaEvent_t event_of(Ticket ticket);
    void wait(cudaEvent_t event) const;
    void report_times();
};

// An event behind everything that is on the stream now.
void Streams::State::mark(CudaStream& s) {
    Mark m{s.submitted, nullptr};
    if (s.marks.size() < marks_kept) {
        CUDA_CHECK(cudaEventCreateWithFlags(&m.event, cudaEventDisableTiming));
    } else {
        m.event = s.marks.front().event;
        s.marks.pop_front();
    }
    CUDA_CHECK(cudaEventRecord(m.event, s.handle));
    s.marks.push_back(m);
}

cudaEvent_t Streams::State::event_of(Ticket ticket) {
    CudaStream& s = streams.at(ticket.stream);
    TRIFOLD_ASSERT(ticket.number <= s.submitted);
    if (s.marks.empty() || s.marks.back().number < ticket.number) mark(s);
    return std::lower_bound(s.marks.begin(), s.marks.end(), ticket.number, [](const Mark& m, uint64_t n) { return m.number < n; })->event;
}

// Operations that have ended, in the order in which they were submitted. The end of each becomes the origin for the next:
// differences are fp32 milliseconds, which would be coarse after minutes.
void Streams::State::report_times() {
    const auto time_of = [&](cudaEvent_t event) {
        float ms = 0;
        CUDA_CHECK(cudaEventElapsedTime(&ms, origin, event));
        return origin_time + std::chrono::duration_cast<StreamTime::duration>(std::chrono::duration<double, std::milli>(ms));
    };
    while (!timed.empty() && cudaEventQuery(timed.front().end) == cudaSuccess) {
        const Timed t = timed.front();
        timed.pop_front();
        const StreamTime end = time_of(t.end);
        observer(*t.stream, t.name, time_of(t.begin), end);
        timers.insert(timers.end(), {t.begin, origin});
        origin = t.end;
        origin_time = end;
    }
}

Streams::Streams() : state_(std::make_unique<State>()) { CUDA_CHECK(cudaGetDevice(&state_->device)); }

void Streams::enter_thread() const { cudaSetDevice(state_->device); }  // an error comes again at the first call that can throw

// Errors are left alone here: the process is on its way out, or the device is broken and said so before.
Streams::~Streams() {
    for (auto& [index, s] : state_->streams) {
        cudaStreamSynchronize(s.handle);
        for (const Mark& m : s.marks) cudaEventDestroy(m.event);
        for (const HeldUp& h : s.held_up) state_->timers.insert(state_->timers.end(), {h.begin, h.end});
        cudaStreamDestroy(s.handle);
    }
    for (const Timed& t : state_->timed) state_->timers.insert(state_->timers.end(), {t.begin, t.end});
    for (const cudaEvent_t event : state_->timers) cudaEventDestroy(event);
    if (state_->origin) cudaEventDestroy(state_->origin);
}

// Communication is short and others wait for it, so it goes first where both could run.
void Streams::add(const Stream& stream, int index, StreamKind kind) {
    int least = 0, greatest = 0;
    CUDA_CHECK(cudaDeviceGetStreamPriorityRange(&least, &greatest));
    CudaStream& s = state_->streams[index];
    s.stream = &stream;
    s.kind = kind;
    CUDA_CHECK(cudaStreamCreateWithPriority(&s.handle, cudaStreamNonBlocking, kind == StreamKind::communication ? greatest : least));
}

CUstream_st* Streams::handle(int index) const { return state_->streams.at(index).handle; }

void Streams::begin(int index, const char* name, std::span<const BufferAccess> accesses) {
    operation_begin(name, accesses);
    if (!state_->observer) return;
    const CudaStream& s = state_->streams.at(index);
    state_->timed.push_back({s.stream, name, state_->timer(), state_->timer()});
    CUDA_CHECK(cudaEventRecord(state_->timed.back().begin, s.handle));
}

void Streams::end(Ticket ticket) {
    CudaStream& s = state_->streams.at(ticket.stream);
    s.submitted = ticket.number;
    if (state_->observer) CUDA_CHECK(cudaEventRecord(state_->timed.back().end, s.handle));
    if (s.kind == StreamKind::communication) state_->mark(s);
    operation_end();
}

void Streams::follow(int index, Ticket ticket) {
    const CudaStream& s = state_->streams.at(index);
    CudaStream& other = state_->streams.at(ticket.stream);
    const cudaEvent_t event = state_->event_of(ticket);
    const bool timed = s.kind == StreamKind::compute && other.kind == StreamKind::communication;
    if (timed) {
        other.held_up.push_back({state_->timer(), state_->timer()});
        CUDA_CHECK(cudaEventRecord(other.held_up.back().begin, s.handle));
    }
    CUDA_CHECK(cudaStreamWaitEvent(s.handle, event, 0));
    if (timed) CUDA_CHECK(cudaEventRecord(other.held_up.back().end, s.handle));
}

double Streams::waited_s(int index) {
    CudaStream& s = state_->streams.at(index);
    while (!s.held_up.empty() && cudaEventQuery(s.held_up.front().end) == cudaSuccess) {
        const HeldUp h = s.held_up.front();
        s.held_up.pop_front();
        float ms = 0;
        CUDA_CHECK(cudaEventElapsedTime(&ms, h.begin, h.end));
        s.waited_s += ms * 1e-3;
        state_->timers.insert(state_->timers.end(), {h.begin, h.end});
    }
    return s.waited_s;
}

// Asks without a pause at first, since most waits are short.
void Streams::State::wait(cudaEvent_t event) const {
    if (!watch) return CUDA_CHECK(cudaEventSynchronize(event));
    constexpr std::chrono::microseconds patience{200}, pause{50};
    constexpr double between_looks_s = 0.02;
    const StreamTime begin = std::chrono::steady_clock::now();
    const auto waited_s = [&] { return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count(); };
    double looked_s = 0;
    for (cudaError_t state; (state = cudaEventQuery(event)) != cudaSuccess;) {
        if (state != cudaErrorNotReady) check(state, "what was waited for", __FILE__, __LINE__);
        const double now_s = waited_s();
        if (now_s - looked_s > between_looks_s) watch(looked_s = now_s, false);
        if (std::chrono::duration<double>(now_s) > patience) std::this_thread::sleep_for(pause);
    }
    watch(waited_s(), true);
}

void Streams::wait(Ticket ticket) {
    state_->wait(state_->event_of(ticket));
    if (state_->observer) state_->report_times();
}

// An event of its own: marks are taken again while the other thread waits.
std::function<void()> Streams::waiting_for(Ticket ticket) {
    cudaEvent_t event = nullptr;
    CUDA_CHECK(cudaEventCreateWithFlags(&event, cudaEventDisableTiming | cudaEventBlockingSync));
    const std::shared_ptr<CUevent_st> owner(event, [](cudaEvent_t e) { cudaEventDestroy(e); });
    CUDA_CHECK(cudaEventRecord(event, state_->streams.at(ticket.stream).handle));
    return [this, owner] { state_->wait(owner.get()); };
}

bool Streams::done_within(double limit_s) noexcept {
    const StreamTime end = std::chrono::steady_clock::now() + std::chrono::duration_cast<StreamTime::duration>(std::chrono::duration<double>(limit_s));
    try {
        for (auto& [index, s] : state_->streams)
            for (const cudaEvent_t last = state_->event_of({index, s.submitted}); cudaEventQuery(last) == cudaErrorNotReady;) {
                if (std::chrono::steady_clock::now() > end) return false;
                std::this_thread::sleep_for(std::chrono::milliseconds(1));
            }
    } catch (const Problem&) {  // not even an event can be had: the GPU has failed
    }
    return true;
}

void Streams::watch(StreamEngine::Watch watch) { state_->watch = std::move(watch); }

void Streams::observe(const StreamObserver& observer) {
    TRIFOLD_ASSERT(!state_->streams.empty());
    if (!state_->origin) CUDA_CHECK(cudaEventCreate(&state_->origin));
    const cudaStream_t stream = state_->streams.begin()->second.handle;
    CUDA_CHECK(cudaEventRecord(state_->origin, stream));
    CUDA_CHECK(cudaStreamSynchronize(stream));
    state_->origin_time = std::chrono::steady_clock::now();
    state_->observer = observer;
}

}  // namespace trifold::cuda
