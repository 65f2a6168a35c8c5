// parallel/tensor_parallel.h   Sequence-parallel rows around tensor-parallel matrices, with the transfers folded under the products.
//
// Between matrices each of R ranks holds n = N / R rows of every [N, C] tensor: rank r rows [r*n, r*n + n). A column-parallel matrix needs all
// N rows, a row-parallel one leaves N rows of partial sums (Korthikanti et al., arXiv 2205.05198). Chunk by chunk, as MegaScale 3.2:
//
//   gather    rows arrive rank by rank, own ones first, and each block is multiplied while the next one travels
//   scatter   blocks for the other ranks are computed first and travel while the next one is computed, own rows last; the sum over
//             ranks is taken in rank order in fp32
//
// Off-twin: fold = off runs one all-gather before, one reduce-scatter after; the same bits on the host plane.
// Cost      each way (R-1)/R * N * C elements sent and received per rank.
// Order     follow(compute) comes before the gathers of what compute has just written; scatter orders its own transfers. compute must have
//           followed all blocks of a gather (on_arrival or arrive) before its shard or buffer is written again, and a scatter must be
//           finished before the next one begins.
#pragma once
#include <cstdint>
#include <vector>

#include "kernels/arena.h"
#include "kernels/ops.h"
#include "parallel/group.h"

namespace trifold {

enum class Fold : uint8_t { off, on };

class TensorParallel {
public:
    struct Options {
        Fold fold = Fold::on;
        int64_t chunks = 1;  // pieces in which a rank's rows travel
    };
    // One rank, no buffers.
    TensorParallel() = default;
    // Buffers for [N, C] tensors of this type; `gradients`: for backward passes too.
    enum class Gradients : uint8_t { no, yes };
    TensorParallel(const Group& group, const Options& options, DType type, int64_t N, int64_t C, Gradients gradients, Arena& arena);

    int rank() const { return group_ ? group_->rank() : 0; }
    int size() const { return group_ ? group_->size() : 1; }
    bool alone() const { return size() == 1; }
    const Group& group() const { return *group_; }

    struct Rows {
        int64_t first = 0, count = 0;
        Ticket arrived = {};
    };
    struct Gathered {
        Tensor full_NC;
        std::vector<Rows> blocks;
    };
    enum class Buffer : uint8_t { activations, gradients };
    // Transfers come after everything submitted to compute so far: what they read is written, and nothing reads their buffers any more.
    void follow(Stream& compute) const {
        if (!alone()) group_->follow(compute.last());
    }
    // All N rows of what every rank has a shard of. Alone: the shard itself.
    Gathered gather(Stream& compute, const Tensor& shard_nC, int64_t N, Buffer into) const;
    // Calls f(first_row, rows) for each block once compute comes after its arrival.
    template <class F>
    void on_arrival(Stream& compute, const Gathered& g, F&& f) const {
        for (const Rows& b : g.blocks) {
            compute.follow(b.arrived);
            f(b.first, b.count);
        }
    }
    void arrive(Stream& compute, const Gathered& g) const { compute.follow(g.blocks.back().arrived); }  // the last one

    // Where partial sums for `out` are to be written: [N, C]. Alone: `out` itself.
    Tensor partial(const Tensor& out_nC) const { return alone() ? out_nC : partial_NC_; }
    // f(first_row, rows) fills these rows of the partial sums, which may have been begun before. What is submitted to compute before
    // finish() runs while the last rows travel.
    template <class F>
    void scatter(Stream& compute, int64_t N, F&& f) {
        if (alone()) return f(int64_t{0}, N);
        for (const Block& b : outgoing_) {
            f(b.rows.first, b.rows.count);
            if (options_.fold == Fold::on && b.to != rank()) send(compute, b);
        }
    }
    void finish(Stream& compute, const Tensor& out_nC);

private:
    struct Block {
        int to = 0, from = 0;  // where these rows go, and who sends me rows meanwhile
        Rows rows;             // of the whole
        int64_t first_in_shard = 0;
    };
    std::vector<Block> blocks(int64_t direction) const;
    void send(Stream& compute, const Block& b);

    const Group* group_ = nullptr;
    Options options_;
    int64_t n_ = 0, C_ = 0;
    Tensor gathered_[2], partial_NC_, received_;
    std::vector<Block> incoming_, outgoing_;  // of a gather, of a scatter
    Ticket sent_;
};

}  // namespace trifold
