// parallel/signals.cpp   The handler itself only touches one lock-free atomic and calls _exit.
#include "parallel/signals.h"

#include <unistd.h>

#include <atomic>

namespace trifold {
namespace {

// A signal handler has no argument that could carry state, so this is the one variable outside any object.
std::atomic<int> first_signal = 0;
static_assert(std::atomic<int>::is_always_lock_free);

int code_of(int signal) { return static_cast<int>(signal == SIGINT ? Exit::interrupted : Exit::terminated); }

void on_stop_signal(int signal) {
    int none = 0;
    if (!first_signal.compare_exchange_strong(none, signal)) ::_exit(code_of(signal));
}

}  // namespace

constexpr double interrupt_number = 1 << 20;  // more than there are ranks
double number_of(StopRequest r) { return r == StopRequest::interrupt ? interrupt_number : r == StopRequest::terminate ? 1.0 : 0.0; }
StopRequest request_of(double sum) {
    return sum >= interrupt_number ? StopRequest::interrupt : sum >= 1.0 ? StopRequest::terminate : StopRequest::none;
}

Exit exit_code(StopRequest request) {
    switch (request) {
        case StopRequest::none:
            return Exit::ok;
        case StopRequest::interrupt:
            return Exit::interrupted;
        case StopRequest::terminate:
            return Exit::terminated;
    }
    return Exit::ok;
}

SignalHandlers::SignalHandlers() {
    first_signal = 0;
    install(SIGINT, on_stop_signal);
    install(SIGTERM, on_stop_signal);
    install(SIGPIPE, SIG_IGN);
    install(SIGXFSZ, SIG_IGN);
    struct sigaction hangup {};
    ::sigaction(SIGHUP, nullptr, &hangup);
    if (hangup.sa_handler != SIG_IGN) install(SIGHUP, on_stop_signal);
}

SignalHandlers::~SignalHandlers() {
    for (const Previous& p : previous_) ::sigaction(p.signal, &p.action, nullptr);
}

void SignalHandlers::install(int signal, void (*handler)(int)) {
    struct sigaction action {};
    action.sa_handler = handler;
    action.sa_flags = SA_RESTART;  // reads and waits go on after the first signal
    ::sigemptyset(&action.sa_mask);
    Previous previous{signal, {}};
    const int result = ::sigaction(signal, &action, &previous.action);
    TRIFOLD_ASSERT(result == 0);
    previous_.push_back(previous);
}

StopRequest SignalHandlers::requested() const {
    const int signal = first_signal.load();
    if (signal == 0) return StopRequest::none;
    return signal == SIGINT ? StopRequest::interrupt : StopRequest::terminate;
}

}  // namespace trifold
