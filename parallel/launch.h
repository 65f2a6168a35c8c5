// parallel/launch.h   Launchers and their variables (world.h has detect_launch()).
//
//   Open MPI   OMPI_COMM_WORLD_{RANK,SIZE,LOCAL_RANK,LOCAL_SIZE}
//   Hydra      PMI_{RANK,SIZE}, MPI_LOCAL{RANKID,NRANKS}: MPICH, Intel MPI
//   Slurm      SLURM_{PROCID,STEP_NUM_TASKS,LOCALID,...}, set by srun; a batch script or an interactive shell has some of them too, but
//              no job step with several tasks
// mpirun and mpiexec may start their own helpers through srun, so their variables go before Slurm's.
#pragma once
#include <cstdlib>
#include <functional>
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

// The value of a variable, or null.
using Variable = std::function<const char*(const char* name)>;

// What the variables say; empty: there is no launcher. Throws Problem(Exit::usage) when a variable makes no sense.
std::optional<Launch> read_launcher(const Variable& variable = ::getenv);

}  // namespace trifold
