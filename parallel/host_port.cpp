#include "parallel/host_port.h"

#include <ifaddrs.h>
#include <net/if.h>
#include <netdb.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <memory>

#include "base/refuse.h"
#include "base/text.h"
#include "parallel/socket.h"

namespace trifold {
namespace {

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
        const std::string ip = numeric_ip(i->ifa_addr);
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
        refuse(Exit::usage, "{} is '{}', but it must be HOST:PORT with a port of 1 to 65535, such as node-01:29500", option, text);
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

std::string host_ports_text(const std::vector<std::string>& hosts, int port) {
    std::string text;
    for (const std::string& host : hosts) text += (text.empty() ? "" : ",") + HostPort{host, port}.text();
    return text;
}

std::vector<std::string> resolve(const std::string& host) {
    addrinfo hints{}, *first = nullptr;
    hints.ai_socktype = SOCK_STREAM;
    const int error = ::getaddrinfo(host.c_str(), nullptr, &hints, &first);
    if (error != 0)
        refuse(Exit::usage, "the host name '{}' of --launch.store does not resolve ({}): give a name that every node knows, or an address", host, ::gai_strerror(error));
    const std::unique_ptr<addrinfo, decltype(&::freeaddrinfo)> found(first, &::freeaddrinfo);
    std::vector<std::string> ips;
    for (const addrinfo* a = found.get(); a; a = a->ai_next) {
        std::string ip = numeric_ip(a->ai_addr);
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
    refuse(Exit::usage, "--launch.interface is '{}', but this host has no such interface or address that is up: it has {}", interface, join_words(known));
}

bool is_loopback(const std::string& ip) { return ip.starts_with("127.") || ip == "::1"; }

}  // namespace trifold
