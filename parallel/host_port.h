// parallel/host_port.h   Addresses in words: HOST:PORT, host names, network interfaces.
#pragma once
#include <string>
#include <string_view>
#include <vector>

namespace trifold {

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
// As parse_host_ports reads it: each host with this port.
std::string host_ports_text(const std::vector<std::string>& hosts, int port);

// Numeric addresses of a host name. Throws Problem(Exit::usage).
std::vector<std::string> resolve(const std::string& host);
// Numeric addresses at which other hosts may reach this one: of every interface that is up, those of virtual bridges last.
std::vector<std::string> addresses_of_this_host();
// The address of an interface, or `interface` itself when it is an address of this host. Throws Problem(Exit::usage) with the interfaces
// that there are.
std::string address_of_interface(const std::string& interface);
bool is_loopback(const std::string& ip);

}  // namespace trifold
