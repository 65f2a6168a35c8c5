#include "parallel/board.h"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "parallel/host_port.h"
#include "parallel/rank_text.h"

namespace trifold {

constexpr std::string_view agree_call = "agree ";

std::string pack(const Failure& f) { return pack(f.code, f.sentence, f.rank, f.speaker); }

Failure unpack_failure(const std::string& body) {
    Failure f;
    Unpacker{body}(f.code, f.sentence, f.rank, f.speaker);
    return f;
}

Board::Board(int size, double start_s, uint64_t data_key)
    : size_(size), start_s_(start_s), data_key_(data_key), join_deadline_(after_seconds(start_s)), members_(static_cast<size_t>(size)) {}

std::vector<int> Board::ranks_where(auto condition) const {
    std::vector<int> ranks;
    for (int r = 0; r < size_; ++r)
        if (condition(static_cast<size_t>(r))) ranks.push_back(r);
    return ranks;
}

void Board::handle(int rank, const Message& message) {
    Unpacker in(*message.body);
    std::string key;
    switch (message.verb) {
        case Verb::put: {
            std::string value;
            in(key, value);
            boxes_[key].value = std::move(value);
            boxes_[key].taken = 0;
            return settle(key);
        }
        case Verb::take: {
            Take take{.rank = rank, .id = message.id};
            in(key, take.readers);
            boxes_[key].waiting.push_back(take);
            return settle(key);
        }
        case Verb::cancel:
            for (auto& [other, box] : boxes_)
                std::erase_if(box.waiting, [&](const Take& t) { return t.rank == rank && t.id == message.id; });
            return;
        case Verb::meet:
            return meet(rank, message.id, in);
        case Verb::fail: {
            const Failure failure = unpack_failure(*message.body);
            return report(rank, message.id, {failure.code, failure.sentence, rank});
        }
        case Verb::goodbye: {
            double seconds = 0;
            in(seconds);
            return goodbye(rank, message.id, seconds);
        }
        default:
            throw BadMessage();
    }
}

// ---- rendezvous

int Board::join(const Message& message, const std::string& seen_ip) {
    int rank = 0, size = 0;
    Member stranger{.joined = true, .join_id = message.id};
    PeerAddress& p = stranger.place;
    Unpacker{*message.body}(rank, size, stranger.build, p.host, p.ip, p.host_id, p.endpoint, p.cpus);
    p.rank = rank;
    std::string odd;
    if (size != size_ || rank < 0 || rank >= size_)
        odd = fmt::format("a process on {} says that it is rank {} of {}, but this job has {} ranks: start all of them with one launcher command", p.host,
                          rank, size, size_);
    else if (const Member& known = members_[static_cast<size_t>(rank)]; known.joined)
        odd = fmt::format("two processes, on {} and {}, say that they are rank {} of {}: start all ranks with one launcher command", known.place.host,
                          p.host, rank, size_);
    if (!odd.empty()) {
        decide({Exit::usage, odd, rank, 0});
        return -1;
    }
    members_[static_cast<size_t>(rank)] = std::move(stranger);
    ++joined_;
    if (!is_loopback(seen_ip) && !seen_ip.empty() && rank_0_seen_ip_.empty()) rank_0_seen_ip_ = seen_ip;
    if (failure_) {
        send(rank, 0, make_message(Verb::news, 0, pack(*failure_)));
    } else if (all_joined()) {
        welcome();
    }
    return rank;
}

// Everybody's place, hosts once: ranks of one host share most of it.
void Board::welcome() {
    std::vector<std::string> builds;
    for (const Member& m : members_) builds.push_back(m.build);
    if (const std::string odd = disagreement("the build", builds); !odd.empty())
        return decide({Exit::usage, fmt::format("the ranks do not run the same program: {}; install one build on every node", odd), -1, 0});
    std::map<std::pair<std::string, std::string>, int64_t> number_of;  // (host, host id) -> place in the list
    std::string hosts, ranks;
    for (Member& m : members_) {
        // Who came in over the loopback interface shares rank 0's host; others reach that one as they reached rank 0.
        if (is_loopback(m.place.ip) && !rank_0_seen_ip_.empty()) m.place.ip = rank_0_seen_ip_;
        const auto [known, fresh] = number_of.try_emplace({m.place.host, m.place.host_id}, static_cast<int64_t>(number_of.size()));
        if (fresh) hosts += pack(m.place.host, m.place.host_id);
        ranks += pack(known->second, m.place.ip, m.place.endpoint, m.place.cpus);
    }
    const Message places = make_message(Verb::answer, 0, pack(data_key_, number_of.size()) + hosts + ranks);
    for (int r = 0; r < size_; ++r) send(r, members_[static_cast<size_t>(r)].join_id, places);
}

// ---- values

// Gives the value to those who wait for it.
void Board::settle(const std::string& key) {
    Box& box = boxes_.at(key);
    while (box.value && !box.waiting.empty()) {
        const Take take = box.waiting.front();
        box.waiting.pop_front();
        answer(take.rank, take.id, *box.value);
        if (++box.taken >= take.readers) box.value.reset();
    }
    if (!box.value && box.waiting.empty()) boxes_.erase(key);
}

// ---- meetings

void Board::meet(int rank, uint64_t id, Unpacker body) {
    int64_t number = 0;
    std::string kind, what, value;
    Exit code{};
    double seconds = 0;
    body(number, kind, what, value, code, seconds);
    const auto [found, fresh] = meetings_.try_emplace(number);
    Meeting& m = found->second;
    if (fresh) m = {.deadline = after_seconds(seconds), .seconds = seconds, .code = code, .calls = std::vector<std::optional<Call>>(members_.size())};
    std::optional<Call>& call = m.calls[static_cast<size_t>(rank)];
    if (call) throw BadMessage();
    call = Call{kind + " " + what, std::move(value), id};
    if (++m.came < size_) return;
    conclude(m);
    meetings_.erase(number);
}

void Board::refuse(const Meeting& m, const Failure& failure) {
    const Message refusal = make_message(Verb::refusal, 0, pack(failure));
    for (int r = 0; r < size_; ++r)
        if (const auto& call = m.calls[static_cast<size_t>(r)]) send(r, call->id, refusal);
}

void Board::conclude(const Meeting& m) {
    std::vector<std::string> calls, values;
    for (const auto& call : m.calls) calls.push_back(call->what), values.push_back(call->value);
    if (const std::string odd = disagreement("come to", calls); !odd.empty())
        return refuse(m, {Exit::bug, fmt::format("the ranks do not do the same: {}", odd)});
    const bool agree = calls[0].starts_with(agree_call);
    if (agree) {
        if (const std::string odd = disagreement(calls[0].substr(agree_call.size()), values); !odd.empty())
            return refuse(m, {m.code, fmt::format("the ranks do not agree: {}; start all of them with the same command, on the same files", odd)});
    }
    const Message result = make_message(Verb::answer, 0, agree ? "" : values[0]);
    for (int r = 0; r < size_; ++r) send(r, m.calls[static_cast<size_t>(r)]->id, result);
}

// ---- failures

void Board::report(int rank, uint64_t id, Failure failure) {
    questions_.emplace_back(rank, id);
    if (failure_ && !decision_) return answer_questions();
    if (failure.code != Exit::fault) {
        failure.speaker = rank;
        return decide(std::move(failure));
    }
    if (failure_) return;
    decision_ = after_seconds(echo_s);
    failure_ = std::move(failure);
    announce();
}

void Board::decide(Failure failure) {
    if (failure_ && !decision_) return;
    decision_.reset();
    failure_ = std::move(failure);
    courtesy_ends_ = after_seconds(courtesy_s);
    if (failure_->speaker < 0 && !questions_.empty()) failure_->speaker = questions_.front().first;
    announce();
    answer_questions();
}

// After the decision: the speaker at once, the others when it has left.
void Board::answer_questions() {
    if (failure_->speaker < 0 && !questions_.empty()) {
        failure_->speaker = questions_.front().first;
        courtesy_ends_ = after_seconds(courtesy_s);
        announce();  // so that nobody else speaks when this store is killed before it can answer
    }
    const int speaker = failure_->speaker;
    const bool over = speaker >= 0 && (has_left(speaker) || SocketClock::now() >= courtesy_ends_);
    std::erase_if(questions_, [&](const auto& question) {
        const bool due = over || question.first == speaker;
        if (due) answer(question.first, question.second, pack(*failure_));
        return due;
    });
}

void Board::announce() {
    const Message news = make_message(Verb::news, 0, pack(*failure_));
    for (const int r : ranks_where([&](size_t i) { return members_[i].joined && !members_[i].left; })) send(r, 0, news);
    end_goodbye(failure_);
}

void Board::lost(int rank) {
    if (has_left(rank)) return;
    const bool early = !all_joined();
    members_[static_cast<size_t>(rank)].left = true;
    if (failure_ && !decision_) return answer_questions();
    decide({Exit::fault,
            fmt::format("{} ended {}: it was killed, crashed, or its host is gone; look at its output and at the kernel's log there",
                        named(members_[static_cast<size_t>(rank)].place), early ? "during the rendezvous" : "without a word"),
            rank, -1});
}

void Board::goodbye(int rank, uint64_t id, double seconds) {
    members_[static_cast<size_t>(rank)].left = true;
    ++left_;
    if (rank == 0)
        last_goodbye_ = {id, seconds, after_seconds(seconds)};
    else
        answer(rank, id);
    if (failure_ && !decision_) answer_questions();
    if (left_ == size_) end_goodbye({});
}

// Rank 0 has said goodbye and waits for the others: this is its answer.
void Board::end_goodbye(const std::optional<Failure>& failure) {
    if (!last_goodbye_) return;
    send(0, last_goodbye_->id, failure ? make_message(Verb::refusal, 0, pack(*failure)) : make_message(Verb::answer, 0, ""));
    last_goodbye_.reset();
}

// ---- time

SocketClock::time_point Board::next_tick() const {
    SocketClock::time_point next = SocketClock::time_point::max();
    if (decision_) return *decision_;
    if (failure_) return questions_.empty() ? next : courtesy_ends_;
    if (!all_joined()) next = std::min(next, join_deadline_);
    if (last_goodbye_) next = std::min(next, last_goodbye_->deadline);
    for (const auto& [number, meeting] : meetings_) next = std::min(next, meeting.deadline);
    return next;
}

void Board::tick(SocketClock::time_point now) {
    if (decision_ && now >= *decision_) {
        Failure failure = *failure_;
        failure.speaker = failure.rank;
        decide(std::move(failure));
    }
    if (failure_ && !decision_) answer_questions();
    if (failure_) return;
    if (!all_joined() && now >= join_deadline_) {
        const auto missing = ranks_where([&](size_t r) { return !members_[r].joined; });
        decide({Exit::usage,
                fmt::format("{} of {} did not come within {}: see what the launcher says about {}, or give a longer --resilience.start_s",
                            ranks_text(missing), size_, seconds_text(start_s_), missing.size() == 1 ? "it" : "them"),
                missing.front(), 0});
    }
    if (last_goodbye_ && now >= last_goodbye_->deadline) {
        const auto late = ranks_where([&](size_t r) { return !members_[r].left; });
        end_goodbye(Failure{Exit::fault, fmt::format("{} did not finish within {} after rank 0", ranks_text(late), seconds_text(last_goodbye_->seconds))});
    }
    std::erase_if(meetings_, [&](const auto& entry) {
        const Meeting& m = entry.second;
        if (now < m.deadline) return false;
        const auto missing = ranks_where([&](size_t r) { return !m.calls[r]; });
        const auto first = std::ranges::find_if(m.calls, [](const auto& c) { return c.has_value(); });
        refuse(m, {Exit::fault, fmt::format("{} did not come to '{}' within {}", ranks_text(missing), (*first)->what, seconds_text(m.seconds))});
        return true;
    });
}

}  // namespace trifold
