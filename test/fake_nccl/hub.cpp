#include "test/fake_nccl/hub.h"

#include <fmt/format.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>

namespace trifold::fake_nccl {
namespace {

// The first operation that is still to be done and fits `wanted`, or null.
template <class Wanted>
Operation* first(std::vector<Operation>& batch, const Wanted& wanted) {
    for (Operation& op : batch)
        if (!op.done && wanted(op)) return &op;
    return nullptr;
}

}  // namespace

// ---------------------------------------------------------------- matching

bool Matcher::join(int rank, int size, const std::string& name) {
    if (members_.empty()) {
        members_.resize(static_cast<size_t>(size));
        name_ = name;
    }
    if (static_cast<size_t>(size) != members_.size() || members_[static_cast<size_t>(rank)].state != State::absent) return false;
    members_[static_cast<size_t>(rank)].state = State::idle;
    return true;
}
void Matcher::issue(int rank, std::vector<Operation> ops) {
    Member& m = members_[static_cast<size_t>(rank)];
    m.state = State::waiting;
    m.batch = std::move(ops);
}
void Matcher::leave(int rank, const std::string& how) {
    Member& m = members_[static_cast<size_t>(rank)];
    if (m.state == State::left) return;
    m.state = State::left;
    m.how = how;
}
bool Matcher::everybody(State state) const {
    return !members_.empty() && std::all_of(members_.begin(), members_.end(), [&](const Member& m) { return m.state == state; });
}
std::string Matcher::whose(size_t rank) const { return fmt::format("rank {} of '{}'", rank, name_); }

// The next collective of every rank: all of them are one operation, or somebody is wrong.
std::string Matcher::match_collectives(bool& moved) {
    std::vector<Operation*> next(members_.size());
    size_t there = members_.size();
    for (size_t r = 0; r < members_.size(); ++r) {
        if (members_[r].state != State::waiting) continue;
        next[r] = first(members_[r].batch, [](const Operation& op) { return op.collective(); });
        if (!next[r]) continue;
        if (there == members_.size()) there = r;
        if (!next[r]->agrees(*next[there]))
            return fmt::format("{} issued {}, but rank {} issued {}", whose(there), describe(*next[there]), r, describe(*next[r]));
    }
    if (next.empty() || std::any_of(next.begin(), next.end(), [](const Operation* op) { return !op; })) return "";
    std::vector<const std::string*> data;
    for (const Operation* op : next) data.push_back(&op->data);
    std::string gathered;
    for (const std::string* part : data) gathered += *part;
    for (size_t r = 0; r < next.size(); ++r) {
        Operation& op = *next[r];
        switch (op.kind) {
            case OpKind::all_gather: op.result = gathered; break;
            case OpKind::reduce_scatter: op.result = reduced(data, r * op.count, op.count, op.type, op.reduction); break;
            case OpKind::all_reduce: op.result = reduced(data, 0, op.count, op.type, op.reduction); break;
            default: op.result = *data[static_cast<size_t>(op.peer)]; break;
        }
        op.done = true;
    }
    moved = true;
    return "";
}

// The next message of each direction between two ranks.
std::string Matcher::match_messages(bool& moved) {
    for (size_t from = 0; from < members_.size(); ++from)
        for (size_t to = 0; to < members_.size(); ++to) {
            if (members_[from].state != State::waiting || members_[to].state != State::waiting) continue;
            Operation* sent = first(members_[from].batch, [&](const Operation& op) { return op.kind == OpKind::send && op.peer == static_cast<int>(to); });
            Operation* wanted = first(members_[to].batch, [&](const Operation& op) { return op.kind == OpKind::receive && op.peer == static_cast<int>(from); });
            if (!sent || !wanted) continue;
            if (sent->type != wanted->type || sent->count != wanted->count)
                return fmt::format("{} issued {}, but rank {} issued {}", whose(from), describe(*sent), to, describe(*wanted));
            wanted->result = sent->data;
            sent->done = wanted->done = moved = true;
        }
    return "";
}

// Nobody moved: who can still come?
std::string Matcher::stuck() const {
    std::string waiting, finalizing, left;
    for (size_t r = 0; r < members_.size(); ++r) {
        const Member& m = members_[r];
        if (m.state == State::absent || m.state == State::idle) return "";
        if (m.state == State::finalizing) finalizing += fmt::format(", rank {} in finalize", r);
        if (m.state == State::left) left += fmt::format(", rank {} {}", r, m.how);
        if (m.state != State::waiting) continue;
        const auto op = std::find_if(m.batch.begin(), m.batch.end(), [](const Operation& o) { return !o.done; });
        if (op == m.batch.end()) return "";  // its results are on their way
        waiting += fmt::format(", rank {} in {}", r, describe(*op));
    }
    waiting += finalizing;
    if (waiting.empty() || (waiting == finalizing && left.empty())) return "";
    return fmt::format("nobody of '{}' can go on: waiting are{}{}", name_, waiting.substr(1), left.empty() ? "" : "; and" + left.substr(1));
}

std::string Matcher::advance() {
    for (bool moved = true; moved;) {
        moved = false;
        for (const auto match : {&Matcher::match_collectives, &Matcher::match_messages})
            if (const std::string sentence = (this->*match)(moved); !sentence.empty()) return sentence;
    }
    return stuck();
}

bool Matcher::take_results(int rank, std::vector<std::string>& results) {
    Member& m = members_[static_cast<size_t>(rank)];
    if (m.state != State::waiting || first(m.batch, [](const Operation&) { return true; })) return false;
    results.clear();
    for (Operation& op : m.batch) results.push_back(std::move(op.result));
    m.batch.clear();
    m.state = State::idle;
    return true;
}

// ---------------------------------------------------------------- the thread

Hub::Hub(std::string address) : listener_(listen_at(address)), stop_(::eventfd(0, EFD_CLOEXEC)), thread_([this] { run(); }) {}
Hub::~Hub() {
    const uint64_t one = 1;
    (void)!::write(stop_, &one, sizeof one);
    thread_.join();
    ::close(stop_);
    ::close(listener_);
}

void Hub::run() {
    for (;;) {
        std::vector<pollfd> fds{{stop_, POLLIN, 0}, {listener_, POLLIN, 0}};
        for (const Peer& p : peers_) fds.push_back({p.wire.fd(), POLLIN, 0});
        if (::poll(fds.data(), fds.size(), -1) < 0) continue;
        if (fds[0].revents) return;
        for (size_t i = 0; i < peers_.size(); ++i) {
            if (!fds[i + 2].revents) continue;
            Peer& peer = peers_[i];
            const bool open = peer.wire.pump();
            for (Frame frame; peer.wire.take(frame);) handle(peer, frame);
            if (open) continue;
            peer.wire.close();
            if (peer.rank >= 0) matcher_.leave(peer.rank, "is gone");
        }
        if (fds[1].revents) peers_.push_back({Wire(::accept4(listener_, nullptr, nullptr, SOCK_CLOEXEC)), -1});
        answer();
        std::erase_if(peers_, [](const Peer& p) { return p.wire.fd() < 0; });
    }
}

void Hub::handle(Peer& peer, Frame& frame) {
    switch (frame.kind) {
        case Message::hello: {
            const int rank = static_cast<int>(take_number(frame.body)), size = static_cast<int>(take_number(frame.body));
            const std::string name = take_text(frame.body);
            if (matcher_.join(rank, size, name))
                peer.rank = rank;
            else
                peer.wire.put(Message::error, fmt::format("rank {} of {} of '{}' came to a unique id that others use with {} ranks, or that this rank has used before", rank, size, name,
                                                          matcher_.members().size()));
            return;
        }
        case Message::batch: return matcher_.issue(peer.rank, decode_batch(std::move(frame.body)));
        case Message::finalize: return matcher_.finalize(peer.rank);
        case Message::leave: return matcher_.leave(peer.rank, frame.body);
        default: return;
    }
}

void Hub::tell_all(const std::string& sentence) {
    failed_ = true;
    for (Peer& p : peers_)
        if (p.rank >= 0 && matcher_.members()[static_cast<size_t>(p.rank)].state != Matcher::State::left) p.wire.put(Message::error, sentence);
}

void Hub::answer() {
    if (failed_ || finalized_) return;
    using State = Matcher::State;
    if (!started_ && matcher_.everybody(State::idle)) {
        started_ = true;
        for (Peer& p : peers_) p.wire.put(Message::ready);
    }
    if (const std::string sentence = matcher_.advance(); !sentence.empty()) return tell_all(sentence);
    for (Peer& p : peers_) {
        std::vector<std::string> results;
        if (p.rank < 0 || !matcher_.take_results(p.rank, results)) continue;
        std::string body;
        for (const std::string& r : results) put_text(body, r);
        p.wire.put(Message::done, body);
    }
    if (!finalized_ && matcher_.everybody(State::finalizing)) {
        finalized_ = true;
        for (Peer& p : peers_) p.wire.put(Message::finalized);
    }
}

}  // namespace trifold::fake_nccl
