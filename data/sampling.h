// data/sampling.h   Which sample comes when: pure functions of (seed, position), so that nothing has to be saved or exchanged.
#pragma once
#include <cstdint>
#include <vector>

namespace trifold {

// The next hash of a chain; splitmix64's finalizer.
uint64_t mix(uint64_t value);

// A pseudo-random permutation of [0, n), any n < 2^62, in O(1) memory: a Feistel network on the smallest even number of
// bits that holds n, walked along its cycle until the value is below n again (4 steps on average at worst). Black and
// Rogaway, "Ciphers with arbitrary finite domains", 2002.
class Permutation {
public:
    Permutation(uint64_t n, uint64_t key);
    uint64_t operator()(uint64_t i) const;

private:
    static constexpr int rounds = 8;
    uint64_t n_, key_;
    int half_bits_;
};

// Weighted blending by Megatron's rule (helpers.cpp, build_blending_indices): sample i goes to the source that is
// furthest behind its share, argmax_d (w_d * max(i, 1) - count_d), the first one of equals. Weights are scaled to
// sum 1.
//
// The counts before sample i follow from i alone, but only by counting: seek(i) replays from the last of its snapshots, about 2 ns *
// sources per sample (1 s for 10^8 samples of 5 sources), once when a run resumes. One source costs nothing.
class Blend {
public:
    explicit Blend(std::vector<double> weights);
    struct Choice {
        int source;
        int64_t index;  // counts the samples of this source, from 0, over all epochs
    };
    Choice next();
    void seek(int64_t sample);
    int64_t position() const { return position_; }

private:
    static constexpr int64_t snapshot_every = int64_t{1} << 22;
    int choose() const;
    std::vector<double> weights_;
    std::vector<int64_t> counts_;
    std::vector<std::vector<int64_t>> snapshots_;  // counts before sample k * snapshot_every
    int64_t position_ = 0;
};

}  // namespace trifold
