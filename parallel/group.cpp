// parallel/group.cpp   Each method states what its operation reads and writes, and leaves the rest to the Collectives.
//
// In-place forms touch the rank's own part and the others' differently (a gather reads its own and writes theirs), so the three ranges
// before, of and after the own part are declared one by one.
#include "parallel/group.h"

#include <tuple>
#include <utility>

#include "base/error.h"

namespace trifold {
namespace {

struct AllGather {
    Collectives* by;
    Tensor full;
    In shard;
    Out before, own, after;  // of `full`; own: empty in place
    auto views() const { return std::tie(shard, before, own, after); }
};

struct ReduceScatter {
    Collectives* by;
    Tensor full;
    In before, own, after;  // of `full`
    Out shard;
    auto views() const { return std::tie(before, own, after, shard); }
};

struct InPlace {
    Collectives* by;
    InOut x;
    auto views() const { return std::tie(x); }
};

struct Given {  // a broadcast at its root, or a send
    Collectives* by;
    int peer;
    In x;
    auto views() const { return std::tie(x); }
};

struct Taken {  // a broadcast elsewhere, or a receive
    Collectives* by;
    int peer;
    Out x;
    auto views() const { return std::tie(x); }
};

struct Exchange {
    Collectives* by;
    int to, from;
    In x;
    Out y;
    auto views() const { return std::tie(x, y); }
};

struct AllToAll {
    Collectives* by;
    In to;
    Out from;
    std::vector<int64_t> to_counts, from_counts;
    auto views() const { return std::tie(to, from); }
};

// Puts act(where, args) on the stream; `where` is null on a CPU.
template <class Act, class Args>
Ticket put(Stream& stream, const char* name, const Args& args) {
    return stream.launch<Args>(
        name, +[](const Args& a) { Act()(nullptr, a); }, +[](CUstream_st* where, const Args& a) { Act()(where, a); }, args);
}

}  // namespace

// `full` consists of the shards of all ranks. False: there is nobody to send to.
bool Group::parts_travel(const Tensor& shard, const Tensor& full) const {
    TRIFOLD_ASSERT(shard.elems * size_ == full.elems && shard.dtype == full.dtype);
    TRIFOLD_ASSERT(!alone() || shard.data == full.data || !full);
    sent_bytes_ += (size_ - 1) * shard.bytes();
    return !alone();
}

Ticket Group::all_gather(const Tensor& shard, const Tensor& full) const {
    if (!parts_travel(shard, full)) return {};
    const int64_t first = rank_ * shard.elems;
    const Tensor own = full.slice(first, shard.elems);
    const AllGather args{.by = collectives_.get(),
                         .full = full,
                         .shard = shard,
                         .before = full.slice(0, first),
                         .own = own.data == shard.data ? Tensor() : own,
                         .after = full.from(first + shard.elems)};
    struct Act {
        void operator()(CUstream_st* where, const AllGather& a) { a.by->all_gather(where, a.shard, a.full); }
    };
    return put<Act>(*stream_, "all_gather", args);
}

Ticket Group::reduce_scatter(const Tensor& full, const Tensor& shard) const {
    if (!parts_travel(shard, full)) return {};
    const int64_t first = rank_ * shard.elems;
    const ReduceScatter args{.by = collectives_.get(),
                             .full = full,
                             .before = full.slice(0, first),
                             .own = full.slice(first, shard.elems),
                             .after = full.from(first + shard.elems),
                             .shard = shard};
    struct Act {
        void operator()(CUstream_st* where, const ReduceScatter& a) { a.by->reduce_scatter(where, a.full, a.shard); }
    };
    return put<Act>(*stream_, "reduce_scatter", args);
}

Ticket Group::all_reduce(const Tensor& x) const {
    if (alone()) return {};
    sent_bytes_ += 2 * (size_ - 1) * x.bytes() / size_;
    struct Act {
        void operator()(CUstream_st* where, const InPlace& a) { a.by->all_reduce(where, a.x); }
    };
    return put<Act>(*stream_, "all_reduce", InPlace{collectives_.get(), x});
}

Ticket Group::all_reduce_max(const Tensor& x) const {
    if (alone()) return {};
    sent_bytes_ += 2 * (size_ - 1) * x.bytes() / size_;
    struct Act {
        void operator()(CUstream_st* where, const InPlace& a) { a.by->all_reduce_max(where, a.x); }
    };
    return put<Act>(*stream_, "all_reduce_max", InPlace{collectives_.get(), x});
}

Ticket Group::broadcast(const Tensor& x, int root) const {
    TRIFOLD_ASSERT(root >= 0 && root < size_);
    if (alone()) return {};
    struct Act {
        void operator()(CUstream_st* where, const Given& a) { a.by->broadcast(where, a.x, a.peer); }
        void operator()(CUstream_st* where, const Taken& a) { a.by->broadcast(where, a.x, a.peer); }
    };
    if (rank_ == root) return put<Act>(*stream_, "broadcast", Given{collectives_.get(), root, x});
    return put<Act>(*stream_, "broadcast", Taken{collectives_.get(), root, x});
}

Ticket Group::all_to_all(const Tensor& to, std::vector<int64_t> to_counts, const Tensor& from,
                         std::vector<int64_t> from_counts) const {
    if (alone()) {
        TRIFOLD_ASSERT(to.elems == from.elems && (to.data == from.data || !to));
        return {};
    }
    const AllToAll args{.by = collectives_.get(),
                        .to = to,
                        .from = from,
                        .to_counts = std::move(to_counts),
                        .from_counts = std::move(from_counts)};
    struct Act {
        void operator()(CUstream_st* where, const AllToAll& a) {
            a.by->all_to_all(where, a.to, a.to_counts, a.from, a.from_counts);
        }
    };
    return put<Act>(*stream_, "all_to_all", args);
}

Ticket Group::send(int to, const Tensor& x) const {
    TRIFOLD_ASSERT(to >= 0 && to < size_ && to != rank_);
    struct Act {
        void operator()(CUstream_st* where, const Given& a) { a.by->send(where, a.peer, a.x); }
    };
    sent_bytes_ += x.bytes();
    return put<Act>(*stream_, "send", Given{collectives_.get(), to, x});
}

Ticket Group::receive(int from, const Tensor& x) const {
    TRIFOLD_ASSERT(from >= 0 && from < size_ && from != rank_);
    struct Act {
        void operator()(CUstream_st* where, const Taken& a) { a.by->receive(where, a.peer, a.x); }
    };
    return put<Act>(*stream_, "receive", Taken{collectives_.get(), from, x});
}

Ticket Group::exchange(int to, const Tensor& x, int from, const Tensor& y) const {
    if (alone()) {
        TRIFOLD_ASSERT(!x && !y);
        return {};
    }
    TRIFOLD_ASSERT((!x || (to >= 0 && to < size_ && to != rank_)) && (!y || (from >= 0 && from < size_ && from != rank_)));
    struct Act {
        void operator()(CUstream_st* where, const Exchange& a) { a.by->exchange(where, a.to, a.x, a.from, a.y); }
    };
    sent_bytes_ += x.bytes();
    return put<Act>(*stream_, "exchange", Exchange{collectives_.get(), to, from, x, y});
}

// A sum of nothing still waits for everybody.
Ticket Group::barrier() const {
    if (alone()) return {};
    struct Act {
        void operator()(CUstream_st* where, const InPlace& a) { a.by->all_reduce(where, a.x); }
    };
    return put<Act>(*stream_, "barrier", InPlace{collectives_.get(), Tensor()});
}

}  // namespace trifold
