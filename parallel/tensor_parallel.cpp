#include "parallel/tensor_parallel.h"

#include <algorithm>

namespace trifold {

TensorParallel::TensorParallel(const Group& group, const Options& options, DType type, int64_t N, int64_t C, Gradients gradients, Arena& arena)
    : group_(&group), options_(options), n_(N / group.size()), C_(C) {
    TRIFOLD_ASSERT(N % group.size() == 0);
    if (alone()) return;
    const auto reserve = [&](int64_t rows) { return arena.reserve(MemoryClass::workspace, type, rows * C); };
    gathered_[0] = reserve(N);
    if (gradients == Gradients::yes) gathered_[1] = reserve(N);
    partial_NC_ = reserve(N);
    received_ = reserve(N - n_);
    incoming_ = blocks(-1);
    outgoing_ = blocks(+1);
    outgoing_.push_back({rank(), rank(), {rank() * n_, n_}, 0});
}

// The rows of the other ranks, nearest first in this direction, in pieces.
std::vector<TensorParallel::Block> TensorParallel::blocks(int64_t direction) const {
    const int64_t R = size(), pieces = std::min(options_.chunks, n_), piece = (n_ + pieces - 1) / pieces;
    std::vector<Block> all;
    for (int64_t k = 1; k < R; ++k) {
        const auto other = [&](int64_t distance) { return static_cast<int>((rank() + distance + R) % R); };
        const int to = other(direction * k), from = other(-direction * k);
        for (int64_t first = 0; first < n_; first += piece) all.push_back({to, from, {to * n_ + first, std::min(piece, n_ - first)}, first});
    }
    return all;
}

TensorParallel::Gathered TensorParallel::gather(Stream& compute, const Tensor& shard, int64_t N, Buffer into) const {
    if (alone()) return {shard, {{0, N}}};
    TRIFOLD_ASSERT(N == size() * n_);
    const Tensor& full = gathered_[static_cast<size_t>(into)];
    Gathered g{full, {{rank() * n_, n_}}};
    if (options_.fold == Fold::off) {
        g.blocks = {{0, size() * n_, group_->all_gather(shard, full)}};
        return g;
    }
    copy(compute, {.x = shard, .y = full.slice(rank() * n_ * C_, n_ * C_)});
    g.blocks.reserve(incoming_.size() + 1);
    for (const Block& b : incoming_) {  // my rows go one way round, the others' come from there
        const int64_t rows = b.rows.count, first = b.from * n_ + b.first_in_shard;
        const Ticket arrived = group_->exchange(b.to, shard.slice(b.first_in_shard * C_, rows * C_), b.from, full.slice(first * C_, rows * C_));
        g.blocks.push_back({first, rows, arrived});
    }
    return g;
}

void TensorParallel::send(Stream& compute, const Block& b) {
    const int64_t slot = b.from < rank() ? b.from : b.from - 1;  // in rank order, without me
    group_->follow(compute.last());
    sent_ = group_->exchange(b.to, partial_NC_.slice(b.rows.first * C_, b.rows.count * C_), b.from,
                             received_.slice((slot * n_ + b.first_in_shard) * C_, b.rows.count * C_));
}

void TensorParallel::finish(Stream& compute, const Tensor& out) {
    if (alone()) return;
    if (options_.fold == Fold::off) {
        group_->follow(compute.last());
        return compute.follow(group_->reduce_scatter(partial_NC_, out));
    }
    compute.follow(sent_);
    sum_parts(compute, {.own = partial_NC_.slice(rank() * n_ * C_, n_ * C_), .others = received_, .y = out, .rank = rank(), .ranks = size()});
}

}  // namespace trifold
