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
#include "parallel/listener.h"
#include "parallel/message.h"

namespace trifold {

// The job's failure as the ranks hear of it.
struct Failure {
    Exit code = Exit::fault;
    std::string sentence;
    int rank = -1;     // that failed
    int speaker = -1;  // whose Problem it is to say so; -1: the first that asks
};
std::string pack(const Failure& failure);
Failure unpack_failure(const std::string& body);

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
    // A connection says who it is, and comes in at address `seen_ip` of this host. Its rank; -1: it cannot be, the job has failed. Throws
    // BadMessage.
    int join(const Message& message, const std::string& seen_ip);
    // Its connection has ended.
    void lost(int rank);
    // What is due by now.
    void tick(SocketClock::time_point now);
    SocketClock::time_point next_tick() const;
    // Ranks that are gone are among the addressees.
    std::vector<Outgoing> outgoing() { return std::exchange(outgoing_, {}); }

    bool all_joined() const { return joined_ == size_; }
    const std::optional<Failure>& failure() const { return failure_; }
    bool has_left(int rank) const { return members_[static_cast<size_t>(rank)].left; }

private:
    struct Member {
        bool joined = false, left = false;
        uint64_t join_id = 0;
        std::string build;
        PeerAddress place;
    };
    struct Take {
        int rank;
        uint64_t id;
        int64_t readers;
    };
    struct Box {
        std::optional<std::string> value;
        int64_t taken = 0;          // so many times
        std::deque<Take> waiting;  // in the order in which they came
    };
    struct Call {
        std::string what, value;
        uint64_t id;
    };
    struct Meeting {
        SocketClock::time_point deadline;
        double seconds = 0;
        Exit code = Exit::usage;
        int came = 0;
        std::vector<std::optional<Call>> calls;  // by rank
    };
    struct Goodbye {
        uint64_t id;
        double seconds;
        SocketClock::time_point deadline;
    };

    void send(int rank, uint64_t id, const Message& message) { outgoing_.push_back({rank, {message.verb, id, message.body}}); }
    void answer(int rank, uint64_t id, std::string body = {}) { send(rank, id, make_message(Verb::answer, id, std::move(body))); }
    void welcome();
    void settle(const std::string& key);
    void meet(int rank, uint64_t id, Unpacker body);
    void conclude(const Meeting& meeting);
    void refuse(const Meeting& meeting, const Failure& failure);
    void end_goodbye(const std::optional<Failure>& failure);
    void report(int rank, uint64_t id, Failure failure);
    void decide(Failure failure);
    void announce();
    void answer_questions();
    void goodbye(int rank, uint64_t id, double seconds);
    std::vector<int> ranks_where(auto condition) const;

    const int size_;
    const double start_s_;
    const uint64_t data_key_;
    const SocketClock::time_point join_deadline_;
    std::vector<Member> members_;
    int joined_ = 0, left_ = 0;
    std::string rank_0_seen_ip_;  // at which another host reached rank 0's
    std::map<std::string, Box> boxes_;  // by key
    std::map<int64_t, Meeting> meetings_;
    std::optional<Failure> failure_;
    std::optional<SocketClock::time_point> decision_;  // when the failure is decided, if it is not yet
    std::vector<std::pair<int, uint64_t>> questions_;  // of ranks that want to know whether to speak
    SocketClock::time_point courtesy_ends_;
    std::optional<Goodbye> last_goodbye_;  // rank 0's, not answered yet
    std::vector<Outgoing> outgoing_;
};

}  // namespace trifold
