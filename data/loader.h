// data/loader.h   Global batches of token sequences, prepared ahead in another thread.
//
// Global batch k holds samples k*G .. k*G + G - 1 (G: sequences of the global batch). Each is a pure function of (seed,
// number, data), whatever the layout, so a run that resumes or is re-laid out sees the same samples:
//
//   number -> (source, j)       weighted blending of the sources (sampling.h)
//   j -> sample of the source   epoch e = j / n, sample P(j % n), P the permutation keyed by (seed, source, e); without shuffling P is the
//                               identity. So each of the n samples comes exactly once per epoch.
//   sample -> tokens            sample s of a file is tokens [s*seq, s*seq + seq]: seq inputs, and the same shifted by one as targets;
//                               neighbours share one token. Samples do not cross files; less than seq tokens at a file's end are not used.
//
// documents = isolated: a document begins where the end-of-document id was just read, and where a Megatron index says
// so. The target behind an end-of-document input stays: it teaches how documents begin.
#pragma once
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "model/config.h"

namespace trifold {

struct MicroBatch {
    int64_t sequences = 0, seq = 0;  // B and T; everything below is B*T, one sequence after another
    std::vector<int32_t> tokens;
    std::vector<int32_t> targets;      // -1: not counted in the loss
    std::vector<int32_t> positions;    // from the first token of the document that this sequence sees
    std::vector<int32_t> doc_start;    // that first token's index in the sequence; empty unless documents are isolated
    int64_t valid = 0;                 // targets that count
    std::vector<uint64_t> sample_ids;  // B: number of the sample among all samples of the data, the same in every epoch
};

struct GlobalBatch {
    int64_t index = 0;
    std::vector<MicroBatch> micro;  // this rank's slice
    int64_t valid_tokens = 0;       // of the whole global batch, on every rank
};

struct LoaderOptions {
    std::string name = "data.train";  // what error messages call it
    int64_t seq = 0;
    int64_t micro_batch = 1, global_batch = 1;  // sequences
    // This rank's slice of every global batch, in sequences; a count of 0: all of it.
    int64_t first_sequence = 0, sequence_count = 0;
    uint64_t seed = 1234;
    int64_t vocab = 0;  // ids must be below it
    bool shuffle = true;
    Documents documents = Documents::joined;
    int32_t end_of_document = -1;
    bool mask_prompt = false;
};

class Loader {
public:
    // Opens and checks every file. Problem(Exit::data): bad or missing files, less than one sequence; (Exit::usage): weights.
    Loader(const std::vector<DataSource>& sources, const LoaderOptions& options);
    ~Loader();
    Loader(Loader&&) noexcept;

    // The next global batch. What the reading thread met is thrown here, such as an id outside the vocabulary.
    GlobalBatch next();
    // The next call of next() gives global batch k.
    void seek(int64_t k);
    int64_t position() const;  // the k that next() gives

    int64_t samples_per_epoch() const;  // of all sources, each counted once
    // Tells data sets apart, not paths: sizes, sampled blocks, order and weights of the sources, and prompt masks if in use.
    uint64_t content_hash() const;
    // One line per source for the start-up print.
    std::string description() const;

private:
    struct Samples;
    struct State;
    std::unique_ptr<State> state_;
};

}  // namespace trifold
