// parallel/socket.h   Descriptors of stream sockets that close themselves, their addresses, and waits that end on time. Linux only.
#pragma once
#include <poll.h>
#include <sys/socket.h>

#include <atomic>
#include <chrono>
#include <mutex>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "base/fd.h"

namespace trifold {

using SocketClock = std::chrono::steady_clock;
// From now on; any number of seconds, also one that no clock can hold.
SocketClock::time_point after_seconds(double seconds, SocketClock::time_point from = SocketClock::now());

using Socket = Fd;

struct SocketAddress {
    sockaddr_storage storage{};
    socklen_t bytes = 0;
    int family() const { return storage.ss_family; }
    const sockaddr* get() const { return reinterpret_cast<const sockaddr*>(&storage); }
};
// Both numeric. Throws Problem(Exit::usage).
SocketAddress tcp_address(const std::string& ip, const std::string& port);
// An abstract name: no file, gone with its socket. Empty: the kernel chooses one when the socket is bound.
SocketAddress unix_address(const std::string& name);
// What a bound socket's address says: the TCP port, or the abstract name.
std::string port_of(const Socket& socket);

// Never block. TCP sends small messages at once.
Socket stream_socket(int family);
Socket listening_socket(const SocketAddress& at);
// Empty: nobody is there at the moment.
Socket accept_from(const Socket& listening);

// Returns when one of them is ready, or at `deadline`, exactly. False: the deadline has passed.
bool poll_until(std::span<pollfd> fds, SocketClock::time_point deadline);

// Problem(Exit::fault): what failed and what the system says of it.
[[noreturn]] void socket_fault(const std::string& what, int error);

// The sockets of one Net, as far as other threads touch them. Closed when the last owner lets go.
class SocketSet {
public:
    explicit SocketSet(int size);
    // By the Net's thread.
    int size() const { return static_cast<int>(sockets_.size()); }
    int operator[](int i) const { return sockets_[static_cast<size_t>(i)].get(); }
    void put(int i, Socket socket);
    int event() const { return event_.get(); }  // readable after abort() and wake()
    void asleep() const;                       // no longer readable
    // From any thread.
    void wake() const noexcept;
    void abort() noexcept;
    bool aborted() const { return aborted_; }

private:
    mutable std::mutex mutex_;  // guards sockets_ between put() and abort()
    std::vector<Socket> sockets_;
    Socket event_;
    std::atomic<bool> aborted_ = false;
};

}  // namespace trifold
