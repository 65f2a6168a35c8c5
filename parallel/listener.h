// parallel/listener.h   Where a process of the job is reached, and the sockets that arrive there. Linux only.
//
// One per process, made before the rendezvous: its endpoint travels in everybody's PeerAddress. All Nets of the process share
// it: a connection begins with a hello (job key, group, generation, rank) and waits until the group that it names asks for it,
// whichever thread happened to accept it. What does not begin like that is closed without a word.
#pragma once
#include <cstdint>
#include <list>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "parallel/socket.h"

namespace trifold {

// Where a rank can be reached.
struct PeerAddress {
    int rank = 0;          // global, for messages
    std::string host;      // name, for messages
    std::string ip;        // numeric TCP address
    std::string host_id;   // Listener::host_id()
    std::string endpoint;  // Listener::endpoint()
    std::string cpus;      // cpu_list(): which CPUs it may use
    bool operator==(const PeerAddress&) const = default;
};
// "rank 5 on node-03"
std::string named(const PeerAddress& peer);

struct NetOptions {
    uint64_t job_key = 0;  // secret: who knows it may join
    std::string name;      // of the group
    int generation = 0;    // counts re-creations of the group; never used twice
    int index = 0;         // of this rank in `members`
    std::vector<PeerAddress> members;
    double connect_s = 60;  // deadline for all connections together
};

class Listener {
public:
    // Listens at `ip` (numeric; empty: at all IPv4 addresses) on a port that the system chooses, and inside the host. Throws
    // Problem(Exit::usage) when this host has no such address.
    explicit Listener(const std::string& ip);
    ~Listener();
    Listener(const Listener&) = delete;
    Listener& operator=(const Listener&) = delete;

    // For PeerAddress: the TCP port and the name inside the host.
    const std::string& endpoint() const { return endpoint_; }
    // Boot id and network namespace: ranks with the same one reach each other without TCP.
    static std::string host_id();
    // One socket to each other member: lower ranks listen, higher ones connect. Done when every connection has been answered. Throws
    // Problem(Exit::fault).
    std::shared_ptr<SocketSet> connect(const NetOptions& options);
    // From any thread, final: every group of this process fails, the connected ones and those that connect now or later.
    void abort() noexcept;

private:
    struct Hello;
    struct Visitor;
    class Meeting;

    void watch(const Socket& socket, void* visitor) const;
    std::shared_ptr<SocketSet> enlist(int size);
    void serve(uint64_t job_key);
    void welcome(const Socket& listening);
    bool hear(Visitor& v, uint64_t job_key);
    Socket take(const Hello& expected);

    const Socket tcp_, local_, epoll_;
    const std::string endpoint_;
    std::mutex mutex_;  // guards what follows
    std::list<Visitor> visitors_;
    std::vector<std::weak_ptr<SocketSet>> groups_;
    bool aborted_ = false;
};

}  // namespace trifold
