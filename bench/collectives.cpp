// bench/collectives.cpp   Host collectives of N forked ranks of this machine, over both kinds of sockets, against a floor.
//
// The floor: all ranks at once copy as many bytes from memory to memory as each of them receives. A socket copies every byte twice
// and wakes somebody up, and sums read more, so a share of 0.2 to 0.4 is good. Medians over rounds, as rank 0 sees them.
//   collectives [--json] [--ranks N] [--only TEXT] [--rounds R]
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <functional>
#include <stdexcept>
#include <string>
#include <vector>

#include "parallel/host_collectives.h"

using namespace trifold;

namespace {

struct Arguments {
    bool json = false;
    int ranks = 4;
    int rounds = 15;
    std::string only;
};

Arguments parse(const std::vector<std::string>& words) {
    Arguments a;
    for (size_t i = 0; i < words.size(); ++i) {
        const std::string &word = words[i], value = i + 1 < words.size() ? words[i + 1] : "";
        if (word == "--json")
            a.json = true;
        else if (word == "--ranks")
            a.ranks = std::stoi(value);
        else if (word == "--rounds")
            a.rounds = std::stoi(value);
        else if (word == "--only")
            a.only = value;
        else
            throw std::invalid_argument("unknown option " + word);
        if (word != "--json") ++i;
    }
    return a;
}

// What one rank does, over and over.
class Rank {
public:
    Rank(const Arguments& a, const char* path, int me, std::unique_ptr<Collectives> collectives)
        : a_(a),
          path_(path),
          me_(me),
          c_(std::move(collectives)),
          x_(64 << 20),
          y_(64 << 20),
          from_(64 << 20, std::byte{1}),
          to_(64 << 20) {}

    void all() {
        const int n = a_.ranks;
        const int64_t share = n - 1;
        add("barrier", 0, [&] { c_->all_reduce(nullptr, {}); });
        add("all_reduce 64 B", 64 * share, [&] { c_->all_reduce(nullptr, floats(x_, 64)); });
        add("send and back 4 B", 4, [&] {
            if (me_ == 0) c_->send(nullptr, 1, floats(x_, 4)), c_->receive(nullptr, 1, floats(y_, 4));
            if (me_ == 1) c_->receive(nullptr, 0, floats(y_, 4)), c_->send(nullptr, 0, floats(y_, 4));
        });
        for (const int64_t mib : {1, 16, 64}) {
            const int64_t bytes = mib << 20, part = bytes / n / 4 * 4, moved = part * share;
            const std::string size = " " + std::to_string(mib) + " MiB";
            const Tensor full = floats(x_, part * n), own = full.slice(part / 4 * me_, part / 4);
            add("all_reduce" + size, 2 * moved, [=, this] { c_->all_reduce(nullptr, full); });
            add("all_reduce bf16" + size, 2 * moved, [=, this] {
                c_->all_reduce(nullptr, {full.data, DType::bf16, 2 * full.elems});
            });
            add("reduce_scatter" + size, moved, [=, this] { c_->reduce_scatter(nullptr, full, own); });
            add("all_gather" + size, moved, [=, this] { c_->all_gather(nullptr, own, full); });
            add("broadcast" + size, bytes, [=, this] { c_->broadcast(nullptr, full, 0); });
            const std::vector<int64_t> counts(static_cast<size_t>(n), part / 4);
            add("all_to_all" + size, moved, [=, this] { c_->all_to_all(nullptr, full, counts, floats(y_, part * n), counts); });
            add("exchange in a ring" + size, bytes,
                [=, this] { c_->exchange(nullptr, (me_ + 1) % n, floats(x_, bytes), (me_ + n - 1) % n, floats(y_, bytes)); });
        }
    }

private:
    static Tensor floats(std::vector<std::byte>& v, int64_t bytes) { return {v.data(), DType::f32, bytes / 4}; }

    // `bytes`: what a rank receives.
    void add(const std::string& name, int64_t bytes, const std::function<void()>& work) {
        if (name.find(a_.only) == std::string::npos) return;
        const int rounds = bytes > 1 << 20 ? a_.rounds : 20 * a_.rounds;
        std::vector<double> op, floor;
        for (int i = 0; i < rounds; ++i) {
            op.push_back(seconds(work));
            floor.push_back(seconds([&] { copy(bytes); }));
        }
        const double op_s = median(op), copy_s = median(floor);
        if (me_ != 0) return;
        const char* line =
            a_.json ? "{\"op\":\"%s\",\"path\":\"%s\",\"ranks\":%d,\"seconds\":%.7f,\"copy_seconds\":%.7f,\"share\":%.3f}\n"
                    : "%-28s %-12s %2d ranks %10.3f ms   copy %10.3f ms   share %.2f\n";
        const double unit = a_.json ? 1 : 1e3;
        std::printf(line, name.c_str(), path_, a_.ranks, op_s * unit, copy_s * unit, copy_s / op_s);
        std::fflush(stdout);
    }
    // Round through more memory than caches hold.
    void copy(int64_t bytes) {
        for (const auto all = static_cast<int64_t>(from_.size()); bytes > 0;) {
            at_ = at_ < all ? at_ : 0;
            const int64_t some = std::min(bytes, all - at_);
            std::memcpy(to_.data() + at_, from_.data() + at_, static_cast<size_t>(some));
            at_ += some;
            bytes -= some;
        }
    }
    double seconds(const std::function<void()>& work) {
        c_->all_reduce(nullptr, {});
        const auto begin = std::chrono::steady_clock::now();
        work();
        return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
    }
    static double median(std::vector<double>& x) {
        const auto middle = x.begin() + static_cast<std::ptrdiff_t>(x.size() / 2);
        std::nth_element(x.begin(), middle, x.end());
        return *middle;
    }

    const Arguments& a_;
    const char* path_;
    const int me_;
    const std::unique_ptr<Collectives> c_;
    std::vector<std::byte> x_, y_, from_, to_;
    int64_t at_ = 0;  // of the next copy
};

// True: all ranks ended well.
bool run(const Arguments& a, const char* path) {
    std::vector<std::unique_ptr<Listener>> listeners;
    std::vector<PeerAddress> members;
    for (int r = 0; r < a.ranks; ++r) {
        listeners.push_back(std::make_unique<Listener>("127.0.0.1"));
        const std::string host_id = path == std::string("unix") ? Listener::host_id() : std::to_string(r);
        members.push_back(
            {.rank = r, .host = "this host", .ip = "127.0.0.1", .host_id = host_id, .endpoint = listeners.back()->endpoint()});
    }
    std::vector<pid_t> children;
    for (int r = 0; r < a.ranks; ++r) {
        const pid_t pid = ::fork();
        if (pid == 0) {
            try {
                Rank(a, path, r, connect_host_collectives(*listeners[static_cast<size_t>(r)], {.job_key = 1, .name = "bench", .index = r, .members = members, .connect_s = 30}, 60))
                    .all();
            } catch (const std::exception& e) {
                std::fprintf(stderr, "rank %d: %s\n", r, e.what());
                ::_exit(1);
            }
            ::_exit(0);
        }
        children.push_back(pid);
    }
    bool fine = true;
    for (const pid_t child : children) {
        int status = 0;
        fine = ::waitpid(child, &status, 0) == child && status == 0 && fine;
    }
    return fine;
}

}  // namespace

int main(int argc, char** argv) {
    try {
        const Arguments a = parse({argv + 1, argv + argc});
        if (a.ranks < 2) throw std::invalid_argument("--ranks is at least 2");
        return run(a, "unix") && run(a, "tcp") ? 0 : 1;
    } catch (const std::exception& e) {
        std::fprintf(stderr, "collectives: %s\n", e.what());
        return 2;
    }
}
