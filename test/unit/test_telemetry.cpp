#if __has_include(<catch2/catch_all.hpp>)
#include <catch2/catch_all.hpp>
#else
#include <catch2/catch.hpp>
#endif

#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <limits>
#include <map>
#include <nlohmann/json.hpp>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

#include "base/error.h"
#include "parallel/append_file.h"
#include "parallel/console.h"
#include "parallel/signals.h"
#include "parallel/telemetry.h"
#include "parallel/tensorboard.h"

using namespace trifold;
using Json = nlohmann::ordered_json;
namespace fs = std::filesystem;

namespace {

struct TempDir {
    fs::path path;
    TempDir() {
        std::string name = (fs::temp_directory_path() / "trifold-telemetry-XXXXXX").string();
        path = ::mkdtemp(name.data());
    }
    ~TempDir() { fs::remove_all(path); }
    std::string operator/(const std::string& name) const { return (path / name).string(); }
};

// A FILE that collects what is written to it.
class Captured {
public:
    Captured() : file_(::open_memstream(&text_, &size_)) {}
    ~Captured() { std::fclose(file_), std::free(text_); }
    std::FILE* file() const { return file_; }
    std::string text() const {
        std::fflush(file_);
        return {text_, size_};
    }

private:
    char* text_ = nullptr;
    size_t size_ = 0;
    std::FILE* file_;
};

std::string content(const std::string& path) {
    std::ifstream in(path, std::ios::binary);
    return {std::istreambuf_iterator<char>(in), {}};
}

std::vector<std::string> lines_of(const std::string& text) {
    std::vector<std::string> lines;
    std::istringstream in(text);
    for (std::string line; std::getline(in, line);) lines.push_back(line);
    return lines;
}

size_t count(const std::string& text, const std::string& part) {
    size_t n = 0;
    for (size_t at = text.find(part); at != std::string::npos; at = text.find(part, at + part.size())) ++n;
    return n;
}

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

StepRecord record(int64_t step) {
    StepRecord r;
    r.step = step, r.loss = 4.0 / static_cast<double>(step), r.grad_norm = 0.1, r.lr = 6e-4;
    r.tokens = 4096, r.step_s = 0.5, r.tokens_per_s = 8192, r.mfu = 0.451;
    r.exposed_s.dp = 0.01, r.bubble_s = 0.02, r.mem_bytes = int64_t{3} << 30;
    return r;
}

struct Setup {
    TempDir dir;
    Captured out, complaints;
    TelemetryOptions options;
    explicit Setup(int64_t resumed_step = 0) {
        options.steps = 100;
        options.resumed_step = resumed_step;
        options.mfu_convention = "6 FLOPs per parameter";
        options.out = out.file();
        options.complaints = complaints.file();
    }
    std::string run_dir() const { return dir / "run"; }
    std::string metrics() const { return content(run_dir() + "/metrics.jsonl"); }
    std::string events() const { return content(run_dir() + "/events.jsonl"); }
};

// ---- an independent reader of TensorBoard's files

uint32_t slow_crc32c(const std::string& bytes) {
    uint32_t crc = 0xffffffffu;
    for (const char b : bytes) {
        crc ^= static_cast<uint8_t>(b);
        for (int i = 0; i < 8; ++i) crc = (crc & 1) != 0 ? (crc >> 1) ^ 0x82f63b78u : crc >> 1;
    }
    return crc ^ 0xffffffffu;
}

template <class T>
T read_as(const std::string& bytes, size_t at) {
    T value;
    REQUIRE(at + sizeof value <= bytes.size());
    std::memcpy(&value, bytes.data() + at, sizeof value);
    return value;
}

std::vector<std::string> messages_of(const std::string& file) {
    const auto check = [&](size_t at, const std::string& bytes) {
        const uint32_t crc = slow_crc32c(bytes);
        CHECK(read_as<uint32_t>(file, at) == ((crc >> 15) | (crc << 17)) + 0xa282ead8u);
    };
    std::vector<std::string> messages;
    for (size_t at = 0; at < file.size();) {
        const auto bytes = static_cast<size_t>(read_as<uint64_t>(file, at));
        check(at + 8, file.substr(at, 8));
        messages.push_back(file.substr(at + 12, bytes));
        check(at + 12 + bytes, messages.back());
        at += 16 + bytes;
    }
    return messages;
}

// Field number -> raw values (varints and fixed-width values as 8 bytes).
using Fields = std::multimap<uint64_t, std::string>;
Fields fields_of(const std::string& message) {
    Fields fields;
    size_t at = 0;
    const auto varint = [&] {
        uint64_t value = 0;
        for (int shift = 0;; shift += 7) {
            const auto b = static_cast<uint8_t>(message.at(at++));
            value |= static_cast<uint64_t>(b & 0x7f) << shift;
            if (b < 0x80) return value;
        }
    };
    while (at < message.size()) {
        const uint64_t key = varint();
        std::string value(8, '\0');
        if (key % 8 == 0) {
            const uint64_t v = varint();
            std::memcpy(value.data(), &v, 8);
        } else {
            const size_t bytes = key % 8 == 1 ? 8 : key % 8 == 5 ? 4 : static_cast<size_t>(varint());
            value = message.substr(at, bytes);
            at += bytes;
        }
        fields.emplace(key / 8, value);
    }
    return fields;
}

std::string only_tensorboard_file(const std::string& run_dir) {
    std::vector<std::string> files;
    for (const auto& f : fs::directory_iterator(run_dir + "/tensorboard")) files.push_back(f.path().string());
    REQUIRE(files.size() == 1);
    CHECK(files[0].find("events.out.tfevents.") != std::string::npos);
    return content(files[0]);
}

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

TEST_CASE("TensorBoard files parse, with their checksums", "[telemetry]") {
    CHECK(crc32c("123456789") == 0xe3069283u);
    Setup s(10);
    {
        Telemetry t(s.run_dir(), s.options);
        t.step(record(11));
        t.evaluation(300, 2.5);
    }
    const auto messages = messages_of(only_tensorboard_file(s.run_dir()));
    REQUIRE(messages.size() == 4);
    CHECK(fields_of(messages[0]).find(3)->second == "brain.Event:2");
    const Fields start = fields_of(messages[1]);
    CHECK(read_as<int64_t>(start.find(2)->second, 0) == 11);
    CHECK(read_as<int64_t>(fields_of(start.find(7)->second).find(1)->second, 0) == 1);
    std::map<std::string, float> values;
    for (size_t m : {2u, 3u}) {
        const Fields event = fields_of(messages[m]);
        CHECK(read_as<double>(event.find(1)->second, 0) > 1.6e9);
        CHECK(read_as<int64_t>(event.find(2)->second, 0) == (m == 2 ? 11 : 300));
        const Fields summary = fields_of(event.find(5)->second);
        for (auto [v, end] = summary.equal_range(1); v != end; ++v) {
            const Fields value = fields_of(v->second);
            values[value.find(1)->second] = read_as<float>(value.find(2)->second, 0);
        }
    }
    CHECK(values == std::map<std::string, float>{{"loss", 4.0f / 11},
                                                 {"grad_norm", 0.1f},
                                                 {"lr", 6e-4f},
                                                 {"tokens_per_s", 8192.0f},
                                                 {"mfu", 0.451f},
                                                 {"val_loss", 2.5f}});
}

TEST_CASE("TensorBoard can be switched off", "[telemetry]") {
    Setup s;
    s.options.tensorboard = false;
    Telemetry t(s.run_dir(), s.options);
    t.step(record(1));
    CHECK_FALSE(fs::exists(s.run_dir() + "/tensorboard"));
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
        CHECK(t.failed_writes() > 10);
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
        CHECK(file.lost() == 2);
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
        CHECK(t.failed_writes() > 0);
    }
    std::fclose(full);
    CHECK(count(s.complaints.text(), "standard output") == 1);
    CHECK(lines_of(s.metrics()).size() == 3);
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
