// parallel/tcp.h   Addresses in words and TCP connections with deadlines, for the control plane (store.h).
#pragma once
#include <chrono>
#include <string>
#include <string_view>
#include <vector>

#include "parallel/socket.h"

namespace trifold {

// For poll(): rounded up, 0 when it is past.
int milliseconds_until(SocketClock::time_point deadline);
// "60 s", "0.5 s"
std::string seconds_text(double seconds);

// HOST:PORT, [HOST]:PORT with colons in HOST.
struct HostPort {
    std::string host;
    int port = 0;
    std::string text() const;
};
// Throws Problem(Exit::usage); `option` is where the text comes from.
HostPort parse_host_port(std::string_view text, const std::string& option);
// Several, separated by commas.
std::vector<HostPort> parse_host_ports(std::string_view text, const std::string& option);

// Numeric addresses of a host name. Throws Problem(Exit::usage).
std::vector<std::string> resolve(const std::string& host);
// Numeric addresses at which other hosts may reach this one: of every interface that is up, those of virtual bridges last.
std::vector<std::string> addresses_of_this_host();
// The address of an interface, or `interface` itself when it is an address of this host. Throws Problem(Exit::usage) with the interfaces
// that there are.
std::string address_of_interface(const std::string& interface);
bool is_loopback(const std::string& ip);

// Listens at a numeric address (empty: at all of this host); port 0: the system chooses. Throws Problem(Exit::usage).
Socket listen_at(const std::string& ip, int port);
int tcp_port_of(const Socket& listener);
// The numeric address of this end of a connection; empty when it has none.
std::string local_ip(const Socket& socket);

// An empty socket: refused, unreachable, or not before the deadline. `why` then says which.
Socket connect_to(const HostPort& to, SocketClock::time_point deadline, std::string& why);
// What every connection of the control plane gets: the system notices a host that vanished.
void prepare_connection(const Socket& socket);

// Waits for one descriptor. False: the deadline came first.
bool wait_for(int fd, short events, SocketClock::time_point deadline);
// Sends everything over a non-blocking socket. False: the connection broke, or the deadline came first.
bool send_all(int fd, std::string_view bytes, SocketClock::time_point deadline);

}  // namespace trifold
