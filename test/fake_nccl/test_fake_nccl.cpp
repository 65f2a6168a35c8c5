// test/fake_nccl/test_fake_nccl.cpp   The fake can fail: each misuse of NCCL has its sentence.
#include <chrono>
#include <functional>

#include "parallel/nccl.h"
#include "test/catch.h"
#include "test/fake_nccl/fake_nccl.h"
#include "test/fake_nccl/ranks.h"

using namespace trifold;

namespace {

// body(communicator, rank) with the table itself: what must not be done. The communicators are aborted afterwards.
Outcome on_communicators(int size, const std::function<void(ncclComm_t, int)>& body) {
    const NcclApi& nccl = fake_nccl::api();
    ncclUniqueId id;
    nccl.GetUniqueId(&id);
    Outcome outcome;
    std::vector<ncclComm_t> comms(static_cast<size_t>(size));
    outcome.sentences = on_threads(size, [&](int rank) {
        ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
        config.blocking = 0;
        config.commName = "dp";
        nccl.CommInitRankConfig(&comms[static_cast<size_t>(rank)], size, id, rank, &config);
        body(comms[static_cast<size_t>(rank)], rank);
    });
    outcome.findings = fake_nccl::take_findings();
    for (ncclComm_t comm : comms) nccl.CommAbort(comm);
    fake_nccl::take_findings();
    return outcome;
}

// Polls until the state is no longer "in progress".
ncclResult_t state_of(ncclComm_t comm) {
    ncclResult_t state = ncclInProgress;
    for (int i = 0; i < 10000 && state == ncclInProgress; ++i) {
        if (fake_nccl::api().CommGetAsyncError(comm, &state) != ncclSuccess) return ncclInternalError;
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    return state;
}

}  // namespace

TEST_CASE("the fake sees operations that differ", "[nccl][fake]") {
    const NcclApi& nccl = fake_nccl::api();
    std::vector<float> x[2] = {std::vector<float>(64), std::vector<float>(64)};
    using Issue = std::function<ncclResult_t(ncclComm_t, float*)>;
    struct Fault {
        Issue of_rank[2];
        std::string sentence;
    };
    const auto reduce = [&](size_t count, ncclDataType_t type, ncclRedOp_t op) -> Issue {
        return [&nccl, count, type, op](ncclComm_t c, float* p) { return nccl.AllReduce(p, p, count, type, op, c, nullptr); };
    };
    const auto broadcast = [&](int root) -> Issue { return [&nccl, root](ncclComm_t c, float* p) { return nccl.Broadcast(p, p, 4, ncclFloat32, root, c, nullptr); }; };
    const auto send = [&](size_t count, int to) -> Issue { return [&nccl, count, to](ncclComm_t c, float* p) { return nccl.Send(p, count, ncclFloat32, to, c, nullptr); }; };
    const auto receive = [&](size_t count, int from) -> Issue { return [&nccl, count, from](ncclComm_t c, float* p) { return nccl.Recv(p, count, ncclFloat32, from, c, nullptr); }; };
    const Fault faults[] = {
        {{reduce(4, ncclFloat32, ncclSum), reduce(5, ncclFloat32, ncclSum)}, "rank 0 of 'dp' issued all_reduce(sum) of 4 fp32, but rank 1 issued all_reduce(sum) of 5 fp32"},
        {{reduce(4, ncclFloat32, ncclSum), reduce(4, ncclBfloat16, ncclSum)}, "rank 0 of 'dp' issued all_reduce(sum) of 4 fp32, but rank 1 issued all_reduce(sum) of 4 bf16"},
        {{reduce(4, ncclFloat32, ncclSum), reduce(4, ncclFloat32, ncclMax)}, "rank 0 of 'dp' issued all_reduce(sum) of 4 fp32, but rank 1 issued all_reduce(max) of 4 fp32"},
        {{broadcast(0), broadcast(1)}, "rank 0 of 'dp' issued broadcast of 4 fp32 from rank 0, but rank 1 issued broadcast of 4 fp32 from rank 1"},
        {{send(4, 1), receive(3, 0)}, "rank 0 of 'dp' issued send of 4 fp32 to rank 1, but rank 1 issued receive of 3 fp32 from rank 0"},
        {{send(4, 1), send(4, 0)}, "nobody of 'dp' can go on: waiting are rank 0 in send of 4 fp32 to rank 1, rank 1 in send of 4 fp32 to rank 0"},
        {{send(4, 1), broadcast(0)}, "nobody of 'dp' can go on: waiting are rank 0 in send of 4 fp32 to rank 1, rank 1 in broadcast of 4 fp32 from rank 0"},
    };
    for (const Fault& fault : faults) {
        CAPTURE(fault.sentence);
        ncclResult_t states[2];
        const Outcome outcome = on_communicators(2, [&](ncclComm_t comm, int rank) {
            state_of(comm);
            fault.of_rank[rank](comm, x[rank].data());
            states[rank] = state_of(comm);
        });
        CHECK((states[0] == ncclRemoteError && states[1] == ncclRemoteError));
        CHECK((outcome.findings.size() == 2 && outcome.findings[0] == fault.sentence && outcome.findings[1] == fault.sentence));
    }
    // Another order of the same operations.
    const Outcome outcome = on_communicators(2, [&](ncclComm_t comm, int rank) {
        state_of(comm);
        for (const Issue& issue : {rank == 0 ? reduce(4, ncclFloat32, ncclSum) : broadcast(0), rank == 0 ? broadcast(0) : reduce(4, ncclFloat32, ncclSum)}) {
            issue(comm, x[rank].data());
            state_of(comm);
        }
    });
    CHECK(outcome.found("rank 0 of 'dp' issued all_reduce(sum) of 4 fp32, but rank 1 issued broadcast of 4 fp32 from rank 0"));
}

TEST_CASE("the fake sees wrong groups, life cycles, arguments and threads", "[nccl][fake]") {
    const NcclApi& nccl = fake_nccl::api();
    float x[16] = {}, y[16] = {};
    const auto reduce = [&](ncclComm_t c) { return nccl.AllReduce(x, x, 4, ncclFloat32, ncclSum, c, nullptr); };
    // On one rank; the call that must be refused is the last one, and gives `result`.
    struct Fault {
        std::string sentence;
        std::function<ncclResult_t(ncclComm_t)> misuse;
    };
    const auto leave = [&](ncclComm_t c) {
        state_of(c);
        nccl.CommFinalize(c);
        state_of(c);
        nccl.CommDestroy(c);
    };
    const Fault faults[] = {
        {"all_reduce(sum) of 4 fp32 on rank 0 of 'dp' before the communicator is ready", reduce},
        {"all_reduce(sum) of 4 fp32 on rank 0 of 'dp' while all_reduce(sum) of 4 fp32 is in progress", [&](ncclComm_t c) { return state_of(c), reduce(c), reduce(c); }},
        {"ncclCommFinalize on rank 0 of 'dp' while all_reduce(sum) of 4 fp32 is in progress", [&](ncclComm_t c) { return state_of(c), reduce(c), nccl.CommFinalize(c); }},
        {"all_reduce(sum) of 4 fp32 on rank 0 of 'dp' after ncclCommFinalize", [&](ncclComm_t c) { return state_of(c), nccl.CommFinalize(c), reduce(c); }},
        {"ncclCommFinalize on rank 0 of 'dp' after ncclCommFinalize", [&](ncclComm_t c) { return state_of(c), nccl.CommFinalize(c), nccl.CommFinalize(c); }},
        {"ncclCommDestroy on rank 0 of 'dp' before ncclCommFinalize was done", [&](ncclComm_t c) { return state_of(c), nccl.CommDestroy(c); }},
        {"ncclCommDestroy on rank 0 of 'dp' before ncclCommFinalize was done", [&](ncclComm_t c) { return state_of(c), nccl.CommFinalize(c), nccl.CommDestroy(c); }},
        {"ncclAllReduce on rank 0 of 'dp' after it was destroyed", [&](ncclComm_t c) { return leave(c), reduce(c); }},
        {"ncclCommDestroy on rank 0 of 'dp' after it was destroyed", [&](ncclComm_t c) { return leave(c), nccl.CommDestroy(c); }},
        {"ncclCommAbort on rank 0 of 'dp' after it was aborted", [&](ncclComm_t c) { return nccl.CommAbort(c), nccl.CommAbort(c); }},
        {"ncclCommGetAsyncError on rank 0 of 'dp' after it was aborted",
         [&](ncclComm_t c) {
             ncclResult_t state;
             return nccl.CommAbort(c), nccl.CommGetAsyncError(c, &state);
         }},
        {"ncclAllReduce on something that is no communicator", [&](ncclComm_t) { return reduce(nullptr); }},
        {"ncclGroupEnd without ncclGroupStart", [&](ncclComm_t) { return nccl.GroupEnd(); }},
        {"ncclCommGetAsyncError on rank 0 of 'dp' inside an open group: ncclGroupEnd is missing",
         [&](ncclComm_t c) {
             ncclResult_t state = ncclSuccess;
             state_of(c), nccl.GroupStart(), reduce(c);
             const ncclResult_t result = nccl.CommGetAsyncError(c, &state);
             nccl.GroupEnd();
             return result;
         }},
        {"a thread ended inside a group: ncclGroupEnd is missing", [&](ncclComm_t) { return nccl.GroupStart(), ncclInvalidUsage; }},
        {"send of 4 fp32 to rank 1 on rank 0 of 'dp' with a rank that is none of 1", [&](ncclComm_t c) { return state_of(c), nccl.Send(x, 4, ncclFloat32, 1, c, nullptr); }},
        {"all_reduce(sum) of 4 fp32 on rank 0 of 'dp' has a null buffer",
         [&](ncclComm_t c) { return state_of(c), nccl.AllReduce(x, nullptr, 4, ncclFloat32, ncclSum, c, nullptr); }},
        {"all_reduce(sum) of 4 fp32 on rank 0 of 'dp' has buffers that overlap without being in place",
         [&](ncclComm_t c) { return state_of(c), nccl.AllReduce(x, x + 1, 4, ncclFloat32, ncclSum, c, nullptr); }},
        {"receive of 4 fp32 from rank 0 on rank 0 of 'dp' has a buffer that send of 4 fp32 to rank 0 of the same group uses",
         [&](ncclComm_t c) {
             state_of(c), nccl.GroupStart(), nccl.Send(x, 4, ncclFloat32, 0, c, nullptr), nccl.Recv(x + 3, 4, ncclFloat32, 0, c, nullptr);
             return nccl.GroupEnd();
         }},
        {"all_reduce(sum) of 4 type 6 on rank 0 of 'dp' has a type that the fake does not know",
         [&](ncclComm_t c) { return state_of(c), nccl.AllReduce(x, y, 4, ncclFloat16, ncclSum, c, nullptr); }},
    };
    for (const Fault& fault : faults) {
        CAPTURE(fault.sentence);
        ncclResult_t result = ncclSuccess;
        const Outcome outcome = on_communicators(1, [&](ncclComm_t comm, int) { result = fault.misuse(comm); });
        CHECK((result == ncclInvalidArgument || result == ncclInvalidUsage));
        CHECK((outcome.findings.size() == 1 && outcome.findings[0] == fault.sentence));
    }
    ncclUniqueId id;
    nccl.GetUniqueId(&id);
    ncclComm_t comm = nullptr;
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    CHECK(nccl.CommInitRankConfig(&comm, 1, id, 0, &config) == ncclInvalidArgument);
    config.blocking = 0;
    CHECK(nccl.CommInitRankConfig(&comm, 2, id, 2, &config) == ncclInvalidArgument);
    CHECK(Outcome{{}, fake_nccl::take_findings()}.found("without config.blocking = 0"));
    CHECK(fake_nccl::communicators().open == 0);
}

TEST_CASE("the fake sees a rank that leaves while others need it, and takes a group of many as one", "[nccl][fake]") {
    const NcclApi& nccl = fake_nccl::api();
    float x[2][16] = {{1, 2, 3, 4}, {5, 6, 7, 8}}, y[2][16] = {};
    Outcome outcome = on_communicators(2, [&](ncclComm_t comm, int rank) {
        state_of(comm);
        if (rank == 1) return (void)nccl.CommAbort(comm);
        nccl.AllReduce(x[0], x[0], 4, ncclFloat32, ncclSum, comm, nullptr);
        state_of(comm);
    });
    CHECK(outcome.found("nobody of 'dp' can go on: waiting are rank 0 in all_reduce(sum) of 4 fp32; and rank 1 was aborted"));
    outcome = on_communicators(2, [&](ncclComm_t comm, int rank) {
        state_of(comm);
        if (rank == 1) return (void)nccl.CommAbort(comm);
        nccl.CommFinalize(comm);
        state_of(comm);
    });
    CHECK(outcome.found("nobody of 'dp' can go on: waiting are rank 0 in finalize; and rank 1 was aborted"));

    // Nested groups are one; sends and receives of it pair whatever their order.
    outcome = on_communicators(2, [&](ncclComm_t comm, int rank) {
        state_of(comm);
        nccl.GroupStart();
        nccl.GroupStart();
        nccl.Send(x[rank], 2, ncclFloat32, 1 - rank, comm, nullptr);
        nccl.Send(x[rank] + 2, 2, ncclFloat32, 1 - rank, comm, nullptr);
        nccl.GroupEnd();
        nccl.Recv(y[rank], 2, ncclFloat32, 1 - rank, comm, nullptr);
        nccl.Recv(y[rank] + 2, 2, ncclFloat32, 1 - rank, comm, nullptr);
        if (nccl.GroupEnd() != ncclInProgress || state_of(comm) != ncclSuccess) throw std::runtime_error("a group failed");
    });
    CHECK(outcome.all() == "");
    CHECK((y[0][0] == 5 && y[0][3] == 8 && y[1][0] == 1 && y[1][3] == 4));
}
