// test/unit/test_stream.cpp   Inline, worker and adversarial streams: order, tickets, failures, copies.
#include "test/catch.h"

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <future>
#include <thread>
#include <chrono>
#include <mutex>
#include <random>
#include <set>
#include <stdexcept>
#include <string>
#include <vector>

#include "kernels/ops.h"
#include "test/unit/streams.h"

using namespace trifold;
using namespace trifold::stream_test;

namespace {

// A gate that an operation on a worker waits at, so that tests need no sleep.
class Gate {
public:
    void open() {
        const std::lock_guard lock(mutex_);
        open_ = true;
        changed_.notify_all();
    }
    void pass() {
        std::unique_lock lock(mutex_);
        changed_.wait(lock, [&] { return open_; });
    }

private:
    std::mutex mutex_;
    std::condition_variable changed_;
    bool open_ = false;
};

// Counts how often it is copied.
struct Counted {
    int* copies;
    In x;
    explicit Counted(int* c) : copies(c) {}
    Counted(const Counted& o) : copies(o.copies), x(o.x) { ++*copies; }
    auto views() const { return std::tie(x); }
};

}  // namespace

TEST_CASE("an inline stream runs at once and copies nothing", "[stream]") {
    StreamEngine engine;
    Stream& s = engine.add("compute", StreamKind::compute);
    REQUIRE(s.runs_inline());
    int copies = 0, runs = 0;
    const Counted args(&copies);
    auto work = [args, &runs] { ++runs; };
    copies = 0;
    const Ticket t = s.submit("work", {}, work);
    CHECK(runs == 1);
    const Ticket u = s.launch<Counted>(
        "launch", +[](const Counted& a) { *a.copies += 100; }, nullptr, args);
    CHECK(copies == 100);
    CHECK(u.number == t.number + 1);
    CHECK(s.last() == u);
    engine.wait(u);
    engine.wait(Ticket());
}

TEST_CASE("a worker stream is asynchronous and keeps its order", "[stream]") {
    StreamEngine engine;
    Stream& s = engine.add("dp", StreamKind::communication);
    REQUIRE_FALSE(s.runs_inline());
    Gate gate;
    std::vector<int> order;
    s.submit("first", {}, [&] { gate.pass(), order.push_back(1); });
    s.submit("second", {}, [&] { order.push_back(2); });
    const Ticket third = s.submit("third", {}, [&] { order.push_back(3); });
    gate.open();  // a stream that ran inline would not have come here
    engine.wait(third);
    CHECK(order == std::vector<int>{1, 2, 3});
}

TEST_CASE("a stream follows tickets of another worker", "[stream]") {
    StreamEngine engine;
    Stream &a = engine.add("a", StreamKind::communication), &b = engine.add("b", StreamKind::communication);
    Gate gate;
    std::atomic<int> value = 0, seen = -1;
    const Ticket first = a.submit("set", {}, [&] { gate.pass(), value = 7; });
    b.follow(first);
    const Ticket second = b.submit("get", {}, [&] { seen = value.load(); });
    gate.open();
    engine.wait(second);
    CHECK(seen == 7);
}

TEST_CASE("an inline stream that follows a worker waits for it", "[stream]") {
    StreamEngine engine;
    Stream &compute = engine.add("compute", StreamKind::compute), &dp = engine.add("dp", StreamKind::communication);
    int value = 0;
    dp.follow(compute.submit("before", {}, [&] { value = 1; }));
    const Ticket gathered = dp.submit("gather", {}, [&] { value += 1; });
    compute.follow(gathered);
    compute.submit("after", {}, [&] { value *= 10; });
    CHECK(value == 20);
}

TEST_CASE("the last ticket of a stream stands for what it followed too, and following twice changes nothing", "[stream]") {
    const StreamMode mode = GENERATE(StreamMode::normal, StreamMode::adversarial);
    StreamEngine engine(mode);
    Stream &a = engine.add("a", StreamKind::communication), &b = engine.add("b", StreamKind::communication);
    std::atomic<int> value = 0;
    const Ticket own = b.submit("own", {}, nothing), set = a.submit("set", {}, [&] { value = 7; });
    CHECK(b.last() == own);
    b.follow(set);
    const Ticket both = b.last();
    CHECK(both.number == own.number + 1);
    CHECK(b.last() == both);
    b.follow(set);
    CHECK(b.last() == both);
    engine.wait(both);
    CHECK(value == 7);
    CHECK(engine.findings().empty());
}

TEST_CASE("streams can be added while others run, and the observer sees every operation", "[stream]") {
    StreamEngine engine;
    std::mutex mutex;
    std::set<std::string> seen;
    engine.observe([&](const Stream& s, const char* name, StreamTime begin, StreamTime end) {
        const std::lock_guard lock(mutex);
        if (begin <= end && name != waiting) seen.insert(s.name() + "/" + name);
    });
    Stream& compute = engine.add("compute", StreamKind::compute);
    compute.submit("forward", {}, nothing);
    for (int i = 0; i < 4; ++i)
        engine.add("axis" + std::to_string(i), StreamKind::communication).submit("send", {}, nothing);
    engine.wait_all();
    CHECK(seen == std::set<std::string>{"compute/forward", "axis0/send", "axis1/send", "axis2/send", "axis3/send"});
}

TEST_CASE("the observer and waited_s tell how long the host was blocked, and by which stream", "[stream]") {
    StreamEngine engine;
    std::string blocked_by;
    std::chrono::duration<double> blocked{};
    engine.observe([&](const Stream& s, const char* name, StreamTime begin, StreamTime end) {
        if (name != waiting) return;
        blocked_by += s.name();
        blocked += end - begin;
    });
    Stream& compute = engine.add("compute", StreamKind::compute);
    Stream &dp = engine.add("dp", StreamKind::communication), &tp = engine.add("tp", StreamKind::communication);
    std::promise<void> host_waits;
    const Ticket slow = dp.submit("all_reduce", {}, [&, go = host_waits.get_future().share()] {
        go.wait();
        std::this_thread::sleep_for(std::chrono::milliseconds(20));
    });
    std::thread release([&] { host_waits.set_value(); });
    compute.follow(slow);
    release.join();
    CHECK(blocked_by == "dp");
    CHECK(engine.waited_s(dp) == Approx(blocked.count()));
    CHECK(engine.waited_s(dp) > 0.005);
    CHECK(engine.waited_s(tp) == 0);
}

TEST_CASE("adversarial: nothing runs without a wait, and of compute then only what the ticket needs, the latest first", "[stream]") {
    StreamEngine engine(StreamMode::adversarial);
    Stream &first = engine.add("first", StreamKind::compute), &second = engine.add("second", StreamKind::compute);
    std::string order;
    const Ticket a = first.submit("a", {}, [&] { order += 'a'; });
    const Ticket b = first.submit("b", {}, [&] { order += 'b'; });
    second.submit("x", {}, [&] { order += 'x'; });
    second.follow(a);
    const Ticket y = second.submit("y", {}, [&] { order += 'y'; });
    const Ticket z = second.submit("z", {}, [&] { order += 'z'; });
    CHECK(order.empty());
    engine.wait(y);
    CHECK(order == "xay");  // x is free to come before a, which was submitted earlier; b and z are not needed
    engine.wait(b);
    CHECK(order == "xayb");
    engine.wait_all();
    CHECK(order == "xaybz");
    engine.wait(z);
    CHECK(engine.findings().empty());
}

TEST_CASE("adversarial: every wait lets all communication so far run, with the compute that it needs, and no other", "[stream]") {
    Checked c;
    Stream& tp = c.engine.add("tp", StreamKind::communication);
    std::atomic<bool> free_ran = false, sent = false, late = false;
    std::string computed;
    const Ticket a = c.compute.submit("a", {}, [&] { computed += 'a'; });
    const Ticket b = c.compute.submit("b", {}, [&] { computed += 'b'; });
    c.compute.submit("c", {}, [&] { computed += 'c'; });
    c.dp.submit("free", {}, [&] { free_ran = true; });
    tp.follow(b);
    tp.submit("send", {}, [&] { sent = true; });
    CHECK_FALSE(free_ran);  // nothing was waited for
    c.engine.wait(a);       // another rank may need what tp sends before it sends what this one waits for later
    CHECK(free_ran);
    CHECK(sent);
    CHECK(computed == "ab");
    tp.submit("late", {}, [&] { late = true; });
    c.engine.wait(b);  // done already; communication submitted since then runs nevertheless
    CHECK(late);
    CHECK(computed == "ab");
    c.engine.wait_all();
    CHECK(computed == "abc");
    CHECK(c.findings().empty());
}

TEST_CASE("adversarial: communication of two streams runs at the same time, like that of two ranks", "[stream]") {
    Checked c;
    Stream& tp = c.engine.add("tp", StreamKind::communication);
    Gate gate;
    c.dp.submit("receive", {}, [&] { gate.pass(); });
    const Ticket sent = tp.submit("send", {}, [&] { gate.open(); });
    c.engine.wait(sent);  // one thread for both would hang in "receive"
    c.engine.wait_all();
    CHECK(c.findings().empty());
}

TEST_CASE("adversarial: dependencies are transitive across streams and survive their completion", "[stream]") {
    StreamEngine engine(StreamMode::adversarial);
    Stream &a = engine.add("a", StreamKind::compute), &b = engine.add("b", StreamKind::communication),
           &c = engine.add("c", StreamKind::communication);
    std::vector<int> data(1);
    const Ticket set = a.submit("set", {writes(data)}, [&] { data[0] = 5; });
    b.follow(set);
    const Ticket marker = b.submit("marker", {}, nothing);
    engine.wait(set);  // done on the host's side, while b and c still have to learn of it
    c.follow(marker);
    int seen = 0;
    const Ticket get = c.submit("get", {reads(data)}, [&] { seen = data[0]; });
    engine.wait(get);
    CHECK(seen == 5);
    CHECK(engine.findings().empty());
}

TEST_CASE("adversarial: a missing wait gives wrong values", "[stream]") {
    Checked c;
    std::vector<int> x(1, 1), y(1, 0);
    c.compute.submit("produce", {writes(x)}, [&] { x[0] = 42; });
    const Ticket copied = c.dp.submit("copy", {reads(x), writes(y)}, [&] { y[0] = x[0]; });
    c.engine.wait(copied);
    CHECK(y[0] == 1);
    REQUIRE(c.findings().size() == 1);
}

TEST_CASE("failures are delivered to whoever waits for them", "[stream]") {
    const auto fail = [] { throw std::runtime_error("link down"); };
    bool ran_after = false, ran_elsewhere = false;
    const auto after = [&] { ran_after = true; };
    SECTION("inline: at once") {
        StreamEngine engine;
        Stream& s = engine.add("compute", StreamKind::compute);
        CHECK_THROWS_WITH(s.submit("fail", {}, fail), "link down");
        s.submit("after", {}, after);
        CHECK(ran_after);
    }
    SECTION("queues: at every wait for it or for what depends on it, and nowhere else") {
        const StreamMode mode = GENERATE(StreamMode::normal, StreamMode::adversarial);
        StreamEngine engine(mode);
        Stream &a = engine.add("a", StreamKind::communication), &b = engine.add("b", StreamKind::communication),
               &c = engine.add("c", StreamKind::communication);
        const Ticket fine = a.submit("fine", {}, nothing);
        const Ticket failed = a.submit("fail", {}, fail);
        const Ticket same_stream = a.submit("after", {}, after);
        const Ticket independent = b.submit("independent", {}, [&] { ran_elsewhere = true; });
        b.follow(failed);
        const Ticket follower = b.submit("after", {}, after);
        c.follow(follower);
        const Ticket second_hand = c.submit("after", {}, after);
        CHECK_THROWS_WITH(engine.wait(second_hand), "link down");
        CHECK_THROWS_WITH(engine.wait(failed), "link down");
        CHECK_THROWS_WITH(engine.wait(same_stream), "link down");
        CHECK_THROWS_WITH(engine.wait(follower), "link down");
        CHECK_THROWS_WITH(engine.wait_all(), "link down");
        CHECK_NOTHROW(engine.wait(fine));
        CHECK_NOTHROW(engine.wait(independent));
        CHECK_FALSE(ran_after);
        CHECK(ran_elsewhere);
        Stream& fresh = engine.add("fresh", StreamKind::communication);
        CHECK_NOTHROW(engine.wait(fresh.submit("alive", {}, nothing)));
        if (mode == StreamMode::normal) {
            Stream& compute = engine.add("compute", StreamKind::compute);
            CHECK_THROWS_WITH(compute.follow(follower), "link down");
        }
    }
}

TEST_CASE("destroying an engine drops what has not begun and does not hang", "[stream]") {
    int runs = 0;
    Gate gate;
    {
        StreamEngine engine;
        Stream &a = engine.add("a", StreamKind::communication), &b = engine.add("b", StreamKind::communication);
        b.follow(a.submit("open", {}, [&] { gate.open(); }));
        for (int i = 0; i < 1000; ++i) b.submit("count", {}, [&] { ++runs; });
        gate.pass();
    }
    CHECK(runs <= 1000);
    {
        StreamEngine engine(StreamMode::adversarial);
        Stream& a = engine.add("a", StreamKind::communication);
        a.submit("never", {}, [&] { runs = 1'000'000; });
    }
    CHECK(runs < 1'000'000);
}

TEST_CASE("an operation of the table is put on its stream with a copy of its arguments", "[stream]") {
    Checked c;
    std::vector<float> y(16, 1.0f);
    Ticket t;
    {
        Zero args;
        args.y = Tensor{y.data(), DType::f32, 16};
        t = zero(c.compute, args);
        args.y = Tensor();
    }
    CHECK(y[15] == 1.0f);
    c.engine.host_access({reads(y)}, "too early");
    REQUIRE(c.findings().size() == 1);
    CHECK(mentions(c.findings()[0], {"too early", "reads 64 bytes", "zero (#1 on 'compute') writes"}));
    c.engine.wait(t);
    CHECK(y == std::vector<float>(16, 0.0f));
}
