// base/jobs.h   Independent jobs on a few threads.
#pragma once
#include <atomic>
#include <cstdint>
#include <cstring>
#include <exception>
#include <functional>
#include <mutex>
#include <system_error>
#include <thread>
#include <vector>

namespace trifold {

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

// Bytes to be copied; nothing needs to be aligned.
struct CopyJob {
    const void* from;
    void* to;
    int64_t bytes;
};
// Copies them all on a few threads. Long ones are cut, so that all threads have work.
inline void run_copies(std::vector<CopyJob> copies, int threads) {
    constexpr int64_t most = int64_t{4} << 20;
    for (size_t i = 0; i < copies.size(); ++i)  // the rest of a long one comes last
        if (const CopyJob c = copies[i]; c.bytes > most) {
            copies[i].bytes = most;
            copies.push_back({static_cast<const char*>(c.from) + most, static_cast<char*>(c.to) + most, c.bytes - most});
        }
    run_jobs(std::ssize(copies), threads, [&](int64_t i) {
        const CopyJob& c = copies[static_cast<size_t>(i)];
        std::memcpy(c.to, c.from, static_cast<size_t>(c.bytes));
    });
}

}  // namespace trifold
