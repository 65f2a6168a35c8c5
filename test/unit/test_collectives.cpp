// test/unit/test_collectives.cpp   Every collective against what it means, bit by bit: sums against a serial one in rank order;
// then groups on streams, and what their operations declare.
#include <fmt/format.h>
#include <signal.h>

#include <atomic>
#include <cmath>
#include <cstring>
#include <limits>
#include <numeric>

#include "parallel/group.h"
#include "test/catch.h"
#include "test/unit/problems.h"
#include "test/unit/ranks.h"
#include "test/unit/streams.h"

using namespace trifold;
using namespace trifold::ranks_test;
using namespace trifold::stream_test;

namespace {

const Sentences nobody_failed(int n) { return Sentences(static_cast<size_t>(n)); }

template <class T>
Tensor tensor(std::vector<T>& v) {
    return {v.data(), dtype_of<T>(), static_cast<int64_t>(v.size())};
}

template <class T>
bool same_bits(const std::vector<T>& a, const std::vector<T>& b) {
    return a.size() == b.size() && (a.empty() || std::memcmp(a.data(), b.data(), a.size() * sizeof(T)) == 0);
}

template <class T>
T made_of(double v) {
    if constexpr (std::is_same_v<T, bf16>)
        return bf16(static_cast<float>(v));
    else
        return static_cast<T>(v);
}

// The same on all ranks that ask for rank r's values: of very different sizes, so that the order of a sum shows; small integers
// where T is an integer.
template <class T>
std::vector<T> values(int r, size_t elems) {
    uint64_t random = static_cast<uint64_t>(r + 1);
    std::vector<T> v(elems);
    for (T& x : v) {
        random = random * 6364136223846793005 + 1442695040888963407;
        const double mantissa = static_cast<double>(random >> 44) - (1 << 19),
                     scale = static_cast<double>(1 << (random >> 32 & 15));
        x = made_of<T>(std::is_integral_v<T> ? static_cast<double>(random >> 57) : mantissa * scale);
    }
    return v;
}

// Element by element over the ranks' values, from left to right.
template <class T, class Op>
std::vector<T> in_rank_order(int n, size_t elems, Op op) {
    using Sum = std::conditional_t<std::is_same_v<T, bf16>, float, T>;
    const std::vector<T> first = values<T>(0, elems);
    std::vector<Sum> sum(elems);
    for (size_t i = 0; i < elems; ++i) sum[i] = static_cast<Sum>(first[i]);
    for (int r = 1; r < n; ++r) {
        const std::vector<T> next = values<T>(r, elems);
        for (size_t i = 0; i < elems; ++i) sum[i] = op(sum[i], static_cast<Sum>(next[i]));
    }
    std::vector<T> result(elems);
    for (size_t i = 0; i < elems; ++i) result[i] = static_cast<T>(sum[i]);
    return result;
}

template <class T>
std::vector<T> part_of(const std::vector<T>& v, int r, size_t elems) {
    const auto first = v.begin() + static_cast<std::ptrdiff_t>(static_cast<size_t>(r) * elems);
    return {first, first + static_cast<std::ptrdiff_t>(elems)};
}

template <class T>
std::vector<T> joined(int n, size_t elems) {
    std::vector<T> all;
    for (int r = 0; r < n; ++r) {
        const std::vector<T> v = values<T>(r, elems);
        all.insert(all.end(), v.begin(), v.end());
    }
    return all;
}

// All collectives with these sizes on one rank; the names of those that went wrong.
template <class T>
std::string wrong(Collectives& c, int me, int n, size_t elems) {
    std::string names;
    const auto expect = [&](const char* name, const std::vector<T>& got, const std::vector<T>& wanted) {
        if (!same_bits(got, wanted)) names += fmt::format("{} of {} {} on rank {}; ", name, elems, name_of(dtype_of<T>()), me);
    };
    const auto plus = [](auto a, auto b) { return static_cast<decltype(a)>(a + b); };
    const auto larger = [](auto a, auto b) { return std::max(a, b); };
    const size_t all = elems * static_cast<size_t>(n);
    const auto own = static_cast<int64_t>(elems) * me, count = static_cast<int64_t>(elems);

    std::vector<T> shard = values<T>(me, elems), full(all);
    c.all_gather(nullptr, tensor(shard), tensor(full));
    expect("all_gather", full, joined<T>(n, elems));
    std::vector<T> in_place(all);
    std::copy(shard.begin(), shard.end(), in_place.begin() + own);
    c.all_gather(nullptr, tensor(in_place).slice(own, count), tensor(in_place));
    expect("all_gather in place", in_place, full);

    if constexpr (!std::is_same_v<T, uint8_t>) {
        const std::vector<T> sums = in_rank_order<T>(n, all, plus), mine = part_of(sums, me, elems);
        std::vector<T> x = values<T>(me, all);
        c.reduce_scatter(nullptr, tensor(x), tensor(shard));
        expect("reduce_scatter", shard, mine);
        c.reduce_scatter(nullptr, tensor(x), tensor(x).slice(own, count));
        expect("reduce_scatter in place", part_of(x, me, elems), mine);
        std::vector<T> y = values<T>(me, elems);
        c.all_reduce(nullptr, tensor(y));
        expect("all_reduce", y, in_rank_order<T>(n, elems, plus));
    }
    std::vector<T> m = values<T>(me, elems);
    c.all_reduce_max(nullptr, tensor(m));
    expect("all_reduce_max", m, in_rank_order<T>(n, elems, larger));

    for (const int root : {0, n - 1}) {
        std::vector<T> b = values<T>(me, elems);
        c.broadcast(nullptr, tensor(b), root);
        expect("broadcast", b, values<T>(root, elems));
    }

    // Rank r sends (r + 2 p) % 3 shares of its values to rank p.
    std::vector<int64_t> to_counts, from_counts;
    std::vector<T> out, in, wanted;
    const auto shares = [](int from, int to) { return static_cast<size_t>((from + 2 * to) % 3); };
    const auto message = [&](int from, int to) { return values<T>(from + 100 * to, elems * shares(from, to)); };
    for (int p = 0; p < n; ++p) {
        const std::vector<T> there = message(me, p), here = message(p, me);
        to_counts.push_back(static_cast<int64_t>(there.size()));
        from_counts.push_back(static_cast<int64_t>(here.size()));
        out.insert(out.end(), there.begin(), there.end());
        wanted.insert(wanted.end(), here.begin(), here.end());
    }
    in.resize(wanted.size());
    c.all_to_all(nullptr, tensor(out), to_counts, tensor(in), from_counts);
    expect("all_to_all", in, wanted);

    const int next = (me + 1) % n, previous = (me + n - 1) % n;
    std::vector<T> x = values<T>(me, elems), y(elems);
    c.exchange(nullptr, next, tensor(x), previous, tensor(y));
    expect("exchange", y, values<T>(previous, elems));
    if (me == 0) c.exchange(nullptr, 1, tensor(x), -1, Tensor());
    if (me == 1) c.exchange(nullptr, -1, Tensor(), 0, tensor(y));
    if (me == 1) expect("exchange in one direction", y, values<T>(0, elems));
    for (int r = 0; r + 1 < n; ++r) {
        if (me == r) c.send(nullptr, r + 1, tensor(x)), c.send(nullptr, r + 1, tensor(shard));
        std::vector<T> first(elems), second(elems);
        if (me == r + 1) c.receive(nullptr, r, tensor(first)), c.receive(nullptr, r, tensor(second));
        if (me == r + 1) expect("send", first, values<T>(r, elems));
    }
    return names;
}

struct Recorder final : Collectives {
    void all_gather(CUstream_st*, const Tensor&, const Tensor&) override {}
    void reduce_scatter(CUstream_st*, const Tensor&, const Tensor&) override {}
    void all_reduce(CUstream_st*, const Tensor&) override {}
    void all_reduce_max(CUstream_st*, const Tensor&) override {}
    void broadcast(CUstream_st*, const Tensor&, int) override {}
    void all_to_all(CUstream_st*, const Tensor&, std::span<const int64_t>, const Tensor&, std::span<const int64_t>) override {}
    void send(CUstream_st*, int, const Tensor&) override {}
    void receive(CUstream_st*, int, const Tensor&) override {}
    void exchange(CUstream_st*, int, const Tensor&, int, const Tensor&) override {}
    void abort() noexcept override {}
};

// What an operation of rank 1 of 3 does to each element of x: w where it writes, r where it only reads, - where neither. Told by what an
// unordered read or write beside it is reported as.
template <class Act>
std::string declared(std::vector<float>& x, Act act) {
    std::string letters;
    for (size_t i = 0; i < x.size(); ++i) {
        const auto conflicts = [&](Access access) {
            Checked c;
            const Group group("dp", 1, 3, c.dp, std::make_unique<Recorder>());
            const Ticket ticket = act(group);
            c.compute.submit("other", {stream_test::access(access, x, i, 1)}, nothing);
            c.engine.wait(ticket);
            return !c.findings().empty();
        };
        letters += conflicts(Access::read) ? 'w' : conflicts(Access::write) ? 'r' : '-';
    }
    return letters;
}

}  // namespace

TEMPLATE_TEST_CASE("collectives of any size on any number of ranks", "[collectives]", float, bf16, double, int32_t, uint8_t) {
    const int n = GENERATE(2, 3, 4, 8);
    const Ranks ranks(n, n == 3 ? Path::tcp : Path::inside_host);
    std::vector<std::string> mistakes(static_cast<size_t>(n));
    const Sentences said = on_threads(n, [&](int me) {
        const auto c = ranks.collectives(me);
        for (const size_t elems : {0, 1, 2, 7, 1023, 9001})
            mistakes[static_cast<size_t>(me)] += wrong<TestType>(*c, me, n, elems);
    });
    CHECK(said == nobody_failed(n));
    CHECK(mistakes == nobody_failed(n));
}

TEST_CASE("large tensors go in pieces", "[collectives]") {
    const int n = GENERATE(2, 4);
    const Ranks ranks(n, GENERATE(Path::inside_host, Path::tcp));
    std::vector<std::string> mistakes(static_cast<size_t>(n));
    const Sentences said = on_threads(n, [&](int me) {
        const auto c = ranks.collectives(me);
        mistakes[static_cast<size_t>(me)] = wrong<float>(*c, me, n, 300'007) + wrong<bf16>(*c, me, n, 131'072 * 3);
    });
    CHECK(said == nobody_failed(n));
    CHECK(mistakes == nobody_failed(n));
}

TEST_CASE("a maximum keeps NaN, whoever has it", "[collectives]") {
    const int n = 3;
    const Ranks ranks(n);
    const size_t elems = GENERATE(3, 6000);
    std::atomic<int> mistakes = 0;
    CHECK(on_threads(n, [&](int me) {
              std::vector<float> x(elems, static_cast<float>(me));
              x[static_cast<size_t>(me)] = std::numeric_limits<float>::quiet_NaN();
              ranks.collectives(me)->all_reduce_max(nullptr, tensor(x));
              for (size_t i = 0; i < elems; ++i) mistakes += i < 3 ? !std::isnan(x[i]) : x[i] != 2;
          }) == nobody_failed(n));
    CHECK(mistakes == 0);
}

TEST_CASE("ranks that disagree about a collective are told", "[collectives]") {
    const Ranks ranks(2);
    Sentences later(2);
    const Sentences said = on_threads(2, [&](int me) {
        const auto c = ranks.collectives(me);
        std::vector<float> x(10), more(10);
        c->all_reduce(nullptr, tensor(x));
        more.resize(me == 0 ? 10 : 12);
        const std::string sentence = sentence_of([&] { c->all_reduce(nullptr, tensor(more)); });
        later[static_cast<size_t>(me)] = sentence_of([&] { c->all_reduce(nullptr, tensor(x)); });
        throw Problem(Exit::fault, sentence);
    });
    for (const size_t r : {0, 1}) CHECK(later[r] == "group 'dp' has failed before: " + said[r]);
    CHECK((has(said[0], "group 'dp' (all_reduce #2): rank 11 on node-1 ") && has(said[0], " 48 ")));
    CHECK((has(said[1], "group 'dp' (all_reduce #2): rank 10 on node-0 ") && has(said[1], " 48")));
}

TEST_CASE("a rank that is killed in a collective ends all others", "[collectives]") {
    const int n = 4, victim = 1;
    Ranks ranks(n);
    std::vector<Pipe> reports(n);
    std::vector<pid_t> pids;
    for (int r = 0; r < n; ++r) {
        pids.push_back(forked(ranks, r, [&](int me) {
            const Pipe& report = reports[static_cast<size_t>(me)];
            report.write(sentence_of([&] {
                const auto c = ranks.collectives(me);
                std::vector<float> x(2'000'000);
                c->all_reduce(nullptr, tensor(x));
                report.write("summed");
                while (true) c->all_reduce(nullptr, tensor(x));
            }));
        }));
    }
    ranks.listeners.clear();
    CHECK(after_kill(reports, pids, victim, "summed") == "");
}

TEST_CASE("a group of one does nothing and needs no stream", "[group]") {
    const Group group;
    std::vector<float> x{1, 2, 3};
    CHECK(group.alone());
    group.follow(Ticket{0, 7});
    CHECK(group.all_gather(tensor(x), tensor(x)) == Ticket());
    CHECK(group.reduce_scatter(tensor(x), tensor(x)) == Ticket());
    CHECK(group.all_reduce(tensor(x)) == Ticket());
    CHECK(group.all_reduce_max(tensor(x)) == Ticket());
    CHECK(group.broadcast(tensor(x), 0) == Ticket());
    CHECK(group.all_to_all(tensor(x), {3}, tensor(x), {3}) == Ticket());
    CHECK(group.exchange(-1, Tensor(), -1, Tensor()) == Ticket());
    CHECK(group.barrier() == Ticket());
    group.abort();
    CHECK(x == std::vector<float>{1, 2, 3});
}

TEST_CASE("operations of a group run on its stream, after what it follows, and give tickets", "[group]") {
    const int n = 3;
    const size_t elems = 10'000;
    const Ranks ranks(n);
    const StreamMode mode = GENERATE(StreamMode::normal, StreamMode::adversarial);
    std::atomic<int> mistakes = 0;
    const Sentences said = on_threads(n, [&](int me) {
        StreamEngine engine(mode);
        Stream &compute = engine.add("compute", StreamKind::compute), &dp = engine.add("dp", StreamKind::communication);
        const Group group("dp", me, n, dp, ranks.collectives(me));
        std::vector<float> grads(elems * n), shard(elems), params(elems * n);
        for (int step = 1; step <= 3; ++step) {
            const float expected = static_cast<float>(step * (n * (n + 1) / 2));
            group.follow(compute.submit("backward", {writes(grads)}, [&grads, me, step] {
                std::fill(grads.begin(), grads.end(), static_cast<float>(step * (me + 1)));
            }));
            compute.follow(group.reduce_scatter(tensor(grads), tensor(shard)));
            Tensor own = tensor(params).slice(static_cast<int64_t>(elems) * me, static_cast<int64_t>(elems));
            group.follow(compute.submit(
                "update", {reads(shard), stream_test::access(Access::write, params, elems * static_cast<size_t>(me), elems)},
                [&shard, own] { std::copy(shard.begin(), shard.end(), own.as<float>()); }));
            const Ticket gathered = group.all_gather(own, tensor(params));
            engine.wait(group.barrier());
            engine.wait(gathered);
            engine.host_access({reads(params)}, "check");
            for (const float p : params) mistakes += p != expected;
        }
        engine.wait_all();
        mistakes += static_cast<int>(engine.findings().size());
    });
    CHECK(said == nobody_failed(n));
    CHECK(mistakes == 0);
}

TEST_CASE("a failed operation fails its ticket and all that the group is told later", "[group]") {
    const Ranks ranks(2);
    const Sentences said = on_threads(2, [&](int me) {
        StreamEngine engine;
        const Group group("dp", me, 2, engine.add("dp", StreamKind::communication), ranks.collectives(me));
        std::vector<float> x(4);
        engine.wait(group.all_reduce(tensor(x)));
        if (me == 0) return;
        const Ticket failed = group.all_reduce(tensor(x)), later = group.barrier();
        const std::string sentence = sentence_of([&] { engine.wait(failed); });
        CHECK(sentence_of([&] { engine.wait(later); }) == sentence);
        throw Problem(Exit::fault, sentence);
    });
    CHECK(said[0] == "");
    CHECK(has(said[1], "rank 10 on node-0 closed its connection of group 'dp' (all_reduce #2)"));
}

TEST_CASE("abort reaches an operation that is running", "[group]") {
    const Ranks ranks(2);
    const Sentences said = on_threads(2, [&](int me) {
        StreamEngine engine;
        const Group group("dp", me, 2, engine.add("dp", StreamKind::communication), ranks.collectives(me));
        const Ticket never = me == 0 ? group.barrier() : Ticket();
        if (me == 1) group.abort();
        engine.wait(never);
    });
    CHECK(has(said[0], "rank 11 on node-1 closed its connection of group 'dp'"));
    CHECK(said[1] == "");
}

TEST_CASE("operations declare exactly what they read and write", "[group]") {
    std::vector<float> x(12), y(12);
    const Tensor t = tensor(x), u = tensor(y);
    const auto none = std::vector<int64_t>{0, 0, 0};
    CHECK(declared(x, [&](const Group& g) { return g.all_gather(u.slice(0, 4), t); }) == "wwwwwwwwwwww");
    CHECK(declared(y, [&](const Group& g) { return g.all_gather(u.slice(0, 4), t); }) == "rrrr--------");
    CHECK(declared(x, [&](const Group& g) { return g.all_gather(t.slice(4, 4), t); }) == "wwwwrrrrwwww");
    CHECK(declared(x, [&](const Group& g) { return g.reduce_scatter(t, u.slice(0, 4)); }) == "rrrrrrrrrrrr");
    CHECK(declared(y, [&](const Group& g) { return g.reduce_scatter(t, u.slice(0, 4)); }) == "wwww--------");
    CHECK(declared(x, [&](const Group& g) { return g.reduce_scatter(t, t.slice(4, 4)); }) == "rrrrwwwwrrrr");
    CHECK(declared(x, [&](const Group& g) { return g.all_reduce(t.slice(1, 3)); }) == "-www--------");
    CHECK(declared(x, [&](const Group& g) { return g.all_reduce_max(t.slice(1, 3)); }) == "-www--------");
    CHECK(declared(x, [&](const Group& g) { return g.broadcast(t, 0); }) == "wwwwwwwwwwww");
    CHECK(declared(x, [&](const Group& g) { return g.broadcast(t, 1); }) == "rrrrrrrrrrrr");
    CHECK(declared(x, [&](const Group& g) {
              return g.all_to_all(t.slice(0, 3), {1, 2, 0}, t.slice(6, 3), {1, 2, 0});
          }) == "rrr---www---");
    CHECK(declared(x, [&](const Group& g) { return g.all_to_all(Tensor(), none, Tensor(), none); }) == "------------");
    CHECK(declared(x, [&](const Group& g) { return g.send(0, t.slice(0, 2)); }) == "rr----------");
    CHECK(declared(x, [&](const Group& g) { return g.receive(2, t.slice(0, 2)); }) == "ww----------");
    CHECK(declared(x, [&](const Group& g) { return g.exchange(0, t.slice(0, 2), 2, t.slice(2, 2)); }) == "rrww--------");
    CHECK(declared(x, [&](const Group& g) { return g.exchange(-1, Tensor(), 2, t.slice(2, 2)); }) == "--ww--------");
    CHECK(declared(x, [&](const Group& g) { return g.barrier(); }) == "------------");
}
