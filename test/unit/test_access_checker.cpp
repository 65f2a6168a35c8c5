// test/unit/test_access_checker.cpp   Every pair of accesses that nothing orders is reported, and no ordered pair is.
#include "test/catch.h"

#include <cstdio>
#include <stdexcept>

#include "test/unit/streams.h"

using namespace trifold;
using namespace trifold::stream_test;

TEST_CASE("the checker names both operations, their streams, numbers and bytes", "[stream]") {
    Checked c;
    c.compute.submit("zero", {}, nothing);
    c.compute.submit("linear_forward", {writes(c.buffer)}, nothing);
    c.dp.submit("all_gather", {access(Access::read, c.buffer, 48, 16)}, nothing);
    REQUIRE(c.findings().size() == 1);
    char range[64];
    std::snprintf(range, sizeof range, "reads 16 bytes at %p", static_cast<void*>(c.buffer.data() + 48));
    INFO(c.findings()[0]);
    CHECK(mentions(c.findings()[0], {"all_gather (#1 on 'dp')", range, "linear_forward (#2 on 'compute') writes"}));
}

TEST_CASE("each kind of unordered access is found", "[stream]") {
    Checked c;
    const auto kind = GENERATE(table<Access, Access, bool>({{Access::write, Access::read, true},
                                                            {Access::read, Access::write, true},
                                                            {Access::write, Access::write, true},
                                                            {Access::read_write, Access::read, true},
                                                            {Access::read, Access::read_write, true},
                                                            {Access::read, Access::read, false}}));
    const auto [first, second, races] = kind;
    const bool followed = GENERATE(false, true);
    const Ticket t = c.compute.submit("first", {access(first, c.buffer, 0, 40)}, nothing);
    if (followed) c.dp.follow(t);
    c.dp.submit("second", {access(second, c.buffer, 24, 40)}, nothing);
    CHECK(c.findings().size() == (races && !followed ? 1u : 0u));
}

TEST_CASE("neighbouring buffers and the buffers of one operation do not conflict", "[stream]") {
    Checked c;
    c.compute.submit("first", {access(Access::write, c.buffer, 0, 32), access(Access::read, c.buffer, 16, 8)}, nothing);
    c.dp.submit("second", {access(Access::write, c.buffer, 32, 32)}, nothing);
    c.dp.submit("third", {access(Access::write, c.buffer, 10, 0)}, nothing);
    CHECK(c.findings().empty());
}

TEST_CASE("an access to the middle of a buffer leaves its ends alone", "[stream]") {
    Checked c;
    c.dp.follow(c.compute.submit("whole", {writes(c.buffer)}, nothing));
    c.dp.submit("middle", {access(Access::write, c.buffer, 16, 32)}, nothing);
    c.compute.submit("front", {access(Access::write, c.buffer, 0, 16)}, nothing);
    c.compute.submit("back", {access(Access::write, c.buffer, 48, 16)}, nothing);
    CHECK(c.findings().empty());
    c.compute.submit("one byte too many", {access(Access::read, c.buffer, 47, 17)}, nothing);
    REQUIRE(c.findings().size() == 1);
    CHECK(mentions(c.findings()[0], {"reads 1 bytes", "middle (#1 on 'dp')"}));
}

TEST_CASE("one pair is one finding, however the ranges are split", "[stream]") {
    Checked c;
    const Ticket whole = c.compute.submit("whole", {writes(c.buffer)}, nothing);
    for (size_t i = 0; i < 8; ++i) c.compute.submit("part", {access(Access::read, c.buffer, i * 8, 4)}, nothing);
    c.dp.submit("late", {reads(c.buffer), access(Access::read, c.buffer, 0, 8)}, nothing);
    REQUIRE(c.findings().size() == 1);
    CHECK(mentions(c.findings()[0], {"late (#1 on 'dp') reads 64 bytes", "whole (#1"}));
    c.dp.follow(whole);
    c.dp.submit("ordered", {reads(c.buffer)}, nothing);
    CHECK(c.findings().size() == 1);
    c.dp.submit("overwrite", {writes(c.buffer)}, nothing);
    CHECK(c.findings().size() == 9);  // it does not follow the eight readers
}

TEST_CASE("an older reader of another stream is not forgotten", "[stream]") {
    Checked c;
    Stream& tp = c.engine.add("tp", StreamKind::communication);
    const Ticket w = c.compute.submit("write", {writes(c.buffer)}, nothing);
    c.dp.follow(w);
    tp.follow(w);
    c.dp.submit("read1", {reads(c.buffer)}, nothing);
    const Ticket r2 = tp.submit("read2", {reads(c.buffer)}, nothing);
    c.compute.follow(r2);
    c.compute.submit("overwrite", {writes(c.buffer)}, nothing);
    REQUIRE(c.findings().size() == 1);
    CHECK(mentions(c.findings()[0], {"overwrite", "read1 (#1 on 'dp') reads"}));
}

TEST_CASE("host accesses are checked against what the host waited for", "[stream]") {
    Checked c;
    const Ticket t = c.compute.submit("loss", {writes(c.buffer)}, nothing);
    SECTION("read without a wait") {
        c.engine.host_access({reads(c.buffer)}, "print the loss");
        REQUIRE(c.findings().size() == 1);
        CHECK(mentions(c.findings()[0],
                       {"print the loss (#1 on 'host') reads 64 bytes", "loss (#1 on 'compute') writes"}));
    }
    SECTION("read after a wait") {
        c.engine.wait(t);
        c.engine.host_access({reads(c.buffer)}, "print the loss");
        CHECK(c.findings().empty());
    }
    SECTION("the host writes what a stream has still to read") {
        c.engine.wait(t);
        c.dp.submit("send", {reads(c.buffer)}, nothing);
        c.engine.host_access({writes(c.buffer)}, "next batch");
        CHECK(c.findings().size() == 1);
    }
    SECTION("work submitted after a host access or a host wait comes after it") {
        c.engine.wait(t);
        c.dp.submit("send", {reads(c.buffer)}, nothing);
        c.engine.wait_all();
        c.engine.host_access({writes(c.buffer)}, "next batch");
        c.compute.submit("use", {writes(c.buffer)}, nothing);
        CHECK(c.findings().empty());
    }
}

TEST_CASE("released buffers", "[stream]") {
    Checked c;
    const Ticket t = c.dp.submit("send", {reads(c.buffer)}, nothing);
    SECTION("released while still in use") {
        c.engine.buffer_released(c.buffer.data(), 64, "free");
        REQUIRE(c.findings().size() == 1);
        CHECK(mentions(c.findings()[0], {"free (#1 on 'host') writes 64 bytes", "send (#1 on 'dp') reads"}));
    }
    SECTION("used after release") {
        c.engine.wait(t);
        c.engine.buffer_released(c.buffer.data(), 64, "free");
        CHECK(c.findings().empty());
        c.compute.submit("late", {access(Access::read, c.buffer, 60, 4)}, nothing);
        REQUIRE(c.findings().size() == 1);
        CHECK(mentions(c.findings()[0],
                       {"late (#1 on 'compute') reads 4 bytes", "released before by free (#1 on 'host')"}));
    }
    SECTION("the same addresses handed out again") {
        c.engine.wait(t);
        c.engine.buffer_released(c.buffer.data(), 64, "free");
        c.engine.buffer_allocated(c.buffer.data(), 32);
        c.compute.submit("fresh", {access(Access::write, c.buffer, 0, 32)}, nothing);
        CHECK(c.findings().empty());
        c.compute.submit("stale", {access(Access::write, c.buffer, 24, 16)}, nothing);
        CHECK(c.findings().size() == 1);
    }
}

TEST_CASE("a failed wait does not make the checker forget what was ordered", "[stream]") {
    Checked c;
    Stream& tp = c.engine.add("tp", StreamKind::communication);
    c.dp.follow(c.compute.submit("write", {writes(c.buffer)}, nothing));
    const Ticket marker = c.dp.submit("marker", {}, nothing);
    tp.follow(marker);
    CHECK_THROWS(c.engine.wait(tp.submit("fail", {}, [] { throw std::runtime_error("link down"); })));
    Stream& ep = c.engine.add("ep", StreamKind::communication);
    c.engine.wait(ep.submit("independent", {}, nothing));
    ep.follow(marker);
    ep.submit("read", {reads(c.buffer)}, nothing);
    CHECK(c.findings().empty());
}
