#include "parallel/nccl.h"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <exception>
#include <thread>

#include "parallel/nccl_api.h"

namespace trifold {
namespace {

using Clock = std::chrono::steady_clock;

ncclDataType_t type_of(const Tensor& t) {
    switch (t.dtype) {
        case DType::f32: return ncclFloat32;
        case DType::bf16: return ncclBfloat16;
        case DType::f64: return ncclFloat64;
        case DType::i32: return ncclInt32;
        case DType::u8: return ncclUint8;
    }
    return ncclNumTypes;
}
size_t count_of(const Tensor& t) { return static_cast<size_t>(t.elems); }

// The first of several results that is neither success nor "in progress", else the last.
struct Worst {
    ncclResult_t result = ncclSuccess;
    void add(ncclResult_t next) {
        if (result == ncclSuccess || result == ncclInProgress) result = next;
    }
};

}  // namespace

// How the calls look at NCCL's results.
struct NcclCollectives::Calls {
    static std::string words(const NcclCollectives& c, ncclResult_t result) {
        const char* last = c.api_.GetLastError(c.comm_);
        return fmt::format("NCCL reports '{}'{}; NCCL_DEBUG=INFO and the logs of the other ranks say more", c.api_.GetErrorString(result),
                           last && *last ? fmt::format(" ({})", last) : "");
    }
    // Until NCCL has put on the stream what was issued: its result, ncclInProgress after the deadline, ncclRemoteError when another rank has
    // failed meanwhile. Sleeps longer and longer.
    static ncclResult_t settled(NcclCollectives& c, double deadline_s) {
        const auto deadline = Clock::now() + std::chrono::duration<double>(deadline_s);
        for (std::chrono::microseconds pause{0};; pause = std::min(pause + std::chrono::microseconds(5), std::chrono::microseconds(1000))) {
            {
                const std::lock_guard lock(c.mutex_);
                if (!c.comm_) return ncclInvalidUsage;  // aborted meanwhile
                ncclResult_t state = ncclSuccess;
                if (const ncclResult_t asked = c.api_.CommGetAsyncError(c.comm_, &state); asked != ncclSuccess) return asked;
                if (state != ncclInProgress) return state;
            }
            if (c.options_.give_up && c.options_.give_up()) return ncclRemoteError;
            if (Clock::now() >= deadline) return ncclInProgress;
            std::this_thread::sleep_for(pause);
        }
    }
    static void settle(NcclCollectives& c, const char* op, double deadline_s, const char* waiting_for) {
        const ncclResult_t result = settled(c, deadline_s);
        if (result == ncclSuccess) return;
        if (result == ncclInProgress) c.fail(op, fmt::format("{} within {} s; the logs of the other ranks tell which of them is missing, and why", waiting_for, deadline_s));
        c.fail(op, words(c, result));
    }
};

NcclCollectives::NcclCollectives(const NcclApi& api, NcclMember member, const NcclIds& ids, NcclOptions options)
    : api_(api), member_(std::move(member)), options_(options), exceptions_(std::uncaught_exceptions()) {
    TRIFOLD_ASSERT(member_.rank >= 0 && member_.rank < member_.size);
    try {
        start(ids);
    } catch (...) {
        abort();
        throw;
    }
}

void NcclCollectives::start(const NcclIds& ids) {
    ncclUniqueId id;
    if (member_.rank == 0) {
        if (const ncclResult_t result = api_.GetUniqueId(&id); result != ncclSuccess) fail("start", Calls::words(*this, result));
        if (member_.size > 1) ids.put(member_.key, std::string(id.internal, sizeof id.internal));
    } else {
        const std::string value = ids.take(member_.key, options_.start_s, member_.size - 1);
        TRIFOLD_ASSERT(value.size() == sizeof id.internal);
        std::memcpy(id.internal, value.data(), sizeof id.internal);
    }
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    config.blocking = 0;
#if NCCL_VERSION_CODE >= NCCL_VERSION(2, 27, 0)
    config.commName = member_.name.c_str();
#endif
    const ncclResult_t result = api_.CommInitRankConfig(&comm_, member_.size, id, member_.rank, &config);
    if (result != ncclSuccess && result != ncclInProgress) fail("start", Calls::words(*this, result));
    Calls::settle(*this, "start", options_.start_s, "not all ranks of the group came");
}

// The good path flushes and agrees with the other ranks; both abort and destroy free the communicator, so nothing may follow.
NcclCollectives::~NcclCollectives() {
    bool finished = std::uncaught_exceptions() == exceptions_;
    if (finished) {
        const std::lock_guard lock(mutex_);
        if (!comm_) return;
        const ncclResult_t result = api_.CommFinalize(comm_);
        finished = result == ncclSuccess || result == ncclInProgress;
    }
    if (!finished || Calls::settled(*this, options_.stall_s) != ncclSuccess) {
        abort();
        return;
    }
    const std::lock_guard lock(mutex_);
    if (comm_) api_.CommDestroy(comm_);
}

void NcclCollectives::abort() noexcept {
    const std::lock_guard lock(mutex_);
    if (!comm_) return;
    if (failure_.empty()) failure_ = "the group was aborted, here or by another rank's failure";
    api_.CommAbort(comm_);  // its kernels stop, so that the stream goes on
    comm_ = nullptr;
}

std::string NcclCollectives::trouble() {
    const std::lock_guard lock(mutex_);
    if (!comm_) return failure_;
    ncclResult_t state = ncclSuccess;
    const ncclResult_t asked = api_.CommGetAsyncError(comm_, &state);
    if (asked == ncclSuccess && (state == ncclSuccess || state == ncclInProgress)) return "";
    return fmt::format("group '{}' (rank {} of {}): {}", member_.name, member_.rank, member_.size, Calls::words(*this, asked == ncclSuccess ? state : asked));
}

// Called without the lock. The first failure is kept: later calls repeat it.
void NcclCollectives::fail(const char* op, const std::string& reason) {
    std::string first;
    {
        const std::lock_guard lock(mutex_);
        if (failure_.empty()) failure_ = reason;
        first = failure_;
    }
    abort();
    throw Problem(Exit::fault, fmt::format("{} on group '{}' (rank {} of {}): {}", op, member_.name, member_.rank, member_.size, first));
}

template <class Issue>
void NcclCollectives::run(const char* op, const Issue& issue) {
    std::string reason;
    {
        const std::lock_guard lock(mutex_);
        const ncclResult_t result = comm_ ? issue() : ncclInvalidUsage;
        if (result != ncclSuccess && result != ncclInProgress) reason = Calls::words(*this, result);
    }
    if (!reason.empty()) fail(op, reason);
    Calls::settle(*this, op, options_.stall_s, "NCCL did not get it onto the stream");
}

// The group is closed whatever happens inside: an open one would swallow all later calls of this thread.
template <class Issue>
void NcclCollectives::run_grouped(const char* op, const Issue& issue) {
    run(op, [&] {
        Worst worst;
        worst.add(api_.GroupStart());
        if (worst.result != ncclSuccess) return worst.result;
        issue([&](ncclResult_t result) { worst.add(result); });
        worst.add(api_.GroupEnd());
        return worst.result;
    });
}

// ---------------------------------------------------------------- operations: what is empty is empty on all ranks, and needs no call

void NcclCollectives::all_gather(CUstream_st* stream, const Tensor& shard, const Tensor& full) {
    TRIFOLD_ASSERT(full.elems == shard.elems * member_.size && full.dtype == shard.dtype);
    if (shard) run("all_gather", [&] { return api_.AllGather(shard.data, full.data, count_of(shard), type_of(shard), comm_, stream); });
}

void NcclCollectives::reduce_scatter(CUstream_st* stream, const Tensor& full, const Tensor& shard) {
    TRIFOLD_ASSERT(full.elems == shard.elems * member_.size && full.dtype == shard.dtype);
    if (shard) run("reduce_scatter", [&] { return api_.ReduceScatter(full.data, shard.data, count_of(shard), type_of(shard), ncclSum, comm_, stream); });
}

void NcclCollectives::all_reduce(CUstream_st* stream, const Tensor& x) {
    if (x) run("all_reduce", [&] { return api_.AllReduce(x.data, x.data, count_of(x), type_of(x), ncclSum, comm_, stream); });
}

void NcclCollectives::all_reduce_max(CUstream_st* stream, const Tensor& x) {
    if (x) run("all_reduce_max", [&] { return api_.AllReduce(x.data, x.data, count_of(x), type_of(x), ncclMax, comm_, stream); });
}

void NcclCollectives::broadcast(CUstream_st* stream, const Tensor& x, int root) {
    TRIFOLD_ASSERT(root >= 0 && root < member_.size);
    if (x) run("broadcast", [&] { return api_.Broadcast(x.data, x.data, count_of(x), type_of(x), root, comm_, stream); });
}

void NcclCollectives::all_to_all(CUstream_st* stream, const Tensor& to, std::span<const int64_t> to_counts, const Tensor& from, std::span<const int64_t> from_counts) {
    TRIFOLD_ASSERT(std::ssize(to_counts) == member_.size && std::ssize(from_counts) == member_.size && to.dtype == from.dtype);
    TRIFOLD_ASSERT(to_counts[static_cast<size_t>(member_.rank)] == from_counts[static_cast<size_t>(member_.rank)]);
    const auto none = [](int64_t count) { return count == 0; };
    if (std::all_of(to_counts.begin(), to_counts.end(), none) && std::all_of(from_counts.begin(), from_counts.end(), none)) return;
    run_grouped("all_to_all", [&](const auto& issued) {
        int64_t sent = 0, received = 0;
        for (int r = 0; r < member_.size; ++r) {
            const Tensor x = to.slice(sent, to_counts[static_cast<size_t>(r)]), y = from.slice(received, from_counts[static_cast<size_t>(r)]);
            if (x) issued(api_.Send(x.data, count_of(x), type_of(x), r, comm_, stream));
            if (y) issued(api_.Recv(y.data, count_of(y), type_of(y), r, comm_, stream));
            sent += x.elems;
            received += y.elems;
        }
    });
}

void NcclCollectives::send(CUstream_st* stream, int to, const Tensor& x) {
    TRIFOLD_ASSERT(to >= 0 && to < member_.size && to != member_.rank);
    if (x) run("send", [&] { return api_.Send(x.data, count_of(x), type_of(x), to, comm_, stream); });
}

void NcclCollectives::receive(CUstream_st* stream, int from, const Tensor& x) {
    TRIFOLD_ASSERT(from >= 0 && from < member_.size && from != member_.rank);
    if (x) run("receive", [&] { return api_.Recv(x.data, count_of(x), type_of(x), from, comm_, stream); });
}

void NcclCollectives::exchange(CUstream_st* stream, int to, const Tensor& x, int from, const Tensor& y) {
    TRIFOLD_ASSERT(to >= 0 && to < member_.size && from >= 0 && from < member_.size);
    if (!x && !y) return;
    run_grouped("exchange", [&](const auto& issued) {
        if (x) issued(api_.Send(x.data, count_of(x), type_of(x), to, comm_, stream));
        if (y) issued(api_.Recv(y.data, count_of(y), type_of(y), from, comm_, stream));
    });
}

}  // namespace trifold
