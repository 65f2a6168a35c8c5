// commands/loading.h   Which tokens a command reads, from its configuration, and how they reach a stage.
#pragma once
#include <vector>

#include "data/loader.h"
#include "model/config.h"
#include "model/stage.h"
#include "parallel/world.h"

namespace trifold {

// What a stage reads; the batch must live until then.
inline TokenBatch view(const MicroBatch& b) {
    return {b.tokens.data(), b.targets.data(), b.positions.data(), b.doc_start.empty() ? nullptr : b.doc_start.data()};
}

// Data-parallel rank d takes the d-th part of every global batch; the ranks of one model replica read the same.
LoaderOptions training_data(const Config& c, int dp_rank);
// Micro-batch k*dp + d of an evaluation belongs to data-parallel rank d.
LoaderOptions validation_data(const Config& c, int dp_rank);
// Opens and checks the files. They may be missing on one host only: there the sentence says which it is.
Loader open_data(const std::vector<DataSource>& sources, const LoaderOptions& options, const World& world);

}  // namespace trifold
