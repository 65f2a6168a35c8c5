// parallel/trace.cpp   Chrome's trace event format: complete events ("X") on threads ("tid") of one process per rank.
#include "parallel/trace.h"

#include <fmt/format.h>

#include <chrono>
#include <cstdint>
#include <filesystem>
#include <map>
#include <mutex>
#include <nlohmann/json.hpp>

#include "parallel/append_file.h"

namespace trifold {
namespace {

using namespace std::chrono;

constexpr size_t chunk_bytes = 64 << 10;
constexpr auto chunk_time = seconds(1);  // what a crash may cost

std::string json_text(std::string_view text) {
    return nlohmann::json(text).dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
}

std::string metadata(const char* what, int rank, int track, const std::string& name) {
    return fmt::format(R"({{"name":"{}","ph":"M","pid":{},"tid":{},"args":{{"name":{}}}}})", what, rank, track,
                       json_text(name));
}

std::string create_file(const std::string& run_dir, int rank) {
    std::error_code ignored;  // opening the file fails then, with the reason
    std::filesystem::create_directories(run_dir + "/trace", ignored);
    return fmt::format("{}/trace/rank-{:05}.json", run_dir, rank);
}

// 1234567 ns -> "1234.567"
std::string microseconds_text(int64_t ns) { return fmt::format("{}.{:03}", ns / 1000, ns % 1000); }

}  // namespace

struct Trace::State {
    const int rank;
    const nanoseconds to_unix;  // of rank 0's host
    std::mutex mutex;
    AppendFile file;
    std::string chunk;
    StreamTime written = steady_clock::now();
    std::map<std::string, int, std::less<>> tracks;

    State(const std::string& run_dir, int r, int64_t clock_offset_ns, std::FILE* complaints)
        : rank(r),
          to_unix(system_clock::now().time_since_epoch() - steady_clock::now().time_since_epoch() + nanoseconds(clock_offset_ns)),
          file(create_file(run_dir, r), AppendFile::Start::empty, complaints) {
        chunk = "[\n" + metadata("process_name", rank, 0, fmt::format("rank {}", rank));
    }
    ~State() { file.append(chunk + "\n]\n"); }

    int track_number(std::string_view name) {
        if (const auto known = tracks.find(name); known != tracks.end()) return known->second;
        const int number = static_cast<int>(tracks.size()) + 1;
        chunk += ",\n" + metadata("thread_name", rank, number, std::string(name));
        return tracks.emplace(name, number).first->second;
    }
};

Trace::Trace() = default;

Trace::Trace(const std::string& run_dir, int rank, int64_t clock_offset_ns, std::FILE* complaints)
    : state_(std::make_unique<State>(run_dir, rank, clock_offset_ns, complaints)) {}

Trace::~Trace() = default;

StreamObserver Trace::stream_observer() {
    if (!on()) return {};
    return [this](const Stream& s, const char* name, StreamTime begin, StreamTime end) {
        if (name == waiting)
            span("waits", "for " + s.name(), begin, end);
        else
            span(s.name(), name, begin, end);
    };
}

void Trace::span(std::string_view track, std::string_view name, StreamTime begin, StreamTime end) {
    if (!on()) return;
    State& s = *state_;
    const std::lock_guard lock(s.mutex);
    const int number = s.track_number(track);
    const int64_t start_ns = (begin.time_since_epoch() + s.to_unix).count();
    s.chunk +=
        fmt::format(",\n{{\"name\":{},\"ph\":\"X\",\"pid\":{},\"tid\":{},\"ts\":{},\"dur\":{}}}", json_text(name),
                    s.rank, number, microseconds_text(start_ns), microseconds_text((end - begin).count()));
    if (s.chunk.size() < chunk_bytes && end - s.written < chunk_time) return;
    s.file.append(s.chunk);
    s.chunk.clear();
    s.written = end;
}

}  // namespace trifold
