// test/unit/test_signals.cpp   SIGINT and SIGTERM ask for a stop; the second one leaves at once.
#include "test/catch.h"

#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <csignal>
#include <functional>

#include "parallel/signals.h"

using namespace trifold;

namespace {

// Runs `body` in a child process and returns its exit code, or -signal.
int in_child(const std::function<int()>& body) {
    const pid_t child = ::fork();
    if (child == 0) ::_exit(body());
    int status = 0;
    ::waitpid(child, &status, 0);
    return WIFSIGNALED(status) ? -WTERMSIG(status) : WEXITSTATUS(status);
}

}  // namespace

TEST_CASE("the first signal is a request", "[signals]") {
    const SignalHandlers handlers;
    CHECK(handlers.requested() == StopRequest::none);
    SECTION("SIGINT") {
        std::raise(SIGINT);
        CHECK(handlers.requested() == StopRequest::interrupt);
        CHECK(exit_code(handlers.requested()) == Exit::interrupted);
    }
    SECTION("SIGTERM") {
        std::raise(SIGTERM);
        CHECK(handlers.requested() == StopRequest::terminate);
        CHECK(exit_code(handlers.requested()) == Exit::terminated);
    }
}

TEST_CASE("a new start knows nothing of the last request", "[signals]") {
    {
        const SignalHandlers handlers;
        std::raise(SIGINT);
    }
    const SignalHandlers handlers;
    CHECK(handlers.requested() == StopRequest::none);
    CHECK(exit_code(handlers.requested()) == Exit::ok);
}

TEST_CASE("the second signal leaves at once", "[signals]") {
    const auto two = [](int first, int second) {
        return in_child([=] {
            const SignalHandlers handlers;
            std::raise(first);
            std::raise(second);
            return 1;
        });
    };
    CHECK(two(SIGINT, SIGINT) == 130);
    CHECK(two(SIGTERM, SIGTERM) == 143);
    CHECK(two(SIGTERM, SIGINT) == 130);
}

TEST_CASE("a lost terminal asks to stop, except under nohup", "[signals]") {
    const auto hangup = [] {
        const SignalHandlers handlers;
        std::raise(SIGHUP);
        return static_cast<int>(handlers.requested());
    };
    CHECK(in_child([&] { return std::signal(SIGHUP, SIG_DFL), hangup(); }) == static_cast<int>(StopRequest::terminate));
    CHECK(in_child([&] { return std::signal(SIGHUP, SIG_IGN), hangup(); }) == static_cast<int>(StopRequest::none));
}

TEST_CASE("a closed pipe is a failed write", "[signals]") {
    CHECK(in_child([] {
              const SignalHandlers handlers;
              int ends[2];
              if (::pipe(ends) != 0 || ::close(ends[0]) != 0) return 1;
              return ::write(ends[1], "x", 1) < 0 && errno == EPIPE ? 0 : 2;
          }) == 0);
}

TEST_CASE("what was installed before comes back", "[signals]") {
    std::signal(SIGTERM, SIG_IGN);
    { const SignalHandlers handlers; }
    CHECK(std::signal(SIGTERM, SIG_DFL) == SIG_IGN);
}
