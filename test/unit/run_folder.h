// test/unit/run_folder.h   A temporary run directory and what telemetry needs to write into it.
#pragma once
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <string>
#include <vector>

#include "parallel/telemetry.h"

namespace trifold::telemetry_test {

namespace fs = std::filesystem;

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

inline std::string content(const std::string& path) {
    std::ifstream in(path, std::ios::binary);
    return {std::istreambuf_iterator<char>(in), {}};
}

inline std::vector<std::string> lines_of(const std::string& text) {
    std::vector<std::string> lines;
    std::istringstream in(text);
    for (std::string line; std::getline(in, line);) lines.push_back(line);
    return lines;
}

inline size_t count(const std::string& text, const std::string& part) {
    size_t n = 0;
    for (size_t at = text.find(part); at != std::string::npos; at = text.find(part, at + part.size())) ++n;
    return n;
}

inline StepRecord record(int64_t step) {
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

}  // namespace trifold::telemetry_test
