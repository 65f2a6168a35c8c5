// parallel/listener.cpp   Accepting, greeting and connecting.
//
// The listening sockets and the connections whose hello is not complete yet are in one epoll set, which every connecting thread
// polls beside an event of its own: whoever wakes up first serves all of them, parks what arrived, and wakes the others.
#include "parallel/listener.h"

#include <fmt/format.h>
#include <sys/epoll.h>
#include <sys/stat.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <fstream>
#include <list>

#include "base/error.h"
#include "base/text.h"

namespace trifold {
namespace {

using Clock = SocketClock;

constexpr auto patience = std::chrono::seconds(10);  // for the hello of a stranger

// The first bytes of a connection in both directions.
struct Hello {
    uint64_t magic = 0x31746e6f66697254;  // "Trifont1"
    uint64_t job_key = 0;
    uint64_t group = 0;        // hash of its name and members
    uint32_t generation = 0;   // of the group
    int32_t from = 0, to = 0;  // ranks in the group
    int32_t size = 0;          // of the group
    bool operator==(const Hello&) const = default;
};
static_assert(sizeof(Hello) == 40);

// FNV-1a over the name and the global ranks: ranks that disagree about a group do not meet.
uint64_t hash_of_group(const NetOptions& o) {
    uint64_t hash = 0xcbf29ce484222325;
    const auto add = [&](const std::string& text) {
        for (const char c : text) hash = (hash ^ static_cast<uint8_t>(c)) * 0x100000001b3;
    };
    add(o.name);
    for (const PeerAddress& m : o.members) add(fmt::format("/{}", m.rank));
    return hash;
}

}  // namespace

std::string named(const PeerAddress& peer) { return fmt::format("rank {} on {}", peer.rank, peer.host); }

struct Listener::State {
    struct Arriving {
        Socket socket;
        Hello hello;
        size_t bytes = 0;  // of the hello
        Clock::time_point since;
    };
    struct Parked {
        Socket socket;
        Hello hello;
    };

    Socket tcp, local, epoll{::epoll_create1(EPOLL_CLOEXEC)};
    std::string endpoint;
    std::mutex mutex;  // guards what follows
    std::list<Arriving> arriving;
    std::list<Parked> parked;
    std::vector<std::weak_ptr<SocketSet>> groups;
    bool aborted = false;

    explicit State(const std::string& ip)
        : tcp(listening_socket(tcp_address(ip.empty() ? "0.0.0.0" : ip, "0"))), local(listening_socket(unix_address(""))) {
        if (!epoll) socket_fault("epoll_create1", errno);
        watch(tcp, &tcp);
        watch(local, &local);
        endpoint = fmt::format("{} {}", port_of(tcp), port_of(local));
    }

    void watch(const Socket& socket, void* what) const {
        epoll_event e{.events = EPOLLIN, .data = {.ptr = what}};
        if (::epoll_ctl(epoll.get(), EPOLL_CTL_ADD, socket.get(), &e) != 0) socket_fault("epoll_ctl", errno);
    }
    std::shared_ptr<SocketSet> enlist(int size);
    void serve(uint64_t job_key);
    void welcome(const Socket& listening);
    bool greeted(Arriving& a, uint64_t job_key);
    Socket take(const Hello& expected);
};

std::shared_ptr<SocketSet> Listener::State::enlist(int size) {
    auto sockets = std::make_shared<SocketSet>(size);
    const std::lock_guard lock(mutex);
    std::erase_if(groups, [](const auto& g) { return g.expired(); });
    groups.push_back(sockets);
    if (aborted) sockets->abort();
    return sockets;
}

// Accepts and reads what is there, and wakes everybody when something could be parked.
void Listener::State::serve(uint64_t job_key) {
    const std::lock_guard lock(mutex);
    const size_t before = parked.size();
    std::array<epoll_event, 64> events;
    while (const int n = std::max(0, ::epoll_wait(epoll.get(), events.data(), events.size(), 0))) {
        for (int i = 0; i < n; ++i) {
            void* what = events[static_cast<size_t>(i)].data.ptr;
            if (what == &tcp || what == &local) {
                welcome(*static_cast<Socket*>(what));
            } else if (greeted(*static_cast<Arriving*>(what), job_key)) {
                arriving.remove_if([&](const Arriving& a) { return &a == what; });
            }
        }
    }
    arriving.remove_if([](const Arriving& a) { return Clock::now() - a.since > patience; });
    if (parked.size() == before) return;
    for (const auto& group : groups) {
        if (const auto sockets = group.lock()) sockets->wake();
    }
}

void Listener::State::welcome(const Socket& listening) {
    while (Socket s = accept_from(listening)) {
        arriving.push_back({std::move(s), {}, 0, Clock::now()});
        watch(arriving.back().socket, &arriving.back());
    }
}

// Reads of the hello what is there. True: this arrival is over, parked or closed.
bool Listener::State::greeted(Arriving& a, uint64_t job_key) {
    const ssize_t n = ::recv(a.socket.get(), reinterpret_cast<std::byte*>(&a.hello) + a.bytes, sizeof a.hello - a.bytes, 0);
    if (n < 0 && (errno == EAGAIN || errno == EINTR)) return false;
    if (n <= 0) return true;
    a.bytes += static_cast<size_t>(n);
    if (a.bytes < sizeof a.hello) return false;
    if (a.hello.magic == Hello().magic && a.hello.job_key == job_key) {
        ::epoll_ctl(epoll.get(), EPOLL_CTL_DEL, a.socket.get(), nullptr);
        parked.push_back({std::move(a.socket), a.hello});
    }
    return true;
}

// The connection that is expected, if it is there. What came for older generations of the group is closed.
Socket Listener::State::take(const Hello& expected) {
    const std::lock_guard lock(mutex);
    Socket found;
    parked.remove_if([&](Parked& p) {
        if (p.hello == expected) found = std::move(p.socket);
        return !p.socket || (p.hello.group == expected.group && p.hello.generation < expected.generation);
    });
    return found;
}

Listener::Listener(const std::string& ip) : state_(std::make_unique<State>(ip)) {}
Listener::~Listener() = default;

const std::string& Listener::endpoint() const { return state_->endpoint; }

std::string Listener::host_id() {
    std::string boot;
    std::ifstream("/proc/sys/kernel/random/boot_id") >> boot;
    struct stat network {};
    ::stat("/proc/self/ns/net", &network);
    return fmt::format("{}:{}", boot, network.st_ino);
}

void Listener::abort() noexcept {
    const std::lock_guard lock(state_->mutex);
    state_->aborted = true;
    for (const auto& group : state_->groups) {
        if (const auto sockets = group.lock()) sockets->abort();
    }
}

namespace {

// One group on its way.
class Meeting {
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
        const SocketAddress at = near ? unix_address(to.endpoint.substr(space + 1)) : tcp_address(to.ip, port);
        const auto unreachable = [&](int error) {
            const std::string where = near ? "inside the host" : fmt::format("at {} port {}", to.ip, port);
            fail(fmt::format("{} cannot be reached {} ({}): it has ended, or this network does not lead there", named(to), where,
                             std::strerror(error)));
        };
        sockets_.put(p, stream_socket(at.family()));
        while (::connect(sockets_[p], at.get(), at.bytes) != 0 && errno != EISCONN) {
            if (errno == EAGAIN) {  // the peer's queue is full
                await(-1, 0, std::min(deadline_, Clock::now() + std::chrono::milliseconds(1)));
            } else if (errno == EINPROGRESS || errno == EALREADY) {
                await(sockets_[p], POLLOUT, deadline_);
                int error = 0;
                socklen_t bytes = sizeof error;
                ::getsockopt(sockets_[p], SOL_SOCKET, SO_ERROR, &error, &bytes);
                if (error != 0) unreachable(error);
            } else if (errno != EINTR) {
                unreachable(errno);
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

    // For `fd`, abort(), or whoever parked something for us. False: the limit has passed.
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
        fail(fmt::format("{} did not come within {} s: look at what happened there, or raise --resilience.start_s", join_words(names),
                         o_.connect_s));
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

}  // namespace

// Nobody waits in a ring: what a rank sends first needs nobody's help, then it waits for higher ranks' hellos, and last for the
// answers of lower ranks, who are then in the second step or beyond it.
std::shared_ptr<SocketSet> Listener::connect(const NetOptions& options) {
    const int size = static_cast<int>(options.members.size());
    TRIFOLD_ASSERT(options.index >= 0 && options.index < size);
    const auto sockets = state_->enlist(size);
    const Meeting meeting(options, *sockets);
    for (int p = 0; p < options.index; ++p) meeting.call(p);
    while (true) {
        state_->serve(options.job_key);
        std::vector<int> missing;
        for (int p = options.index + 1; p < size; ++p) {
            if ((*sockets)[p] >= 0) continue;
            Socket s = state_->take(meeting.hello(p, options.index));
            if (!s) {
                missing.push_back(p);
                continue;
            }
            sockets->put(p, std::move(s));
            meeting.greet(p);
        }
        if (missing.empty()) break;
        if (!meeting.await(state_->epoll.get(), POLLIN, meeting.deadline())) meeting.late(missing);
    }
    for (int p = 0; p < options.index; ++p) meeting.hear_answer(p);
    return sockets;
}

}  // namespace trifold
