#include "test/emulation/cuda_runtime.h"

#include <cuda_runtime_api.h>
#include <sanitizer/asan_interface.h>
#include <sys/mman.h>

#include <algorithm>
#include <cstring>
#include <iterator>
#include <map>
#include <memory>
#include <mutex>
#include <thread>
#include <utility>

#include "test/emulation/emulator.h"

struct CUstream_st {
    trifold::Stream* stream;
};
struct CUevent_st {
    trifold::Ticket ticket;
    // When the stream reached it; a record that is still to come may outlive the event.
    std::shared_ptr<trifold::StreamTime> time = std::make_shared<trifold::StreamTime>();
};

namespace trifold::emulation {
namespace {

constexpr size_t device_memory = size_t{16} << 30;
constexpr unsigned char uninitialised = 0xff;

// Addresses of their own, so that no host memory ever lies where device memory was: a range of which pages are used as they
// are needed. What is freed is used again for requests of similar size, for fresh pages would cost more than the tests.
class DeviceHeap {
public:
    DeviceHeap() {
        void* p = mmap(nullptr, 16 * device_memory, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (p == MAP_FAILED) die("no address space for the device's memory");
        next_ = begin_ = static_cast<std::byte*>(p);
    }
    // 256-byte aligned; AddressSanitizer sees its end, and at least 256 bytes behind it.
    void* allocate(size_t bytes) {
        const size_t room = (bytes + 511) / 256 * 256;
        std::byte* p;
        if (const auto found = free_.lower_bound(room); found != free_.end() && found->first <= 2 * room) {
            p = found->second;
            rooms_[p] = found->first;
            free_.erase(found);
        } else {
            p = next_;
            next_ += room;
            rooms_[p] = room;
        }
        ASAN_POISON_MEMORY_REGION(p, rooms_[p]);
        ASAN_UNPOISON_MEMORY_REGION(p, bytes);
        return p;
    }
    void release(void* p) {
        const auto room = rooms_.find(static_cast<std::byte*>(p));
        ASAN_POISON_MEMORY_REGION(p, room->second);
        free_.emplace(room->second, room->first);
        rooms_.erase(room);
    }
    bool holds(const void* p) const { return p >= begin_ && p < begin_ + 16 * device_memory; }

private:
    std::byte *begin_, *next_;
    std::map<std::byte*, size_t> rooms_;
    std::multimap<size_t, std::byte*> free_;
};

thread_local const CUevent_st* asked = nullptr;  // by this thread's last call, which was a query
const std::thread::id first_thread = std::this_thread::get_id();
thread_local bool has_device = std::this_thread::get_id() == first_thread;

struct Runtime {
    DeviceHeap heap;
    StreamEngine engine{StreamMode::adversarial};
    CUstream_st default_stream{&engine.add("default stream", StreamKind::compute)};
    std::map<Stream*, uint64_t> reached;  // by the host's waits
    std::map<std::byte*, size_t> allocations;
    std::map<const std::byte*, size_t> page_locked;
    std::map<Stream*, uint64_t> submitted, copied;  // copied: the last copy that a real machine ends before it returns
    std::vector<std::string> holding_copies;
    const char* operation = nullptr;
    std::vector<BufferAccess> accesses;
    Ranges ranges;

    Stream& of(CUstream_st* s) { return s ? *s->stream : *default_stream.stream; }
    Ticket put(CUstream_st* stream, const char* name, std::vector<BufferAccess> what, std::function<void()> work) {
        asked = nullptr;
        const Ticket ticket = of(stream).submit(name, std::span<const BufferAccess>(what), std::move(work));
        submitted[&of(stream)] = ticket.number;
        return ticket;
    }
    void wait(Stream& s, Ticket ticket) {
        asked = nullptr;
        engine.wait(ticket);
        uint64_t& number = reached[&s];
        number = std::max(number, ticket.number);
    }
    bool is_page_locked(const void* memory) const {
        const auto* p = static_cast<const std::byte*>(memory);
        const auto after = page_locked.upper_bound(p);
        return after != page_locked.begin() && p < std::prev(after)->first + std::prev(after)->second;
    }
    void wait_all() {
        engine.wait_all();
        for (auto& [stream, number] : reached) number = stream->last().number;
    }
};

// The runtime, held until the end of the statement: several threads call it (communication by the host), but kernels are run by one at a
// time. The engine counts all of them as the host, so that an order that only two threads together could break goes unseen.
class Entered {
public:
    Runtime* operator->() const { return &instance_; }

private:
    static std::recursive_mutex& mutex() {
        static auto* const m = new std::recursive_mutex;
        return *m;
    }
    static Runtime& instance() {
        static Runtime* const r = new Runtime;  // outlives whatever asks at the end of the program
        return *r;
    }
    std::lock_guard<std::recursive_mutex> lock_{mutex()};
    Runtime& instance_ = instance();
};
// On a real machine a thread that never selected a GPU uses the first one, whichever its process computes on.
Entered runtime() {
    if (!has_device) die("a thread uses the GPU without having selected it");
    return Entered();
}

// The stream that a ticket is of, through the streams that exist.
std::vector<CUstream_st*>& streams() {
    static std::vector<CUstream_st*> all{&runtime()->default_stream};
    return all;
}
Stream& stream_of(Ticket ticket) {
    for (CUstream_st* s : streams())
        if (s->stream->last().stream == ticket.stream) return *s->stream;
    die("an event of a stream that does not exist");
}

BufferAccess access(const void* p, size_t bytes, Access how) { return {static_cast<const std::byte*>(p), static_cast<int64_t>(bytes), how}; }

}  // namespace

void begin_operation(const char* name, std::span<const BufferAccess> accesses) {
    runtime()->operation = name;
    runtime()->accesses.assign(accesses.begin(), accesses.end());
    declare_accesses(accesses);
}
void end_operation() {
    runtime()->operation = nullptr;
    runtime()->accesses.clear();
    declare_accesses({});
}

void begin_range(const char* name) {
    runtime()->ranges.names.push_back(name);
    ++runtime()->ranges.open;
}
void end_range() {
    if (--runtime()->ranges.open < 0) die("a range ends that was not opened");
}
const Ranges& ranges() { return runtime()->ranges; }

void submit(CUstream_st* stream, const char* kernel, std::function<void()> run) {
    const Entered r = runtime();
    r->put(stream, r->operation ? r->operation : kernel, r->accesses, std::move(run));
}

std::vector<std::string> unordered_accesses() { return runtime()->engine.findings(); }

const std::vector<std::string>& holding_copies() { return runtime()->holding_copies; }

int64_t device_bytes() {
    int64_t sum = 0;
    const Entered r = runtime();
    for (const auto& [begin, bytes] : r->allocations) sum += static_cast<int64_t>(bytes);
    return sum;
}

}  // namespace trifold::emulation

// ---------------------------------------------------------------- the calls

using namespace trifold;
using emulation::runtime;

extern "C" {

cudaError_t cudaGetDeviceCount(int* count) { return *count = 1, cudaSuccess; }
cudaError_t cudaDriverGetVersion(int* version) { return *version = CUDART_VERSION, cudaSuccess; }
cudaError_t cudaGetDevice(int* device) { return *device = 0, cudaSuccess; }
cudaError_t cudaSetDevice(int device) { return emulation::has_device = device == 0, device == 0 ? cudaSuccess : cudaErrorInvalidDevice; }
cudaError_t cudaGetDeviceProperties(cudaDeviceProp* p, int) {
    *p = {};
    std::strcpy(p->name, "emulated H200");
    p->totalGlobalMem = emulation::device_memory;
    p->major = 9;
    p->multiProcessorCount = 4;
    p->sharedMemPerBlockOptin = static_cast<size_t>(emulation::settings().shared_bytes);
    return cudaSuccess;
}
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int) {
    if (attribute != cudaDevAttrMaxSharedMemoryPerBlockOptin) return cudaErrorInvalidValue;
    return *value = emulation::settings().shared_bytes, cudaSuccess;
}
cudaError_t cudaMemGetInfo(size_t* available, size_t* total) {
    *total = emulation::device_memory;
    *available = *total - static_cast<size_t>(emulation::device_bytes());
    return cudaSuccess;
}
cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) { return *least = 0, *greatest = -5, cudaSuccess; }
cudaError_t cudaFuncSetAttribute(const void*, cudaFuncAttribute, int) { return cudaSuccess; }
cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* a, const void*) { return *a = {}, cudaSuccess; }
cudaError_t cudaGetLastError() { return cudaSuccess; }
const char* cudaGetErrorString(cudaError_t) { return "an error of the emulated runtime"; }
const char* cudaGetErrorName(cudaError_t) { return "emulated"; }

cudaError_t cudaMalloc(void** p, size_t bytes) {
    if (bytes > emulation::device_memory) return cudaErrorMemoryAllocation;
    *p = runtime()->heap.allocate(bytes);
    std::memset(*p, emulation::uninitialised, bytes);
    runtime()->allocations[static_cast<std::byte*>(*p)] = bytes;
    runtime()->engine.buffer_allocated(*p, static_cast<int64_t>(bytes));
    emulation::device_memory_added(*p, bytes);
    return cudaSuccess;
}
// Waits for the device like the real one; what still had to run counts as a use after free all the same.
cudaError_t cudaFree(void* p) {
    if (!p) return cudaSuccess;
    const auto found = runtime()->allocations.find(static_cast<std::byte*>(p));
    if (found == runtime()->allocations.end()) emulation::die("cudaFree of what was not allocated, or was freed before");
    runtime()->engine.buffer_released(p, static_cast<int64_t>(found->second), "cudaFree");
    runtime()->wait_all();
    emulation::device_memory_removed(p);
    runtime()->allocations.erase(found);
    runtime()->heap.release(p);
    return cudaSuccess;
}
cudaError_t cudaHostRegister(void* p, size_t bytes, unsigned) { return runtime()->page_locked[static_cast<std::byte*>(p)] = bytes, cudaSuccess; }
cudaError_t cudaHostUnregister(void* p) { return runtime()->page_locked.erase(static_cast<std::byte*>(p)), cudaSuccess; }

cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind, cudaStream_t stream) {
    constexpr size_t with_the_call = 64;
    const auto r = runtime();
    const bool up = !r->heap.holds(from), down = !r->heap.holds(to);
    const bool may_hold = (up && bytes > with_the_call && !r->is_page_locked(from)) || (down && !r->is_page_locked(to));
    Stream* const s = &r->of(stream);
    const bool idle = std::max(r->reached[s], r->copied[s]) >= r->submitted[s];
    if (may_hold && !idle) r->holding_copies.push_back(r->operation ? r->operation : "cudaMemcpyAsync");
    const Ticket copied = r->put(stream, "cudaMemcpyAsync", {emulation::access(from, bytes, Access::read), emulation::access(to, bytes, Access::write)},
                                 [=] { std::memcpy(to, from, bytes); });
    if (may_hold && idle) r->copied[s] = copied.number;
    return cudaSuccess;
}
cudaError_t cudaMemsetAsync(void* p, int value, size_t bytes, cudaStream_t stream) {
    runtime()->put(stream, "cudaMemsetAsync", {emulation::access(p, bytes, Access::write)}, [=] { std::memset(p, value, bytes); });
    return cudaSuccess;
}
cudaError_t cudaMemcpy(void* to, const void* from, size_t bytes, cudaMemcpyKind kind) {
    cudaMemcpyAsync(to, from, bytes, kind, nullptr);
    return cudaStreamSynchronize(nullptr);
}
cudaError_t cudaMemset(void* p, int value, size_t bytes) {
    cudaMemsetAsync(p, value, bytes, nullptr);
    return cudaStreamSynchronize(nullptr);
}

cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned flags, int) {
    if (flags != cudaStreamNonBlocking) emulation::die("the emulated runtime knows only non-blocking streams");
    *stream = new CUstream_st{&runtime()->engine.add("stream " + std::to_string(emulation::streams().size()), StreamKind::compute)};
    emulation::streams().push_back(*stream);
    return cudaSuccess;
}
cudaError_t cudaStreamDestroy(cudaStream_t stream) {
    const cudaError_t error = cudaStreamSynchronize(stream);
    std::erase(emulation::streams(), stream);
    delete stream;
    return error;
}
cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
    Stream& s = runtime()->of(stream);
    runtime()->wait(s, s.last());
    return cudaSuccess;
}
cudaError_t cudaDeviceSynchronize() { return runtime()->wait_all(), cudaSuccess; }
cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned) {
    runtime()->of(stream).follow(event->ticket);
    return cudaSuccess;
}

cudaError_t cudaEventCreate(cudaEvent_t* event) { return *event = new CUevent_st{}, cudaSuccess; }
cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned) { return cudaEventCreate(event); }
cudaError_t cudaEventDestroy(cudaEvent_t event) { return delete event, cudaSuccess; }
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
    event->time = std::make_shared<StreamTime>();
    event->ticket = runtime()->put(stream, "cudaEventRecord", {}, [time = event->time] { *time = std::chrono::steady_clock::now(); });
    return cudaSuccess;
}
cudaError_t cudaEventSynchronize(cudaEvent_t event) {
    if (event->ticket.number > 0) runtime()->wait(emulation::stream_of(event->ticket), event->ticket);
    return cudaSuccess;
}
// A host that does nothing but ask is waiting.
cudaError_t cudaEventQuery(cudaEvent_t event) {
    if (event->ticket.number == 0) return cudaSuccess;
    if (std::exchange(emulation::asked, event) == event) return cudaEventSynchronize(event);
    return runtime()->reached[&emulation::stream_of(event->ticket)] >= event->ticket.number ? cudaSuccess : cudaErrorNotReady;
}
cudaError_t cudaEventElapsedTime(float* ms, cudaEvent_t from, cudaEvent_t to) {
    if (cudaEventQuery(to) != cudaSuccess) return cudaErrorNotReady;
    *ms = std::chrono::duration<float, std::milli>(*to->time - *from->time).count();
    return cudaSuccess;
}

}  // extern "C"
