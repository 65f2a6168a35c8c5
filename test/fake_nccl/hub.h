// test/fake_nccl/hub.h   The meeting place of one communicator of the fake NCCL: a thread that matches what the ranks issue, computes
// the results, and says what does not fit.
#pragma once
#include <string>
#include <thread>
#include <vector>

#include "test/fake_nccl/messages.h"

namespace trifold::fake_nccl {

// What the ranks of one communicator have issued; knows nothing of sockets.
class Matcher {
public:
    enum class State { absent, idle, waiting, finalizing, left };
    struct Member {
        State state = State::absent;
        std::vector<Operation> batch;  // while waiting: all of one ncclGroupEnd
        std::string how;               // left: "was destroyed", "was aborted", "is gone"
    };

    // The number of ranks is that of the first who comes. False: this rank cannot come.
    bool join(int rank, int size, const std::string& name);
    void issue(int rank, std::vector<Operation> ops);
    void finalize(int rank) { members_[static_cast<size_t>(rank)].state = State::finalizing; }
    void leave(int rank, const std::string& how);
    // Completes what can be completed. Empty, or what does not fit.
    std::string advance();
    bool everybody(State state) const;
    const std::vector<Member>& members() const { return members_; }
    // The results of a batch that is complete; the rank is idle afterwards.
    bool take_results(int rank, std::vector<std::string>& results);

private:
    std::string whose(size_t rank) const;
    std::string match_collectives(bool& moved);
    std::string match_messages(bool& moved);
    std::string stuck() const;

    std::string name_;
    std::vector<Member> members_;
};

class Hub {
public:
    explicit Hub(std::string address);
    ~Hub();
    Hub(const Hub&) = delete;

private:
    struct Peer {
        Wire wire;
        int rank = -1;
    };
    void run();
    void handle(Peer& peer, Frame& frame);
    void answer();
    void tell_all(const std::string& sentence);

    int listener_, stop_;
    Matcher matcher_;
    std::vector<Peer> peers_;
    bool started_ = false, finalized_ = false, failed_ = false;
    std::thread thread_;
};

}  // namespace trifold::fake_nccl
