// test/unit/test_stream_programs.cpp   Random programs over several streams: every engine gives the same results.
#include "test/catch.h"

#include <algorithm>
#include <cstdint>
#include <random>
#include <string>
#include <vector>

#include "test/unit/streams.h"

using namespace trifold;
using namespace trifold::stream_test;

// Random programs on streams, with follows exactly where they are needed, against a closure of "comes before" that is
// written out without vector clocks.

namespace {

// A random program on a few buffers. `follows` are the tickets (operation indices) that an operation's stream follows
// first.
struct Step {
    int stream = 0;  // -1: the host
    std::vector<int> follows;
    std::vector<int> read, written;  // buffers
};
using Program = std::vector<Step>;

bool conflict(const Step& a, const Step& b) {
    const auto meet = [](const std::vector<int>& x, const std::vector<int>& y) {
        return std::any_of(x.begin(), x.end(), [&](int v) { return std::count(y.begin(), y.end(), v) > 0; });
    };
    return meet(a.written, b.written) || meet(a.written, b.read) || meet(a.read, b.written);
}

// before[i][j]: step j is ordered before step i. Written out as a plain closure, independent of vector clocks.
std::vector<std::vector<char>> order_of(const Program& p) {
    std::vector<std::vector<char>> before(p.size(), std::vector<char>(p.size(), 0));
    for (size_t i = 0; i < p.size(); ++i) {
        const auto inherit = [&](size_t j) {
            before[i][j] = 1;
            for (size_t k = 0; k < j; ++k) before[i][k] = static_cast<char>(before[i][k] | before[j][k]);
        };
        for (size_t j = 0; j < i; ++j) {
            if (p[j].stream == p[i].stream || p[j].stream == -1) inherit(j);
        }
        for (int j : p[i].follows) inherit(static_cast<size_t>(j));
    }
    return before;
}

bool has_race(const Program& p) {
    const auto before = order_of(p);
    for (size_t i = 0; i < p.size(); ++i) {
        for (size_t j = 0; j < i; ++j) {
            if (!before[i][j] && conflict(p[i], p[j])) return true;
        }
    }
    return false;
}

// Follows are added exactly where an operation would otherwise race with an earlier one.
Program random_program(std::mt19937& random, int steps, int streams, int buffers) {
    const auto below = [&](int n) { return static_cast<int>(random() % static_cast<unsigned>(n)); };
    Program p;
    for (int i = 0; i < steps; ++i) {
        Step s;
        s.stream = below(8) == 0 ? -1 : below(streams);
        for (int r = below(3); r > 0; --r) s.read.push_back(below(buffers));
        s.written.push_back(below(buffers));
        p.push_back(s);
        for (int j = i - 1; j >= 0; --j) {
            const auto before = order_of(p);
            const auto n = static_cast<size_t>(i), m = static_cast<size_t>(j);
            if (conflict(p[n], p[m]) && !before[n][m]) p[n].follows.push_back(j);
        }
    }
    return p;
}

// What each operation does: it depends on all that it reads and on its own place in the program.
struct Buffers {
    std::vector<std::vector<uint64_t>> data;
    explicit Buffers(int n) : data(static_cast<size_t>(n), std::vector<uint64_t>(2, 1)) {}
    void apply(const Step& s, uint64_t salt) {
        uint64_t sum = salt;
        for (int r : s.read) sum = sum * 31 + data[static_cast<size_t>(r)][0];
        for (int w : s.written) {
            auto& cell = data[static_cast<size_t>(w)];
            cell[0] = cell[0] * 17 + sum, cell[1] = sum;
        }
    }
    std::vector<BufferAccess> accesses(const Step& s) const {
        std::vector<BufferAccess> list;
        for (int r : s.read) list.push_back(reads(data[static_cast<size_t>(r)]));
        for (int w : s.written) list.push_back(access(Access::read_write, data[static_cast<size_t>(w)], 0, 2));
        return list;
    }
};

Buffers run_in_order(const Program& p, int buffers) {
    Buffers b(buffers);
    for (size_t i = 0; i < p.size(); ++i) b.apply(p[i], i);
    return b;
}

// Runs the program on streams of one kind and gives the buffers; `findings` counts what the checker saw.
Buffers run_on_streams(const Program& p, int streams, int buffers, StreamMode mode, StreamKind kind, size_t& findings) {
    Buffers b(buffers);
    StreamEngine engine(mode);
    std::vector<Stream*> stream;
    for (int s = 0; s < streams; ++s) stream.push_back(&engine.add("s" + std::to_string(s), kind));
    std::vector<Ticket> tickets;
    for (size_t i = 0; i < p.size(); ++i) {
        const Step& s = p[i];
        if (s.stream < 0) {
            for (int f : s.follows) engine.wait(tickets[static_cast<size_t>(f)]);
            engine.host_access(b.accesses(s), "host");
            b.apply(s, i);
            tickets.emplace_back();
        } else {
            Stream& on = *stream[static_cast<size_t>(s.stream)];
            for (int f : s.follows) on.follow(tickets[static_cast<size_t>(f)]);
            tickets.push_back(on.submit("step", b.accesses(s), [&b, &s, i] { b.apply(s, i); }));
        }
    }
    engine.wait_all();
    findings = engine.findings().size();
    return b;
}

}  // namespace

TEST_CASE("random programs: a clean one computes what program order says, in both modes, with and without threads", "[stream]") {
    std::mt19937 random(20240613);
    for (int round = 0; round < 60; ++round) {
        const Program p = random_program(random, 30, 4, 6);
        REQUIRE_FALSE(has_race(p));
        const Buffers expected = run_in_order(p, 6);
        for (StreamMode mode : {StreamMode::normal, StreamMode::adversarial})
            for (StreamKind kind : {StreamKind::compute, StreamKind::communication}) {
                size_t findings = 0;
                CHECK(run_on_streams(p, 4, 6, mode, kind, findings).data == expected.data);
                CHECK(findings == 0);
            }
    }
}

TEST_CASE("random programs: removing any one follow or wait is reported exactly when it was needed", "[stream]") {
    std::mt19937 random(7);
    int needed = 0;
    for (int round = 0; round < 40; ++round) {
        const Program clean = random_program(random, 24, 4, 6);
        for (size_t i = 0; i < clean.size(); ++i) {
            for (size_t f = 0; f < clean[i].follows.size(); ++f) {
                Program faulty = clean;
                faulty[i].follows.erase(faulty[i].follows.begin() + static_cast<std::ptrdiff_t>(f));
                const bool race = has_race(faulty);
                size_t findings = 0;
                run_on_streams(faulty, 4, 6, StreamMode::adversarial, StreamKind::compute, findings);  // threads would race in earnest
                REQUIRE((findings > 0) == race);
                needed += race;
            }
        }
    }
    CHECK(needed > 200);  // of the others each was implied by a later one
}

TEST_CASE("thousands of operations on five workers", "[stream]") {
    constexpr int streams = 5, operations = 20'000;
    std::mt19937 random(99);
    StreamEngine engine;
    std::vector<Stream*> stream;
    for (int s = 0; s < streams; ++s) stream.push_back(&engine.add("s" + std::to_string(s), StreamKind::communication));
    uint64_t chain = 0, expected = 0;
    Ticket last;
    for (uint64_t i = 0; i < operations; ++i) {  // one chain of additions, handed from stream to stream
        Stream& s = *stream[random() % streams];
        s.follow(last);
        last = s.submit("link", {}, [&chain, i] { chain = chain * 3 + i; });
        expected = expected * 3 + i;
        if (i % 1000 == 999) engine.wait(last);
    }
    engine.wait_all();
    CHECK(chain == expected);
}
