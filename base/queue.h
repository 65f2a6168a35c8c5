// base/queue.h   A queue between threads.
#pragma once
#include <condition_variable>
#include <cstddef>
#include <deque>
#include <mutex>
#include <optional>
#include <utility>

namespace trifold {

template <class T>
class Queue {
public:
    explicit Queue(size_t most) : most_(most) {}

    // Waits while there are `most` entries. False: the queue was closed.
    bool push(T entry) {
        std::unique_lock lock(mutex_);
        changed_.wait(lock, [&] { return closed_ || entries_.size() < most_; });
        if (!closed_) entries_.push_back(std::move(entry));
        changed_.notify_all();
        return !closed_;
    }
    // Waits for an entry. Nothing: the queue was closed.
    std::optional<T> pop() {
        std::unique_lock lock(mutex_);
        changed_.wait(lock, [&] { return closed_ || !entries_.empty(); });
        if (closed_) return std::nullopt;
        std::optional<T> entry = std::move(entries_.front());
        entries_.pop_front();
        changed_.notify_all();
        return entry;
    }
    // Ends every wait; what is left is dropped.
    void close() {
        const std::lock_guard lock(mutex_);
        closed_ = true;
        entries_.clear();
        changed_.notify_all();
    }

private:
    const size_t most_;
    std::mutex mutex_;
    std::condition_variable changed_;
    std::deque<T> entries_;
    bool closed_ = false;
};

}  // namespace trifold
