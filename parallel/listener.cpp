// parallel/listener.cpp   Accepting, greeting and connecting.
//
// The listening sockets and the connections whose hello is not complete yet are in one epoll set, which every connecting thread
// polls beside an event of its own: whoever wakes up first serves all of them and wakes the others.
#include "parallel/listener.h"

#include <sys/epoll.h>
#include <sys/stat.h>
#include <xxhash.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <fstream>

#include "base/refuse.h"
#include "base/text.h"

namespace trifold {
namespace {

using Clock = SocketClock;

constexpr auto patience = std::chrono::seconds(10);  // for the hello of a stranger

// Ranks that disagree about the name or the members of a group do not meet.
uint64_t hash_of_group(const NetOptions& o) {
    std::string text = o.name;
    for (const PeerAddress& m : o.members) text += fmt::format("/{}", m.rank);
    return XXH3_64bits(text.data(), text.size());
}

Socket listening_at(const SocketAddress& at) {
    int error = 0;
    Socket s = listening_socket(at, error);
    if (error == EADDRNOTAVAIL) refuse(Exit::usage, "this host has no such network address: choose another --launch.interface");
    if (error != 0) socket_fault("cannot listen for the other ranks", error);
    return s;
}

}  // namespace

std::string named(const PeerAddress& peer) { return fmt::format("rank {} on {}", peer.rank, peer.host); }

// The first bytes of a connection in both directions.
struct Listener::Hello {
    uint64_t magic = 0x31746e6f66697254;  // "Trifont1"
    uint64_t job_key = 0;
    uint64_t group = 0;        // hash of its name and members
    uint32_t generation = 0;   // of the group
    int32_t from = 0, to = 0;  // ranks in the group
    int32_t size = 0;          // of the group
    bool operator==(const Hello&) const = default;
};

// A connection that has come in. When its hello is here it waits for the group that this names.
struct Listener::Visitor {
    Socket socket;
    Hello hello;
    size_t bytes = 0;  // of the hello
    Clock::time_point since = Clock::now();
    bool greeted() const { return bytes == sizeof hello; }
};

Listener::Listener(const std::string& ip)
    : tcp_(listening_at(tcp_address(ip.empty() ? "0.0.0.0" : ip, 0))),
      local_(listening_at(unix_address(""))),
      epoll_(::epoll_create1(EPOLL_CLOEXEC)),
      endpoint_(fmt::format("{} {}", address_of(tcp_).port(), address_of(local_).name())) {
    static_assert(sizeof(Hello) == 40);
    if (!epoll_) socket_fault("epoll_create1", errno);
    watch(tcp_, nullptr);
    watch(local_, nullptr);
}
Listener::~Listener() = default;

// What comes is somebody new, or more of the visitor's hello.
void Listener::watch(const Socket& socket, void* visitor) const {
    epoll_event e{.events = EPOLLIN, .data = {.ptr = visitor}};
    if (::epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, socket.get(), &e) != 0) socket_fault("epoll_ctl", errno);
}

std::shared_ptr<SocketSet> Listener::enlist(int size) {
    auto sockets = std::make_shared<SocketSet>(size);
    const std::lock_guard lock(mutex_);
    std::erase_if(groups_, [](const auto& g) { return g.expired(); });
    groups_.push_back(sockets);
    if (aborted_) sockets->abort();
    return sockets;
}

// Accepts and reads what is there, and wakes everybody when somebody's hello is complete.
void Listener::serve(uint64_t job_key) {
    const std::lock_guard lock(mutex_);
    bool somebody = false;
    std::array<epoll_event, 64> events;
    while (const int n = std::max(0, ::epoll_wait(epoll_.get(), events.data(), events.size(), 0))) {
        for (int i = 0; i < n; ++i) {
            if (void* visitor = events[static_cast<size_t>(i)].data.ptr)
                somebody |= hear(*static_cast<Visitor*>(visitor), job_key);
            else
                welcome(tcp_), welcome(local_);
        }
    }
    visitors_.remove_if([](const Visitor& v) { return !v.socket || (!v.greeted() && Clock::now() - v.since > patience); });
    if (!somebody) return;
    for (const auto& group : groups_) {
        if (const auto sockets = group.lock()) sockets->wake();
    }
}

void Listener::welcome(const Socket& listening) {
    while (Socket s = accept_from(listening)) {
        visitors_.push_back({std::move(s), {}});
        watch(visitors_.back().socket, &visitors_.back());
    }
    if (errno != EAGAIN) socket_fault("cannot accept the connection of another rank", errno);
}

// Reads of the hello what is there, and hangs up when it is none. True: it is complete.
bool Listener::hear(Visitor& v, uint64_t job_key) {
    const ssize_t n = ::recv(v.socket.get(), reinterpret_cast<std::byte*>(&v.hello) + v.bytes, sizeof v.hello - v.bytes, 0);
    if (n < 0 && (errno == EAGAIN || errno == EINTR)) return false;
    v.bytes += static_cast<size_t>(std::max<ssize_t>(n, 0));
    const bool job = v.hello.magic == Hello().magic && v.hello.job_key == job_key;
    if (n <= 0 || (v.greeted() && !job)) {
        v.socket = Socket();
        return false;
    }
    if (v.greeted()) ::epoll_ctl(epoll_.get(), EPOLL_CTL_DEL, v.socket.get(), nullptr);
    return v.greeted();
}

// The connection that is expected, if it is there. What came for older generations of the group is closed.
Socket Listener::take(const Hello& expected) {
    const std::lock_guard lock(mutex_);
    Socket found;
    visitors_.remove_if([&](Visitor& v) {
        if (!v.greeted()) return false;
        if (v.hello == expected) found = std::move(v.socket);
        return !v.socket || (v.hello.group == expected.group && v.hello.generation < expected.generation);
    });
    return found;
}

std::string Listener::host_id() {
    std::string boot;
    std::ifstream("/proc/sys/kernel/random/boot_id") >> boot;
    struct stat network {};
    ::stat("/proc/self/ns/net", &network);
    return fmt::format("{}:{}", boot, network.st_ino);
}

void Listener::abort() noexcept {
    const std::lock_guard lock(mutex_);
    aborted_ = true;
    for (const auto& group : groups_) {
        if (const auto sockets = group.lock()) sockets->abort();
    }
}

// One group on its way.
class Listener::Meeting {
public:
    Meeting(const NetOptions& options, SocketSet& sockets)
        : o_(options), sockets_(sockets), deadline_(after_seconds(options.connect_s)) {}

    Hello hello(int from, int to) const {
        return {.job_key = o_.job_key,
                .group = hash_,
                .generation = static_cast<uint32_t>(o_.generation),
                .from = from,
                .to = to,
                .size = sockets_.size()};
    }

    // A fresh connection always has room for a hello.
    void greet(int p) const {
        const Hello mine = hello(o_.index, p);
        if (::send(sockets_[p], &mine, sizeof mine, MSG_NOSIGNAL) != sizeof mine)
            fail(fmt::format("{} closed its connection", named(peer(p))));
    }

    void call(int p) const {
        const PeerAddress& to = peer(p);
        const size_t space = to.endpoint.find(' ');
        TRIFOLD_ASSERT(space != std::string::npos);
        const bool near = to.host_id == peer(o_.index).host_id;
        const std::string port = to.endpoint.substr(0, space);
        const SocketAddress at = near ? unix_address(to.endpoint.substr(space + 1)) : tcp_address(to.ip, std::stoi(port));
        sockets_.put(p, stream_socket(at.family()));
        for (int error; (error = connect_error(sockets_[p], at)) != 0;) {
            if (error == EAGAIN) {  // the peer's queue is full
                await(-1, 0, std::min(deadline_, Clock::now() + std::chrono::milliseconds(1)));
            } else if (error == EINPROGRESS) {
                await(sockets_[p], POLLOUT, deadline_);
            } else {
                const std::string where = near ? "inside the host" : fmt::format("at {} port {}", to.ip, port);
                fail(fmt::format("{} cannot be reached {} ({}): it has ended, or this network does not lead there", named(to), where,
                                 std::strerror(error)));
            }
            if (Clock::now() >= deadline_) late({p});
        }
        greet(p);
    }

    void hear_answer(int p) const {
        Hello answer;
        for (size_t got = 0; got < sizeof answer;) {
            const ssize_t n = ::recv(sockets_[p], reinterpret_cast<std::byte*>(&answer) + got, sizeof answer - got, 0);
            if (n > 0) {
                got += static_cast<size_t>(n);
            } else if (n < 0 && (errno == EAGAIN || errno == EINTR)) {
                if (!await(sockets_[p], POLLIN, deadline_)) late({p});
            } else {
                fail(fmt::format("{} closed its connection: it has failed, or it is of another job", named(peer(p))));
            }
        }
        if (answer != hello(p, o_.index))
            fail(fmt::format("what answers at the address of {} is of another job or another group", named(peer(p))));
    }

    // For `fd`, abort(), or whoever heard a hello that may be for us. False: the limit has passed.
    bool await(int fd, short events, Clock::time_point limit) const {
        std::array<pollfd, 2> fds{{{sockets_.event(), POLLIN, 0}, {fd, events, 0}}};
        const bool in_time = poll_until(fds, limit);
        if (fds[0].revents != 0) sockets_.asleep();
        if (sockets_.aborted()) fail("aborted");
        return in_time;
    }

    [[noreturn]] void late(const std::vector<int>& missing) const {
        std::vector<std::string> names;
        for (const int p : missing) names.push_back(named(peer(p)));
        fail(fmt::format("{} did not come within {}: look at what happened there, or raise --resilience.start_s", join_words(names),
                         seconds_text(o_.connect_s)));
    }
    Clock::time_point deadline() const { return deadline_; }

private:
    const PeerAddress& peer(int p) const { return o_.members[static_cast<size_t>(p)]; }
    [[noreturn]] void fail(const std::string& why) const {
        throw Problem(Exit::fault, fmt::format("{} could not connect group '{}': {}", named(peer(o_.index)), o_.name,
                                               sockets_.aborted() ? "it was aborted" : why));
    }

    const NetOptions& o_;
    SocketSet& sockets_;
    const Clock::time_point deadline_;
    const uint64_t hash_ = hash_of_group(o_);
};

// Nobody waits in a ring: what a rank sends first needs nobody's help, then it waits for higher ranks' hellos, and last for the
// answers of lower ranks, who are then in the second step or beyond it.
std::shared_ptr<SocketSet> Listener::connect(const NetOptions& options) {
    const int size = static_cast<int>(options.members.size());
    TRIFOLD_ASSERT(options.index >= 0 && options.index < size);
    const auto sockets = enlist(size);
    const Meeting meeting(options, *sockets);
    for (int p = 0; p < options.index; ++p) meeting.call(p);
    while (true) {
        serve(options.job_key);
        std::vector<int> missing;
        for (int p = options.index + 1; p < size; ++p) {
            if ((*sockets)[p] >= 0) continue;
            Socket s = take(meeting.hello(p, options.index));
            if (!s) {
                missing.push_back(p);
                continue;
            }
            sockets->put(p, std::move(s));
            meeting.greet(p);
        }
        if (missing.empty()) break;
        if (!meeting.await(epoll_.get(), POLLIN, meeting.deadline())) meeting.late(missing);
    }
    for (int p = 0; p < options.index; ++p) meeting.hear_answer(p);
    return sockets;
}

}  // namespace trifold
