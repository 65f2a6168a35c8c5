// kernels/stream.cpp   The queues behind streams: worker threads in normal mode, the host itself in adversarial mode.
//
// Each operation carries a vector clock of what must be done before it: its predecessor, what its stream follows, what
// the host had waited for when it was submitted, and all that these depend on. Both modes read the order from these
// clocks alone: a worker waits until they are reached, and the adversary runs exactly what the clock of the awaited
// ticket names. Communication has its thread in both modes: other ranks wait for it.
#include "kernels/stream.h"

#include <condition_variable>
#include <cstdlib>
#include <deque>
#include <exception>
#include <limits>
#include <mutex>
#include <stdexcept>
#include <thread>

#include "kernels/access_checker.h"
#include "kernels/cuda/runtime.h"

namespace trifold {
namespace {

constexpr double hung_after_s = 10;  // a GPU that has this much left to do after a failure
constexpr int host_lane = 0;  // the host counts as a stream of its own, so that its accesses are checked like any other
constexpr uint64_t never = std::numeric_limits<uint64_t>::max();

struct Operation {
    const char* name;
    VectorClock before;  // must be done first
    uint64_t submission;
    std::function<void()> work;
};

// What the engine keeps for one stream.
struct Lane {
    std::unique_ptr<Stream> stream;  // none for the host
    VectorClock clock;               // what the next operation comes after
    std::deque<Operation> ops;       // numbers forgotten + 1, forgotten + 2, ...
    uint64_t forgotten = 0, done = 0;
    uint64_t failed_at = never;  // nothing runs from this number on
    std::exception_ptr error;
    double waited_s = 0;         // by the host, for this stream
    std::condition_variable arrived, finished;
    std::thread worker;  // of communication streams
};

}  // namespace

struct StreamEngine::State {
    const StreamMode mode;
    const std::string host_name = "host";
    StreamObserver observer;
    AccessChecker checker;
    std::mutex mutex;  // guards what follows against the workers
    std::vector<std::unique_ptr<Lane>> lanes;
    uint64_t submissions = 0;
    int64_t orderings = 0, left_out = 0;  // left_out: the number of the planted fault
    VectorClock released;                 // adversarial: what the workers may run
    std::condition_variable progress;     // adversarial: an operation has ended
    bool stopping = false;
    std::unique_ptr<cuda::Streams> cuda;  // null on a CPU; else only host communication has a queue

    using Lock = std::unique_lock<std::mutex>;

    explicit State(StreamMode m) : mode(m) { lanes.push_back(std::make_unique<Lane>()); }

    Lane& lane(int stream) {
        TRIFOLD_ASSERT(stream >= 0 && static_cast<size_t>(stream) < lanes.size());
        return *lanes[static_cast<size_t>(stream)];
    }
    Lane& host() { return lane(host_lane); }
    bool adversarial() const { return mode == StreamMode::adversarial; }

    void order_after(VectorClock& clock, Ticket ticket);
    AccessChecker::Operation next_host_event(const char* what);
    bool reached(const VectorClock& clock) const;
    bool await(const VectorClock& clock, Lock& lock);
    void run_all_of(VectorClock clock, Lock& lock);
    // The adversary counts only orderings that its clocks do not know yet.
    bool ordered_already(int stream, Ticket ticket) {
        if (!adversarial()) return false;
        const std::lock_guard lock(mutex);
        return lane(stream).clock.covers(ticket) || host().clock.covers(ticket);
    }
    void throw_planted() const {
        if (left_out > 0 && !checker.findings().empty()) throw std::runtime_error(checker.findings().front());
    }
    bool leave_out() { return ++orderings == left_out; }
    bool may_run_next(const Lane& lane, int index) const;
    Lane* latest_ready(const VectorClock& clock) const;
    void run_next(Lane& lane, Lock& lock);
    std::exception_ptr run(const Lane& lane, const char* name, std::function<void()> work) const;
    std::exception_ptr failure_among(const VectorClock& clock) const;
    void forget();
    void serve(Lane& lane, int index);
};

// What comes after the ticket comes after all that the ticket's operation comes after. Operations already forgotten
// need no clock: in normal mode they are done, in adversarial mode the host's clock covers them and joins every
// submission.
void StreamEngine::State::order_after(VectorClock& clock, Ticket ticket) {
    const Lane& from = lane(ticket.stream);
    TRIFOLD_ASSERT(ticket.number <= from.forgotten + from.ops.size());
    if (ticket.number > from.forgotten) clock.join(from.ops[ticket.number - from.forgotten - 1].before);
    clock.advance(ticket);
}

AccessChecker::Operation StreamEngine::State::next_host_event(const char* what) {
    return {{host_lane, ++host().done}, what, &host_name};
}

bool StreamEngine::State::reached(const VectorClock& clock) const {
    for (int s = 0; s < clock.streams(); ++s) {
        if (lanes[static_cast<size_t>(s)]->done < clock[s]) return false;
    }
    return true;
}

// Blocks until the workers have reached the clock; false: the engine is being destroyed.
bool StreamEngine::State::await(const VectorClock& clock, Lock& lock) {
    for (int s = 0; s < clock.streams(); ++s) {
        Lane& other = lane(s);
        other.finished.wait(lock, [&] { return stopping || other.done >= clock[s]; });
    }
    return !stopping;
}

void StreamEngine::State::run_all_of(VectorClock clock, Lock& lock) {
    for (int s = host_lane + 1; s < static_cast<int>(lanes.size()); ++s) {
        Lane& lane = *lanes[static_cast<size_t>(s)];
        if (lane.worker.joinable() && !lane.ops.empty()) order_after(clock, {s, lane.forgotten + lane.ops.size()});
    }
    released.join(clock);
    for (const auto& lane : lanes) lane->arrived.notify_all();
    while (!reached(clock)) {
        if (Lane* lane = latest_ready(clock)) run_next(*lane, lock);
        else progress.wait(lock);
    }
}

bool StreamEngine::State::may_run_next(const Lane& lane, int index) const {
    return lane.forgotten + lane.ops.size() > lane.done && (!adversarial() || released[index] > lane.done);
}

// Of the operations that the clock needs and that may run now, the one submitted last: the order between streams is
// turned round wherever nothing forbids it.
Lane* StreamEngine::State::latest_ready(const VectorClock& clock) const {
    Lane* latest = nullptr;
    uint64_t submission = 0;
    for (int s = 0; s < clock.streams(); ++s) {
        Lane& lane = *lanes[static_cast<size_t>(s)];
        if (s == host_lane || lane.worker.joinable() || lane.done >= clock[s]) continue;
        const Operation& next = lane.ops[lane.done - lane.forgotten];
        if (next.submission > submission && reached(next.before)) {
            latest = &lane;
            submission = next.submission;
        }
    }
    return latest;
}

// Runs the lane's next operation, or passes over it when something before it failed.
void StreamEngine::State::run_next(Lane& lane, Lock& lock) {
    Operation& op = lane.ops[lane.done - lane.forgotten];
    std::exception_ptr error = failure_among(op.before);
    std::function<void()> work = std::move(op.work);
    const char* name = op.name;
    lock.unlock();
    if (!error) error = run(lane, name, std::move(work));
    lock.lock();
    ++lane.done;
    if (error && !lane.error) {
        lane.error = error;
        lane.failed_at = lane.done;
    }
    if (!adversarial()) forget();
    lane.finished.notify_all();
    progress.notify_all();
}

// `work` is a parameter, so that what it captured is gone before anybody sees the operation done.
std::exception_ptr StreamEngine::State::run(const Lane& lane, const char* name, std::function<void()> work) const {
    try {
        const StreamTime begin = observer ? std::chrono::steady_clock::now() : StreamTime();
        work();
        if (observer) observer(*lane.stream, name, begin, std::chrono::steady_clock::now());
        return nullptr;
    } catch (...) {
        return std::current_exception();
    }
}

std::exception_ptr StreamEngine::State::failure_among(const VectorClock& clock) const {
    for (int s = 0; s < clock.streams(); ++s) {
        const Lane& lane = *lanes[static_cast<size_t>(s)];
        if (lane.failed_at <= clock[s]) return lane.error;
    }
    return nullptr;
}

void StreamEngine::State::forget() {
    for (int s = host_lane + 1; s < static_cast<int>(lanes.size()); ++s) {
        Lane& lane = *lanes[static_cast<size_t>(s)];
        while (lane.forgotten < lane.done && (!adversarial() || host().clock.covers({s, lane.forgotten + 1}))) {
            lane.ops.pop_front();
            ++lane.forgotten;
        }
    }
}

// A worker's life.
void StreamEngine::State::serve(Lane& lane, int index) {
    Lock lock(mutex);
    while (true) {
        lane.arrived.wait(lock, [&] { return stopping || may_run_next(lane, index); });
        if (stopping || !await(lane.ops[lane.done - lane.forgotten].before, lock)) return;
        run_next(lane, lock);
    }
}

Ticket Stream::enqueue(const char* name, std::span<const BufferAccess> accesses, std::function<void()> work) {
    StreamEngine::State& state = *engine_->state_;
    const std::lock_guard lock(state.mutex);
    Lane& lane = state.lane(index_);
    lane.clock.join(state.host().clock);
    const Ticket ticket{index_, ++submitted_};
    followed_ = false;
    if (state.adversarial()) state.checker.record({ticket, name, &name_}, lane.clock, accesses);
    state.throw_planted();
    lane.ops.push_back({name, lane.clock, ++state.submissions, std::move(work)});
    lane.clock.advance(ticket);
    lane.arrived.notify_one();
    return ticket;
}

// The calls that put one operation on a CUDA stream.
Ticket Stream::issue(const char* name, std::span<const BufferAccess> accesses, const std::function<void(CUstream_st*)>& launches) {
    cuda_->begin(index_, name, accesses);
    launches(cuda_->handle(index_));
    const Ticket ticket{index_, ++submitted_};
    followed_ = false;
    cuda_->end(ticket);
    return ticket;
}

// An operation that does nothing stands for what was followed.
Ticket Stream::join() {
    if (cuda_) return issue("join", {}, [](CUstream_st*) {});
    return enqueue("join", {}, [] {});
}

void Stream::follow(Ticket ticket) {
    if (ticket.number == 0 || ticket.stream == index_ || engine_->state_->ordered_already(index_, ticket)) return;
    const auto other = static_cast<size_t>(ticket.stream);
    if (orders_.size() <= other) orders_.resize(other + 1);
    if (orders_[other] >= ticket.number) return;
    orders_[other] = ticket.number;
    if (engine_->state_->adversarial() && engine_->state_->leave_out()) return;
    StreamEngine::State& state = *engine_->state_;
    const Stream& followed = *state.lane(ticket.stream).stream;
    if (inline_ || (cuda_ && !followed.cuda_)) return engine_->wait(ticket);  // a GPU cannot wait for a thread
    if (followed.cuda_ && !cuda_) {
        enqueue("until the GPU is there", {}, state.cuda->waiting_for(ticket));
        return;
    }
    followed_ = true;
    if (cuda_) return cuda_->follow(index_, ticket);
    const std::lock_guard lock(state.mutex);
    if (followed.inline_) return;  // done when it was submitted
    state.order_after(state.lane(index_).clock, ticket);
}

StreamRange::StreamRange(const Stream& stream, const char* name) : on_gpu_(stream.device() == Device::cuda) {
    if (on_gpu_) cuda::push_range(name);
}
StreamRange::~StreamRange() {
    if (on_gpu_) cuda::pop_range();
}

StreamEngine::StreamEngine(StreamMode mode, Device device) : state_(std::make_unique<State>(mode)) {
    TRIFOLD_ASSERT(device != Device::automatic && (device == Device::cpu || mode == StreamMode::normal));
    if (device == Device::cuda) state_->cuda = std::make_unique<cuda::Streams>();
}

StreamEngine::~StreamEngine() { abandon(); }

void StreamEngine::abandon() noexcept {
    {
        const std::lock_guard lock(state_->mutex);
        state_->stopping = true;
        for (const auto& lane : state_->lanes) {
            lane->arrived.notify_all();
            lane->finished.notify_all();
        }
    }
    if (state_->cuda && !state_->cuda->done_within(hung_after_s)) std::_Exit(static_cast<int>(Exit::fault));
    for (const auto& lane : state_->lanes) {
        if (lane->worker.joinable()) lane->worker.join();
    }
}

Stream& StreamEngine::add(const std::string& name, StreamKind kind) {
    State& state = *state_;
    const std::lock_guard lock(state.mutex);
    const int index = static_cast<int>(state.lanes.size());
    cuda::Streams* const cuda = kind == StreamKind::host_communication ? nullptr : state.cuda.get();
    const bool threaded = !cuda && kind != StreamKind::compute, queued = threaded || (!cuda && state.adversarial());
    Lane& lane = *state.lanes.emplace_back(std::make_unique<Lane>());
    lane.stream.reset(new Stream(this, index, name, !queued && !cuda, cuda, &state.observer));
    if (cuda) cuda->add(*lane.stream, index, kind);
    if (threaded)
        lane.worker = std::thread([&state, &lane, index] {
            if (state.cuda) state.cuda->enter_thread();
            state.serve(lane, index);
        });
    return *lane.stream;
}

void StreamEngine::wait(Ticket ticket) {
    if (ticket.number == 0) return;
    State& state = *state_;
    Lane& lane = state.lane(ticket.stream);
    if (lane.stream->cuda_) return state.cuda->wait(ticket);
    if (state.adversarial() && state.leave_out()) return;
    State::Lock lock(state.mutex);
    if (lane.stream->inline_) return;
    VectorClock needed;
    state.order_after(needed, ticket);
    if (state.adversarial()) {
        state.run_all_of(needed, lock);
    } else if (!state.reached(needed)) {
        const StreamTime begin = std::chrono::steady_clock::now();
        state.await(needed, lock);
        const StreamTime end = std::chrono::steady_clock::now();
        lane.waited_s += std::chrono::duration<double>(end - begin).count();
        if (state.observer) state.observer(*lane.stream, waiting, begin, end);
    }
    if (lane.failed_at <= ticket.number) std::rethrow_exception(lane.error);
    state.host().clock.join(needed);
    state.forget();
}

void StreamEngine::wait_all() {
    std::exception_ptr first;
    for (size_t s = host_lane + 1; s < state_->lanes.size(); ++s) {  // the vector changes on this thread only
        try {
            wait(state_->lanes[s]->stream->last());
        } catch (...) {
            if (!first) first = std::current_exception();
        }
    }
    if (first) std::rethrow_exception(first);
}

void StreamEngine::drain() noexcept {
    try {
        wait_all();
    } catch (...) {
    }
}

void StreamEngine::observe(StreamObserver observer) {
    state_->observer = std::move(observer);
    if (state_->cuda) state_->cuda->observe(state_->observer);
}

void StreamEngine::watch(Watch watch) {
    if (state_->cuda) state_->cuda->watch(std::move(watch));
}

void StreamEngine::host_access(const std::vector<BufferAccess>& accesses, const char* what) {
    if (!state_->adversarial()) return;
    const AccessChecker::Operation event = state_->next_host_event(what);
    state_->checker.record(event, state_->host().clock, accesses);
    state_->throw_planted();
    state_->host().clock.advance(event.ticket);
}

void StreamEngine::buffer_released(const void* begin, int64_t bytes, const char* what) {
    if (!state_->adversarial()) return;
    const AccessChecker::Operation event = state_->next_host_event(what);
    state_->checker.release(event, state_->host().clock, begin, bytes);
    state_->host().clock.advance(event.ticket);
}

void StreamEngine::buffer_allocated(const void* begin, int64_t bytes) {
    if (state_->adversarial()) state_->checker.allocate(begin, bytes);
}

const std::vector<std::string>& StreamEngine::findings() const { return state_->checker.findings(); }

StreamMode StreamEngine::mode() const { return state_->mode; }

int64_t StreamEngine::orderings() const { return state_->orderings; }
void StreamEngine::leave_out_ordering(int64_t n) { state_->left_out = n; }

double StreamEngine::waited_s(const Stream& stream) const {
    return stream.cuda_ ? stream.cuda_->waited_s(stream.index_) : state_->lane(stream.index_).waited_s;
}

}  // namespace trifold
