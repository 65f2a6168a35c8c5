// parallel/socket.cpp   The system calls behind socket.h.
#include "parallel/socket.h"

#include <netdb.h>
#include <netinet/tcp.h>
#include <sys/eventfd.h>
#include <sys/uio.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <cstring>

#include "base/refuse.h"

namespace trifold {

SocketClock::time_point after_seconds(double seconds, SocketClock::time_point from) {
    return from + std::chrono::duration_cast<SocketClock::duration>(std::chrono::duration<double>(std::clamp(seconds, 0.0, 1e8)));
}

std::string seconds_text(double seconds) { return fmt::format("{:g} s", seconds); }

void socket_fault(const std::string& what, int error) { refuse(Exit::fault, "{}: {}", what, std::strerror(error)); }

int SocketAddress::port() const {
    const auto& v4 = reinterpret_cast<const sockaddr_in&>(storage);
    const auto& v6 = reinterpret_cast<const sockaddr_in6&>(storage);
    return ntohs(family() == AF_INET ? v4.sin_port : v6.sin6_port);
}

std::string SocketAddress::name() const {
    return std::string(reinterpret_cast<const sockaddr_un&>(storage).sun_path + 1, bytes - offsetof(sockaddr_un, sun_path) - 1);
}

SocketAddress tcp_address(const std::string& ip, int port) {
    addrinfo hints{}, *found = nullptr;
    hints.ai_flags = AI_NUMERICHOST | AI_NUMERICSERV;
    hints.ai_socktype = SOCK_STREAM;
    const int error = ::getaddrinfo(ip.c_str(), std::to_string(port).c_str(), &hints, &found);
    if (error != 0) refuse(Exit::usage, "'{}' port '{}' is no numeric network address: {}", ip, port, ::gai_strerror(error));
    SocketAddress a;
    a.bytes = found->ai_addrlen;
    std::memcpy(&a.storage, found->ai_addr, found->ai_addrlen);
    ::freeaddrinfo(found);
    return a;
}

SocketAddress unix_address(const std::string& name) {
    SocketAddress a;
    auto& u = reinterpret_cast<sockaddr_un&>(a.storage);
    TRIFOLD_ASSERT(name.size() < sizeof u.sun_path);
    u.sun_family = AF_UNIX;
    std::memcpy(u.sun_path + 1, name.data(), name.size());
    a.bytes = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + (name.empty() ? 0 : 1 + name.size()));
    return a;
}

SocketAddress address_of(const Socket& socket) {
    SocketAddress a;
    a.bytes = sizeof a.storage;
    if (::getsockname(socket.get(), a.get(), &a.bytes) != 0) socket_fault("getsockname", errno);
    return a;
}

std::string numeric_ip(const sockaddr* address) {
    const int family = address->sa_family;
    if (family != AF_INET && family != AF_INET6) return "";
    char host[NI_MAXHOST] = "";
    const socklen_t bytes = family == AF_INET ? sizeof(sockaddr_in) : sizeof(sockaddr_in6);
    return ::getnameinfo(address, bytes, host, sizeof host, nullptr, 0, NI_NUMERICHOST) == 0 ? host : "";
}

std::string local_ip(const Socket& socket) {
    const std::string ip = numeric_ip(address_of(socket).get());
    return ip.substr(0, ip.find('%'));
}

static void set_option(const Socket& s, int level, int option, int value) { ::setsockopt(s.get(), level, option, &value, sizeof value); }

// TCP sizes its buffers itself.
static void tune(const Socket& s, int family) {
    constexpr int buffer_bytes = 4 << 20;  // the kernel lowers it to net.core.wmem_max
    if (family == AF_UNIX)
        set_option(s, SOL_SOCKET, SO_SNDBUF, buffer_bytes);
    else
        set_option(s, IPPROTO_TCP, TCP_NODELAY, 1);
}

Socket stream_socket(int family) {
    Socket s(::socket(family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
    if (!s) socket_fault("cannot open a socket", errno);
    tune(s, family);
    return s;
}

Socket listening_socket(const SocketAddress& at, int& error) {
    Socket s = stream_socket(at.family());
    set_option(s, SOL_SOCKET, SO_REUSEADDR, 1);
    const bool listens = ::bind(s.get(), at.get(), at.bytes) == 0 && ::listen(s.get(), SOMAXCONN) == 0;
    error = listens ? 0 : errno;
    return listens ? std::move(s) : Socket();
}

Socket accept_from(const Socket& listening) {
    SocketAddress from;
    from.bytes = sizeof from.storage;
    while (true) {
        Socket s(::accept4(listening.get(), from.get(), &from.bytes, SOCK_CLOEXEC | SOCK_NONBLOCK));
        if (s) tune(s, from.family());
        if (s || (errno != EINTR && errno != ECONNABORTED)) return s;
    }
}

int connect_error(int fd, const SocketAddress& to) {
    if (::connect(fd, to.get(), to.bytes) == 0 || errno == EISCONN) return 0;
    return errno == EINTR || errno == EALREADY ? EINPROGRESS : errno;
}

Socket listen_at(const std::string& ip, int port) {
    int error = 0;
    Socket socket = listening_socket(tcp_address(ip.empty() ? "0.0.0.0" : ip, port), error);
    if (error == EADDRINUSE)
        refuse(Exit::usage, "port {} of this host is taken, so rank 0 cannot keep the store there: choose another one in --launch.store, or end what uses it", port);
    if (error == EADDRNOTAVAIL)
        refuse(Exit::usage, "the address {} is not one of this host, where rank 0 runs: --launch.store must name the host of rank 0", ip);
    if (error != 0)
        refuse(Exit::usage, "rank 0 cannot listen at {} port {}: {}; choose another port in --launch.store", ip, port, std::strerror(error));
    return socket;
}

Socket connect_to(const SocketAddress& to, SocketClock::time_point deadline, std::string& why) {
    Socket socket = stream_socket(to.family());
    int error = connect_error(socket.get(), to);
    while (error == EINPROGRESS) error = wait_for(socket.get(), POLLOUT, deadline) ? connect_error(socket.get(), to) : ETIMEDOUT;
    if (error != 0) {
        why = std::strerror(error);
        return Socket();
    }
    prepare_connection(socket);
    return socket;
}

void prepare_connection(const Socket& socket) {
    constexpr int idle_s = 5, every_s = 5, probes = 3, unanswered_ms = 30000;
    set_option(socket, SOL_SOCKET, SO_KEEPALIVE, 1);
    set_option(socket, IPPROTO_TCP, TCP_KEEPIDLE, idle_s);
    set_option(socket, IPPROTO_TCP, TCP_KEEPINTVL, every_s);
    set_option(socket, IPPROTO_TCP, TCP_KEEPCNT, probes);
    set_option(socket, IPPROTO_TCP, TCP_USER_TIMEOUT, unanswered_ms);
}

bool wait_for(int fd, short events, SocketClock::time_point deadline) {
    pollfd p{fd, events, 0};
    while (poll_until({&p, 1}, deadline) && p.revents == 0) continue;
    return p.revents != 0;
}

ssize_t send_rest(int fd, std::string_view first, std::string_view second, size_t done) {
    const size_t in_first = std::min(done, first.size()), in_second = done - in_first;
    iovec parts[2] = {{const_cast<char*>(first.data()) + in_first, first.size() - in_first},
                      {const_cast<char*>(second.data()) + in_second, second.size() - in_second}};
    msghdr message{};
    message.msg_iov = parts;
    message.msg_iovlen = 2;
    return ::sendmsg(fd, &message, MSG_NOSIGNAL | MSG_DONTWAIT);
}

bool send_all(int fd, std::string_view bytes, SocketClock::time_point deadline) {
    while (!bytes.empty()) {
        const ssize_t sent = ::send(fd, bytes.data(), bytes.size(), MSG_NOSIGNAL);
        if (sent > 0) {
            bytes.remove_prefix(static_cast<size_t>(sent));
        } else if (errno == EAGAIN) {
            if (!wait_for(fd, POLLOUT, deadline)) return false;
        } else if (errno != EINTR) {
            return false;
        }
    }
    return true;
}

bool poll_until(std::span<pollfd> fds, SocketClock::time_point deadline) {
    const auto left = std::max(SocketClock::duration::zero(), deadline - SocketClock::now());
    const auto seconds = std::chrono::duration_cast<std::chrono::seconds>(left);
    const timespec limit{seconds.count(), std::chrono::nanoseconds(left - seconds).count()};
    if (::ppoll(fds.data(), fds.size(), &limit, nullptr) < 0 && errno != EINTR) socket_fault("ppoll", errno);
    return SocketClock::now() < deadline;
}

SocketSet::SocketSet(int size) : sockets_(static_cast<size_t>(size)), event_(::eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC)) {
    if (!event_) socket_fault("eventfd", errno);
}

void SocketSet::put(int i, Socket socket) {
    const std::lock_guard lock(mutex_);
    if (aborted_) ::shutdown(socket.get(), SHUT_RDWR);
    sockets_[static_cast<size_t>(i)] = std::move(socket);
}

void SocketSet::asleep() const {
    uint64_t count;
    [[maybe_unused]] const ssize_t n = ::read(event_.get(), &count, sizeof count);
}

void SocketSet::wake() const noexcept {
    const uint64_t one = 1;
    [[maybe_unused]] const ssize_t n = ::write(event_.get(), &one, sizeof one);
}

void SocketSet::abort() noexcept {
    const std::lock_guard lock(mutex_);
    aborted_ = true;
    for (const Socket& s : sockets_) {
        if (s) ::shutdown(s.get(), SHUT_RDWR);  // the peers see the end of the stream, and our own calls return
    }
    wake();
}

}  // namespace trifold
