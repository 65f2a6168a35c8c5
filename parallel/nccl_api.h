// parallel/nccl_api.h   Every NCCL call that this program makes, as one table of function pointers: filled from the library in
// nccl_library.cpp, and by tests from a fake that checks order, counts, grouping and life cycle (test/fake_nccl/).
#pragma once
#include <nccl.h>

namespace trifold {

#define TRIFOLD_NCCL_CALLS(X) \
    X(GetVersion)             \
    X(GetErrorString)         \
    X(GetLastError)           \
    X(GetUniqueId)            \
    X(CommInitRankConfig)     \
    X(CommGetAsyncError)      \
    X(CommFinalize)           \
    X(CommDestroy)            \
    X(CommAbort)              \
    X(GroupStart)             \
    X(GroupEnd)               \
    X(AllGather)              \
    X(ReduceScatter)          \
    X(AllReduce)              \
    X(Broadcast)              \
    X(Send)                   \
    X(Recv)

struct NcclApi {
#define X(call) decltype(&::nccl##call) call;
    TRIFOLD_NCCL_CALLS(X)
#undef X
};

}  // namespace trifold
