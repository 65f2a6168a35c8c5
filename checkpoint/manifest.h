// checkpoint/manifest.h   manifest.json: what a checkpoint holds. It is written last, so a checkpoint without one is not complete.
//
// The file ends with the xxh3 of every byte before it, so that no change to it goes unnoticed.
#pragma once
#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "checkpoint/digest.h"

namespace trifold {

// The progress of a run: with the tensors, all that a resumed run needs to repeat the uninterrupted one bit for bit.
// Random numbers and samples are functions of (seed, position), so there is no other generator state.
struct TrainingState {
    int64_t step = 0;     // optimizer steps done, skipped ones included
    int64_t updates = 0;  // steps that changed the weights: Adam's step count
    int64_t skipped = 0;
    int64_t samples = 0;  // taken from the data since step 0; goes on counting across epochs
    int64_t tokens = 0;
    uint64_t seed = 0;
    std::string config_json = "";  // the resolved configuration
    std::string data_hash = "";    // identifies the training data, empty: none
};

struct ShardFile {
    std::string file;  // name inside the checkpoint
    FileDigest digest;
    std::vector<std::string> pieces;  // keys, see piece.h
};

struct Manifest {
    // Counts the saves of a directory. The newest checkpoint is the one with the highest number, not always the highest
    // step: a run may have gone back to an older checkpoint.
    int64_t save_number = 1;
    std::string tool = "";
    int64_t ranks = 1;
    TrainingState state = {};
    std::map<std::string, std::vector<int64_t>> tensors = {};  // global name and shape
    std::vector<ShardFile> shards = {};
};

inline constexpr const char* manifest_name = "manifest.json";

// A rank's files, as it tells them to rank 0.
std::string to_line(const std::vector<ShardFile>& shards);
std::vector<ShardFile> from_line(const std::string& line);

std::string to_text(const Manifest& manifest);
// Reads and checks DIR/manifest.json. Throws Problem(Exit::checkpoint) with what is wrong.
Manifest read_manifest(const std::string& step_dir);

}  // namespace trifold
