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

// One question and its answer, before there is a reading thread.
std::optional<Message> exchange(StoreLink& link, const Message& question, SocketClock::time_point deadline) {
    if (!send_all(link.socket.get(), header_of(question) + *question.body, deadline)) return {};
    ++link.sent;
    MessageCutter cutter;
    std::vector<Message> messages;
    while (messages.empty()) {
        char bytes[4096];
        if (!wait_for(link.socket.get(), POLLIN, deadline)) return {};
        const ssize_t got = ::recv(link.socket.get(), bytes, sizeof(bytes), MSG_DONTWAIT);
        if (got < 0 && (errno == EAGAIN || errno == EINTR)) continue;
        if (got <= 0 || !cutter.cut({bytes, static_cast<size_t>(got)}, sizeof(bytes), messages)) return {};
    }
    return messages.front();
}

// One reading of the store's clock. The answer was written somewhere between two readings of ours; taking the middle errs by at most half
// the round trip. Negative: no answer.
int64_t ping(StoreLink& link, uint64_t job_key, SocketClock::time_point deadline) {
    using std::chrono::nanoseconds;
    const auto before = std::chrono::system_clock::now();
    const auto answer = exchange(link, make_message(Verb::ping, 0, Packer().number(static_cast<int64_t>(job_key)).take()), deadline);
    const auto after = std::chrono::system_clock::now();
    if (!answer || answer->verb != Verb::answer) return -1;
    try {
        Unpacker in(*answer->body);
        const int64_t trip = std::chrono::duration_cast<nanoseconds>(after - before).count();
        link.clock_offset_ns = in.number() - std::chrono::duration_cast<nanoseconds>(before.time_since_epoch()).count() - trip / 2;
        link.host_id = in.text();
        return std::max<int64_t>(trip, 0);
    } catch (const BadMessage&) {
        return -1;
    }
}

constexpr int clock_pings = 7;

// Hosts have clocks of their own: the shortest of some round trips tells the difference best.
void compare_clocks(StoreLink& link, uint64_t job_key, int64_t first_trip, SocketClock::time_point deadline) {
    int64_t shortest = first_trip, best = link.clock_offset_ns;
    for (int i = 0; i < clock_pings; ++i) {
        const int64_t trip = ping(link, job_key, deadline);
        if (trip < 0) break;  // the rendezvous will say that it is gone
        if (trip < shortest) shortest = trip, best = link.clock_offset_ns;
    }
    link.clock_offset_ns = best;
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
            link.socket = connect_to(address, std::min(deadline, after_seconds(3)), why);
            if (!link.socket) continue;
            const int64_t trip = ping(link, job_key, std::min(deadline, after_seconds(10)));
            if (trip < 0) {
                stranger = true;
                why = "what answers there is not the store of this job";
                continue;
            }
            if (link.host_id == host_id) {
                link.clock_offset_ns = 0;
            } else {
                compare_clocks(link, job_key, trip, deadline);
            }
            return link;
        }
        if (SocketClock::now() >= deadline) break;
        std::this_thread::sleep_until(std::min(deadline, after_seconds(pause_s)));
    }
    const std::string sentence = fmt::format("rank 0's store at {} could not be reached within {} ({}): did rank 0 start, and may this host connect there?", tried,
                                             seconds_text(start_s), why);
    if (stranger) throw StrangerProblem(Exit::usage, sentence);
    throw Problem(Exit::usage, sentence);
}

std::pair<Socket, StoreLink> link_inside_process(const std::string& host_id) {
    int ends[2];
    const int result = ::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, ends);
    TRIFOLD_ASSERT(result == 0);
    StoreLink link;
    link.socket = Socket(ends[1]);
    link.host_id = host_id;
    return {Socket(ends[0]), std::move(link)};
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
    if (say_goodbye) send(make_message(Verb::goodbye, 0, Packer().number(0).take()), after_seconds(1));
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
    Question& question = questions_[id];
    lock.unlock();
    send(make_message(verb, id, std::move(body)), std::min(deadline, after_seconds(send_s)));
    lock.lock();
    const bool ended = changed_.wait_until(lock, deadline, [&] { return question.answer || over(); });
    std::optional<Message> answer;
    answer.swap(question.answer);
    questions_.erase(id);
    lock.unlock();
    if (!ended && verb == Verb::take) send(make_message(Verb::cancel, id, ""), after_seconds(send_s));
    return answer;
}

std::string StoreClient::ask(Verb verb, std::string body, SocketClock::time_point deadline, const std::string& late) {
    const std::optional<Message> answer = await(verb, std::move(body), deadline, false);
    if (answer && answer->verb == Verb::answer) return *answer->body;
    if (answer) {
        Unpacker in(*answer->body);
        const Exit code = static_cast<Exit>(in.number());
        throw Problem(code, in.text());
    }
    if (const auto f = failure()) throw Problem(f->code, f->sentence);
    throw Problem(Exit::fault, late);
}

bool StoreClient::fail(Exit code, const std::string& sentence) {
    const auto body = Packer().number(static_cast<int64_t>(code)).text(sentence).take();
    const std::optional<Message> answer = await(Verb::fail, body, after_seconds(verdict_s), true);
    if (answer) {
        const Failure verdict = unpacked_failure(*answer->body);
        failed(verdict);
        return verdict.speaker == rank_;
    }
    // Nobody can be asked. Who speaks may have been told before; else rank 0 is gone too, and the next one speaks for it.
    const auto known = failure();
    if (!known) failed({code, sentence, rank_, 1});
    if (known && known->speaker >= 0) return known->speaker == rank_;
    return rank_ == (known && known->rank == 1 ? 2 : 1);
}

void StoreClient::goodbye(double seconds) {
    {
        const std::lock_guard lock(mutex_);
        if (std::exchange(leaving_, true)) return;
    }
    ask(Verb::goodbye, Packer().number(static_cast<int64_t>(seconds * 1e3)).take(), after_seconds(seconds + send_s),
        "rank 0 does not answer at the end of the job");
}

std::optional<Failure> StoreClient::failure() const {
    const std::lock_guard lock(mutex_);
    return failure_;
}

void StoreClient::read() {
    MessageCutter cutter;
    std::vector<char> bytes(64 << 10);
    for (bool open = true; open;) {
        wait_for(socket_.get(), POLLIN, SocketClock::time_point::max());
        const ssize_t got = ::recv(socket_.get(), bytes.data(), bytes.size(), MSG_DONTWAIT);
        if (got < 0 && (errno == EAGAIN || errno == EINTR)) continue;
        std::vector<Message> messages;
        open = got > 0 && cutter.cut({bytes.data(), static_cast<size_t>(got)}, most_bytes_of_message, messages);
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
    if (message.verb == Verb::news) return failed(unpacked_failure(*message.body));
    const std::lock_guard lock(mutex_);
    if (const auto q = questions_.find(message.id); q != questions_.end()) {
        q->second.answer = message;
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
