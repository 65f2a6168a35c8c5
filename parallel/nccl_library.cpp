// parallel/nccl_library.cpp   The table of NCCL calls from the library itself, and what NCCL reads from the environment.
#include <fmt/format.h>

#include <cstdlib>

#include "parallel/nccl.h"
#include "parallel/nccl_api.h"

namespace trifold {
namespace {

constexpr NcclApi library{
#define X(call) .call = nccl##call,
    TRIFOLD_NCCL_CALLS(X)
#undef X
};

}  // namespace

bool nccl_compiled_in() { return true; }

std::string nccl_version() {
    int code = 0;
    if (library.GetVersion(&code) != ncclSuccess) return "";
    return fmt::format("{}.{}.{}", code / 10000, code / 100 % 100, code % 100);
}

std::unique_ptr<Collectives> nccl_collectives(NcclMember member, const NcclIds& ids, NcclOptions options) {
    return std::make_unique<NcclCollectives>(library, std::move(member), ids, options);
}

void set_nccl_environment(NcclSums sums) {
    constexpr int keep_the_users = 0;
    // Kernels of several communicators on one GPU start in the order in which the host issued them, which is the same on all
    // ranks; otherwise two ranks could each wait in the kernel that the other one has not started yet.
    setenv("NCCL_LAUNCH_ORDER_IMPLICIT", "1", keep_the_users);
    if (sums == NcclSums::fastest) return;
    setenv("NCCL_ALGO", "Ring", keep_the_users);
    setenv("NCCL_PROTO", "Simple", keep_the_users);
}

}  // namespace trifold
