#include "commands/loading.h"

#include <fmt/format.h>

#include "data/tokenizer.h"

namespace trifold {
namespace {

// Isolated documents need to know which id ends one; joined ones do not care.
int32_t end_of_document(const DataConfig& data) {
    return data.documents == Documents::isolated ? Tokenizer::load(data.tokenizer).end_of_document() : -1;
}

}  // namespace

LoaderOptions training_data(const Config& c, int dp_rank) {
    const int64_t own = c.train.global_batch / c.mesh.dp;
    return {.name = "data.train", .seq = c.train.seq, .micro_batch = c.train.micro_batch, .global_batch = c.train.global_batch,
            .first_sequence = dp_rank * own, .sequence_count = own, .seed = c.train.seed, .vocab = c.model.vocab, .shuffle = c.data.shuffle,
            .documents = c.data.documents, .end_of_document = end_of_document(c.data),
            .mask_prompt = c.data.mask_prompt};
}

LoaderOptions validation_data(const Config& c, int dp_rank) {
    LoaderOptions o = training_data(c, dp_rank);
    o.name = "data.val";
    o.global_batch = c.train.micro_batch * c.mesh.dp;
    o.first_sequence = dp_rank * c.train.micro_batch;
    o.sequence_count = c.train.micro_batch;
    o.shuffle = false;
    return o;
}

Loader open_data(const std::vector<DataSource>& sources, const LoaderOptions& options, const World& world) {
    try {
        return Loader(sources, options);
    } catch (const Problem& p) {
        if (world.size() == 1) throw;
        throw Problem(p.code(), fmt::format("rank {} on {}: {}", world.rank(), world.host_of(world.rank()), p.what()));
    }
}

}  // namespace trifold
