// parallel/no_nccl.cpp   Stands in for NCCL in builds without it.
#include "parallel/nccl.h"

namespace trifold {

bool nccl_compiled_in() { return false; }
std::string nccl_version() { return ""; }
std::unique_ptr<Collectives> nccl_collectives(NcclMember, const NcclIds&, NcclOptions) {
    throw Problem(Exit::usage, "run.comm=nccl: this build has no NCCL (no CUDA toolkit, or no nccl.h and libnccl were found when it was made); "
                               "run.comm=host sends through host memory");
}
void set_nccl_environment(NcclSums) {}

}  // namespace trifold
