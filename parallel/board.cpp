#include "parallel/board.h"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "base/text.h"
#include "parallel/rank_text.h"

namespace trifold {
namespace {

constexpr std::string_view agree_call = "agree ";

}  // namespace

std::string packed(const Failure& f) {
    return Packer().number(static_cast<int64_t>(f.code)).text(f.sentence).number(f.rank).number(f.speaker).take();
}

Failure unpacked_failure(const std::string& body) {
    Unpacker in(body);
    Failure f;
    f.code = static_cast<Exit>(in.number());
    f.sentence = in.text();
    f.rank = static_cast<int>(in.number());
    f.speaker = static_cast<int>(in.number());
    return f;
}

Board::Board(int size, double start_s, uint64_t data_key)
    : size_(size), start_s_(start_s), data_key_(data_key), join_deadline_(after_seconds(start_s)), members_(static_cast<size_t>(size)) {}

void Board::send(int rank, Verb verb, uint64_t id, std::string body) { outgoing_.push_back({rank, make_message(verb, id, std::move(body))}); }

std::vector<int> Board::ranks_where(auto condition) const {
    std::vector<int> ranks;
    for (int r = 0; r < size_; ++r)
        if (condition(static_cast<size_t>(r))) ranks.push_back(r);
    return ranks;
}

std::string Board::named(int rank) const { return fmt::format("rank {} on {}", rank, members_[static_cast<size_t>(rank)].place.host); }

void Board::handle(int rank, const Message& message) {
    Unpacker in(*message.body);
    switch (message.verb) {
        case Verb::put: {
            const std::string key = in.text();
            values_[key] = {in.text()};
            return settle(key);
        }
        case Verb::take: {
            const std::string key = in.text();
            takes_[key].push_back({rank, message.id, in.number()});
            return settle(key);
        }
        case Verb::cancel:
            for (auto& [key, waiting] : takes_)
                std::erase_if(waiting, [&](const Take& t) { return t.rank == rank && t.id == message.id; });
            return;
        case Verb::meet:
            return meet(rank, message.id, in);
        case Verb::fail: {
            Failure failure;
            failure.code = static_cast<Exit>(in.number());
            failure.sentence = in.text();
            failure.rank = rank;
            return report(rank, message.id, failure);
        }
        case Verb::goodbye: {
            const auto milliseconds = static_cast<double>(in.number());
            return goodbye(rank, message.id, milliseconds / 1e3);
        }
        default:
            throw BadMessage();
    }
}

// ---- rendezvous

bool Board::join(int rank, int size, const Message& message, Unpacker body, const std::string& seen_ip) {
    Member stranger{.joined = true, .join_id = message.id, .build = body.text()};
    stranger.place = {body.text(), body.text(), body.text(), body.text(), body.text()};
    if (size != size_ || rank < 0 || rank >= size_) {
        decide({Exit::usage,
                fmt::format("a process on {} says that it is rank {} of {}, but this job has {} ranks: start all of them with one launcher command",
                            stranger.place.host, rank, size, size_),
                rank, 0});
        return false;
    }
    Member& member = members_[static_cast<size_t>(rank)];
    if (member.joined) {
        decide({Exit::usage,
                fmt::format("two processes, on {} and {}, say that they are rank {} of {}: start all ranks with one launcher command", member.place.host,
                            stranger.place.host, rank, size_),
                rank, 0});
        return false;
    }
    member = std::move(stranger);
    ++joined_;
    if (!is_loopback(seen_ip) && !seen_ip.empty() && rank_0_seen_ip_.empty()) rank_0_seen_ip_ = seen_ip;
    if (failure_) {
        send(rank, Verb::news, 0, packed(*failure_));
    } else if (all_joined()) {
        welcome();
    }
    return true;
}

// Everybody's place, hosts once: ranks of one host share most of it.
void Board::welcome() {
    std::vector<std::string> builds;
    for (const Member& m : members_) builds.push_back(m.build);
    if (const std::string odd = disagreement("the build", builds); !odd.empty())
        return decide({Exit::usage, fmt::format("the ranks do not run the same program: {}; install one build on every node", odd), -1, 0});
    std::map<std::pair<std::string, std::string>, int64_t> number_of;  // (host, host id) -> place in the list
    Packer hosts, ranks;
    for (Member& m : members_) {
        // Who came in over the loopback interface shares rank 0's host; others reach that one as they reached rank 0.
        if (is_loopback(m.place.ip) && !rank_0_seen_ip_.empty()) m.place.ip = rank_0_seen_ip_;
        const auto [known, fresh] = number_of.try_emplace({m.place.host, m.place.host_id}, static_cast<int64_t>(number_of.size()));
        if (fresh) hosts.text(m.place.host).text(m.place.host_id);
        ranks.number(known->second).text(m.place.ip).text(m.place.endpoint).text(m.place.cpus);
    }
    Packer all;
    all.number(static_cast<int64_t>(data_key_)).number(static_cast<int64_t>(number_of.size()));
    const auto body = std::make_shared<const std::string>(all.take() + hosts.take() + ranks.take());
    for (int r = 0; r < size_; ++r) outgoing_.push_back({r, {Verb::answer, members_[static_cast<size_t>(r)].join_id, body}});
}

// ---- values

// Gives the value to those who wait for it, in the order in which they came.
void Board::settle(const std::string& key) {
    const auto takes = takes_.find(key);
    if (takes == takes_.end()) return;
    std::deque<Take>& waiting = takes->second;
    while (!waiting.empty() && values_.contains(key)) {
        Value& value = values_.at(key);
        const Take take = waiting.front();
        waiting.pop_front();
        answer(take.rank, take.id, value.bytes);
        if (++value.taken >= take.readers) values_.erase(key);
    }
    if (waiting.empty()) takes_.erase(takes);
}

// ---- meetings

void Board::meet(int rank, uint64_t id, Unpacker body) {
    const int64_t number = body.number();
    const std::string kind = body.text(), what = body.text();
    std::string value = body.text();
    const Exit code = static_cast<Exit>(body.number());
    const double seconds = static_cast<double>(body.number()) / 1e3;
    const auto [found, fresh] = meetings_.try_emplace(number);
    Meeting& m = found->second;
    if (fresh) {
        m.deadline = after_seconds(seconds);
        m.seconds = seconds;
        m.code = code;
        m.calls.resize(members_.size());
        m.values.resize(members_.size());
        m.ids.resize(members_.size());
    }
    const auto r = static_cast<size_t>(rank);
    if (m.calls[r]) throw BadMessage();
    m.calls[r] = kind + " " + what;
    m.values[r] = std::move(value);
    m.ids[r] = id;
    if (++m.came < size_) return;
    conclude(m);
    meetings_.erase(number);
}

void Board::refuse(const Meeting& m, Exit code, const std::string& sentence) {
    const auto body = std::make_shared<const std::string>(Packer().number(static_cast<int64_t>(code)).text(sentence).take());
    for (size_t r = 0; r < members_.size(); ++r)
        if (m.calls[r]) outgoing_.push_back({static_cast<int>(r), {Verb::refusal, m.ids[r], body}});
}

void Board::conclude(const Meeting& m) {
    std::vector<std::string> calls, values;
    for (size_t r = 0; r < members_.size(); ++r) calls.push_back(*m.calls[r]), values.push_back(*m.values[r]);
    if (const std::string odd = disagreement("come to", calls); !odd.empty())
        return refuse(m, Exit::bug, fmt::format("the ranks do not do the same: {}", odd));
    const bool agree = calls[0].starts_with(agree_call);
    if (agree) {
        if (const std::string odd = disagreement(calls[0].substr(agree_call.size()), values); !odd.empty())
            return refuse(m, m.code, fmt::format("the ranks do not agree: {}; start all of them with the same command, on the same files", odd));
    }
    const auto body = std::make_shared<const std::string>(agree ? "" : values[0]);
    for (size_t r = 0; r < members_.size(); ++r) outgoing_.push_back({static_cast<int>(r), {Verb::answer, m.ids[r], body}});
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
        if (due) answer(question.first, question.second, packed(*failure_));
        return due;
    });
}

void Board::announce() {
    const auto body = std::make_shared<const std::string>(packed(*failure_));
    for (const int r : ranks_where([&](size_t i) { return members_[i].joined && !members_[i].left; }))
        outgoing_.push_back({r, {Verb::news, 0, body}});
    // Rank 0 has said goodbye and waits for the others: this is its answer.
    if (last_goodbye_) send(0, Verb::refusal, *std::exchange(last_goodbye_, std::nullopt), Packer().number(static_cast<int64_t>(failure_->code)).text(failure_->sentence).take());
}

void Board::lost(int rank) {
    if (has_left(rank)) return;
    const bool early = !all_joined();
    members_[static_cast<size_t>(rank)].left = true;
    if (failure_ && !decision_) return answer_questions();
    decide({Exit::fault,
            fmt::format("{} ended {}: it was killed, crashed, or its host is gone; look at its output and at the kernel's log there", named(rank),
                        early ? "during the rendezvous" : "without a word"),
            rank, -1});
}

void Board::goodbye(int rank, uint64_t id, double seconds) {
    members_[static_cast<size_t>(rank)].left = true;
    ++left_;
    if (rank == 0) {
        last_goodbye_ = id;
        goodbye_s_ = seconds;
        goodbye_deadline_ = after_seconds(seconds);
    } else {
        answer(rank, id);
    }
    if (failure_ && !decision_) answer_questions();
    if (last_goodbye_ && left_ == size_) answer(0, *std::exchange(last_goodbye_, std::nullopt));
}

// ---- time

SocketClock::time_point Board::next_tick() const {
    SocketClock::time_point next = SocketClock::time_point::max();
    if (decision_) return *decision_;
    if (failure_) return questions_.empty() ? next : courtesy_ends_;
    if (!all_joined()) next = std::min(next, join_deadline_);
    if (last_goodbye_) next = std::min(next, goodbye_deadline_);
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
    if (last_goodbye_ && now >= goodbye_deadline_) {
        const auto late = ranks_where([&](size_t r) { return !members_[r].left; });
        const std::string sentence = fmt::format("{} did not finish within {} after rank 0", ranks_text(late), seconds_text(goodbye_s_));
        send(0, Verb::refusal, *std::exchange(last_goodbye_, std::nullopt), Packer().number(static_cast<int64_t>(Exit::fault)).text(sentence).take());
    }
    std::erase_if(meetings_, [&](const auto& entry) {
        const Meeting& m = entry.second;
        if (now < m.deadline) return false;
        const auto missing = ranks_where([&](size_t r) { return !m.calls[r]; });
        const auto first = std::ranges::find_if(m.calls, [](const auto& c) { return c.has_value(); });
        refuse(m, Exit::fault, fmt::format("{} did not come to '{}' within {}", ranks_text(missing), **first, seconds_text(m.seconds)));
        return true;
    });
}

}  // namespace trifold
