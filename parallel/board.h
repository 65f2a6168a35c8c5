// parallel/board.h   What the store knows and answers, without threads and sockets (store.h has those).
//
//   rendezvous  joins are held until the last rank has come; then everybody gets the places of all ranks in one answer
//   values      put and taken by key; a take waits on the board
//   meetings    agree, barrier, rank 0's value: one question and one answer per rank, held until the last has asked
//   failures    the first one is the job's. A fault that a rank reports may only be the echo of another rank's death, whose
//               connection ends a moment later; so it is news to everybody at once (who waits, stops waiting), but what the cause was and
//               which rank says so is decided `echo_s` later, or at once when a rank died or reported anything but a fault. The others
//               are asked to wait until that rank has left: launchers kill everybody as soon as one rank leaves with a code other than 0.
#pragma once
#include <cstdint>
#include <deque>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "base/error.h"
#include "parallel/message.h"
#include "parallel/tcp.h"

namespace trifold {

// The job's failure as the ranks hear of it.
struct Failure {
    Exit code = Exit::fault;
    std::string sentence;
    int rank = -1;     // that failed
    int speaker = -1;  // whose Problem it is to say so; -1: the first that asks
};
std::string packed(const Failure& failure);
Failure unpacked_failure(const std::string& body);

// A rank's part of the rendezvous.
struct Place {
    std::string host, ip, host_id, endpoint, cpus;
};

class Board {
public:
    struct Outgoing {
        int rank;
        Message message;
    };
    static constexpr double echo_s = 0.3, courtesy_s = 1;

    Board(int size, double start_s, uint64_t data_key);

    // `rank` has sent this. Throws BadMessage.
    void handle(int rank, const Message& message);
    // A connection says that it is `rank` of `size`, and comes in at address `seen_ip` of this host. False: it cannot be, the job has
    // failed. Throws BadMessage.
    bool join(int rank, int size, const Message& message, Unpacker body, const std::string& seen_ip);
    // Its connection has ended.
    void lost(int rank);
    // What is due by now.
    void tick(SocketClock::time_point now);
    SocketClock::time_point next_tick() const;
    // Ranks that are gone are among the addressees.
    std::vector<Outgoing> outgoing() { return std::exchange(outgoing_, {}); }

    bool all_joined() const { return joined_ == size_; }
    bool has_joined(int rank) const { return members_[static_cast<size_t>(rank)].joined; }
    const std::optional<Failure>& failure() const { return failure_; }
    bool has_left(int rank) const { return members_[static_cast<size_t>(rank)].left; }

private:
    struct Member {
        bool joined = false, left = false;
        uint64_t join_id = 0;
        std::string build;
        Place place;
    };
    struct Value {
        std::string bytes;
        int64_t taken = 0;
    };
    struct Take {
        int rank;
        uint64_t id;
        int64_t readers;
    };
    struct Meeting {
        SocketClock::time_point deadline;
        double seconds = 0;
        int came = 0;
        std::vector<std::optional<std::string>> calls, values;  // by rank
        std::vector<uint64_t> ids;
        Exit code = Exit::usage;
    };

    void send(int rank, Verb verb, uint64_t id, std::string body);
    void answer(int rank, uint64_t id, std::string body = {}) { send(rank, Verb::answer, id, std::move(body)); }
    void welcome();
    void settle(const std::string& key);
    void meet(int rank, uint64_t id, Unpacker body);
    void conclude(const Meeting& meeting);
    void refuse(const Meeting& meeting, Exit code, const std::string& sentence);
    void report(int rank, uint64_t id, Failure failure);
    void decide(Failure failure);
    void announce();
    void answer_questions();
    void goodbye(int rank, uint64_t id, double seconds);
    std::vector<int> ranks_where(auto condition) const;
    std::string named(int rank) const;

    const int size_;
    const double start_s_;
    const uint64_t data_key_;
    const SocketClock::time_point join_deadline_;
    std::vector<Member> members_;
    int joined_ = 0, left_ = 0;
    std::string rank_0_seen_ip_;  // at which another host reached rank 0's
    std::map<std::string, Value> values_;
    std::map<std::string, std::deque<Take>> takes_;
    std::map<int64_t, Meeting> meetings_;
    std::optional<Failure> failure_;
    std::optional<SocketClock::time_point> decision_;  // when the failure is decided, if it is not yet
    std::vector<std::pair<int, uint64_t>> questions_;  // of ranks that want to know whether to speak
    SocketClock::time_point courtesy_ends_;
    std::optional<uint64_t> last_goodbye_;          // of rank 0
    SocketClock::time_point goodbye_deadline_;
    double goodbye_s_ = 0;
    std::vector<Outgoing> outgoing_;
};

}  // namespace trifold
