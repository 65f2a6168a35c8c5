#include "parallel/store.h"

#include <sys/epoll.h>
#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <deque>
#include <memory>
#include <unordered_map>
#include <utility>

namespace trifold {

struct StoreServer::Connection {
    Socket socket;
    MessageCutter cutter;
    std::deque<Message> queue;  // to be sent; `sent` bytes of the first are
    size_t sent = 0;
    int rank = -1;        // -1: not joined yet
    bool known = false;   // has shown the job's key
    bool waits_for_room = false;
    bool leaving = false;  // to be closed when the queue is empty
};

// The thread's own: nothing here is shared.
struct StoreServer::Loop {
    Socket listener, poller;
    Options options;
    std::atomic<int64_t>& received;
    Board board;
    std::unordered_map<int, Connection> connections;  // by descriptor
    std::vector<int> descriptor_of;                   // by rank; -1: none
    bool own_end_open = true;

    Loop(Socket listening, Socket own, const Options& o, std::atomic<int64_t>& count)
        : listener(std::move(listening)),
          poller(::epoll_create1(EPOLL_CLOEXEC)),
          options(o),
          received(count),
          board(o.size, o.start_s, o.data_key),
          descriptor_of(static_cast<size_t>(o.size), -1) {
        watch(listener.get(), EPOLLIN, EPOLL_CTL_ADD);
        add(std::move(own)).known = true;
    }

    void watch(int fd, uint32_t events, int operation) {
        epoll_event event{.events = events, .data = {.fd = fd}};
        const int result = ::epoll_ctl(poller.get(), operation, fd, &event);
        TRIFOLD_ASSERT(result == 0);
    }

    Connection& add(Socket socket) {
        const int fd = socket.get();
        watch(fd, EPOLLIN, EPOLL_CTL_ADD);
        Connection& c = connections[fd];
        c.socket = std::move(socket);
        return c;
    }

    void run() {
        while (own_end_open) turn(board.next_tick());
        leave();
    }

    // Waits for something to do, and does it.
    void turn(SocketClock::time_point until) {
        std::array<epoll_event, 64> events;
        wait_for(poller.get(), POLLIN, until);
        const int ready = ::epoll_wait(poller.get(), events.data(), static_cast<int>(events.size()), 0);
        for (int i = 0; i < ready; ++i) {
            const int fd = events[static_cast<size_t>(i)].data.fd;
            if (fd == listener.get()) {
                accept();
            } else if (const auto c = connections.find(fd); c != connections.end()) {
                if (events[static_cast<size_t>(i)].events & EPOLLOUT) flush(c->second);
                if (events[static_cast<size_t>(i)].events & ~uint32_t{EPOLLOUT}) read(c->second);
            }
        }
        board.tick(SocketClock::now());
        deliver();
        if (listener && board.all_joined()) close_door();
    }

    void accept() {
        while (Socket socket = accept_from(listener)) {
            prepare_connection(socket);
            add(std::move(socket));
        }
        // Out of descriptors: the caller stays in the queue until one is free; no need to spin until then.
        if (errno == EMFILE || errno == ENFILE) std::this_thread::sleep_for(std::chrono::milliseconds(20));
    }

    // Everybody has come: strangers are not heard any more.
    void close_door() {
        listener = Socket();
        std::erase_if(connections, [](const auto& entry) { return entry.second.rank < 0; });
    }

    void read(Connection& c) {
        std::vector<Message> messages;
        bool open = c.cutter.read(c.socket.get(), c.known ? most_bytes_of_message : most_bytes_of_strangers, messages);
        try {
            for (const Message& m : messages) handle(c, m);
        } catch (const BadMessage&) {
            open = false;
        }
        if (!open) close(c);
    }

    void close(Connection& c) {
        const int rank = c.rank;
        connections.erase(c.socket.get());
        if (rank < 0) return;
        descriptor_of[static_cast<size_t>(rank)] = -1;
        if (rank == 0) own_end_open = false;
        board.lost(rank);
    }

    void handle(Connection& c, const Message& m) {
        ++received;
        if (m.verb == Verb::ping) {
            uint64_t key = 0;
            Unpacker{*m.body}(key);
            c.known = c.known || key == options.job_key;
        }
        if (!c.known) throw BadMessage();
        if (m.verb == Verb::ping) {
            const auto now = std::chrono::system_clock::now().time_since_epoch();
            const int64_t ns = std::chrono::duration_cast<std::chrono::nanoseconds>(now).count();
            c.queue.push_back(make_message(Verb::answer, m.id, pack(ns, options.host_id)));
            flush(c);
        } else if (m.verb == Verb::join) {
            join(c, m);
        } else if (c.rank >= 0) {
            board.handle(c.rank, m);
        }
    }

    void join(Connection& c, const Message& m) {
        if (const int rank = board.join(m, local_ip(c.socket)); rank >= 0) {
            c.rank = rank;
            descriptor_of[static_cast<size_t>(rank)] = c.socket.get();
        } else {
            c.queue.push_back(make_message(Verb::news, 0, pack(*board.failure())));
            c.leaving = true;
            flush(c);
        }
    }

    void deliver() {
        for (auto& [rank, message] : board.outgoing()) {
            const int fd = descriptor_of[static_cast<size_t>(rank)];
            if (fd < 0) continue;
            Connection& c = connections.at(fd);
            c.queue.push_back(std::move(message));
            if (!c.waits_for_room) flush(c);
        }
    }

    // Sends what the socket takes. A broken connection is noticed by the next read.
    void flush(Connection& c) {
        while (!c.queue.empty()) {
            const std::string header = header_of(c.queue.front());
            const std::string& body = *c.queue.front().body;
            const ssize_t sent = send_rest(c.socket.get(), header, body, c.sent);
            if (sent < 0 && errno == EINTR) continue;
            if (sent < 0 && errno == EAGAIN) break;
            if (sent < 0) {
                c.queue.clear();
                break;
            }
            c.sent += static_cast<size_t>(sent);
            if (c.sent < header.size() + body.size()) continue;
            c.queue.pop_front();
            c.sent = 0;
        }
        if (c.queue.empty() && c.leaving) ::shutdown(c.socket.get(), SHUT_WR);
        if (c.waits_for_room == !c.queue.empty()) return;
        c.waits_for_room = !c.queue.empty();
        watch(c.socket.get(), c.waits_for_room ? EPOLLIN | EPOLLOUT : EPOLLIN, EPOLL_CTL_MOD);
    }

    // Rank 0 is leaving. After a failure the others get a moment to hear of it and to ask who speaks, those too who are still on their way
    // to the rendezvous; what was answered is sent.
    void leave() {
        const SocketClock::time_point deadline = after_seconds(1);
        const auto busy = [&] {
            const bool asking = board.failure() && !(connections.empty() && board.all_joined());
            return asking || std::ranges::any_of(connections, [](const auto& c) { return !c.second.queue.empty(); });
        };
        while (busy() && SocketClock::now() < deadline) turn(std::min(deadline, board.next_tick()));
    }
};

StoreServer::StoreServer(Socket listener, Socket own, const Options& options)
    : thread_([this, loop = std::make_unique<Loop>(std::move(listener), std::move(own), options, received_)] { loop->run(); }) {}

StoreServer::~StoreServer() { thread_.join(); }

}  // namespace trifold
