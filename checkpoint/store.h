// checkpoint/store.h   Saving: one directory of checkpoints, step-00000500/ and so on.
//
// A save that dies at any moment leaves either the old checkpoints or these and the new one:
//   1 step-N.tmp/ is filled with shard files, each synced
//   2 step-N.tmp/manifest.json is written and synced, then step-N.tmp/ itself
//   3 step-N.tmp/ is renamed to step-N/ and the parent directory synced: from here on the checkpoint exists
//   4 only then are older ones deleted, each renamed to step-M.deleting/ first
// With several ranks, rank 0 creates, publishes and deletes; each rank fills its own shard files in between and tells rank 0 their digests.
// Names that end in .tmp, .deleting or .replaced are leftovers of a dead process; prepare() removes them.
#pragma once
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "checkpoint/files.h"
#include "checkpoint/manifest.h"
#include "model/parameters.h"
#include "parallel/world.h"

namespace trifold {

struct StoreOptions {
    std::string dir;
    int64_t keep = 3;                          // newest ones; 0: all
    int64_t keep_every = 0;                    // the checkpoints of every n-th step are never deleted; 0: none
    int threads = 1;                           // that write shard files
    int64_t shard_bytes = int64_t{256} << 20;  // aimed at per file, so that several can be written and read at once
    std::string tool = "trifold";              // name and version, for the manifest
    World* world = nullptr;                    // the other ranks; null: there are none
    // Called before every step of a save that changes the file system, with its name, from any of the writing threads.
    // The fault injector and the tests stop here.
    std::function<void(const char* phase)> on_phase;
};

// How a save ended. A save never throws: training goes on when the disk is full.
struct SaveOutcome {
    int64_t step = 0;
    std::string problem = "";  // empty: the checkpoint is complete and on disk
    std::string path = "";
    int64_t bytes = 0;
    double seconds = 0;
    std::vector<std::string> deleted = {};  // older checkpoints that the keep policy removed
    std::string warning = "";               // an older one that could not be deleted
    bool ok() const { return problem.empty(); }
};

class CheckpointStore {
public:
    explicit CheckpointStore(StoreOptions options);  // touches nothing

    // Before step 0: creates the directory, makes sure that no other process writes to it, removes leftovers, and
    // proves that it is writable and has `needed_bytes` free. Throws Problem(Exit::checkpoint).
    void prepare(int64_t needed_bytes);

    // Every rank gives the slices that it answers for, all with master, m and v. All ranks return the same outcome.
    SaveOutcome save(const ModelConfig& model, const std::vector<StateSlice>& slices, const TrainingState& state);

private:
    StoreOptions options_;
    Fd writer_lock_;
    int64_t saves_ = 0;  // so far, the same on all ranks: it tells their messages of one save from those of another

    void phase(const char* name) const;
    int rank() const { return options_.world ? options_.world->rank() : 0; }
    int ranks() const { return options_.world ? options_.world->size() : 1; }
    std::vector<ShardFile> write_shards(const std::string& dir, const std::vector<StateSlice>& slices) const;
    void write_own(const std::string& dir, const std::vector<StateSlice>& slices) const;
    std::vector<ShardFile> all_shards() const;
    void lead(SaveOutcome& outcome, const ModelConfig& model, const std::vector<StateSlice>& slices, const TrainingState& state) const;
    void publish(const std::string& temporary, const std::string& final_path) const;
    void delete_old(SaveOutcome& outcome) const;
};

// Bytes on disk of one checkpoint of this model, rounded up a little: twelve per parameter, names and manifest.
int64_t checkpoint_bytes(const ParameterTable& table, int ranks = 1);

std::string step_name(int64_t step);  // step-00000500
std::optional<int64_t> step_of(const std::string& name);

struct ListedCheckpoint {
    std::string path = "";
    int64_t step = 0, save_number = 0;
};
struct CheckpointList {
    std::vector<ListedCheckpoint> complete;  // their manifest and file sizes are right; newest first
    std::vector<std::string> incomplete;     // a sentence about each of the others
    bool damaged = false;                    // one of these has a manifest: it was complete once
};
CheckpointList list_checkpoints(const std::string& dir);

}  // namespace trifold
