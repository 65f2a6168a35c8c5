// parallel/socket.cpp   The system calls behind socket.h.
#include "parallel/socket.h"

#include <fmt/format.h>
#include <netdb.h>
#include <netinet/tcp.h>
#include <sys/eventfd.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <cstring>

#include "base/error.h"

namespace trifold {

SocketClock::time_point after_seconds(double seconds, SocketClock::time_point from) {
    return from + std::chrono::duration_cast<SocketClock::duration>(std::chrono::duration<double>(std::clamp(seconds, 0.0, 1e8)));
}

void socket_fault(const std::string& what, int error) {
    throw Problem(Exit::fault, fmt::format("{}: {}", what, std::strerror(error)));
}

SocketAddress tcp_address(const std::string& ip, const std::string& port) {
    addrinfo hints{}, *found = nullptr;
    hints.ai_flags = AI_NUMERICHOST | AI_NUMERICSERV;
    hints.ai_socktype = SOCK_STREAM;
    const int error = ::getaddrinfo(ip.c_str(), port.c_str(), &hints, &found);
    if (error != 0)
        throw Problem(Exit::usage,
                      fmt::format("'{}' port '{}' is no numeric network address: {}", ip, port, ::gai_strerror(error)));
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

std::string port_of(const Socket& socket) {
    SocketAddress a;
    a.bytes = sizeof a.storage;
    if (::getsockname(socket.get(), reinterpret_cast<sockaddr*>(&a.storage), &a.bytes) != 0) socket_fault("getsockname", errno);
    const auto& u = reinterpret_cast<const sockaddr_un&>(a.storage);
    if (a.family() == AF_UNIX) return std::string(u.sun_path + 1, a.bytes - offsetof(sockaddr_un, sun_path) - 1);
    const auto& v4 = reinterpret_cast<const sockaddr_in&>(a.storage);
    const auto& v6 = reinterpret_cast<const sockaddr_in6&>(a.storage);
    return std::to_string(ntohs(a.family() == AF_INET ? v4.sin_port : v6.sin6_port));
}

// TCP sizes its buffers itself.
void tune(const Socket& s, int family) {
    const int one = 1, buffer_bytes = 4 << 20;  // the kernel lowers it to net.core.wmem_max
    if (family == AF_UNIX)
        ::setsockopt(s.get(), SOL_SOCKET, SO_SNDBUF, &buffer_bytes, sizeof buffer_bytes);
    else
        ::setsockopt(s.get(), IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
}

Socket stream_socket(int family) {
    Socket s(::socket(family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
    if (!s) socket_fault("cannot open a socket", errno);
    tune(s, family);
    return s;
}

Socket listening_socket(const SocketAddress& at) {
    Socket s = stream_socket(at.family());
    if (::bind(s.get(), at.get(), at.bytes) != 0 || ::listen(s.get(), 4096) != 0) {
        const int error = errno;
        if (error == EADDRNOTAVAIL)
            throw Problem(Exit::usage, "this host has no such network address: choose another --launch.interface");
        socket_fault("cannot listen for the other ranks", error);
    }
    return s;
}

Socket accept_from(const Socket& listening) {
    SocketAddress from;
    from.bytes = sizeof from.storage;
    while (true) {
        Socket s(
            ::accept4(listening.get(), reinterpret_cast<sockaddr*>(&from.storage), &from.bytes, SOCK_CLOEXEC | SOCK_NONBLOCK));
        if (s) tune(s, from.family());
        if (s || errno == EAGAIN) return s;
        if (errno != EINTR && errno != ECONNABORTED) socket_fault("cannot accept the connection of another rank", errno);
    }
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
