// checkpoint/load.h   Finding the newest complete and verified checkpoint, and reading it into any layout.
#pragma once
#include <string>
#include <vector>

#include "checkpoint/manifest.h"
#include "checkpoint/piece.h"
#include "checkpoint/store.h"
#include "model/config.h"
#include "model/parameters.h"

namespace trifold {

struct LoadOptions {
    int threads = 2;
};

struct FoundCheckpoint {
    std::string path = "";  // empty: there is none
    TrainingState state = {};
    std::vector<std::string> damaged = {};  // a sentence about each that is damaged or half-written: to be printed and logged
    bool found() const { return !path.empty(); }
};

// The newest checkpoint in `dir` whose files all have the size and the xxh3 of its manifest. Nothing found is no error,
// but throws Problem(Exit::checkpoint) when there are finished checkpoints and every one of them is damaged.
FoundCheckpoint find_newest(const std::string& dir, const LoadOptions& options = {});

// `path` is one checkpoint, a directory of checkpoints, or a run directory. Throws Problem(Exit::checkpoint) when there
// is none or it is damaged.
FoundCheckpoint open_checkpoint(const std::string& path, const LoadOptions& options = {});

// Throws Problem(Exit::checkpoint) when the checkpoint belongs to another model, or was trained on other data (an empty
// `data_hash` allows any data), and says what differs.
void check_resumable(const FoundCheckpoint& checkpoint, const ModelConfig& model, const std::string& data_hash);
// The resolved model of a checkpoint.
ModelConfig model_of(const FoundCheckpoint& checkpoint);

// Fills these slices of the model's tensors; without m and v only the weights. Does not verify again.
void load_state(const FoundCheckpoint& checkpoint, const ModelConfig& model, const std::vector<StateSlice>& slices, const LoadOptions& options = {});

// What load_state is made of: any pieces of the tensors, from whatever pieces the checkpoint has.
void read_pieces(const std::string& path, const Manifest& manifest, const std::vector<PieceInMemory>& wanted, const LoadOptions& options);

}  // namespace trifold
