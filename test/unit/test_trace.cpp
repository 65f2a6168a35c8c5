// test/unit/test_trace.cpp   The timeline: valid JSON at any moment, events on the right tracks.
#include "test/catch.h"

#include <chrono>
#include <cmath>
#include <map>
#include <nlohmann/json.hpp>
#include <string>

#include "base/error.h"
#include "parallel/trace.h"
#include "test/unit/run_folder.h"

using namespace trifold;
using namespace trifold::telemetry_test;
using Json = nlohmann::json;

TEST_CASE("a trace that is off does nothing", "[trace]") {
    Trace trace;
    CHECK_FALSE(trace.on());
    trace.span("compute", "forward", {}, {});
    CHECK_FALSE(static_cast<bool>(trace.stream_observer()));
}

TEST_CASE("spans have names, tracks, and microseconds since 1970", "[trace]") {
    TempDir dir;
    const auto begin = std::chrono::steady_clock::now();
    const double now_us =
        std::chrono::duration<double, std::micro>(std::chrono::system_clock::now().time_since_epoch()).count();
    {
        Trace trace(dir.path.string(), 3);
        trace.span("compute", "say \"hi\"", begin, begin + std::chrono::nanoseconds(1234567));
        trace.span("dp", "all_gather", begin + std::chrono::microseconds(500), begin + std::chrono::microseconds(600));
        trace.span("compute", "backward", begin, begin + std::chrono::seconds(2));
        trace.span("host", "step", begin, begin);
    }
    const Json events = Json::parse(content(dir / "trace/rank-00003.json"));
    std::map<int, std::string> tracks;
    std::map<std::string, Json> spans;
    for (const Json& e : events) {
        CHECK(e["pid"] == 3);
        if (e["ph"] == "X") spans[e["name"]] = e;
        if (e["name"] == "thread_name") tracks[e["tid"]] = e["args"]["name"];
    }
    REQUIRE(spans.size() == 4);
    CHECK(tracks.size() == 3);
    CHECK(tracks.at(spans["all_gather"]["tid"]) == "dp");
    CHECK(spans["backward"]["tid"] == spans["say \"hi\""]["tid"]);
    CHECK(spans["say \"hi\""]["dur"] == 1234.567);
    const double offset_us = spans["all_gather"]["ts"].get<double>() - spans["backward"]["ts"].get<double>();
    CHECK(std::abs(offset_us - 500) < 1);
    CHECK(std::abs(spans["backward"]["ts"].get<double>() - now_us) < 1e6);
}

TEST_CASE("times are those of rank 0's clock", "[trace]") {
    TempDir dir;
    const auto begin = std::chrono::steady_clock::now();
    const auto written = [&](int rank, int64_t clock_offset_ns) {
        { Trace(dir.path.string(), rank, clock_offset_ns).span("tp", "all_gather", begin, begin + std::chrono::microseconds(3)); }
        for (const Json& e : Json::parse(content(dir / ("trace/rank-0000" + std::to_string(rank) + ".json"))))
            if (e["ph"] == "X") return e["ts"].get<double>();
        return 0.0;
    };
    const double here = written(0, 0);
    CHECK(here > 0);
    CHECK(std::abs(written(1, 3'600'000'000'000) - here - 3.6e9) < 1e6);  // an hour, within a second between the two clocks' readings
    CHECK(std::abs(written(2, -3'600'000'000'000) - here + 3.6e9) < 1e6);
}

TEST_CASE("a trace that was cut short lacks the last bracket only", "[trace]") {
    TempDir dir;
    Trace trace(dir.path.string(), 0);
    const auto begin = std::chrono::steady_clock::now();
    for (int i = 0; i < 5000; ++i) trace.span("compute", "op", begin, begin + std::chrono::microseconds(i));
    const std::string text = content(dir / "trace/rank-00000.json");  // the run still goes on
    REQUIRE(text.size() > 100'000);
    CHECK_FALSE(Json::accept(text));
    CHECK(Json::parse(text + "]").size() > 1000);
}

TEST_CASE("every operation of an engine becomes a span on its stream's track", "[trace]") {
    TempDir dir;
    {
        Trace trace(dir.path.string(), 0);
        StreamEngine engine;
        engine.observe(trace.stream_observer());
        Stream& compute = engine.add("compute", StreamKind::compute);
        Stream& dp = engine.add("dp", StreamKind::communication);
        for (int i = 0; i < 10; ++i) {
            dp.follow(compute.submit("forward", {}, [] {}));
            dp.submit("all_reduce", {}, [] {});
        }
        engine.wait_all();
    }
    std::map<std::string, int> spans;
    for (const Json& e : Json::parse(content(dir / "trace/rank-00000.json"))) {
        if (e["ph"] == "X" && e["name"] != "for dp") ++spans[e["name"]];  // the host's waits lie on a track of their own
    }
    CHECK(spans == std::map<std::string, int>{{"forward", 10}, {"all_reduce", 10}});
}

TEST_CASE("a trace that cannot be written is refused at the start", "[trace]") {
    CHECK_THROWS_AS(Trace("/dev/null/nowhere", 0), Problem);
}
