#include "parallel/store.h"

#include <fmt/format.h>
#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <utility>

#include "base/error.h"

namespace trifold {

// ---- connecting

namespace {

struct ClockReading {
    int64_t trip_ns = 0, offset_ns = 0;
    std::string host_id;
};

// One reading of the store's clock. The answer was written somewhere between two readings of ours; taking the middle errs by at most half
// the round trip. Empty: no answer.
std::optional<ClockReading> ping(StoreLink& link, uint64_t job_key, SocketClock::time_point deadline) {
    const auto nanoseconds = [](auto t) { return std::chrono::duration_cast<std::chrono::nanoseconds>(t).count(); };
    const Message question = make_message(Verb::ping, 0, pack(job_key));
    const auto before = std::chrono::system_clock::now();
    if (!send_all(link.socket.get(), header_of(question) + *question.body, deadline)) return {};
    ++link.sent;
    MessageCutter cutter;
    std::vector<Message> answers;
    while (answers.empty()) {
        if (!wait_for(link.socket.get(), POLLIN, deadline) || !cutter.read(link.socket.get(), most_bytes_of_strangers, answers)) return {};
    }
    const auto after = std::chrono::system_clock::now();
    if (answers.front().verb != Verb::answer) return {};
    try {
        int64_t stores_ns = 0;
        ClockReading r{.trip_ns = std::max<int64_t>(nanoseconds(after - before), 0)};
        Unpacker{*answers.front().body}(stores_ns, r.host_id);
        r.offset_ns = stores_ns - nanoseconds(before.time_since_epoch()) - r.trip_ns / 2;
        return r;
    } catch (const BadMessage&) {
        return {};
    }
}

constexpr int clock_pings = 7;

// False: something else answers than the store of this job. Hosts have clocks of their own: the shortest of some round trips tells
// the difference best.
bool greet(StoreLink& link, uint64_t job_key, const std::string& host_id, SocketClock::time_point deadline) {
    std::optional<ClockReading> best = ping(link, job_key, std::min(deadline, after_seconds(10)));
    if (!best) return false;
    for (int i = 0; best->host_id != host_id && i < clock_pings; ++i) {
        const std::optional<ClockReading> next = ping(link, job_key, deadline);
        if (!next) break;  // the rendezvous will say that it is gone
        if (next->trip_ns < best->trip_ns) best = next;
    }
    link.clock_offset_ns = best->host_id == host_id ? 0 : best->offset_ns;
    return true;
}

}  // namespace

StoreLink connect_to_store(const std::vector<HostPort>& addresses, uint64_t job_key, const std::string& host_id, double start_s) {
    const SocketClock::time_point deadline = after_seconds(start_s);
    std::string why, tried;
    bool stranger = false;
    for (const HostPort& a : addresses) tried += (tried.empty() ? "" : ", ") + a.text();
    for (double pause_s = 0.01;; pause_s = std::min(2 * pause_s, 0.5)) {
        for (const HostPort& address : addresses) {
            StoreLink link;
            link.socket = connect_to(tcp_address(address.host, address.port), std::min(deadline, after_seconds(3)), why);
            if (!link.socket) continue;
            if (greet(link, job_key, host_id, deadline)) return link;
            stranger = true;
            why = "what answers there is not the store of this job";
        }
        if (SocketClock::now() >= deadline) break;
        std::this_thread::sleep_until(std::min(deadline, after_seconds(pause_s)));
    }
    const std::string sentence = fmt::format("rank 0's store at {} could not be reached within {} ({}): did rank 0 start, and may this host connect there?", tried,
                                             seconds_text(start_s), why);
    if (stranger) throw StrangerProblem(Exit::usage, sentence);
    throw Problem(Exit::usage, sentence);
}

std::pair<Socket, StoreLink> link_inside_process() {
    int ends[2];
    const int result = ::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, ends);
    TRIFOLD_ASSERT(result == 0);
    return {Socket(ends[0]), StoreLink{.socket = Socket(ends[1])}};
}

// ---- client

namespace {

constexpr double send_s = 60;     // rank 0's node takes nothing for so long: it is gone
constexpr double verdict_s = 10;  // for the store to say who speaks

}  // namespace

StoreClient::StoreClient(StoreLink link, int rank, std::function<void()> on_failure)
    : rank_(rank), socket_(std::move(link.socket)), on_failure_(std::move(on_failure)), sent_(link.sent), reader_([this] { read(); }) {}

StoreClient::~StoreClient() {
    bool say_goodbye;
    {
        const std::lock_guard lock(mutex_);
        say_goodbye = failure_ && !leaving_;  // who leaves because of a failure has not died
        leaving_ = true;
    }
    if (say_goodbye) send(make_message(Verb::goodbye, 0, pack(0.0)), after_seconds(1));
    ::shutdown(socket_.get(), SHUT_RDWR);
    reader_.join();
}

void StoreClient::send(const Message& message, SocketClock::time_point deadline) {
    const std::lock_guard lock(sending_);
    if (send_all(socket_.get(), header_of(message), deadline) && send_all(socket_.get(), *message.body, deadline)) {
        ++sent_;
    } else {
        ::shutdown(socket_.get(), SHUT_RDWR);  // half a message cannot be followed by another; the reader sees the end
    }
}

void StoreClient::tell(Verb verb, std::string body) {
    if (const auto f = failure()) throw Problem(f->code, f->sentence);
    send(make_message(verb, 0, std::move(body)), after_seconds(send_s));
}

std::optional<Message> StoreClient::await(Verb verb, std::string body, SocketClock::time_point deadline, bool survives_failure) {
    std::unique_lock lock(mutex_);
    const uint64_t id = ++last_id_;
    const auto over = [&] { return closed_ || (failure_ && !survives_failure); };
    if (over()) return {};
    std::optional<Message>& waiting = answers_[id];
    lock.unlock();
    send(make_message(verb, id, std::move(body)), std::min(deadline, after_seconds(send_s)));
    lock.lock();
    const bool ended = changed_.wait_until(lock, deadline, [&] { return waiting || over(); });
    std::optional<Message> answer;
    answer.swap(waiting);
    answers_.erase(id);
    lock.unlock();
    if (!ended && verb == Verb::take) send(make_message(Verb::cancel, id, ""), after_seconds(send_s));
    return answer;
}

std::string StoreClient::ask(Verb verb, std::string body, SocketClock::time_point deadline, const std::string& late) {
    const std::optional<Message> answer = await(verb, std::move(body), deadline, false);
    if (answer && answer->verb == Verb::answer) return *answer->body;
    if (const auto f = answer ? std::optional(unpack_failure(*answer->body)) : failure()) throw Problem(f->code, f->sentence);
    throw Problem(Exit::fault, late);
}

bool StoreClient::fail(Exit code, const std::string& sentence) {
    const Failure own{code, sentence, rank_, 1};
    const std::optional<Message> answer = await(Verb::fail, pack(own), after_seconds(verdict_s), true);
    if (answer) {
        const Failure verdict = unpack_failure(*answer->body);
        failed(verdict);
        return verdict.speaker == rank_;
    }
    // Nobody can be asked. Who speaks may have been told before; else rank 0 is gone too, and the next one speaks for it.
    const auto known = failure();
    if (!known) failed(own);
    if (known && known->speaker >= 0) return known->speaker == rank_;
    return rank_ == (known && known->rank == 1 ? 2 : 1);
}

void StoreClient::goodbye(double seconds) {
    {
        const std::lock_guard lock(mutex_);
        if (std::exchange(leaving_, true)) return;
    }
    ask(Verb::goodbye, pack(seconds), after_seconds(seconds + send_s),
        "rank 0 does not answer at the end of the job");
}

std::optional<Failure> StoreClient::failure() const {
    const std::lock_guard lock(mutex_);
    return failure_;
}

void StoreClient::read() {
    MessageCutter cutter;
    for (bool open = true; open;) {
        wait_for(socket_.get(), POLLIN, SocketClock::time_point::max());
        std::vector<Message> messages;
        open = cutter.read(socket_.get(), most_bytes_of_message, messages);
        for (const Message& m : messages) arrived(m);
    }
    bool orphaned;
    {
        const std::lock_guard lock(mutex_);
        closed_ = true;
        orphaned = !leaving_ && !failure_;
    }
    if (orphaned) failed({Exit::fault, "rank 0, which keeps the store of the job, ended without a word: look at its output and at the kernel's log on its host", 0, 1});
    changed_.notify_all();
}

void StoreClient::arrived(const Message& message) {
    if (message.verb == Verb::news) return failed(unpack_failure(*message.body));
    const std::lock_guard lock(mutex_);
    if (const auto waiting = answers_.find(message.id); waiting != answers_.end()) {
        waiting->second = message;
        changed_.notify_all();
    }
}

void StoreClient::failed(Failure failure) {
    bool first;
    {
        const std::lock_guard lock(mutex_);
        first = !failure_;
        failure_ = std::move(failure);
    }
    changed_.notify_all();
    if (first && on_failure_) on_failure_();
}

}  // namespace trifold
