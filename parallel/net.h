// parallel/net.h   Host data plane: one stream socket to each peer of one group, Unix-domain inside a host and TCP between hosts
// (faster than every packaged transport that can be aborted).
//
//   messages   a header (tag, bytes) and the body; a receive takes the first message with its tag from its peer. Bytes move only
//              inside wait() and progress(): post receives before waiting for sends, and wait for both together. What arrives
//              before its receive is posted stays in the kernel (back-pressure), unless another receive waits behind it.
//   threads    one at a time; abort() from any
//   failures   a dead peer, another size than expected, abort(), and `stall_s` without a single byte moved: Problem(Exit::fault)
//              with a sentence. The sockets are shut down, so that the peers learn of it; the Net stays failed.
#pragma once
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "parallel/listener.h"

namespace trifold {

class Net {
public:
    // Operations that are not done yet; it must live until wait() has seen none of them left, or has thrown.
    struct Pending {
        int left = 0;
    };

    // Connects (Listener::connect). The listener may be gone before the Net.
    Net(Listener& listener, const NetOptions& options);
    ~Net();
    Net(const Net&) = delete;
    Net& operator=(const Net&) = delete;

    int index() const { return o_.index; }
    int size() const { return static_cast<int>(o_.members.size()); }
    // What is being done from now on, for messages: "all_reduce #48211". `what` is a literal.
    void label(const char* what, uint32_t number) { what_ = what, number_ = number; }
    // The memory belongs to the operation until it is done.
    void send(int peer, uint32_t tag, const void* data, int64_t bytes, Pending& pending);
    void receive(int peer, uint32_t tag, void* data, int64_t bytes, Pending& pending);
    // Moves what can be moved, of these operations and all others, until these are done.
    void wait(const Pending& pending, double stall_s);
    // Moves what can be moved without waiting. True: something moved.
    bool progress();
    void abort() noexcept { sockets_->abort(); }

private:
    struct Peer;
    struct Header;
    struct Receive;

    Peer& peer(int p);
    std::string name(int p) const { return named(o_.members[static_cast<size_t>(p)]); }
    std::string where() const;

    ssize_t send_some(int p);
    bool push(int p);
    bool pull(int p);
    bool place(int p);
    void arrived(int p);
    void sleep(SocketClock::time_point deadline);

    void check_alive();
    void check_size(int p, const Receive& r, int64_t bytes);
    bool said(int p, const Header& last);
    void farewell(std::vector<int> to, const Header& last, double limit_s);
    void accuse(int culprit);
    [[noreturn]] void told(int p);
    [[noreturn]] void lost(int p, int error);
    [[noreturn]] void stalled(double stall_s);
    [[noreturn]] void fail(const std::string& sentence);

    const NetOptions o_;
    const std::shared_ptr<SocketSet> sockets_;
    std::vector<Peer> peers_;
    std::vector<pollfd> fds_;
    const char* what_ = "";  // for messages
    uint32_t number_ = 0;
    std::string failure_;  // empty: none
};

}  // namespace trifold
