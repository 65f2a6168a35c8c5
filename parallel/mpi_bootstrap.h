// parallel/mpi_bootstrap.h   All that MPI is used for: who am I, and one broadcast. mpi_bootstrap.cpp is the only file that includes MPI's header;
// no_mpi.cpp stands in for it in builds without.
#pragma once
#include <functional>
#include <string>

#include "parallel/world.h"

namespace trifold {

bool mpi_is_built_in();

// MPI_Init, ranks (local: of those that share memory), one broadcast of what rank 0's function returns (at most 4000 bytes), MPI_Finalize: Open MPI's mpirun still notices non-zero exit
// codes and signals afterwards, while a process that stays in MPI burns a core whenever it waits. When the function throws a Problem,
// all ranks do. MPI has no deadlines: the process ends with Exit::usage and a sentence when `start_s` is over.
std::string exchange_by_mpi(Launch& launch, double start_s, const std::function<std::string()>& note_of_rank_0);

}  // namespace trifold
