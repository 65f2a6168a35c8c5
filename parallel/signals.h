// parallel/signals.h   How a run is asked to stop: the first signal is a request, the second one leaves at once.
//
//   SIGINT, SIGTERM   the training loop reads requested(), finishes its step, saves, and exits 130 or 143;
//                     a second one ends the process on the spot with the same codes, nothing is saved
//   SIGHUP            the terminal is gone: like SIGTERM, unless it was ignored when the process started (nohup)
//   SIGPIPE, SIGXFSZ  ignored: a closed pipe or a file at its size limit is a failed write, not the end of the run
#pragma once
#include <csignal>
#include <cstdint>
#include <vector>

#include "base/error.h"

namespace trifold {

enum class StopRequest : int32_t { none = 0, terminate = 1, interrupt = 1 << 20 };  // numbers: an interrupt is more than all ranks together

// The documented exit code after a clean stop; Exit::ok without a request.
Exit exit_code(StopRequest request);

// A request as a number that can be summed over ranks, and back; of different ones, an interrupt wins.
double number_of(StopRequest request);
StopRequest request_of(double sum);

// Installs the handlers, and puts back in the end what was there. One at a time in a process.
class SignalHandlers {
public:
    SignalHandlers();
    ~SignalHandlers();
    SignalHandlers(const SignalHandlers&) = delete;
    SignalHandlers& operator=(const SignalHandlers&) = delete;
    StopRequest requested() const;

private:
    struct Previous {
        int signal;
        struct sigaction action;
    };
    void install(int signal, void (*handler)(int));
    std::vector<Previous> previous_;
};

}  // namespace trifold
