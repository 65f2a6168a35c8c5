// test/unit/test_telemetry.cpp   metrics.jsonl, events.jsonl and the console: contents, resuming, full disks.
#include "test/catch.h"

#include <sys/resource.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <fstream>
#include <limits>
#include <nlohmann/json.hpp>
#include <string>
#include <thread>
#include <vector>

#include "base/error.h"
#include "parallel/append_file.h"
#include "parallel/console.h"
#include "parallel/signals.h"
#include "parallel/telemetry.h"
#include "test/unit/run_folder.h"

using namespace trifold;
using namespace trifold::telemetry_test;
using Json = nlohmann::ordered_json;

namespace {

// No file of this process grows beyond `bytes` while it lives: a full disk that needs no mount. Standard output may be
// a file too, so nothing is asserted under it.
class FullDisk {
public:
    explicit FullDisk(rlim_t bytes) {
        ::getrlimit(RLIMIT_FSIZE, &before_);
        const rlimit limit{bytes, before_.rlim_max};
        ::setrlimit(RLIMIT_FSIZE, &limit);
    }
    ~FullDisk() { ::setrlimit(RLIMIT_FSIZE, &before_); }

private:
    SignalHandlers handlers_;  // ignores SIGXFSZ
    rlimit before_{};
};

}  // namespace

TEST_CASE("metrics.jsonl has the documented fields in the documented order", "[telemetry]") {
    Setup s;
    Telemetry t(s.run_dir(), s.options);
    t.step(record(1));
    CHECK(
        s.metrics() ==
        R"({"step":1,"loss":4.0,"grad_norm":0.1,"lr":0.0006,"tokens":4096,"step_s":0.5,"tokens_per_s":8192.0,"mfu":0.451,)"
        R"("exposed_s":{"dp":0.01,"tp":0.0,"pp":0.0,"ep":0.0,"cp":0.0},"bubble_s":0.02,"mem_bytes":3221225472})"
        "\n");
    StepRecord bad = record(2);
    bad.loss = std::nan(""), bad.grad_norm = std::numeric_limits<double>::infinity();
    t.step(bad);
    t.evaluation(2, 3.25);
    const auto lines = lines_of(s.metrics());  // on disk while the run goes on
    REQUIRE(lines.size() == 3);
    CHECK(Json::parse(lines[1])["loss"].is_null());
    CHECK(Json::parse(lines[1])["grad_norm"].is_null());
    CHECK(lines[2] == R"({"step":2,"val_loss":3.25})");
    CHECK(s.complaints.text().empty());
}

TEST_CASE("events.jsonl has a time, a kind and typed fields", "[telemetry]") {
    Setup s;
    Telemetry t(s.run_dir(), s.options);
    t.event("checkpoint", {{"step", 500}, {"path", "a\xff\"b"}, {"seconds", 0.5}, {"ok", true}});
    t.event("stop");
    const auto lines = lines_of(s.events());
    REQUIRE(lines.size() == 2);
    const Json e = Json::parse(lines[0]);
    std::string time = e["time"];  // 2024-06-13T17:05:02.123Z
    std::replace_if(
        time.begin(), time.end(), [](char c) { return c >= '0' && c <= '9'; }, '0');
    CHECK(time == "0000-00-00T00:00:00.000Z");
    CHECK(e["kind"] == "checkpoint");
    CHECK(e["step"].is_number_integer());
    CHECK(e["path"] == "a\xef\xbf\xbd\"b");  // bytes that are no UTF-8 become U+FFFD
    CHECK(e["seconds"] == 0.5);
    CHECK(e["ok"] == true);
    CHECK(Json::parse(lines[1])["kind"] == "stop");
}

TEST_CASE("events from several threads stay whole lines", "[telemetry]") {
    Setup s;
    Telemetry t(s.run_dir(), s.options);
    const auto many = [&] {
        for (int i = 0; i < 200; ++i) t.event("tick", {{"i", i}});
    };
    std::thread other(many);
    many();
    other.join();
    const auto lines = lines_of(s.events());
    CHECK(lines.size() == 400);
    for (const std::string& line : lines) REQUIRE(Json::accept(line));
}

TEST_CASE("the console prints a header once and every log_every-th step", "[telemetry]") {
    Setup s;
    s.options.log_every = 10;
    Telemetry t(s.run_dir(), s.options);
    for (int64_t step = 1; step <= 100; ++step) t.step(record(step));
    t.evaluation(100, 3.5);
    t.say("saved");
    const auto lines = lines_of(s.out.text());
    REQUIRE(lines.size() == 14);
    CHECK(lines[0].find("MFU: 6 FLOPs per parameter") != std::string::npos);
    for (const char* part : {"  1/100", "4.0000", "6.00e-04", "8.19 k", "45.1%", "3.00 GiB", "0.5 s", "50 s"}) {
        INFO(lines[1] << " has " << part);
        CHECK(lines[1].find(part) != std::string::npos);
    }
    CHECK(lines[1].find("  1/100") == 0);
    CHECK(lines[11].find("100/100") == 0);
    CHECK(lines[12] == "100/100 validation loss 3.5000");
    CHECK(lines[13] == "saved");
    CHECK(lines_of(s.metrics()).size() == 101);
}

TEST_CASE("on a terminal the last line is a progress bar", "[telemetry]") {
    Setup s;
    s.options.console = ConsoleStyle::bar;
    {
        Telemetry t(s.run_dir(), s.options);
        t.step(record(1));
        t.step(record(50));
    }
    const std::string text = s.out.text();
    const std::string erase = "\r\x1b[2K", bar = text.substr(0, text.rfind(erase));
    CHECK(text.ends_with(erase));  // nothing of the bar stays
    CHECK(bar.ends_with(".]  50%   50/100  25 s left"));
    CHECK(count(bar, "[#") == 1);  // at 1 % there is nothing to fill yet
    CHECK(bar.size() - bar.rfind(erase) < 80 + erase.size());
}

TEST_CASE("durations as people read them", "[telemetry]") {
    CHECK(human_seconds(0.0123) == "0.0123 s");
    CHECK(human_seconds(59.4) == "59 s");
    CHECK(human_seconds(59.6) == "1m00s");
    CHECK(human_seconds(3599) == "59m59s");
    CHECK(human_seconds(7260) == "2h01m");
    CHECK(human_seconds(200000) == "2d07h");
    CHECK(human_seconds(std::nan("")) == "-");
}

TEST_CASE("a run directory that cannot be written is refused at the start", "[telemetry]") {
    Setup s;
    std::ofstream(s.dir / "file") << "x";
    try {
        Telemetry t(s.dir / "file", s.options);
        FAIL("a file was taken for a run directory");
    } catch (const Problem& p) {
        CHECK(p.code() == Exit::usage);
        CHECK(std::string(p.what()).find(s.dir / "file") != std::string::npos);
    }
    fs::create_directories(s.run_dir() + "/metrics.jsonl");
    CHECK_THROWS_AS(Telemetry(s.run_dir(), s.options), Problem);
}

TEST_CASE("a full disk is reported once, nothing is torn, and later everything is there", "[telemetry]") {
    Setup s;
    s.options.tensorboard = false;
    {
        Telemetry t(s.run_dir(), s.options);
        {
            const FullDisk full(1000);
            for (int64_t step = 1; step <= 20; ++step) t.step(record(step));
        }
        CHECK(fs::file_size(s.run_dir() + "/metrics.jsonl") == 1000);  // in the middle of a line
        t.step(record(21));
        const auto lines = lines_of(s.metrics());
        REQUIRE(lines.size() == 21);
        for (size_t i = 0; i < lines.size(); ++i) CHECK(Json::parse(lines[i])["step"] == i + 1);
    }
    CHECK(count(s.complaints.text(), "\n") == 1);
    CHECK(count(s.complaints.text(), "metrics.jsonl: File too large; the run goes on") == 1);
}

TEST_CASE("what waits for the disk is bounded, and what is lost is counted", "[telemetry]") {
    TempDir dir;
    Captured complaints;
    const std::string path = dir / "log";
    const std::string record = std::string(1 << 20, 'x') + "\n";
    {
        AppendFile file(path, AppendFile::Start::empty, complaints.file());
        int written = 0;
        {
            const FullDisk full(100);
            for (int i = 0; i < 6; ++i) written += file.append(record);
        }
        CHECK(written == 0);
    }
    CHECK(fs::file_size(path) == 4 * record.size());  // the last attempt is made at the end, when there is room again
    CHECK(count(complaints.text(), "2 records are lost") == 1);
}

TEST_CASE("a broken standard output does not stop the run", "[telemetry]") {
    Setup s;
    std::FILE* full = std::fopen("/dev/full", "w");
    REQUIRE(full != nullptr);
    s.options.out = full;
    {
        Telemetry t(s.run_dir(), s.options);
        for (int64_t step = 1; step <= 3; ++step) t.step(record(step));
    }
    std::fclose(full);
    CHECK(count(s.complaints.text(), "standard output") == 1);
    CHECK(lines_of(s.metrics()).size() == 3);
}

TEST_CASE("lines that a crash cut off stay apart from what follows", "[telemetry]") {
    Setup s(2);
    fs::create_directories(s.run_dir());
    std::ofstream(s.run_dir() + "/metrics.jsonl") << "{\"step\":2}\n{\"step\":2,\"val_l";
    std::ofstream(s.run_dir() + "/events.jsonl") << "{\"time\":\"20";
    Telemetry t(s.run_dir(), s.options);
    CHECK(s.metrics() == "{\"step\":2}\n");
    CHECK(content(s.run_dir() + "/metrics.superseded.jsonl") == "{\"step\":2,\"val_l\n");
    const auto events = lines_of(s.events());
    REQUIRE(events.size() == 2);
    CHECK(Json::parse(events[1])["lines"] == 1);
}

TEST_CASE("a resumed run has each step once and keeps what was superseded", "[telemetry]") {
    Setup s(4);
    TelemetryOptions fresh = s.options;
    fresh.resumed_step = 0;
    {
        Telemetry t(s.run_dir(), fresh);
        for (int64_t step = 1; step <= 6; ++step) t.step(record(step));
        t.evaluation(6, 1.0);
    }
    const auto before = lines_of(s.metrics());
    std::ofstream(s.run_dir() + "/metrics.jsonl", std::ios::app) << R"({"step":7,"lo)";
    {
        Telemetry t(s.run_dir(), s.options);
        CHECK(lines_of(s.metrics()) == std::vector<std::string>(before.begin(), before.begin() + 4));
        t.step(record(5));
    }
    const auto after = lines_of(s.metrics());
    REQUIRE(after.size() == 5);
    CHECK(after[4] == before[4]);
    auto superseded = lines_of(content(s.run_dir() + "/metrics.superseded.jsonl"));
    REQUIRE(superseded.size() == 4);  // steps 5 and 6, the evaluation, the torn line
    CHECK(superseded[2] == before[6]);
    const Json event = Json::parse(lines_of(s.events()).at(0));
    CHECK(event["kind"] == "metrics_superseded");
    CHECK(event["resumed_step"] == 4);
    CHECK(event["lines"] == 4);
    SECTION("resuming at the end changes nothing") {
        TelemetryOptions next = s.options;
        next.resumed_step = 5;
        Telemetry t(s.run_dir(), next);
        CHECK(lines_of(s.metrics()) == after);
        CHECK(lines_of(s.events()).size() == 1);
    }
    SECTION("a second roll-back is added to the first") {
        TelemetryOptions next = s.options;
        next.resumed_step = 3;
        Telemetry t(s.run_dir(), next);
        CHECK(lines_of(s.metrics()).size() == 3);
        CHECK(lines_of(content(s.run_dir() + "/metrics.superseded.jsonl")).size() == 6);
    }
    SECTION("when they cannot be moved, they stay and that is said") {
        fs::remove(s.run_dir() + "/metrics.superseded.jsonl");
        fs::create_directory(s.run_dir() + "/metrics.superseded.jsonl");
        TelemetryOptions next = s.options;
        next.resumed_step = 3;
        Telemetry t(s.run_dir(), next);
        CHECK(lines_of(s.metrics()) == after);
        CHECK(count(s.complaints.text(), "not moved: Is a directory") == 1);
    }
}
