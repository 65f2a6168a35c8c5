#include "parallel/mpi_bootstrap.h"

#include <fmt/format.h>
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
#include <thread>

#include "parallel/tcp.h"
#include "parallel/world.h"

namespace trifold {
namespace {

// Ends the process when it has not been destroyed by then.
class Alarm {
public:
    Alarm(int rank, double seconds) : thread_([this, rank, seconds] { wait(rank, seconds); }) {}
    ~Alarm() {
        {
            const std::lock_guard lock(mutex_);
            done_ = true;
        }
        changed_.notify_all();
        thread_.join();
    }
    Alarm(const Alarm&) = delete;
    Alarm& operator=(const Alarm&) = delete;

private:
    void wait(int rank, double seconds) {
        std::unique_lock lock(mutex_);
        if (changed_.wait_until(lock, after_seconds(seconds), [&] { return done_; })) return;
        if (rank <= 1)  // not everybody; and rank 0 may be the one that does not come
            std::fprintf(stderr, "trifold: MPI_Init and one broadcast did not end within %s: a rank did not start, or MPI's network does not work "
                                 "(try --launch.store=HOST:PORT, which needs no MPI)\n", seconds_text(seconds).c_str());
        ::_exit(static_cast<int>(Exit::usage));
    }
    std::mutex mutex_;
    std::condition_variable changed_;
    bool done_ = false;
    std::thread thread_;
};

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

MpiRanks read_ranks() {
    MpiRanks ranks;
    MPI_Comm node = MPI_COMM_NULL;
    MPI_Comm_rank(MPI_COMM_WORLD, &ranks.rank);
    MPI_Comm_size(MPI_COMM_WORLD, &ranks.size);
    MPI_Comm_split_type(MPI_COMM_WORLD, MPI_COMM_TYPE_SHARED, ranks.rank, MPI_INFO_NULL, &node);
    MPI_Comm_rank(node, &ranks.local_rank);
    MPI_Comm_size(node, &ranks.local_size);
    MPI_Comm_free(&node);
    return ranks;
}

}  // namespace

bool mpi_is_built_in() { return true; }

MpiRanks exchange_by_mpi(int expected_rank, double start_s, const std::function<std::string(const MpiRanks&)>& note_of_rank_0) {
    const Alarm alarm(expected_rank, start_s);
    const CrashHandlersKept handlers;
    Note note;
    MpiRanks ranks;
    std::optional<Problem> problem;  // rank 0's
    {
        const MpiSession session;
        ranks = read_ranks();
        if (ranks.rank == 0) {
            try {
                ranks.note = note_of_rank_0(ranks);
            } catch (const Problem& p) {
                problem = p;
                note.problem = static_cast<int32_t>(p.code());
                ranks.note = p.what();
            }
            std::strncpy(note.text, ranks.note.c_str(), sizeof(note.text) - 1);
        }
        MPI_Bcast(&note, sizeof(note), MPI_BYTE, 0, MPI_COMM_WORLD);
    }
    if (problem) throw *problem;
    if (note.problem != 0) throw QuietProblem(static_cast<Exit>(note.problem), note.text);
    ranks.note = note.text;
    return ranks;
}

}  // namespace trifold
