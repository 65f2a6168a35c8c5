#include "test/fake_nccl/fake_nccl.h"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>

#include "test/fake_nccl/hub.h"

using trifold::fake_nccl::Operation;
using trifold::fake_nccl::Wire;

// One rank's communicator. It stays when it is destroyed, so that late calls are seen.
struct ncclComm {
    struct Issued {
        Operation op;
        const char *send, *send_end;
        char *receive, *receive_end;
    };
    enum class Phase { connecting, ready, busy, finalizing, finalized, gone };

    std::string name;
    int rank = 0, size = 1;
    Wire wire;
    Phase phase = Phase::connecting;
    bool arrived = false;  // what `phase` waits for; told to the caller after some more polls
    int polls_left = 0;
    std::vector<Issued> issued;
    ncclResult_t error = ncclSuccess;
    std::string sentence, how;  // of the error; of the end

    std::string who() const { return fmt::format("rank {} of '{}'", rank, name); }
};

namespace trifold::fake_nccl {
namespace {

using Phase = ncclComm::Phase;
using Issued = ncclComm::Issued;

// NCCL's calls know nothing but a communicator, so what they share in a process has to be global.
struct Shared {
    std::mutex mutex;
    std::vector<std::unique_ptr<ncclComm>> communicators;
    std::vector<std::unique_ptr<Hub>> hubs;
    std::vector<std::string> findings;
};
Shared& shared() {
    static Shared s;
    return s;
}

void found(const std::string& sentence) {
    const std::lock_guard lock(shared().mutex);
    shared().findings.push_back(sentence);
}
ncclResult_t wrong(ncclComm_t comm, ncclResult_t result, const std::string& sentence) {
    if (comm) comm->sentence = sentence;
    found(sentence);
    return result;
}

// The open group of this thread.
struct OpenGroup {
    int depth = 0;
    ncclResult_t error = ncclSuccess;
    std::vector<std::pair<ncclComm_t, std::vector<Issued>>> issued;
    ~OpenGroup() {
        if (depth > 0) found("a thread ended inside a group: ncclGroupEnd is missing");
    }
    std::vector<Issued>& of(ncclComm_t comm) {
        for (auto& [c, list] : issued)
            if (c == comm) return list;
        return issued.emplace_back(comm, std::vector<Issued>{}).second;
    }
};
thread_local OpenGroup group;

// One call on one communicator: ok() when it may go on, else `result` says why not.
class Call {
public:
    Call(const char* name, ncclComm_t comm) : comm_(known(comm)) {
        if (!comm_) {
            result = wrong(nullptr, ncclInvalidArgument, fmt::format("{} on something that is no communicator", name));
        } else if (comm_->phase == Phase::gone) {
            result = wrong(comm_, ncclInvalidArgument, fmt::format("{} on {} after it {}", name, comm_->who(), comm_->how));
        }
    }
    bool ok() const { return result == ncclSuccess; }
    ncclResult_t result = ncclSuccess;

private:
    static ncclComm_t known(ncclComm_t comm) {
        const std::lock_guard lock(shared().mutex);
        const auto& all = shared().communicators;
        return std::any_of(all.begin(), all.end(), [&](const auto& c) { return c.get() == comm; }) ? comm : nullptr;
    }
    ncclComm_t comm_;
};

// ---------------------------------------------------------------- operations

void launch(ncclComm_t comm, std::vector<Issued> issued) {
    std::vector<Operation> ops;
    for (Issued& i : issued) {
        i.op.data.assign(i.send, i.send_end);
        ops.push_back(i.op);
    }
    comm->issued = std::move(issued);
    comm->phase = Phase::busy;
    comm->arrived = false;
    comm->wire.put(Message::batch, encode_batch(ops));
}

std::string not_ready(ncclComm_t comm) {
    switch (comm->phase) {
        case Phase::connecting: return "before the communicator is ready";
        case Phase::busy: return fmt::format("while {} is in progress", describe(comm->issued[0].op));
        case Phase::finalizing: case Phase::finalized: return "after ncclCommFinalize";
        default: return "";
    }
}

bool overlap(const char* a, const char* a_end, const char* b, const char* b_end) { return a < b_end && b < a_end; }

// What is wrong with the buffers, or empty.
std::string bad_buffers(ncclComm_t comm, const Issued& i, const std::vector<Issued>& others) {
    const uint64_t bytes = i.op.count * type_bytes(i.op.type), shift = static_cast<uint64_t>(comm->rank) * bytes;
    if (type_bytes(i.op.type) == 0) return "a type that the fake does not know";
    if ((!i.send && i.op.kind != OpKind::receive) || (!i.receive && i.op.kind != OpKind::send)) return "a null buffer";
    const char* const in_place = i.op.kind == OpKind::all_gather ? i.receive + shift : i.op.kind == OpKind::reduce_scatter ? i.receive - shift : i.receive;
    if (overlap(i.send, i.send_end, i.receive, i.receive_end) && i.send != in_place) return "buffers that overlap without being in place";
    for (const Issued& o : others)
        if (overlap(i.receive, i.receive_end, o.receive, o.receive_end) || overlap(i.receive, i.receive_end, o.send, o.send_end) || overlap(i.send, i.send_end, o.receive, o.receive_end))
            return fmt::format("a buffer that {} of the same group uses", describe(o.op));
    return "";
}

ncclResult_t issue(const char* name, ncclComm_t comm, Operation op, const void* send, uint64_t send_count, void* receive, uint64_t receive_count) {
    const auto checked = [&] {
        Call call(name, comm);
        if (!call.ok()) return call.result;
        if (comm->error != ncclSuccess) return comm->error;
        const auto complain = [&](const std::string& what) { return wrong(comm, ncclInvalidArgument, fmt::format("{} on {} {}", describe(op), comm->who(), what)); };
        if (const std::string why = not_ready(comm); !why.empty()) return complain(why);
        if (op.peer < 0 || op.peer >= comm->size) return complain(fmt::format("with a rank that is none of {}", comm->size));
        const uint64_t bytes = type_bytes(op.type);
        const auto *from = static_cast<const char*>(send);
        auto* to = static_cast<char*>(receive);
        Issued i{op, from, from + send_count * bytes, to, to + receive_count * bytes};
        std::vector<Issued>& of_group = group.of(comm);
        if (const std::string why = bad_buffers(comm, i, of_group); !why.empty()) return complain("has " + why);
        of_group.push_back(std::move(i));
        if (group.depth > 0) return ncclSuccess;
        launch(comm, std::move(of_group));
        group.issued.clear();
        return ncclInProgress;
    };
    const ncclResult_t result = checked();
    if (result != ncclSuccess && result != ncclInProgress && group.depth > 0 && group.error == ncclSuccess) group.error = result;
    return result;
}

ncclResult_t all_gather(const void* send, void* receive, size_t count, ncclDataType_t type, ncclComm_t comm, cudaStream_t) {
    const auto ranks = comm ? static_cast<uint64_t>(comm->size) : 1;
    return issue("ncclAllGather", comm, {.kind = OpKind::all_gather, .type = type, .count = count}, send, count, receive, count * ranks);
}
ncclResult_t reduce_scatter(const void* send, void* receive, size_t count, ncclDataType_t type, ncclRedOp_t reduction, ncclComm_t comm, cudaStream_t) {
    const auto ranks = comm ? static_cast<uint64_t>(comm->size) : 1;
    return issue("ncclReduceScatter", comm, {.kind = OpKind::reduce_scatter, .type = type, .reduction = reduction, .count = count}, send, count * ranks, receive, count);
}
ncclResult_t all_reduce(const void* send, void* receive, size_t count, ncclDataType_t type, ncclRedOp_t reduction, ncclComm_t comm, cudaStream_t) {
    return issue("ncclAllReduce", comm, {.kind = OpKind::all_reduce, .type = type, .reduction = reduction, .count = count}, send, count, receive, count);
}
ncclResult_t broadcast(const void* send, void* receive, size_t count, ncclDataType_t type, int root, ncclComm_t comm, cudaStream_t) {
    return issue("ncclBroadcast", comm, {.kind = OpKind::broadcast, .type = type, .peer = root, .count = count}, send, count, receive, count);
}
ncclResult_t send(const void* from, size_t count, ncclDataType_t type, int peer, ncclComm_t comm, cudaStream_t) {
    return issue("ncclSend", comm, {.kind = OpKind::send, .type = type, .peer = peer, .count = count}, from, count, nullptr, 0);
}
ncclResult_t receive(void* to, size_t count, ncclDataType_t type, int peer, ncclComm_t comm, cudaStream_t) {
    return issue("ncclRecv", comm, {.kind = OpKind::receive, .type = type, .peer = peer, .count = count}, nullptr, 0, to, count);
}

ncclResult_t group_start() {
    ++group.depth;
    return ncclSuccess;
}
ncclResult_t group_end() {
    if (group.depth == 0) return wrong(nullptr, ncclInvalidUsage, "ncclGroupEnd without ncclGroupStart");
    if (--group.depth > 0) return ncclSuccess;
    const auto issued = std::exchange(group.issued, {});
    if (const ncclResult_t error = std::exchange(group.error, ncclSuccess); error != ncclSuccess) return error;
    for (const auto& [comm, list] : issued) launch(comm, list);
    return issued.empty() ? ncclSuccess : ncclInProgress;
}

// ---------------------------------------------------------------- communicators

ncclResult_t get_unique_id(ncclUniqueId* id) {
    static std::atomic<int> count{0};
    const std::string address = fmt::format("trifold-fake-nccl-{}-{}", ::getpid(), ++count);
    std::memset(id, 0, sizeof *id);
    std::memcpy(id->internal, address.data(), address.size());
    auto hub = std::make_unique<Hub>(address);
    const std::lock_guard lock(shared().mutex);
    shared().hubs.push_back(std::move(hub));
    return ncclSuccess;
}

ncclResult_t comm_init(ncclComm_t* out, int size, ncclUniqueId id, int rank, ncclConfig_t* config) {
    if (rank < 0 || rank >= size) return wrong(nullptr, ncclInvalidArgument, fmt::format("ncclCommInitRankConfig with rank {} of {}", rank, size));
    if (!config || config->blocking != 0) return wrong(nullptr, ncclInvalidArgument, "ncclCommInitRankConfig without config.blocking = 0: it could wait for ever");
    auto comm = std::make_unique<ncclComm>();
    comm->name = config->commName ? config->commName : "";
    comm->rank = rank;
    comm->size = size;
    comm->wire = Wire(connect_to(std::string(id.internal)));
    if (comm->wire.fd() < 0) return wrong(nullptr, ncclSystemError, fmt::format("{} cannot reach the process that made the unique id", comm->who()));
    std::string hello;
    put_number(hello, static_cast<uint64_t>(rank));
    put_number(hello, static_cast<uint64_t>(size));
    put_text(hello, comm->name);
    comm->wire.put(Message::hello, hello);
    *out = comm.get();
    const std::lock_guard lock(shared().mutex);
    shared().communicators.push_back(std::move(comm));
    return ncclInProgress;
}

void receive_frames(ncclComm_t comm) {
    const bool open = comm->wire.pump();
    for (Frame frame; comm->wire.take(frame);) {
        if (frame.kind == Message::error) {
            comm->error = wrong(comm, ncclRemoteError, frame.body);
            return;
        }
        for (Issued& i : comm->issued) {
            const std::string result = take_text(frame.body);
            if (!result.empty()) std::memcpy(i.receive, result.data(), result.size());
        }
        comm->issued.clear();
        comm->arrived = true;
        comm->polls_left = 2;
    }
    if (!open && !comm->arrived && comm->phase != Phase::finalized) comm->error = wrong(comm, ncclRemoteError, comm->who() + ": the process that made the unique id is gone");
}

ncclResult_t get_async_error(ncclComm_t comm, ncclResult_t* state) {
    Call call("ncclCommGetAsyncError", comm);
    if (!call.ok()) return call.result;
    if (group.depth > 0) return wrong(comm, ncclInvalidUsage, fmt::format("ncclCommGetAsyncError on {} inside an open group: ncclGroupEnd is missing", comm->who()));
    const bool waits = comm->phase == Phase::connecting || comm->phase == Phase::busy || comm->phase == Phase::finalizing;
    if (!comm->arrived && comm->error == ncclSuccess) receive_frames(comm);
    *state = comm->error;
    if (comm->error != ncclSuccess || !waits) return ncclSuccess;
    *state = ncclInProgress;
    if (!comm->arrived || comm->polls_left-- > 0) return ncclSuccess;
    comm->phase = comm->phase == Phase::finalizing ? Phase::finalized : Phase::ready;
    comm->arrived = false;
    *state = ncclSuccess;
    return ncclSuccess;
}

ncclResult_t finalize(ncclComm_t comm) {
    Call call("ncclCommFinalize", comm);
    if (!call.ok()) return call.result;
    if (comm->error != ncclSuccess) return comm->error;
    if (const std::string why = not_ready(comm); !why.empty()) return wrong(comm, ncclInvalidArgument, fmt::format("ncclCommFinalize on {} {}", comm->who(), why));
    if (group.depth > 0) return wrong(comm, ncclInvalidUsage, fmt::format("ncclCommFinalize on {} inside an open group: ncclGroupEnd is missing", comm->who()));
    comm->phase = Phase::finalizing;
    comm->arrived = false;
    comm->wire.put(Message::finalize);
    return ncclInProgress;
}

const std::string destroyed = "was destroyed", aborted = "was aborted";
void end(ncclComm_t comm, const std::string& how) {
    comm->phase = Phase::gone;
    comm->how = how;
    comm->wire.put(Message::leave, how);
    comm->wire.close();
}
ncclResult_t destroy(ncclComm_t comm) {
    Call call("ncclCommDestroy", comm);
    if (!call.ok()) return call.result;
    const bool finalized = comm->phase == Phase::finalized;
    const std::string who = comm->who();
    end(comm, destroyed);
    return finalized ? ncclSuccess : wrong(comm, ncclInvalidUsage, fmt::format("ncclCommDestroy on {} before ncclCommFinalize was done", who));
}
ncclResult_t abort(ncclComm_t comm) {
    Call call("ncclCommAbort", comm);
    if (!call.ok()) return call.result;
    end(comm, aborted);
    return ncclSuccess;
}

ncclResult_t get_version(int* version) {
    *version = NCCL_VERSION_CODE;
    return ncclSuccess;
}
const char* error_string(ncclResult_t result) {
    switch (result) {
        case ncclSuccess: return "no error";
        case ncclSystemError: return "system error";
        case ncclInvalidArgument: return "invalid argument";
        case ncclInvalidUsage: return "invalid usage";
        case ncclRemoteError: return "remote error";
        case ncclInProgress: return "in progress";
        default: return "other error";
    }
}
const char* last_error(ncclComm_t comm) { return comm ? comm->sentence.c_str() : ""; }

}  // namespace

const NcclApi& api() {
    static constexpr NcclApi table{.GetVersion = get_version,
                                   .GetErrorString = error_string,
                                   .GetLastError = last_error,
                                   .GetUniqueId = get_unique_id,
                                   .CommInitRankConfig = comm_init,
                                   .CommGetAsyncError = get_async_error,
                                   .CommFinalize = finalize,
                                   .CommDestroy = destroy,
                                   .CommAbort = abort,
                                   .GroupStart = group_start,
                                   .GroupEnd = group_end,
                                   .AllGather = all_gather,
                                   .ReduceScatter = reduce_scatter,
                                   .AllReduce = all_reduce,
                                   .Broadcast = broadcast,
                                   .Send = send,
                                   .Recv = receive};
    return table;
}

std::vector<std::string> take_findings() {
    const std::lock_guard lock(shared().mutex);
    return std::exchange(shared().findings, {});
}

Communicators communicators() {
    const std::lock_guard lock(shared().mutex);
    Communicators count;
    for (const auto& c : shared().communicators) ++(c->phase != Phase::gone ? count.open : c->how == destroyed ? count.destroyed : count.aborted);
    return count;
}

}  // namespace trifold::fake_nccl
