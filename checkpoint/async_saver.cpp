// checkpoint/async_saver.cpp   See async_saver.h.
#include "checkpoint/async_saver.h"

#include <signal.h>
#include <sys/resource.h>

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

AsyncSaver::~AsyncSaver() { wait(); }

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
    ended_ = false;
    owed_ = true;
    const auto write = [this, slices, state] {
        outcome_ = store_.save(model_, slices, state);
        ended_ = true;
    };
    try {
        writer_ = std::thread([write] {
            stay_in_background();
            write();
        });
    } catch (const std::system_error&) {  // no thread left: then training waits
        write();
    }
    return before;
}

std::optional<SaveOutcome> AsyncSaver::poll() { return ended_ ? wait() : std::nullopt; }

std::optional<SaveOutcome> AsyncSaver::wait() {
    if (writer_.joinable()) writer_.join();
    if (!std::exchange(owed_, false)) return std::nullopt;
    return std::exchange(outcome_, {});
}

}  // namespace trifold
