// parallel/group.h   Collectives and messages among the ranks of one group, as operations on the group's own stream.
//
// Every call puts one operation on the stream of the group (kernels/stream.h) and returns its ticket:
//   follows   what the stream was told to follow before (`stream().follow(ticket)`): the caller orders it behind the kernel that
//             fills the buffer
//   buffers   belong to the operation until its ticket is done, and are declared to the engine like those of any kernel
//   order     all ranks of the group make the same calls in the same order; send and receive pair up in order for each
//             direction between two ranks
// Sums on the host plane are taken in rank order in fp32 (fp64 for fp64), rounded once to the type of the result: the same bits on every rank
// and from run to run. NCCL sums in its own order, in the type itself (nccl.h). `elems` of all ranks agree. A group of one rank does nothing: in and out are the same.
//
// Failures: a dead peer, a deadline (GroupOptions), a message of another size and abort() end an operation with Problem; its
// ticket throws it, and whatever is submitted to the group afterwards fails at once.
#pragma once
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "kernels/stream.h"
#include "kernels/tensor.h"

namespace trifold {

// What carries the data: sockets between host memories (host_collectives.h) or NCCL between GPUs (nccl.h). Each call blocks until
// it is done (host) or has been put on `stream` (NCCL). One thread at a time; abort() from any.
class Collectives {
public:
    virtual ~Collectives() = default;
    virtual void all_gather(CUstream_st* stream, const Tensor& shard, const Tensor& full) = 0;      // full: [ranks, shard]; shard may be its own part of full
    virtual void reduce_scatter(CUstream_st* stream, const Tensor& full, const Tensor& shard) = 0;  // shard may be its own part of full
    virtual void all_reduce(CUstream_st* stream, const Tensor& x) = 0;                              // in place, sum
    virtual void all_reduce_max(CUstream_st* stream, const Tensor& x) = 0;                          // in place
    virtual void broadcast(CUstream_st* stream, const Tensor& x, int root) = 0;                     // in place
    // counts[r]: elements for (from) rank r, lying one after the other in rank order.
    virtual void all_to_all(CUstream_st* stream, const Tensor& to, std::span<const int64_t> to_counts, const Tensor& from, std::span<const int64_t> from_counts) = 0;
    virtual void send(CUstream_st* stream, int to, const Tensor& x) = 0;
    virtual void receive(CUstream_st* stream, int from, const Tensor& x) = 0;
    // Both at once, so that a ring of them cannot block; either may be empty.
    virtual void exchange(CUstream_st* stream, int to, const Tensor& x, int from, const Tensor& y) = 0;
    virtual void abort() noexcept = 0;
    // From any thread: what has gone wrong with operations that were put on a GPU's stream already; empty: nothing, or an operation says so.
    virtual std::string trouble() { return ""; }
};

class Group {
public:
    // A group of one: no stream, no transport.
    Group() = default;
    Group(std::string name, int rank, int size, Stream& stream, std::shared_ptr<Collectives> collectives)
        : name_(std::move(name)), rank_(rank), size_(size), stream_(&stream), collectives_(std::move(collectives)) {}

    // Size and place alone, for the planner.
    static Group planned(std::string name, int rank, int size) {
        Group g;
        g.name_ = std::move(name);
        g.rank_ = rank;
        g.size_ = size;
        return g;
    }

    const std::string& name() const { return name_; }
    int rank() const { return rank_; }
    int size() const { return size_; }
    bool alone() const { return size_ == 1; }
    Stream& stream() const { return *stream_; }
    // For the operations below: the group's stream comes after this ticket.
    void follow(Ticket ticket) const {
        if (!alone()) stream_->follow(ticket);
    }

    Ticket all_gather(const Tensor& shard, const Tensor& full) const;
    Ticket reduce_scatter(const Tensor& full, const Tensor& shard) const;
    Ticket all_reduce(const Tensor& x) const;
    Ticket all_reduce_max(const Tensor& x) const;
    Ticket broadcast(const Tensor& x, int root) const;
    Ticket all_to_all(const Tensor& to, std::vector<int64_t> to_counts, const Tensor& from, std::vector<int64_t> from_counts) const;
    Ticket send(int to, const Tensor& x) const;
    Ticket receive(int from, const Tensor& x) const;
    Ticket exchange(int to, const Tensor& x, int from, const Tensor& y) const;
    Ticket barrier() const;

    // What this rank has to send for all calls so far: (R-1)/R of gathered and scattered tensors, twice that for an all-reduce.
    int64_t sent_bytes() const { return sent_bytes_; }

    // From any thread: the running operation and all later ones fail.
    void abort() const noexcept {
        if (collectives_) collectives_->abort();
    }

private:
    bool parts_travel(const Tensor& shard, const Tensor& full) const;

    std::string name_ = "alone";
    int rank_ = 0, size_ = 1;
    Stream* stream_ = nullptr;
    std::shared_ptr<Collectives> collectives_;  // the World aborts it when another rank fails
    mutable int64_t sent_bytes_ = 0;
};

}  // namespace trifold
