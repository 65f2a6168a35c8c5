// test/unit/run_ranks.h   A job whose ranks are threads of the test, with a real rendezvous over the loopback interface.
#pragma once
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "base/error.h"
#include "parallel/host_port.h"
#include "parallel/world.h"

namespace trifold {

// What a launcher would tell the ranks of a job on this host.
inline std::vector<Launch> launches_on_this_host(int ranks) {
    const auto socket = std::make_shared<Socket>(listen_at("127.0.0.1", 0));
    const std::string store = HostPort{"127.0.0.1", address_of(*socket).port()}.text();
    std::vector<Launch> launches;
    for (int r = 0; r < ranks; ++r)
        launches.push_back({.rank = r, .size = ranks, .local_rank = r, .local_size = ranks, .store = store, .launcher = "test", .job_key = 0x7e57, .store_socket = r == 0 ? socket : nullptr});
    return launches;
}

// Catch's assertions belong to one thread; this one ends the rank, and with it the job.
inline void require(bool condition, const std::string& what) {
    if (!condition) throw std::runtime_error("failed: " + what);
}

// Runs `act` for every launch on a thread of its own, joins all, and rethrows the first exception.
inline void run_threads(const std::vector<Launch>& launches, const std::function<void(const Launch&)>& act) {
    std::mutex mutex;
    std::exception_ptr first;
    std::vector<std::thread> threads;
    for (const Launch& launch : launches)
        threads.emplace_back([&] {
            try {
                act(launch);
            } catch (...) {
                const std::lock_guard lock(mutex);
                if (!first) first = std::current_exception();
            }
        });
    for (std::thread& t : threads) t.join();
    if (first) std::rethrow_exception(first);
}

// `body` once per rank, then finish(). When it throws on a rank, the job fails on all of them, and the first exception is rethrown.
inline void run_ranks(int ranks, const std::function<void(World&)>& body, const LaunchOptions& options = {.start_s = 30, .stall_s = 30, .build = "test"}) {
    std::mutex mutex;
    std::exception_ptr first;
    const auto failed = [&] {
        const std::lock_guard lock(mutex);
        if (!first) first = std::current_exception();
    };
    run_threads(ranks == 1 ? std::vector<Launch>(1) : launches_on_this_host(ranks), [&](const Launch& launch) {
        try {
            World world(launch, options);
            try {
                body(world);
                world.finish();
            } catch (const Problem& p) {
                failed();
                world.fail(p);
            } catch (const std::exception& e) {
                failed();
                world.fail(Problem(Exit::bug, e.what()));
            }
        } catch (...) {
            failed();
        }
    });
    if (first) std::rethrow_exception(first);
}

}  // namespace trifold
