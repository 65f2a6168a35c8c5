// data/unigram.h   What a model that knows only how often each token occurs would reach: the baseline a trained model must beat.
#pragma once
#include <cstdint>
#include <string>

namespace trifold {

struct UnigramLoss {
    double loss = 0;         // nats per token of `val`
    int64_t tokens = 0;      // of `val`
};

// Frequencies are counted on `train` and every id up to the largest one seen gets one more (Laplace), so that none has
// probability zero. Both are paths or globs of token files. Problem(Exit::data) for bad files.
UnigramLoss unigram_loss(const std::string& train, const std::string& val);

}  // namespace trifold
