// parallel/signals.cpp   The handler itself only touches one lock-free atomic and calls _exit.
#include "parallel/signals.h"

#include <unistd.h>

#include <atomic>

namespace trifold {
namespace {

// A signal handler has no argument that could carry state, so this is the one variable outside any object.
std::atomic<StopRequest> first_request = StopRequest::none;
static_assert(std::atomic<StopRequest>::is_always_lock_free);

void on_stop_signal(int signal) {
    const StopRequest request = signal == SIGINT ? StopRequest::interrupt : StopRequest::terminate;
    StopRequest none = StopRequest::none;
    if (!first_request.compare_exchange_strong(none, request)) ::_exit(static_cast<int>(exit_code(request)));
}

}  // namespace

double number_of(StopRequest request) { return static_cast<double>(request); }
StopRequest request_of(double sum) {
    return sum >= number_of(StopRequest::interrupt) ? StopRequest::interrupt : sum >= 1 ? StopRequest::terminate : StopRequest::none;
}

Exit exit_code(StopRequest request) {
    return request == StopRequest::none ? Exit::ok : request == StopRequest::interrupt ? Exit::interrupted : Exit::terminated;
}

SignalHandlers::SignalHandlers() {
    first_request = StopRequest::none;
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

StopRequest SignalHandlers::requested() const { return first_request; }

}  // namespace trifold
