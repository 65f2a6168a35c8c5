// checkpoint/async_saver.cpp   See async_saver.h.
#include "checkpoint/async_saver.h"

#include <signal.h>
#include <sys/resource.h>

#include <chrono>
#include <system_error>
#include <utility>

#include "base/error.h"
#include "base/jobs.h"

namespace trifold {
namespace {

// For the calling thread and those that it starts: less processor time than training, and signals are left to the main
// thread, so that none interrupts an fsync.
void stay_in_background() {
    ::setpriority(PRIO_PROCESS, 0, 10);  // of this thread, on Linux
    sigset_t all;
    sigfillset(&all);
    for (const int own_fault : {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGABRT}) sigdelset(&all, own_fault);
    pthread_sigmask(SIG_BLOCK, &all, nullptr);
}

}  // namespace

AsyncSaver::AsyncSaver(CheckpointStore& store, const ModelConfig& model, const Tensor& snapshot, int copy_threads)
    : store_(store), model_(model), snapshot_(snapshot), copy_threads_(copy_threads) {}

std::optional<SaveOutcome> AsyncSaver::begin(std::vector<StateSlice> slices, const TrainingState& state) {
    std::optional<SaveOutcome> before = wait();
    std::vector<CopyJob> copies;
    const float *begin = snapshot_.as<float>(), *end = begin + snapshot_.elems;
    float* free = snapshot_.as<float>();
    for (StateSlice& s : slices)
        for (float** from : {&s.master, &s.m, &s.v}) {
            if (*from >= begin && *from < end) continue;
            const int64_t n = s.last - s.first;
            TRIFOLD_ASSERT(free + n <= end);
            copies.push_back({*from, free, n * static_cast<int64_t>(sizeof(float))});
            *from = std::exchange(free, free + n);
        }
    run_copies(std::move(copies), copy_threads_);
    const auto write = [this, slices, state] { return store_.save(model_, slices, state); };
    try {
        running_ = std::async(std::launch::async, [write] {
            stay_in_background();
            return write();
        });
    } catch (const std::system_error&) {  // no thread left: then training waits
        running_ = std::async(std::launch::deferred, write);
        running_.wait();
    }
    return before;
}

std::optional<SaveOutcome> AsyncSaver::poll() {
    const bool ended = running_.valid() && running_.wait_for(std::chrono::seconds(0)) == std::future_status::ready;
    return ended ? wait() : std::nullopt;
}

std::optional<SaveOutcome> AsyncSaver::wait() {
    if (!running_.valid()) return std::nullopt;
    return running_.get();
}

}  // namespace trifold
