// checkpoint/load.cpp   See load.h.
#include "checkpoint/load.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <filesystem>
#include <map>
#include <memory>

#include "base/jobs.h"
#include "base/refuse.h"
#include "base/text.h"
#include "checkpoint/safetensors.h"
#include "model/options.h"

namespace fs = std::filesystem;

namespace trifold {
namespace {

Manifest verified_manifest(const std::string& path, const LoadOptions& options) {
    Manifest manifest = read_manifest(path);
    run_jobs(static_cast<int64_t>(manifest.shards.size()), options.threads, [&](int64_t i) {
        const ShardFile& shard = manifest.shards[static_cast<size_t>(i)];
        verify_file(path + "/" + shard.file, shard.digest);
    });
    return manifest;
}

// Names and shapes of the checkpoint and of the table are the same.
void check_tensors(const std::string& path, const Manifest& manifest, const ParameterTable& table) {
    std::vector<std::string> wrong;
    for (const Parameter& p : table.all()) {
        const auto it = manifest.tensors.find(p.name);
        if (it == manifest.tensors.end())
            wrong.push_back(p.name + " is missing");
        else if (it->second != p.shape)
            wrong.push_back(fmt::format("{} is {} there and {} here", p.name, shape_text(it->second), shape_text(p.shape)));
    }
    for (const auto& [name, shape] : manifest.tensors)
        if (!table.find(name)) wrong.push_back(name + " is only there");
    if (wrong.empty()) return;
    refuse(Exit::checkpoint, "the weights of {} are of another model: {}; give the model options it was trained with", path, join_first(wrong));
}

}  // namespace

FoundCheckpoint find_newest(const std::string& dir, const LoadOptions& options) {
    const CheckpointList list = list_checkpoints(dir);
    FoundCheckpoint result{.damaged = list.incomplete};
    for (const ListedCheckpoint& c : list.complete) {
        try {
            result.state = verified_manifest(c.path, options).state;
            result.path = c.path;
            return result;
        } catch (const Problem& e) {
            result.damaged.push_back(fmt::format("checkpoint {} is damaged: {}", c.path, e.what()));
        }
    }
    if (!list.complete.empty() || list.damaged)
        refuse(Exit::checkpoint, "no checkpoint in {} can be loaded: {}; --checkpoint.resume=none starts from step 0", dir,
               fmt::join(result.damaged, "; "));
    return result;
}

FoundCheckpoint open_checkpoint(const std::string& path, const LoadOptions& options) {
    std::error_code ignored;
    const std::string slashless = fs::path(path).filename().empty() ? fs::path(path).parent_path().string() : path;
    const std::string name = fs::path(slashless).filename().string();
    if (!fs::exists(slashless, ignored)) refuse(Exit::checkpoint, "{} does not exist", path);
    if (fs::exists(slashless + "/" + manifest_name, ignored) || step_of(name)) {
        try {
            return {.path = slashless, .state = verified_manifest(slashless, options).state};
        } catch (const Problem& e) {
            refuse(Exit::checkpoint, "checkpoint {} is damaged: {}; give the folder above it to use the newest undamaged one", slashless, e.what());
        }
    }
    std::string incomplete;
    for (const std::string& dir : {slashless, slashless + "/checkpoints"}) {
        FoundCheckpoint found = find_newest(dir, options);
        if (found.found()) return found;
        for (const std::string& sentence : found.damaged) incomplete += "; " + sentence;
    }
    refuse(Exit::checkpoint, "{} holds no complete checkpoint: give a step-* directory, or one that contains some{}", path, incomplete);
}

ModelConfig model_of(const FoundCheckpoint& checkpoint) {
    Config config = config_from_json(checkpoint.state.config_json, checkpoint.path + "/" + manifest_name);
    return config.model;
}

void check_resumable(const FoundCheckpoint& checkpoint, const ModelConfig& model, const std::string& data_hash) {
    const std::vector<std::string> other = differences(model_of(checkpoint), model);
    if (!other.empty())
        refuse(Exit::checkpoint,
               "checkpoint {} is of another model (there and here): {}; give the same model, another --run.dir, or --checkpoint.resume=none",
               checkpoint.path, join_first(other));
    const std::string& trained_on = checkpoint.state.data_hash;
    if (!data_hash.empty() && trained_on != data_hash)
        refuse(Exit::checkpoint,
               "checkpoint {} was trained on other data (data.train has hash {} there and {} here); give the same data, or another --run.dir with "
               "--init.from={} to take only its weights",
               checkpoint.path, trained_on.empty() ? "none" : trained_on, data_hash, checkpoint.path);
}

void read_pieces(const std::string& path, const Manifest& manifest, const std::vector<PieceInMemory>& wanted, const LoadOptions& options) {
    struct Stored {
        Piece piece;
        size_t shard;
    };
    std::map<std::pair<StateKind, std::string>, std::vector<Stored>> stored;
    for (size_t s = 0; s < manifest.shards.size(); ++s)
        for (const std::string& key : manifest.shards[s].pieces) {
            const Piece piece = piece_of(key);
            stored[{piece.kind, piece.tensor}].push_back({piece, s});
        }
    std::vector<std::unique_ptr<SafetensorsFile>> files(manifest.shards.size());  // opened when first needed
    const auto data_of = [&](const Stored& s) {
        auto& file = files[s.shard];
        if (!file) file = std::make_unique<SafetensorsFile>(path + "/" + manifest.shards[s.shard].file);
        const SafeTensor* t = file->find(key_of(s.piece));
        if (!t || t->type != SafeType::f32 || t->elems != s.piece.elems())
            refuse(Exit::checkpoint, "{} does not hold {} as the manifest says", file->path(), key_of(s.piece));
        return t->data;
    };

    std::vector<CopyJob> copies;
    for (const auto& [piece, to] : wanted) {
        int64_t covered = 0;
        for (const Stored& s : stored[{piece.kind, piece.tensor}])
            for (const SharedRun& run : shared_runs(s.piece, piece)) {
                covered += run.count;
                copies.push_back({data_of(s) + run.from * 4, to + run.to, run.count * 4});
            }
        if (covered != piece.elems()) refuse(Exit::checkpoint, "{} has {} of the {} elements of {}", path, covered, piece.elems(), key_of(piece));
    }
    run_copies(std::move(copies), options.threads);
}

void load_state(const FoundCheckpoint& checkpoint, const ModelConfig& model, const std::vector<StateSlice>& slices, const LoadOptions& options) {
    const Manifest manifest = read_manifest(checkpoint.path);
    check_tensors(checkpoint.path, manifest, ParameterTable(model));
    read_pieces(checkpoint.path, manifest, pieces_of(slices), options);
}

}  // namespace trifold
