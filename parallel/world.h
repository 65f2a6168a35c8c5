// parallel/world.h   The processes of one job as one of them sees them: bootstrap, control plane, groups.
//
//   launch      who am I, how many are we, where is the store: from Open MPI (MPI_Init ... MPI_Finalize around one broadcast),
//               Slurm, Hydra, or nobody (then there is one rank and no MPI)
//   rendezvous  every rank sends one message to the store on rank 0's node (who, where, build id) and gets one back
//               (everybody's address and the job's random key): 2 * ranks messages, whatever the number of groups
//   groups      connect on their own from these addresses; no barrier, no further message to the store
//   control     the connection to the store stays: small values, agreement, and the news that a rank has failed
//
// One rank speaks for the job when it fails:
//     catch (const Problem& p) {
//         if (world.fail(p)) print(world.cause()->what());
//         return world.cause()->code();
//     }
// A Problem from detect_launch() or the constructor is printed by itself, unless it is a QuietProblem.
#pragma once
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/error.h"
#include "parallel/group.h"
#include "parallel/listener.h"
#include "parallel/mesh.h"

namespace trifold {

// What the launcher told this process.
struct Launch {
    int rank = 0, size = 1, local_rank = 0, local_size = 1;  // local size 0: not said
    std::string store;       // numeric HOST:PORT of rank 0's store, or several, to be tried in turn; empty with one rank
    std::string launcher;    // "Open MPI", "Slurm", "Hydra", "" (alone), for messages
    std::string job;         // what tells this job from others, as far as the launcher's variables do
    uint64_t job_key = 0;    // the same on all ranks, secret where MPI could carry it
    std::shared_ptr<Socket> store_socket;  // rank 0: listens there already
    bool operator==(const Launch&) const = default;
};

struct LaunchOptions {
    std::string store;      // launch.store: HOST:PORT, needed when there is no MPI under the launcher
    std::string interface;  // launch.interface: network interface (or address) that other hosts reach this process at
    double start_s = 60;    // deadline of the rendezvous
    double stall_s = 60;    // deadline of every collective
    std::string build;      // what must be the same on all ranks; empty: build_id()
};

// Another rank prints the same sentence.
struct QuietProblem : Problem {
    using Problem::Problem;
};

// Reads the launcher's variables and, under Open MPI, exchanges the store's address and the key. Throws Problem(Exit::usage).
Launch detect_launch(const LaunchOptions& options);

class World {
public:
    // One rank, no sockets.
    World();
    // Meets the other ranks. Throws Problem(Exit::usage) with the ranks whose build differs, that never came, or whose address does not
    // resolve; Problem(Exit::fault) when a rank dies meanwhile.
    World(const Launch& launch, const LaunchOptions& options);
    ~World();
    World(const World&) = delete;
    World& operator=(const World&) = delete;

    int rank() const;
    int size() const;
    int local_rank() const;   // among the ranks of this host
    int local_size() const;
    // Ranks of this host, this one among them, that may use the same CPUs: all, or fewer where the launcher binds each to its own.
    int ranks_sharing_cpus() const;
    const std::string& host_of(int rank) const;
    // Nanoseconds to add to this host's clock to get that of rank 0's host.
    int64_t clock_offset_ns() const;

    // Everybody calls these in the same order. Who comes first waits at most `deadline_s` (0: LaunchOptions::stall_s); that a rank has died
    // is noticed at once in any case.
    void agree(const std::string& what, const std::string& value, Exit code = Exit::usage, double deadline_s = 0);  // Problem(code) naming the ranks that differ, on all ranks
    std::string from_rank_0(const std::string& value, double deadline_s = 0);                                       // rank 0's value
    void barrier(const std::string& what, double deadline_s = 0);

    // Values of any size by key, kept at rank 0 of a job of several ranks; may be called from any thread. take() waits until the value is there (deadline_s,
    // or until a rank fails), and removes it when it was the last of `readers`. Until then another put() of the key replaces it.
    void put(const std::string& key, const std::string& value);
    std::string take(const std::string& key, double deadline_s, int readers = 1);

    // This rank cannot go on: everybody else learns it, their groups are aborted, and they leave with the same exit code. True on one rank of
    // the job, once: it is to print the cause. After a fault it takes a moment, because the cause may be another rank's death.
    bool fail(const Problem& problem);
    // Why the job fails, the same on every rank after fail(): the first rank's sentence, or that a rank has died. Empty: it does not.
    std::optional<Problem> cause() const;
    // Another rank has failed: the exit code to leave with, else Exit::ok.
    Exit failed_elsewhere() const;
    // All is done: ranks may go in any order from now on. Rank 0 waits until everybody has said so, at most stall_s.
    void finish();

    // The group of `members` (global ranks in order, this one among them) named `name`, on a stream of its own; ranks with other members but
    // the same name form their own group. Connects when everybody of it does. `generation` counts re-creations. Tensors lie in `memory`;
    // those on a GPU pass through the host (staged_collectives.h).
    Group host_group(const std::string& name, const std::vector<int>& members, Stream& stream, int generation = 0, Device memory = Device::cpu);
    // The same between the GPUs that these ranks have selected, through NCCL.
    Group nccl_group(const std::string& name, const std::vector<int>& members, Stream& stream, int generation = 0);

    // Looks after operations that are on a GPU's streams (StreamEngine::watch): throws Problem(Exit::fault) when one of their groups has failed
    // or another rank has, and when the host has waited for longer than stall_s and four times its longest wait so far (the first 20
    // times: ten times stall_s).
    void watch(double waited_s, bool over);

    // Messages that this rank has sent to the store, and the store has received (known to rank 0 only), since the start.
    struct Counts {
        int64_t sent = 0, received = 0;
    };
    Counts messages() const;

private:
    struct State;
    std::unique_ptr<State> state_;
};

}  // namespace trifold
