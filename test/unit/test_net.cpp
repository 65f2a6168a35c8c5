// test/unit/test_net.cpp   Messages between ranks that are threads or processes, over both kinds of sockets, and every way in which
// they fail.
#include <arpa/inet.h>
#include <signal.h>
#include <sys/socket.h>

#include <atomic>
#include <cstring>
#include <filesystem>
#include <numeric>

#include "parallel/net.h"
#include "test/catch.h"
#include "test/unit/problems.h"
#include "test/unit/ranks.h"

using namespace trifold;
using namespace trifold::ranks_test;

namespace {

std::vector<int> counting(int from, size_t elems) {
    std::vector<int> v(elems);
    std::iota(v.begin(), v.end(), from);
    return v;
}

int64_t bytes_of(const std::vector<int>& v) { return static_cast<int64_t>(v.size() * sizeof(int)); }

void send_now(Net& net, int peer, uint32_t tag, const std::vector<int>& v) {
    Net::Pending pending;
    net.send(peer, tag, v.data(), bytes_of(v), pending);
    net.wait(pending, 20);
}

void receive_now(Net& net, int peer, uint32_t tag, std::vector<int>& v, double stall_s = 20) {
    Net::Pending pending;
    net.receive(peer, tag, v.data(), bytes_of(v), pending);
    net.wait(pending, stall_s);
}

size_t open_files() { return static_cast<size_t>(std::distance(std::filesystem::directory_iterator("/proc/self/fd"), {})); }

const Sentences nobody_failed(int n) { return Sentences(static_cast<size_t>(n)); }

// A connection to the TCP port of a rank from something that is no rank.
Socket stranger(const PeerAddress& to, const std::string& says) {
    const SocketAddress at = tcp_address(to.ip, std::stoi(to.endpoint));
    Socket s(::socket(at.family(), SOCK_STREAM, 0));
    REQUIRE(::connect(s.get(), at.get(), at.bytes) == 0);
    REQUIRE(::send(s.get(), says.data(), says.size(), 0) == static_cast<ssize_t>(says.size()));
    return s;
}

}  // namespace

TEST_CASE("everybody exchanges messages of all sizes with everybody", "[net]") {
    const Path path = GENERATE(Path::inside_host, Path::tcp);
    const int n = GENERATE(2, 3, 5);
    const Ranks ranks(n, path);
    std::atomic<int> wrong = 0;
    const Sentences said = on_threads(n, [&](int me) {
        const auto net = ranks.connect(me);
        for (const size_t elems : {0, 1, 3, 1000, 70'000, 1'000'000}) {
            std::vector<std::vector<int>> in(static_cast<size_t>(n), std::vector<int>(elems)), out;
            for (int p = 0; p < n; ++p) out.push_back(counting(100 * me + p, elems));
            Net::Pending pending;
            for (int p = 0; p < n; ++p) {
                if (p != me) net->receive(p, 7, in[static_cast<size_t>(p)].data(), bytes_of(in[0]), pending);
                if (p != me) net->send(p, 7, out[static_cast<size_t>(p)].data(), bytes_of(out[0]), pending);
            }
            net->wait(pending, 20);
            for (int p = 0; p < n; ++p) wrong += p != me && in[static_cast<size_t>(p)] != counting(100 * p + me, elems);
        }
    });
    CHECK(said == nobody_failed(n));
    CHECK(wrong == 0);
}

TEST_CASE("messages find their receives by tag, in whatever order those are posted", "[net]") {
    const Path path = GENERATE(Path::inside_host, Path::tcp);
    const size_t elems = GENERATE(1, 300'000);
    const Ranks ranks(2, path);
    std::vector<std::vector<int>> got(6, std::vector<int>(elems));
    const Sentences said = on_threads(2, [&](int me) {
        const auto net = ranks.connect(me);
        if (me == 0) {
            Net::Pending pending;
            std::vector<std::vector<int>> out;
            for (int i = 0; i < 6; ++i) out.push_back(counting(i, elems));
            const uint32_t tags[] = {1, 2, 1, 3, 4, 3};
            for (size_t i = 0; i < 6; ++i) net->send(1, tags[i], out[i].data(), bytes_of(out[i]), pending);
            net->wait(pending, 20);
        } else {
            receive_now(*net, 0, 3, got[3]);  // both of tag 1 and that of tag 2 come earlier
            Net::Pending pending;
            net->receive(0, 2, got[1].data(), bytes_of(got[1]), pending);
            net->receive(0, 3, got[5].data(), bytes_of(got[5]), pending);
            net->receive(0, 1, got[0].data(), bytes_of(got[0]), pending);
            net->wait(pending, 20);
            receive_now(*net, 0, 1, got[2]);
            receive_now(*net, 0, 4, got[4]);
        }
    });
    CHECK(said == nobody_failed(2));
    for (int i = 0; i < 6; ++i) CHECK(got[static_cast<size_t>(i)] == counting(i, elems));
}

TEST_CASE("a message of another size than expected is told at both ends", "[net]") {
    const Path path = GENERATE(Path::inside_host, Path::tcp);
    const auto [sent, expected] =
        GENERATE(table<size_t, size_t>({{16, 4}, {2, 4}, {0, 4}, {4, 0}, {1'000'000, 4}, {4, 1'000'000}}));
    const size_t other_way = GENERATE(0, 500'000);  // what the receiver is sending meanwhile
    const Ranks ranks(2, path);
    std::vector<int> guard(expected + 1, -1);
    const Sentences said = on_threads(2, [&](int me) {
        const auto net = ranks.connect(me);
        const std::vector<int> out(me == 0 ? sent : other_way);
        std::vector<int> in(other_way);
        Net::Pending pending;
        if (me == 0)
            net->receive(1, 5, in.data(), bytes_of(in), pending);
        else
            net->receive(0, 5, guard.data(), static_cast<int64_t>(expected * sizeof(int)), pending);
        net->send(1 - me, 5, out.data(), bytes_of(out), pending);
        net->wait(pending, 20);
        receive_now(*net, 1 - me, 6, in);  // never comes; a small send was done before it could be refused
    });
    CAPTURE(sent, expected, other_way);
    const auto commas = [](size_t elems) { return elems == 1'000'000 ? std::string("4,000,000") : std::to_string(elems * 4); };
    CHECK(has(said[0], "group 'dp': rank 11 on node-1 expects " + commas(expected) + " bytes where rank 10 on node-0 sent " +
                           commas(sent)));
    CHECK(has(said[1], "group 'dp': rank 10 on node-0 sent " + commas(sent) + " bytes where rank 11 on node-1 expects " +
                           commas(expected)));
    CHECK(guard.back() == -1);
}

TEST_CASE("a silent peer is named when the limit has passed, and learns of it", "[net]") {
    const Ranks ranks(3, GENERATE(Path::inside_host, Path::tcp));
    std::atomic<bool> over = false;
    std::string later;
    const Sentences said = on_threads(3, [&](int me) {
        const auto net = ranks.connect(me);
        std::vector<int> in(10);
        if (me == 0) {
            const std::string sentence = sentence_of([&] { receive_now(*net, 2, 1, in, 0.05); });
            later = sentence_of([&] { receive_now(*net, 1, 1, in); });
            over = true;
            throw Problem(Exit::fault, sentence);
        }
        if (me == 1) receive_now(*net, 0, 1, in);
        while (!over) std::this_thread::yield();
        if (me == 2) send_now(*net, 0, 1, std::vector<int>(1'000'000));
    });
    CHECK(has(said[0],
              "group 'dp': nothing has moved for 0.05 s while rank 10 on node-0 waits for rank 12 on node-2 to send (0 of 40 "
              "bytes are here)"));
    CHECK(later == "group 'dp' has failed before: " + said[0]);
    CHECK(has(said[1], "group 'dp': rank 12 on node-2 is gone or silent, says rank 10 on node-0"));
    CHECK(has(said[2], "rank 10 on node-0"));
}

TEST_CASE("abort from another thread ends a wait, here and at the peers", "[net]") {
    const Ranks ranks(3, GENERATE(Path::inside_host, Path::tcp));
    const bool in_the_middle = GENERATE(false, true), whole_process = GENERATE(false, true);
    std::atomic<int> waiting = 0;
    const Sentences said = on_threads(3, [&](int me) {
        const auto net = ranks.connect(me);
        std::thread other;
        if (me == 0) {
            other = std::thread([&] {
                while (waiting < 3) std::this_thread::yield();
                whole_process ? ranks.listeners[0]->abort() : net->abort();
            });
        }
        std::vector<int> in(1'000'000), out(1'000'000);
        Net::Pending pending;
        ++waiting;
        const std::string sentence = sentence_of([&] {
            while (true) {  // without the second condition nobody ever sends
                for (int p = 0; p < 3; ++p) {
                    if (p == me) continue;
                    net->receive(p, 1, in.data(), bytes_of(in), pending);
                    if (in_the_middle) net->send(p, 1, out.data(), bytes_of(out), pending);
                }
                net->wait(pending, 20);
            }
        });
        if (other.joinable()) other.join();
        throw Problem(Exit::fault, sentence);
    });
    CHECK(said[0] == "rank 10 on node-0: group 'dp' was aborted");
    for (const size_t r : {1, 2}) CHECK((has(said[r], "rank 10 on node-0") && has(said[r], "group 'dp'")));
}

TEST_CASE("aborting a process reaches groups that connect, now or later, and never one that is gone", "[net]") {
    Ranks ranks(2);
    on_threads(2, [&](int me) { ranks.connect(me); });
    std::thread other([&] { ranks.listeners[0]->abort(); });
    const std::string now = sentence_of([&] { ranks.connect(0, 1); });
    other.join();
    CHECK(now == "rank 10 on node-0 could not connect group 'dp': it was aborted");
    CHECK(sentence_of([&] { ranks.connect(0, 2); }) == now);
    ranks.listeners.clear();
}

TEST_CASE("a Net may outlive its listener", "[net]") {
    Ranks ranks(2);
    std::vector<std::unique_ptr<Net>> nets(2);
    on_threads(2, [&](int me) { nets[static_cast<size_t>(me)] = ranks.connect(me); });
    ranks.listeners.clear();
    std::vector<int> in(3);
    const Sentences said = on_threads(2, [&](int me) {
        if (me == 0) send_now(*nets[0], 1, 1, {1, 2, 3});
        if (me == 1) receive_now(*nets[1], 0, 1, in);
    });
    CHECK(said == nobody_failed(2));
    CHECK(in == std::vector<int>{1, 2, 3});
}

TEST_CASE("who does not come is named", "[net]") {
    Ranks ranks(4, GENERATE(Path::inside_host, Path::tcp));
    SECTION("in time") {
        NetOptions options = ranks.options(1);
        options.connect_s = 0.1;
        CHECK(sentence_of([&] { Net(*ranks.listeners[1], options); }) ==
              "rank 11 on node-1 could not connect group 'dp': rank 12 on node-2 and rank 13 on node-3 did not come within 0.1 "
              "s: look at what happened there, or "
              "raise --resilience.start_s");
    }
    SECTION("in time, though it listens") {
        NetOptions options = ranks.options(3);
        options.connect_s = 0.1;
        CHECK(has(sentence_of([&] { Net(*ranks.listeners[3], options); }), "rank 10 on node-0 did not come within 0.1 s"));
    }
    SECTION("any more") {
        ranks.listeners[0].reset();
        CHECK(has(sentence_of([&] { ranks.connect(3); }), "rank 10 on node-0 cannot be reached"));
    }
}

TEST_CASE("strangers and ranks of other jobs are turned away", "[net]") {
    const Ranks ranks(2, GENERATE(Path::inside_host, Path::tcp));
    Ranks others(2);
    others.job_key = 99;
    others.members[0] = ranks.members[0];
    std::vector<Socket> strangers;
    for (const std::string says : {"", "GET / HTTP/1.1\r\nHost: node-0\r\n\r\nand more than a hello holds", "short"})
        strangers.push_back(stranger(ranks.members[0], says));
    std::string turned_away;
    std::atomic<bool> away = false;
    std::vector<int> in(1);
    const Sentences said = on_threads(3, [&](int me) {
        if (me == 2) {
            turned_away = sentence_of([&] { others.connect(1); });
            away = true;
            return;
        }
        if (me == 1) {
            while (!away) std::this_thread::yield();
        }
        const auto net = ranks.connect(me);
        if (me == 0) receive_now(*net, 1, 1, in);
        if (me == 1) send_now(*net, 0, 1, {42});
    });
    CHECK(said == nobody_failed(3));
    CHECK(in[0] == 42);
    CHECK(has(turned_away, "rank 10 on node-0 closed its connection: it has failed, or it is of another job"));
    char byte;
    CHECK(::recv(strangers[1].get(), &byte, 1, 0) <= 0);  // without a word
}

TEST_CASE("groups of one process share its listener, whoever accepts for whom", "[net]") {
    const int n = 3, groups = 4;
    const Ranks ranks(n, GENERATE(Path::inside_host, Path::tcp));
    std::atomic<int> wrong = 0;
    const Sentences said = on_threads(n * groups, [&](int i) {
        const int me = i / groups, group = i % groups;
        NetOptions options = ranks.options(me);
        options.name = "axis " + std::to_string(group);
        Net net(*ranks.listeners[static_cast<size_t>(me)], options);
        std::vector<int> out{100 * me + group}, in(1);
        Net::Pending pending;
        net.receive((me + n - 1) % n, 1, in.data(), bytes_of(in), pending);
        net.send((me + 1) % n, 1, out.data(), bytes_of(out), pending);
        net.wait(pending, 20);
        wrong += in[0] != 100 * ((me + n - 1) % n) + group;
    });
    CHECK(said == nobody_failed(n * groups));
    CHECK(wrong == 0);
}

TEST_CASE("groups come and go without leaving anything open", "[net]") {
    const int n = 3;
    const Ranks ranks(n, GENERATE(Path::inside_host, Path::tcp));
    const size_t before = open_files();
    std::atomic<int> unexpected = 0;
    for (int generation = 0; generation < 50; ++generation) {
        const Sentences said = on_threads(n, [&](int me) {
            const auto net = ranks.connect(me, generation);
            std::vector<int> in(1);
            if (me == 0 && generation % 2 == 0) return net->abort();
            if (me == 1 && generation % 2 == 0) receive_now(*net, 0, 1, in);
            if (me == 0) send_now(*net, 1, 1, {generation});
            if (me == 1 && generation % 2 == 1) receive_now(*net, 0, 1, in), unexpected += in[0] != generation;
        });
        unexpected += said[0] != "" || said[2] != "" || (said[1] == "") != (generation % 2 == 1);
    }
    CHECK(unexpected == 0);
    CHECK(open_files() == before);
    // A connection for a generation that nobody waits for any more is closed by the next one.
    NetOptions late = ranks.options(2, 100);
    late.connect_s = 0.05;
    CHECK(sentence_of([&] { Net(*ranks.listeners[2], late); }) != "");
    CHECK(on_threads(n, [&](int me) { ranks.connect(me, 101); }) == nobody_failed(n));
    CHECK(open_files() == before);
}

TEST_CASE("a killed rank is named by all others", "[net]") {
    const int n = 4, victim = 2;
    Ranks ranks(n, GENERATE(Path::inside_host, Path::tcp));
    const bool in_the_middle = GENERATE(false, true);  // of large messages, or blocked
    std::vector<Pipe> reports(n);
    std::vector<pid_t> pids;
    for (int r = 0; r < n; ++r) {
        pids.push_back(forked(ranks, r, [&](int me) {
            const Pipe& report = reports[static_cast<size_t>(me)];
            report.write(sentence_of([&] {
                const auto net = ranks.connect(me);
                report.write("connected");
                std::vector<int> in(500'000), out(500'000);
                while (true) {
                    Net::Pending pending;
                    for (int p = 0; p < n; ++p) {
                        if (p != me) net->receive(p, 1, in.data(), bytes_of(in), pending);
                        if (p != me && in_the_middle) net->send(p, 1, out.data(), bytes_of(out), pending);
                    }
                    net->wait(pending, 20);
                }
            }));
        }));
    }
    ranks.listeners.clear();
    CHECK(after_kill(reports, pids, victim, "connected") == "");
}
