// parallel/socket.h   Stream sockets that close themselves, their addresses, and waits that end on time. Linux only.
#pragma once
#include <poll.h>
#include <sys/socket.h>

#include <atomic>
#include <chrono>
#include <mutex>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/fd.h"

namespace trifold {

using SocketClock = std::chrono::steady_clock;
// "60 s", "0.5 s"
std::string seconds_text(double seconds);
// From now on; any number of seconds, also one that no clock can hold.
SocketClock::time_point after_seconds(double seconds, SocketClock::time_point from = SocketClock::now());

using Socket = Fd;

struct SocketAddress {
    sockaddr_storage storage{};
    socklen_t bytes = 0;
    int family() const { return storage.ss_family; }
    const sockaddr* get() const { return reinterpret_cast<const sockaddr*>(&storage); }
    sockaddr* get() { return reinterpret_cast<sockaddr*>(&storage); }
    int port() const;          // TCP
    std::string name() const;  // abstract
};
// Both numeric. Throws Problem(Exit::usage).
SocketAddress tcp_address(const std::string& ip, int port);
// An abstract name: no file, gone with its socket. Empty: the kernel chooses one when the socket is bound.
SocketAddress unix_address(const std::string& name);
// Of this end.
SocketAddress address_of(const Socket& socket);
// Empty where the address has none.
std::string numeric_ip(const sockaddr* address);
std::string local_ip(const Socket& socket);

// Never block. TCP sends small messages at once.
Socket stream_socket(int family);
// Empty: `error` says why.
Socket listening_socket(const SocketAddress& at, int& error);
// Empty: nobody is there at the moment, or errno says what is wrong.
Socket accept_from(const Socket& listening);
// To be called again, while it returns EINPROGRESS, when the socket can be written; 0: it is connected.
int connect_error(int fd, const SocketAddress& to);

// For the control plane: listens at a numeric address (empty: at all of this host); port 0: the system chooses. Throws Problem(Exit::usage).
Socket listen_at(const std::string& ip, int port);
// An empty socket: refused, unreachable, or not before the deadline. `why` then says which.
Socket connect_to(const SocketAddress& to, SocketClock::time_point deadline, std::string& why);
// What every connection of the control plane gets: the system notices a host that vanished.
void prepare_connection(const Socket& socket);

// Waits for one descriptor. False: the deadline came first.
bool wait_for(int fd, short events, SocketClock::time_point deadline);
// Sends what is left of two parts after the first `done` bytes, as far as there is room for it. Like send().
ssize_t send_rest(int fd, std::string_view first, std::string_view second, size_t done);
// Sends everything over a non-blocking socket. False: the connection broke, or the deadline came first.
bool send_all(int fd, std::string_view bytes, SocketClock::time_point deadline);
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
