#include "parallel/staged_collectives.h"

#include "kernels/cuda/runtime.h"

namespace trifold {
namespace {

// Page-locked memory that grows to the largest tensor it has stood for.
class HostCopy {
public:
    HostCopy() = default;
    ~HostCopy() { release(); }
    HostCopy(const HostCopy&) = delete;
    HostCopy& operator=(const HostCopy&) = delete;

    Tensor like(const Tensor& t) {
        if (t.bytes() > bytes_) {
            release();
            memory_ = std::make_unique_for_overwrite<std::byte[]>(static_cast<size_t>(t.bytes()));
            bytes_ = t.bytes();
            pinned_ = cuda::pin(memory_.get(), bytes_);
        }
        return {memory_.get(), t.dtype, t.elems};
    }

private:
    void release() {
        if (pinned_) cuda::unpin(memory_.get());
        pinned_ = false;
    }

    std::unique_ptr<std::byte[]> memory_;
    int64_t bytes_ = 0;
    bool pinned_ = false;
};

class StagedCollectives final : public Collectives {
public:
    StagedCollectives(std::unique_ptr<Collectives> host, int rank) : host_(std::move(host)), rank_(rank) {}

    void all_gather(CUstream_st*, const Tensor& shard, const Tensor& full) override {
        const int64_t first = rank_ * shard.elems, end = first + shard.elems;
        const Tensor copy = first_.like(full), own = copy.slice(first, shard.elems);
        pass(shard, own);
        host_->all_gather(nullptr, own, copy);
        pass(copy.slice(0, first), full.slice(0, first));
        if (const Tensor place = full.slice(first, shard.elems); place.data != shard.data) pass(own, place);
        pass(copy.from(end), full.from(end));
    }
    void reduce_scatter(CUstream_st*, const Tensor& full, const Tensor& shard) override {
        const Tensor copy = first_.like(full), own = copy.slice(rank_ * shard.elems, shard.elems);
        pass(full, copy);
        host_->reduce_scatter(nullptr, copy, own);
        pass(own, shard);
    }
    void all_reduce(CUstream_st*, const Tensor& x) override {
        in_place(x, [&](const Tensor& copy) { host_->all_reduce(nullptr, copy); });
    }
    void all_reduce_max(CUstream_st*, const Tensor& x) override {
        in_place(x, [&](const Tensor& copy) { host_->all_reduce_max(nullptr, copy); });
    }
    void broadcast(CUstream_st*, const Tensor& x, int root) override {
        const Tensor copy = first_.like(x);
        if (rank_ == root) pass(x, copy);
        host_->broadcast(nullptr, copy, root);
        if (rank_ != root) pass(copy, x);
    }
    void all_to_all(CUstream_st*, const Tensor& to, std::span<const int64_t> to_counts, const Tensor& from, std::span<const int64_t> from_counts) override {
        const Tensor sent = down(to, first_), received = second_.like(from);
        host_->all_to_all(nullptr, sent, to_counts, received, from_counts);
        pass(received, from);
    }
    void send(CUstream_st*, int to, const Tensor& x) override { host_->send(nullptr, to, down(x, first_)); }
    void receive(CUstream_st*, int from, const Tensor& x) override {
        const Tensor copy = second_.like(x);
        host_->receive(nullptr, from, copy);
        pass(copy, x);
    }
    void exchange(CUstream_st*, int to, const Tensor& x, int from, const Tensor& y) override {
        const Tensor sent = down(x, first_), received = second_.like(y);
        host_->exchange(nullptr, to, sent, from, received);
        pass(received, y);
    }
    void abort() noexcept override { host_->abort(); }

private:
    void pass(const Tensor& from, const Tensor& to) const {
        if (from) copier_.copy(to.data, from.data, from.bytes());
    }
    Tensor down(const Tensor& x, HostCopy& room) const {
        const Tensor copy = room.like(x);
        pass(x, copy);
        return copy;
    }
    template <class Act>
    void in_place(const Tensor& x, const Act& act) {
        const Tensor copy = down(x, first_);
        act(copy);
        pass(copy, x);
    }

    std::unique_ptr<Collectives> host_;
    const int rank_;
    cuda::Copier copier_;
    HostCopy first_, second_;
};

}  // namespace

std::unique_ptr<Collectives> stage_through_host(std::unique_ptr<Collectives> host, int rank) { return std::make_unique<StagedCollectives>(std::move(host), rank); }

}  // namespace trifold
