#include "parallel/tcp.h"

#include <fmt/format.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <charconv>
#include <cmath>
#include <cstring>
#include <memory>

#include "base/error.h"
#include "base/text.h"

namespace trifold {
namespace {

[[noreturn]] void usage(const std::string& sentence) { throw Problem(Exit::usage, sentence); }

std::string numeric(const sockaddr* address, socklen_t size) {
    char host[NI_MAXHOST] = "";
    return ::getnameinfo(address, size, host, sizeof(host), nullptr, 0, NI_NUMERICHOST) == 0 ? host : "";
}

int family_size(int family) { return family == AF_INET ? sizeof(sockaddr_in) : sizeof(sockaddr_in6); }

struct Interface {
    std::string name, ip;
    bool loopback = false;
};

std::vector<Interface> interfaces_that_are_up() {
    ifaddrs* first = nullptr;
    if (::getifaddrs(&first) != 0) return {};
    const std::unique_ptr<ifaddrs, decltype(&::freeifaddrs)> all(first, &::freeifaddrs);
    std::vector<Interface> found;
    for (const ifaddrs* i = first; i; i = i->ifa_next) {
        if (!i->ifa_addr || !(i->ifa_flags & IFF_UP)) continue;
        const int family = i->ifa_addr->sa_family;
        if (family != AF_INET && family != AF_INET6) continue;
        const std::string ip = numeric(i->ifa_addr, static_cast<socklen_t>(family_size(family)));
        if (ip.empty() || ip.find('%') != std::string::npos) continue;  // link-local IPv6 means nothing elsewhere
        found.push_back({i->ifa_name, ip, (i->ifa_flags & IFF_LOOPBACK) != 0});
    }
    // The order of the system, IPv4 first.
    std::ranges::stable_sort(found, {}, [](const Interface& i) { return i.ip.find(':') != std::string::npos; });
    return found;
}

bool is_virtual(const std::string& interface) {
    return std::ranges::any_of(std::array{"docker", "veth", "virbr", "br-", "cni", "flannel", "lxc"},
                               [&](const char* prefix) { return interface.starts_with(prefix); });
}

}  // namespace

int milliseconds_until(SocketClock::time_point deadline) {
    const auto left = std::chrono::ceil<std::chrono::milliseconds>(deadline - SocketClock::now()).count();
    return static_cast<int>(std::clamp<int64_t>(left, 0, 1 << 30));
}

std::string seconds_text(double seconds) { return fmt::format("{:g} s", seconds); }

std::string HostPort::text() const { return host.find(':') == std::string::npos ? fmt::format("{}:{}", host, port) : fmt::format("[{}]:{}", host, port); }

HostPort parse_host_port(std::string_view text, const std::string& option) {
    HostPort parsed;
    const size_t colon = std::min(text.rfind(':'), text.size());
    std::string_view host = text.substr(0, colon);
    const std::string_view port = text.substr(std::min(colon + 1, text.size()));
    const auto [end, error] = std::from_chars(port.data(), port.data() + port.size(), parsed.port);
    if (host.starts_with('[') && host.ends_with(']')) host = host.substr(1, host.size() - 2);
    parsed.host = host;
    if (host.empty() || error != std::errc() || end != port.data() + port.size() || parsed.port < 1 || parsed.port > 65535)
        usage(fmt::format("{} is '{}', but it must be HOST:PORT with a port of 1 to 65535, such as node-01:29500", option, text));
    return parsed;
}

std::vector<HostPort> parse_host_ports(std::string_view text, const std::string& option) {
    std::vector<HostPort> all;
    while (!text.empty()) {
        const size_t comma = std::min(text.find(','), text.size());
        all.push_back(parse_host_port(text.substr(0, comma), option));
        text.remove_prefix(std::min(comma + 1, text.size()));
    }
    return all;
}

std::vector<std::string> resolve(const std::string& host) {
    addrinfo hints{}, *first = nullptr;
    hints.ai_socktype = SOCK_STREAM;
    const int error = ::getaddrinfo(host.c_str(), nullptr, &hints, &first);
    if (error != 0)
        usage(fmt::format("the host name '{}' of --launch.store does not resolve ({}): give a name that every node knows, or an address", host, ::gai_strerror(error)));
    const std::unique_ptr<addrinfo, decltype(&::freeaddrinfo)> found(first, &::freeaddrinfo);
    std::vector<std::string> ips;
    for (const addrinfo* a = found.get(); a; a = a->ai_next) {
        std::string ip = numeric(a->ai_addr, a->ai_addrlen);
        if (!ip.empty() && std::ranges::find(ips, ip) == ips.end()) ips.push_back(std::move(ip));
    }
    return ips;
}

std::vector<std::string> addresses_of_this_host() {
    std::vector<std::string> real, bridges;
    for (const Interface& i : interfaces_that_are_up())
        if (!i.loopback) (is_virtual(i.name) ? bridges : real).push_back(i.ip);
    real.insert(real.end(), bridges.begin(), bridges.end());
    return real;
}

std::string address_of_interface(const std::string& interface) {
    std::vector<std::string> known;
    for (const Interface& i : interfaces_that_are_up()) {
        if (i.name == interface || i.ip == interface) return i.ip;
        known.push_back(fmt::format("{} ({})", i.name, i.ip));
    }
    usage(fmt::format("--launch.interface is '{}', but this host has no such interface or address that is up: it has {}", interface, join_words(known)));
}

bool is_loopback(const std::string& ip) { return ip.starts_with("127.") || ip == "::1"; }

Socket listen_at(const std::string& ip, int port) {
    const SocketAddress at = tcp_address(ip.empty() ? "0.0.0.0" : ip, std::to_string(port));
    Socket socket = stream_socket(at.family());
    const int on = 1;
    ::setsockopt(socket.get(), SOL_SOCKET, SO_REUSEADDR, &on, sizeof(on));
    if (::bind(socket.get(), at.get(), at.bytes) == 0 && ::listen(socket.get(), SOMAXCONN) == 0) return socket;
    if (errno == EADDRINUSE)
        usage(fmt::format("port {} of this host is taken, so rank 0 cannot keep the store there: choose another one in --launch.store, or end what uses it", port));
    if (errno == EADDRNOTAVAIL) usage(fmt::format("the address {} is not one of this host, where rank 0 runs: --launch.store must name the host of rank 0", ip));
    usage(fmt::format("rank 0 cannot listen at {}: {}; choose another port in --launch.store", HostPort{ip, port}.text(), std::strerror(errno)));
}

int tcp_port_of(const Socket& listener) { return std::stoi(port_of(listener)); }

std::string local_ip(const Socket& socket) {
    sockaddr_storage address{};
    socklen_t size = sizeof(address);
    if (::getsockname(socket.get(), reinterpret_cast<sockaddr*>(&address), &size) != 0) return "";
    if (address.ss_family != AF_INET && address.ss_family != AF_INET6) return "";
    const std::string ip = numeric(reinterpret_cast<sockaddr*>(&address), size);
    return ip.substr(0, ip.find('%'));
}

Socket connect_to(const HostPort& to, SocketClock::time_point deadline, std::string& why) {
    const SocketAddress at = tcp_address(to.host, std::to_string(to.port));
    Socket socket = stream_socket(at.family());
    int error = ::connect(socket.get(), at.get(), at.bytes) == 0 ? 0 : errno;
    if (error == EINPROGRESS) {
        socklen_t size = sizeof(error);
        error = wait_for(socket.get(), POLLOUT, deadline) ? 0 : ETIMEDOUT;
        if (error == 0) ::getsockopt(socket.get(), SOL_SOCKET, SO_ERROR, &error, &size);
    }
    if (error != 0) {
        why = std::strerror(error);
        return Socket();
    }
    prepare_connection(socket);
    return socket;
}

void prepare_connection(const Socket& socket) {
    const int on = 1, idle_s = 5, every_s = 5, probes = 3, unanswered_ms = 30000;
    ::setsockopt(socket.get(), SOL_SOCKET, SO_KEEPALIVE, &on, sizeof(on));
    ::setsockopt(socket.get(), IPPROTO_TCP, TCP_KEEPIDLE, &idle_s, sizeof(idle_s));
    ::setsockopt(socket.get(), IPPROTO_TCP, TCP_KEEPINTVL, &every_s, sizeof(every_s));
    ::setsockopt(socket.get(), IPPROTO_TCP, TCP_KEEPCNT, &probes, sizeof(probes));
    ::setsockopt(socket.get(), IPPROTO_TCP, TCP_USER_TIMEOUT, &unanswered_ms, sizeof(unanswered_ms));
}

bool wait_for(int fd, short events, SocketClock::time_point deadline) {
    pollfd p{fd, events, 0};
    while (poll_until({&p, 1}, deadline) && p.revents == 0) continue;
    return p.revents != 0;
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

}  // namespace trifold
