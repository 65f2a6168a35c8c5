// parallel/nccl.h   Collectives between GPUs through NCCL (docs/nccl.md: its rules, and where they are kept).
//
// Communicators are non-blocking: no call waits for other ranks inside NCCL. Instead every call here polls until the operation has
// been put on its stream, with a deadline, so that a rank that never comes ends in a sentence and not in a hang. Whether the
// operation is done, the stream tells, as for any kernel.
//
// Threads   one at a time, the same order of calls on all ranks of a group, and one order over all groups of a process; abort()
//           from any thread. The thread that makes a communicator has selected the GPU before (cuda::select).
// Failures  a result that NCCL reports, a deadline and abort() end the communicator with ncclCommAbort, which also stops its kernels;
//           the call and all later ones throw Problem(Exit::fault) with group, rank and operation.
// Sums      in NCCL's order: the same from run to run with the same GPUs, ranks and NcclSums::repeatable, but not rank order.
#pragma once
#include <functional>
#include <memory>
#include <mutex>
#include <string>

#include "parallel/group.h"

struct ncclComm;

namespace trifold {

struct NcclApi;

struct NcclMember {
    std::string name;   // of the group, for messages
    int rank = 0, size = 1;
    std::string key;    // the same on all members, and no other group's: it names the unique id in the store
};

// How rank 0 of a group passes the communicator's unique id to the others: World::put and World::take.
struct NcclIds {
    std::function<void(const std::string& key, const std::string& value)> put;
    std::function<std::string(const std::string& key, double deadline_s, int readers)> take;
};

struct NcclOptions {
    double start_s = 60;  // until all ranks have made the communicator
    double stall_s = 60;  // until an operation is on its stream, and until all ranks have finished with the communicator
    std::function<bool()> give_up = {};  // asked while it waits: another rank has failed
};

class NcclCollectives final : public Collectives {
public:
    // Returns when all members have come. `api` outlives it.
    NcclCollectives(const NcclApi& api, NcclMember member, const NcclIds& ids, NcclOptions options = {});
    // Waits until the other members have finished too, at most stall_s; aborts instead when an exception is on its way.
    ~NcclCollectives() override;
    NcclCollectives(const NcclCollectives&) = delete;
    NcclCollectives& operator=(const NcclCollectives&) = delete;

    void all_gather(CUstream_st* stream, const Tensor& shard, const Tensor& full) override;
    void reduce_scatter(CUstream_st* stream, const Tensor& full, const Tensor& shard) override;
    void all_reduce(CUstream_st* stream, const Tensor& x) override;
    void all_reduce_max(CUstream_st* stream, const Tensor& x) override;
    void broadcast(CUstream_st* stream, const Tensor& x, int root) override;
    void all_to_all(CUstream_st* stream, const Tensor& to, std::span<const int64_t> to_counts, const Tensor& from, std::span<const int64_t> from_counts) override;
    void send(CUstream_st* stream, int to, const Tensor& x) override;
    void receive(CUstream_st* stream, int from, const Tensor& x) override;
    void exchange(CUstream_st* stream, int to, const Tensor& x, int from, const Tensor& y) override;
    void abort() noexcept override;
    // From any thread: what has gone wrong with operations that are on their streams already, such as a lost connection; empty when
    // nothing has. Their kernels would wait for ever, so whoever waits for the stream looks here, and calls abort().
    std::string trouble() override;

private:
    struct Calls;  // results of NCCL calls, which nccl.h of NCCL declares

    void start(const NcclIds& ids);
    template <class Issue> void run(const char* op, const Issue& issue);
    template <class Issue> void run_grouped(const char* op, const Issue& issue);
    [[noreturn]] void fail(const char* op, const std::string& reason);

    const NcclApi& api_;
    const NcclMember member_;
    const NcclOptions options_;
    const int exceptions_;       // on their way when it was made
    std::mutex mutex_;           // round each call of NCCL, or each group of them: abort() comes between two
    ncclComm* comm_ = nullptr;   // null: failed or aborted
    std::string failure_;        // then why
};

// Whether this build has NCCL, and the version that is loaded, such as "2.28.9" ("" without).
bool nccl_compiled_in();
std::string nccl_version();
// NcclCollectives on the NCCL library. Throws Problem(Exit::usage) in a build without NCCL.
std::unique_ptr<Collectives> nccl_collectives(NcclMember member, const NcclIds& ids, NcclOptions options = {});

// Sums are repeatable when NCCL may not choose algorithm and protocol by itself.
enum class NcclSums : uint8_t { fastest, repeatable };
// Sets what NCCL reads from the environment, where the user has not: to be called before the first communicator and before any
// thread is started.
void set_nccl_environment(NcclSums sums);

}  // namespace trifold
