// checkpoint/work.h   Independent jobs on a few threads, and how far a long operation has come.
#pragma once
#include <atomic>
#include <cstdint>
#include <exception>
#include <functional>
#include <mutex>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

namespace trifold {

struct Progress {
    const char* what = "";        // "verifying", "reading", "writing"
    int64_t done = 0, total = 0;  // bytes
};
// Called from any thread of the operation, never from two at once.
using ProgressCallback = std::function<void(const Progress&)>;

class ProgressCounter {
public:
    ProgressCounter(const char* what, int64_t total, ProgressCallback callback)
        : progress_{what, 0, total}, callback_(std::move(callback)) {}
    void add(int64_t bytes) {
        const std::lock_guard lock(mutex_);
        progress_.done += bytes;
        if (callback_) callback_(progress_);
    }

private:
    std::mutex mutex_;
    Progress progress_;
    ProgressCallback callback_;
};

// Calls job(0) ... job(count - 1), at most `threads` at a time (the caller's thread included), each taking the next
// free number. After an exception no new job starts, and the first exception is thrown again here.
inline void run_jobs(int64_t count, int threads, const std::function<void(int64_t)>& job) {
    std::atomic<int64_t> next{0};
    std::mutex mutex;
    std::exception_ptr first;
    const auto work = [&] {
        for (int64_t i; (i = next.fetch_add(1)) < count;) {
            try {
                job(i);
            } catch (...) {
                const std::lock_guard lock(mutex);
                if (!first) first = std::current_exception();
                next = count;
            }
        }
    };
    std::vector<std::jthread> helpers;
    try {
        for (int64_t t = 1; t < threads && t < count; ++t) helpers.emplace_back(work);
    } catch (const std::system_error&) {  // the machine has no thread left: fewer do the same work
    }
    work();
    helpers.clear();  // joins
    if (first) std::rethrow_exception(first);
}

}  // namespace trifold
