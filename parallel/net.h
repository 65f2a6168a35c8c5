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

    int index() const;
    int size() const;
    // What is being done from now on, for messages: "all_reduce #48211". `what` is a literal.
    void label(const char* what, uint32_t number);
    // The memory belongs to the operation until it is done.
    void send(int peer, uint32_t tag, const void* data, int64_t bytes, Pending& pending);
    void receive(int peer, uint32_t tag, void* data, int64_t bytes, Pending& pending);
    // Moves what can be moved, of these operations and all others, until these are done.
    void wait(const Pending& pending, double stall_s);
    // Moves what can be moved without waiting. True: something moved.
    bool progress();
    void abort() noexcept;

private:
    struct State;
    std::unique_ptr<State> state_;
};

}  // namespace trifold
