// data/sampling.cpp
#include "data/sampling.h"

#include <algorithm>
#include <bit>
#include <numeric>

#include "base/error.h"

namespace trifold {

uint64_t mix(uint64_t value) {
    value += 0x9E3779B97F4A7C15u;
    value = (value ^ value >> 30) * 0xBF58476D1CE4E5B9u;
    value = (value ^ value >> 27) * 0x94D049BB133111EBu;
    return value ^ value >> 31;
}

Permutation::Permutation(uint64_t n, uint64_t key) : n_(n), key_(key), half_bits_(std::max(1, (static_cast<int>(std::bit_width(n - 1)) + 1) / 2)) {
    TRIFOLD_ASSERT(n > 0 && n < uint64_t{1} << 62);
}

uint64_t Permutation::operator()(uint64_t i) const {
    TRIFOLD_ASSERT(i < n_);
    const uint64_t mask = (uint64_t{1} << half_bits_) - 1;
    do {
        uint64_t left = i >> half_bits_, right = i & mask;
        for (int round = 0; round < rounds; ++round) {
            const uint64_t swapped = left ^ (mix(key_ ^ mix(right << 4 | static_cast<uint64_t>(round))) & mask);
            left = right;
            right = swapped;
        }
        i = left << half_bits_ | right;
    } while (i >= n_);
    return i;
}

Blend::Blend(std::vector<double> weights) : weights_(std::move(weights)), counts_(weights_.size(), 0) {
    TRIFOLD_ASSERT(!weights_.empty());
    const double sum = std::accumulate(weights_.begin(), weights_.end(), 0.0);
    for (double& weight : weights_) weight /= sum;
    snapshots_.push_back(counts_);
}

int Blend::choose() const {
    const auto reached = static_cast<double>(std::max<int64_t>(position_, 1));
    int best = 0;
    double most = weights_[0] * reached - static_cast<double>(counts_[0]);
    for (size_t d = 1; d < weights_.size(); ++d) {
        const double behind = weights_[d] * reached - static_cast<double>(counts_[d]);
        if (behind > most) most = behind, best = static_cast<int>(d);
    }
    return best;
}

Blend::Choice Blend::next() {
    const int source = weights_.size() == 1 ? 0 : choose();
    const int64_t index = counts_[source]++;
    ++position_;
    if (weights_.size() > 1 && position_ % snapshot_every == 0 && position_ / snapshot_every == std::ssize(snapshots_)) snapshots_.push_back(counts_);
    return {source, index};
}

void Blend::seek(int64_t sample) {
    TRIFOLD_ASSERT(sample >= 0);
    if (weights_.size() == 1) {
        counts_[0] = position_ = sample;
        return;
    }
    const int64_t snapshot = std::min<int64_t>(sample / snapshot_every, std::ssize(snapshots_) - 1);
    if (sample < position_ || snapshot * snapshot_every > position_) {
        counts_ = snapshots_[snapshot];
        position_ = snapshot * snapshot_every;
    }
    while (position_ < sample) next();
}

}  // namespace trifold
