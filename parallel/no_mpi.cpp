// parallel/no_mpi.cpp   Builds without MPI: launchers need launch.store.
#include "base/error.h"
#include "parallel/mpi_bootstrap.h"

namespace trifold {

bool mpi_is_built_in() { return false; }

std::string exchange_by_mpi(Launch&, double, const std::function<std::string()>&) {
    TRIFOLD_ASSERT(mpi_is_built_in());
    return {};
}

}  // namespace trifold
