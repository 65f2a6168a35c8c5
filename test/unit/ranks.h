// test/unit/ranks.h   Several ranks in one test: as threads of this process, or forked where one has to be killed.
#pragma once
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "base/error.h"
#include "parallel/host_collectives.h"

namespace trifold::ranks_test {

enum class Path { inside_host, tcp };

// The addresses of n ranks, and what each of them listens with.
struct Ranks {
    std::vector<std::unique_ptr<Listener>> listeners;
    std::vector<PeerAddress> members;
    uint64_t job_key = 0x1234567890abcdef;

    explicit Ranks(int n, Path path = Path::inside_host) {
        for (int r = 0; r < n; ++r) {
            listeners.push_back(std::make_unique<Listener>("127.0.0.1"));
            const std::string host_id = path == Path::inside_host ? Listener::host_id() : "host " + std::to_string(r);
            members.push_back({.rank = 10 + r,
                               .host = "node-" + std::to_string(r),
                               .ip = "127.0.0.1",
                               .host_id = host_id,
                               .endpoint = listeners.back()->endpoint()});
        }
    }
    int size() const { return static_cast<int>(members.size()); }

    NetOptions options(int r, int generation = 0) const {
        return {.job_key = job_key, .name = "dp", .generation = generation, .index = r, .members = members, .connect_s = 20};
    }
    std::unique_ptr<Net> connect(int r, int generation = 0) const {
        return std::make_unique<Net>(*listeners[static_cast<size_t>(r)], options(r, generation));
    }
    std::unique_ptr<Collectives> collectives(int r, double stall_s = 20) const {
        return connect_host_collectives(*listeners[static_cast<size_t>(r)], {.job_key = job_key, .name = "dp", .index = r, .members = members, .connect_s = 20}, stall_s);
    }
};

// What each rank's Problem said; empty where there was none.
using Sentences = std::vector<std::string>;

inline std::string sentence_of(const std::function<void()>& act) {
    try {
        act();
        return "";
    } catch (const Problem& p) {
        return p.code() == Exit::fault ? p.what() : std::string("not a fault: ") + p.what();
    }
}

// act(rank) on n threads.
inline Sentences on_threads(int n, const std::function<void(int)>& act) {
    Sentences said(static_cast<size_t>(n));
    std::vector<std::thread> threads;
    for (int r = 0; r < n; ++r) threads.emplace_back([&, r] { said[static_cast<size_t>(r)] = sentence_of([&] { act(r); }); });
    for (std::thread& t : threads) t.join();
    return said;
}

// A message from one process to another.
class Pipe {
public:
    Pipe() {
        if (::pipe(ends_) != 0) throw std::runtime_error("pipe");
    }
    ~Pipe() { ::close(ends_[0]), ::close(ends_[1]); }
    Pipe(const Pipe&) = delete;
    Pipe& operator=(const Pipe&) = delete;
    void write(const std::string& text) const {
        if (::write(ends_[1], text.data(), text.size()) < 0) ::_exit(3);
    }
    // One message of at least a byte.
    std::string read() const {
        char text[4096];
        const ssize_t n = ::read(ends_[0], text, sizeof text);
        return {text, static_cast<size_t>(std::max<ssize_t>(0, n))};
    }

private:
    int ends_[2];
};

// act(rank) in a process of its own, which keeps only its own listener. Ends with code 0, or 9 where it has thrown.
inline pid_t forked(Ranks& ranks, int rank, const std::function<void(int)>& act) {
    const pid_t pid = ::fork();
    if (pid != 0) return pid;
    for (int r = 0; r < ranks.size(); ++r) {
        if (r != rank) ranks.listeners[static_cast<size_t>(r)].reset();
    }
    try {
        act(rank);
    } catch (...) {
        ::_exit(9);
    }
    ::_exit(0);
}

// All processes have reported `ready`: one is killed, and the others say which, and end well. Returns what went wrong.
inline std::string after_kill(const std::vector<Pipe>& reports, const std::vector<pid_t>& pids, int victim, const std::string& ready) {
    std::string wrong;
    for (const Pipe& report : reports)
        if (const std::string said = report.read(); said != ready) wrong += "not ready: " + said + "; ";
    ::kill(pids[static_cast<size_t>(victim)], SIGKILL);
    const std::string victims_name = "rank " + std::to_string(10 + victim) + " on node-" + std::to_string(victim);
    for (int r = 0; r < static_cast<int>(pids.size()); ++r) {
        if (r != victim)
            if (const std::string said = reports[static_cast<size_t>(r)].read(); said.find(victims_name) == std::string::npos) wrong += "does not name it: " + said + "; ";
        int status = 0;
        if (::waitpid(pids[static_cast<size_t>(r)], &status, 0) != pids[static_cast<size_t>(r)] || status != (r == victim ? SIGKILL : 0))
            wrong += "rank " + std::to_string(r) + " ended with " + std::to_string(status) + "; ";
    }
    return wrong;
}

}  // namespace trifold::ranks_test
