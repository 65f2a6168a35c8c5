// parallel/trace.h   What ran when, for Perfetto (ui.perfetto.dev) and chrome://tracing: trace/rank-00000.json.
//
// Spans lie on named tracks, one per stream. Times are microseconds since 1970, so that the files of all ranks of a run
// can be loaded together. The file is a JSON array whose last bracket is written at the end; both viewers accept it
// without, so a run that was cut short is still readable.
#pragma once
#include <cstdio>
#include <memory>
#include <string>
#include <string_view>

#include "kernels/stream.h"

namespace trifold {

class Trace {
public:
    Trace();  // off: no call does anything
    // Creates run_dir/trace/rank-RANK.json; throws Problem(Exit::usage) when that is impossible.
    // `clock_offset_ns` makes this host's clock that of rank 0's.
    Trace(const std::string& run_dir, int rank, int64_t clock_offset_ns = 0, std::FILE* complaints = stderr);
    ~Trace();  // ends the file
    Trace(const Trace&) = delete;
    Trace& operator=(const Trace&) = delete;

    bool on() const { return state_ != nullptr; }
    // May be called from several threads.
    void span(std::string_view track, std::string_view name, StreamTime begin, StreamTime end);
    // Makes a span of each operation of an engine; empty when the trace is off. The trace must outlive the engine.
    StreamObserver stream_observer();

private:
    struct State;
    std::unique_ptr<State> state_;
};

}  // namespace trifold
