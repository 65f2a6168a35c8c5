// parallel/launch.h   Launchers and their variables (world.h has detect_launch()).
//
//   Open MPI   OMPI_COMM_WORLD_{RANK,SIZE,LOCAL_RANK,LOCAL_SIZE}
//   Hydra      PMI_{RANK,SIZE}, MPI_LOCAL{RANKID,NRANKS}: MPICH, Intel MPI
//   Slurm      SLURM_{PROCID,STEP_NUM_TASKS,LOCALID,...}, set by srun; a batch script or an interactive shell has some of them too, but
//              no job step with several tasks
// mpirun and mpiexec may start their own helpers through srun, so their variables go before Slurm's.
#pragma once
#include <map>
#include <optional>
#include <string>

#include "parallel/world.h"

namespace trifold {

// Before a rank has met the store it cannot ask who speaks for the job: what every rank of a host meets, the first one says.
template <class Action>
auto said_once_per_host(int local_rank, Action action) {
    try {
        return action();
    } catch (const Problem& p) {
        if (local_rank == 0) throw;
        throw QuietProblem(p.code(), p.what());
    }
}

struct LauncherVariables {
    std::string launcher;
    int rank = 0, size = 1;
    int local_rank = 0, local_size = 0;  // size 0: not said
    std::string job;                     // what tells this job from others, as far as the variables do
    bool operator==(const LauncherVariables&) const = default;
};

using Environment = std::map<std::string, std::string>;
Environment environment_of_process();

// Empty: there is no launcher. Throws Problem(Exit::usage) when a variable makes no sense.
std::optional<LauncherVariables> read_launcher(const Environment& environment);

}  // namespace trifold
