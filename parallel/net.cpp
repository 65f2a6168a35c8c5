// parallel/net.cpp   Messages over the stream sockets of one group.
//
// On the wire   a header of 32 bytes, then the body. A header with a reason other than `message` is the last thing a peer sends.
// Sending       one message at a time and peer, in order; at most a MiB per system call, in turn over the peers_.
// Receiving     the header decides the place: the first posted receive with its tag; else, when another receive waits behind it,
//               memory of its own ("early"); else it stays where it is and the rest of that stream with it ("stalled").
// Failing       sockets are shut down at once, so that everybody learns of it within milliseconds. Who was the first is said in a
//               last header where there is time for it.
#include "parallel/net.h"

#include <fmt/format.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <deque>
#include <list>

#include "base/error.h"
#include "base/text.h"

namespace trifold {
namespace {

using Clock = SocketClock;

constexpr int64_t call_bytes = 1 << 20;  // most that one system call moves, so that all peers get their turn
constexpr int64_t header_bytes = 32;
constexpr uint32_t magic = 0x5446726e;

enum class Reason : uint32_t { message, size_mismatch, culprit };

}  // namespace

struct Net::Header {
    uint32_t magic_word = magic, tag = 0;
    Reason reason = Reason::message;
    int32_t who = -1;      // culprit
    int64_t bytes = 0;     // of the body; size_mismatch: of the message that was too long or too short
    int64_t expected = 0;  // size_mismatch
};

struct Net::Receive {
    uint32_t tag;
    std::byte* data;
    int64_t bytes;
    Pending* pending;
};

struct Net::Peer {
    struct Send {
        uint32_t tag;
        const std::byte* data;
        int64_t bytes;
        Pending* pending;
    };
    struct Early {
        uint32_t tag;
        std::vector<std::byte> data;
    };
    std::deque<Send> sends;       // the first one is on its way
    std::list<Receive> receives;  // in the order of posting
    std::list<Early> early;       // in the order of arrival
    Header out, in;
    int64_t out_done = 0, in_done = 0;  // bytes of the present message, header included
    std::byte* body = nullptr;          // where the present message goes; null: not known
    bool placed = false, is_early = false;
    std::list<Receive>::iterator receive;  // where it is placed and not early

    bool busy() const { return !sends.empty() || !receives.empty(); }
    bool stalled() const { return in_done == header_bytes && !placed; }
};

Net::Net(Listener& listener, const NetOptions& options) : o_(options), sockets_(listener.connect(options)), peers_(options.members.size()) {
    static_assert(sizeof(Header) == header_bytes);
}
Net::~Net() = default;

Net::Peer& Net::peer(int p) { return peers_[static_cast<size_t>(p)]; }

std::string Net::where() const {
    return number_ == 0 ? fmt::format("group '{}'", o_.name) : fmt::format("group '{}' ({} #{})", o_.name, what_, number_);
}

// One system call for the message that is on its way to p.
ssize_t Net::send_some(int p) {
    Peer& q = peer(p);
    const Peer::Send& s = q.sends.front();
    if (q.out_done == 0) q.out = {.tag = s.tag, .bytes = s.bytes};
    const int64_t bytes = std::min(s.bytes, std::max<int64_t>(0, q.out_done - header_bytes) + call_bytes);  // the body's, this call included
    const ssize_t n = send_rest((*sockets_)[p], {reinterpret_cast<const char*>(&q.out), sizeof q.out},
                                {reinterpret_cast<const char*>(s.data), static_cast<size_t>(bytes)}, static_cast<size_t>(q.out_done));
    if (n > 0) q.out_done += n;
    return n;
}

bool Net::push(int p) {
    const ssize_t n = send_some(p);
    if (n < 0 && (errno == EAGAIN || errno == EINTR)) return false;
    if (n < 0) {
        const int error = errno;
        while (pull(p)) {  // it may have said why
        }
        lost(p, error);
    }
    Peer& q = peer(p);
    if (q.out_done == header_bytes + q.sends.front().bytes) {
        --q.sends.front().pending->left;
        q.sends.pop_front();
        q.out_done = 0;
    }
    return true;
}

// At most a header and one call for its body, of what p sends.
bool Net::pull(int p) {
    Peer& q = peer(p);
    bool moved = false;
    const auto read = [&](std::byte* to, int64_t bytes) {
        const ssize_t n = ::recv((*sockets_)[p], to, static_cast<size_t>(bytes), 0);
        if (n == 0) lost(p, 0);
        if (n < 0 && errno != EAGAIN && errno != EINTR) lost(p, errno);
        if (n > 0) q.in_done += n, moved = true;
        return n > 0;
    };
    if (q.in_done < header_bytes &&
        !(read(reinterpret_cast<std::byte*>(&q.in) + q.in_done, header_bytes - q.in_done) && q.in_done == header_bytes))
        return moved;
    if (!q.placed && !place(p)) return moved;
    const int64_t done = q.in_done - header_bytes, left = q.in.bytes - done;
    if (left > 0 && !read(q.body + done, std::min(call_bytes, left))) return moved;
    if (q.in_done == header_bytes + q.in.bytes) arrived(p);
    return true;
}

// False: nobody has asked for anything that p sends, so it stays in the kernel.
bool Net::place(int p) {
    Peer& q = peer(p);
    if (q.in.reason != Reason::message || q.in.magic_word != magic || q.in.bytes < 0) told(p);
    const auto same_tag = [&](const auto& r) { return r.tag == q.in.tag; };
    q.receive = std::find_if(q.receives.begin(), q.receives.end(), same_tag);
    q.is_early = q.receive == q.receives.end();
    if (q.is_early) {
        if (q.receives.empty()) return false;
        q.early.push_back({q.in.tag, std::vector<std::byte>(static_cast<size_t>(q.in.bytes))});
        q.body = q.early.back().data.data();
    } else {
        check_size(p, *q.receive, q.in.bytes);
        q.body = q.receive->data;
    }
    q.placed = true;
    return true;
}

void Net::arrived(int p) {
    Peer& q = peer(p);
    if (q.is_early) {  // its receive may have been posted meanwhile
        q.receive = std::find_if(q.receives.begin(), q.receives.end(), [&](const Receive& r) { return r.tag == q.in.tag; });
        if (q.receive != q.receives.end()) {
            check_size(p, *q.receive, q.in.bytes);
            if (q.in.bytes > 0) std::memcpy(q.receive->data, q.body, static_cast<size_t>(q.in.bytes));
            q.early.pop_back();
        }
    }
    if (q.receive != q.receives.end()) {
        --q.receive->pending->left;
        q.receives.erase(q.receive);
    }
    q.in_done = 0;
    q.placed = false;
}

bool Net::progress() {
    check_alive();
    bool moved = false;
    for (int i = 1; i < size(); ++i) {
        const int p = (index() + i) % size();
        if (!peer(p).sends.empty()) moved |= push(p);
        if (!peer(p).receives.empty()) moved |= pull(p);
    }
    return moved;
}

// Until a peer that has something to do with us can be served, or the deadline. Peers that have not may be gone already.
void Net::sleep(Clock::time_point deadline) {
    fds_.assign(1, {sockets_->event(), POLLIN, 0});
    for (int p = 0; p < size(); ++p) {  // those that have nothing to do with us are not polled
        const Peer& q = peer(p);
        const int in = q.stalled() ? POLLRDHUP : POLLIN, out = q.sends.empty() ? 0 : POLLOUT;
        fds_.push_back({q.busy() ? (*sockets_)[p] : -1, static_cast<short>(in | out), 0});
    }
    poll_until(fds_, deadline);
    if (fds_[0].revents != 0) sockets_->asleep();
    check_alive();
    for (int p = 0; p < size(); ++p) {
        const Peer& q = peer(p);
        if (!q.receives.empty() || (fds_[static_cast<size_t>(1 + p)].revents & ~POLLOUT) == 0) continue;  // progress() does the rest
        if (q.stalled()) lost(p, 0);
        pull(p);  // why it wants nothing more, or the beginning of what we have not asked for yet
    }
}

void Net::check_alive() {
    if (!failure_.empty()) throw Problem(Exit::fault, fmt::format("group '{}' has failed before: {}", o_.name, failure_));
    if (sockets_->aborted()) fail("");
}

void Net::check_size(int p, const Receive& r, int64_t bytes) {
    if (bytes == r.bytes) return;
    const int64_t expected = r.bytes;
    farewell({p}, {.reason = Reason::size_mismatch, .bytes = bytes, .expected = expected}, 1);
    fail(fmt::format("{}: {} sent {} bytes where {} expects {}: the ranks do not make the same calls", where(), name(p),
                     with_commas(bytes), name(index()), with_commas(expected)));
}

// Finishes the message that is on its way to p and says the last words. False: there is no room for them at the moment.
bool Net::said(int p, const Header& last) {
    const Peer& q = peer(p);
    while (true) {
        const bool between = q.out_done == 0 || q.out_done == header_bytes + q.sends.front().bytes;
        const ssize_t n = between ? ::send((*sockets_)[p], &last, sizeof last, MSG_NOSIGNAL) : send_some(p);
        if (n < 0 && errno == EAGAIN) return false;
        if (n < 0 || between) break;
    }
    ::shutdown((*sockets_)[p], SHUT_WR);
    return true;
}

// Tells these peers why, and waits until they have heard it, since closing a socket with unread bytes takes back what is on its
// way. They close their ends when they have.
void Net::farewell(std::vector<int> to, const Header& last, double limit_s) {
    const auto limit = after_seconds(limit_s);
    std::vector<bool> silent(peers_.size(), true);
    std::vector<std::byte> unread(64 << 10);
    do {
        sockets_->asleep();
        fds_.assign(1, {sockets_->event(), POLLIN, 0});
        std::erase_if(to, [&](int p) {
            if (silent[static_cast<size_t>(p)] && said(p, last)) silent[static_cast<size_t>(p)] = false;
            ssize_t n;
            while ((n = ::recv((*sockets_)[p], unread.data(), unread.size(), 0)) > 0) {
            }
            if (n == 0 || errno != EAGAIN) return true;
            fds_.push_back({(*sockets_)[p], static_cast<short>(POLLIN | (silent[static_cast<size_t>(p)] ? POLLOUT : 0)), 0});
            return false;
        });
    } while (!to.empty() && !sockets_->aborted() && poll_until(fds_, limit));
}

// What arrived from p is no message.
void Net::told(int p) {
    const Header h = peer(p).in;
    if (h.magic_word == magic && h.reason == Reason::size_mismatch)
        fail(fmt::format("{}: {} expects {} bytes where {} sent {}: the ranks do not make the same calls", where(), name(p),
                         with_commas(h.expected), name(index()), with_commas(h.bytes)));
    if (h.magic_word == magic && h.reason == Reason::culprit && h.who >= 0 && h.who < size() && h.who != index()) {
        accuse(h.who);
        fail(fmt::format("{}: {} is gone or silent, says {}: look at its log first", where(), name(h.who), name(p)));
    }
    if (h.magic_word == magic && h.reason == Reason::culprit) lost(p, 0);
    fail(fmt::format("{}: what {} sent is no message; that is a bug, or damage on the way", where(), name(p)));
}

// Passes it on, so that everybody names the one who was first and not the one whose end he happened to see.
void Net::accuse(int culprit) {
    std::vector<int> others;
    for (int p = 0; p < size(); ++p) {
        if (p != culprit && p != index()) others.push_back(p);
    }
    if (!sockets_->aborted()) farewell(others, {.reason = Reason::culprit, .who = culprit}, 0.2);
}

// More than one may be gone: all are named.
void Net::lost(int p, int error) {
    std::vector<std::string> gone{name(p)};
    for (int r = 0; r < size() && !sockets_->aborted(); ++r) {
        pollfd fd{(*sockets_)[r], POLLRDHUP, 0};
        if (r != p && r != index() && ::poll(&fd, 1, 0) > 0) gone.push_back(name(r));
    }
    accuse(p);
    const std::string reason = error == 0 || error == EPIPE ? "" : fmt::format(" ({})", std::strerror(error));
    fail(fmt::format("{} closed {} of {}{}: look at {} first", join_words(gone),
                     gone.size() == 1 ? "its connection" : "their connections", where(), reason,
                     gone.size() == 1 ? "its log" : "their logs"));
}

void Net::stalled(double stall_s) {
    std::vector<std::string> waits;
    int awaited = -1;
    for (int p = 0; p < size(); ++p) {
        const Peer& q = peer(p);
        if (q.busy()) awaited = p;
        if (!q.receives.empty()) {
            const bool begun = q.placed && !q.is_early && q.receive == q.receives.begin();
            waits.push_back(fmt::format("{} to send ({} of {} bytes are here)", name(p),
                                        with_commas(begun ? q.in_done - header_bytes : 0),
                                        with_commas(q.receives.front().bytes)));
        } else if (!q.sends.empty()) {
            waits.push_back(fmt::format("{} to receive ({} of {} bytes are sent)", name(p),
                                        with_commas(std::max<int64_t>(0, q.out_done - header_bytes)),
                                        with_commas(q.sends.front().bytes)));
        }
    }
    if (waits.size() == 1) accuse(awaited);
    fail(fmt::format("{}: nothing has moved for {} while {} waits for {}: look at the log there first", where(), seconds_text(stall_s),
                     name(index()), join_words(waits)));
}

void Net::fail(const std::string& sentence) {
    failure_ = sockets_->aborted() ? fmt::format("{}: {} was aborted", name(index()), where()) : sentence;
    sockets_->abort();
    for (Peer& q : peers_) q = Peer();  // what they point to may go now
    throw Problem(Exit::fault, failure_);
}

void Net::send(int peer, uint32_t tag, const void* data, int64_t bytes, Pending& pending) {
    TRIFOLD_ASSERT(peer >= 0 && peer < size() && peer != index() && bytes >= 0);
    ++pending.left;
    this->peer(peer).sends.push_back({tag, static_cast<const std::byte*>(data), bytes, &pending});
}

void Net::receive(int peer, uint32_t tag, void* data, int64_t bytes, Pending& pending) {
    TRIFOLD_ASSERT(peer >= 0 && peer < size() && peer != index() && bytes >= 0);
    Peer& q = this->peer(peer);
    const Receive r{tag, static_cast<std::byte*>(data), bytes, &pending};
    const bool arriving = q.placed && q.is_early;  // the last one
    const auto end = arriving ? std::prev(q.early.end()) : q.early.end();
    const auto early = std::find_if(q.early.begin(), end, [&](const Peer::Early& e) { return e.tag == tag; });
    ++pending.left;
    if (early == end) {
        q.receives.push_back(r);
        return;
    }
    check_size(peer, r, static_cast<int64_t>(early->data.size()));
    if (bytes > 0) std::memcpy(data, early->data.data(), early->data.size());
    q.early.erase(early);
    --pending.left;
}

void Net::wait(const Pending& pending, double stall_s) {
    check_alive();
    auto deadline = after_seconds(stall_s);
    while (pending.left > 0) {
        if (progress()) {
            deadline = after_seconds(stall_s);
        } else if (Clock::now() >= deadline) {
            stalled(stall_s);
        } else {
            sleep(deadline);
        }
    }
}

}  // namespace trifold
