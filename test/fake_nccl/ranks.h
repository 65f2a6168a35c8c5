// test/fake_nccl/ranks.h   Ranks as threads, and what they and the fake found.
#pragma once
#include <algorithm>
#include <condition_variable>
#include <functional>
#include <map>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "parallel/nccl.h"

namespace trifold {

// What World::put and World::take are between processes.
class Ids {
public:
    NcclIds ids() {
        return {.put = [this](const std::string& key, const std::string& value) {
                    const std::lock_guard lock(mutex_);
                    values_[key] = value;
                    changed_.notify_all();
                },
                .take = [this](const std::string& key, double deadline_s, int) {
                    std::unique_lock lock(mutex_);
                    if (!changed_.wait_for(lock, std::chrono::duration<double>(deadline_s), [&] { return values_.count(key) > 0; }))
                        throw Problem(Exit::fault, "nobody put " + key);
                    return values_[key];
                }};
    }

private:
    std::mutex mutex_;
    std::condition_variable changed_;
    std::map<std::string, std::string> values_;
};

// body(rank) on a thread of its own for every rank; the sentences of those that threw.
inline std::vector<std::string> on_threads(int size, const std::function<void(int)>& body) {
    std::vector<std::string> sentences(static_cast<size_t>(size));
    std::vector<std::thread> threads;
    for (int r = 0; r < size; ++r)
        threads.emplace_back([&, r] {
            try {
                body(r);
            } catch (const std::exception& e) {
                sentences[static_cast<size_t>(r)] = e.what();
            }
        });
    for (std::thread& t : threads) t.join();
    return sentences;
}

struct Outcome {
    std::vector<std::string> sentences, findings;
    // What went wrong, in one text: empty when all is well.
    std::string all() const {
        std::string text;
        for (const auto* list : {&sentences, &findings})
            for (const std::string& s : *list) text += s.empty() ? "" : s + "\n";
        return text;
    }
    bool found(const std::string& words) const {
        return std::any_of(findings.begin(), findings.end(), [&](const std::string& s) { return s.find(words) != std::string::npos; });
    }
};

}  // namespace trifold
