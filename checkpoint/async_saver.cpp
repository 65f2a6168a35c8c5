// checkpoint/async_saver.cpp   See async_saver.h.
#include "checkpoint/async_saver.h"

#include <signal.h>
#include <sys/resource.h>

#include <algorithm>
#include <cstring>
#include <system_error>
#include <utility>

#include "base/error.h"
#include "checkpoint/work.h"

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

AsyncSaver::AsyncSaver(CheckpointStore& store, const ParameterTable& table, const Tensor& snapshot, int copy_threads)
    : store_(store), table_(table), snapshot_(snapshot), copy_threads_(copy_threads) {
    TRIFOLD_ASSERT(snapshot.elems >= 3 * table.flat_elems());
}

AsyncSaver::~AsyncSaver() { wait(); }

std::optional<SaveOutcome> AsyncSaver::begin(const FlatState& flat, const TrainingState& state) {
    std::optional<SaveOutcome> before = wait();
    const int64_t n = table_.flat_elems(), step = int64_t{1} << 20, steps = (n + step - 1) / step;
    float* to = snapshot_.as<float>();
    const FlatState copy{to, to + n, to + 2 * n};
    const std::pair<const float*, float*> buffers[] = {{flat.master, copy.master}, {flat.m, copy.m}, {flat.v, copy.v}};
    const int64_t jobs = flat.master == copy.master ? 0 : 3 * steps;
    run_jobs(jobs, copy_threads_, [&](int64_t i) {
        const auto [src, dst] = buffers[i / steps];
        const int64_t first = i % steps * step;
        std::memcpy(dst + first, src + first, static_cast<size_t>(std::min(step, n - first)) * sizeof(float));
    });
    ended_ = false;
    owed_ = true;
    const auto write = [this, copy, state] {
        outcome_ = store_.save(table_, copy, state);
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
