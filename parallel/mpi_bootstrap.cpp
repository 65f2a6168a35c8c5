#include "parallel/mpi_bootstrap.h"

#define OMPI_SKIP_MPICXX 1  // the C interface only: the C++ one needs a library of its own
#define MPICH_SKIP_MPICXX 1
#include <mpi.h>
#include <unistd.h>

#include <array>
#include <condition_variable>
#include <csignal>
#include <cstdio>
#include <cstring>
#include <mutex>
#include <optional>
#include <stop_token>
#include <thread>

#include "parallel/socket.h"

namespace trifold {
namespace {

// Ends the process, unless it is asked to stop before.
void wait_for_mpi(const std::stop_token& done, int rank, double seconds) {
    std::mutex mutex;
    std::unique_lock lock(mutex);
    std::condition_variable_any never;
    if (never.wait_until(lock, done, after_seconds(seconds), [&] { return done.stop_requested(); })) return;
    if (rank <= 1)  // not everybody; and rank 0 may be the one that does not come
        std::fprintf(stderr, "trifold: MPI_Init and one broadcast did not end within %s: a rank did not start, or MPI's network does not work "
                             "(try --launch.store=HOST:PORT, which needs no MPI)\n", seconds_text(seconds).c_str());
    ::_exit(static_cast<int>(Exit::usage));
}

// MPI and what it loads install handlers of their own for crashes; they must not outlive it.
class CrashHandlersKept {
public:
    CrashHandlersKept() {
        for (size_t i = 0; i < signals.size(); ++i) ::sigaction(signals[i], nullptr, &before_[i]);
    }
    ~CrashHandlersKept() {
        for (size_t i = 0; i < signals.size(); ++i) ::sigaction(signals[i], &before_[i], nullptr);
    }
    CrashHandlersKept(const CrashHandlersKept&) = delete;
    CrashHandlersKept& operator=(const CrashHandlersKept&) = delete;

private:
    static constexpr std::array signals{SIGABRT, SIGBUS, SIGFPE, SIGILL, SIGSEGV};
    std::array<struct sigaction, signals.size()> before_{};
};

// Errors inside MPI end the process with MPI's own message (its default handler), so results need no check.
struct MpiSession {
    MpiSession() { MPI_Init(nullptr, nullptr); }
    ~MpiSession() { MPI_Finalize(); }
    MpiSession(const MpiSession&) = delete;
    MpiSession& operator=(const MpiSession&) = delete;
};

struct Note {
    int32_t problem = 0;  // exit code, when `text` is the sentence of one
    char text[4092] = "";
};

void read_ranks(Launch& launch) {
    MPI_Comm node = MPI_COMM_NULL;
    MPI_Comm_rank(MPI_COMM_WORLD, &launch.rank);
    MPI_Comm_size(MPI_COMM_WORLD, &launch.size);
    MPI_Comm_split_type(MPI_COMM_WORLD, MPI_COMM_TYPE_SHARED, launch.rank, MPI_INFO_NULL, &node);
    MPI_Comm_rank(node, &launch.local_rank);
    MPI_Comm_size(node, &launch.local_size);
    MPI_Comm_free(&node);
}

}  // namespace

bool mpi_is_built_in() { return true; }

std::string exchange_by_mpi(Launch& launch, double start_s, const std::function<std::string()>& note_of_rank_0) {
    const std::jthread alarm(wait_for_mpi, launch.rank, start_s);
    const CrashHandlersKept handlers;
    Note note;
    std::optional<Problem> problem;  // rank 0's
    {
        const MpiSession session;
        read_ranks(launch);
        if (launch.rank == 0) {
            std::string text;
            try {
                text = note_of_rank_0();
            } catch (const Problem& p) {
                problem = p;
                note.problem = static_cast<int32_t>(p.code());
                text = p.what();
            }
            std::strncpy(note.text, text.c_str(), sizeof(note.text) - 1);
        }
        MPI_Bcast(&note, sizeof(note), MPI_BYTE, 0, MPI_COMM_WORLD);
    }
    if (problem) throw *problem;
    if (note.problem != 0) throw QuietProblem(static_cast<Exit>(note.problem), note.text);
    return note.text;
}

}  // namespace trifold
