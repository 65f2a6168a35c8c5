// checkpoint/load.cpp   See load.h.
#include "checkpoint/load.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cstring>
#include <filesystem>
#include <map>
#include <memory>

#include "base/error.h"
#include "base/text.h"
#include "checkpoint/safetensors.h"
#include "model/options.h"

namespace fs = std::filesystem;

namespace trifold {
namespace {

[[noreturn]] void refuse(const std::string& sentence) { throw Problem(Exit::checkpoint, sentence); }

constexpr size_t most_named = 5;  // in a sentence about many things

Manifest verified_manifest(const std::string& path, const LoadOptions& options) {
    Manifest manifest = read_manifest(path);
    int64_t total = 0;
    for (const ShardFile& shard : manifest.shards) total += shard.digest.bytes;
    ProgressCounter progress("verifying", total, options.progress);
    run_jobs(static_cast<int64_t>(manifest.shards.size()), options.threads, [&](int64_t i) {
        const ShardFile& shard = manifest.shards[static_cast<size_t>(i)];
        verify_file(path + "/" + shard.file, shard.digest, progress);
    });
    return manifest;
}

// One copy out of a mapped shard file. The source is not aligned.
struct CopyJob {
    const std::byte* from;
    float* to;
    int64_t elems;
};

struct StoredPiece {
    Piece piece;
    size_t shard;
};

// Collects the copies that fill one wanted piece and proves that they fill all of it.
class Reader {
public:
    Reader(const std::string& path, const Manifest& manifest)
        : path_(path), manifest_(manifest), files_(manifest.shards.size()) {
        for (size_t s = 0; s < manifest.shards.size(); ++s)
            for (const std::string& key : manifest.shards[s].pieces) {
                Piece piece = piece_of(key);
                stored_[std::pair(piece.kind, piece.tensor)].push_back({std::move(piece), s});
            }
    }

    void plan(const WantedPiece& wanted) {
        int64_t covered = 0;
        for (const StoredPiece& s : stored_[std::pair(wanted.piece.kind, wanted.piece.tensor)]) {
            const auto runs = shared_runs(s.piece, wanted.piece);
            if (runs.empty()) continue;
            const std::byte* data = tensor(s).data;
            for (const SharedRun& run : runs) {
                covered += run.count;
                add(data + run.from * static_cast<int64_t>(sizeof(float)), wanted.to + run.to, run.count);
            }
        }
        if (covered != wanted.piece.elems())
            refuse(fmt::format("{} has {} of the {} elements of {}", path_, covered, wanted.piece.elems(),
                               key_of(wanted.piece)));
    }

    void run(const LoadOptions& options) const {
        ProgressCounter progress("reading", bytes_, options.progress);
        run_jobs(static_cast<int64_t>(jobs_.size()), options.threads, [&](int64_t i) {
            const CopyJob& job = jobs_[static_cast<size_t>(i)];
            const int64_t bytes = job.elems * static_cast<int64_t>(sizeof(float));
            std::memcpy(job.to, job.from, static_cast<size_t>(bytes));
            progress.add(bytes);
        });
    }

private:
    const std::string& path_;
    const Manifest& manifest_;
    std::map<std::pair<StateKind, std::string>, std::vector<StoredPiece>> stored_;
    std::vector<std::unique_ptr<SafetensorsFile>> files_;  // opened when first needed
    std::vector<CopyJob> jobs_;
    int64_t bytes_ = 0;

    const SafeTensor& tensor(const StoredPiece& stored) {
        auto& file = files_[stored.shard];
        if (!file) file = std::make_unique<SafetensorsFile>(path_ + "/" + manifest_.shards[stored.shard].file);
        const SafeTensor* t = file->find(key_of(stored.piece));
        if (!t || t->type != SafeType::f32 || t->elems != stored.piece.elems())
            refuse(fmt::format("{} does not hold {} as the manifest says", file->path(), key_of(stored.piece)));
        return *t;
    }

    // Long runs are cut so that several threads share the work.
    void add(const std::byte* from, float* to, int64_t elems) {
        constexpr int64_t most = int64_t{4} << 20;
        bytes_ += elems * static_cast<int64_t>(sizeof(float));
        for (; elems > most; elems -= most, to += most, from += most * static_cast<int64_t>(sizeof(float)))
            jobs_.push_back({from, to, most});
        jobs_.push_back({from, to, elems});
    }
};

// "a, b, c and 7 more"
std::string first_of(std::vector<std::string> sentences) {
    const size_t all = sentences.size();
    if (all <= most_named) return join_words(sentences);
    sentences.resize(most_named);
    return fmt::format("{} and {} more", fmt::join(sentences, ", "), all - most_named);
}

// Names and shapes of the checkpoint and of the table are the same.
void check_tensors(const std::string& path, const Manifest& manifest, const ParameterTable& table) {
    std::vector<std::string> wrong;
    for (const Parameter& p : table.all()) {
        const auto it = manifest.tensors.find(p.name);
        if (it == manifest.tensors.end())
            wrong.push_back(p.name + " is missing");
        else if (it->second != p.shape)
            wrong.push_back(
                fmt::format("{} is {} there and {} here", p.name, shape_text(it->second), shape_text(p.shape)));
    }
    for (const auto& [name, shape] : manifest.tensors)
        if (!table.find(name)) wrong.push_back(name + " is only there");
    if (wrong.empty()) return;
    refuse(fmt::format("the weights of {} are of another model: {}; give the model options it was trained with", path,
                       first_of(wrong)));
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
        refuse(fmt::format("no checkpoint in {} can be loaded: {}; --checkpoint.resume=none starts from step 0", dir,
                           fmt::join(result.damaged, "; ")));
    return result;
}

FoundCheckpoint open_checkpoint(const std::string& path, const LoadOptions& options) {
    std::error_code ignored;
    const std::string slashless = fs::path(path).filename().empty() ? fs::path(path).parent_path().string() : path;
    const std::string name = fs::path(slashless).filename().string();
    if (!fs::exists(slashless, ignored)) refuse(fmt::format("{} does not exist", path));
    if (fs::exists(slashless + "/" + manifest_name, ignored) || is_step_name(name)) {
        try {
            return {.path = slashless, .state = verified_manifest(slashless, options).state};
        } catch (const Problem& e) {
            refuse(fmt::format("checkpoint {} is damaged: {}; give the folder above it to use the newest undamaged one",
                               slashless, e.what()));
        }
    }
    std::string incomplete;
    for (const std::string& dir : {slashless, slashless + "/checkpoints"}) {
        FoundCheckpoint found = find_newest(dir, options);
        if (found.found()) return found;
        for (const std::string& sentence : found.damaged) incomplete += "; " + sentence;
    }
    refuse(fmt::format("{} holds no complete checkpoint: give a step-* directory, or one that contains some{}", path,
                       incomplete));
}

ModelConfig model_of(const FoundCheckpoint& checkpoint) {
    Config config = config_from_json(checkpoint.state.config_json, checkpoint.path + "/" + manifest_name);
    return config.model;
}

void check_resumable(const FoundCheckpoint& checkpoint, const ModelConfig& model, const std::string& data_hash) {
    const std::vector<std::string> other = differences(model_of(checkpoint), model);
    if (!other.empty())
        refuse(fmt::format(
            "checkpoint {} is of another model (there and here): {}; give the same model, another --run.dir, or "
            "--checkpoint.resume=none",
            checkpoint.path, first_of(other)));
    const std::string& trained_on = checkpoint.state.data_hash;
    if (!data_hash.empty() && trained_on != data_hash)
        refuse(
            fmt::format("checkpoint {} was trained on other data (data.train has hash {} there and {} here); give the "
                        "same data, or "
                        "another --run.dir with --init.from={} to take only its weights",
                        checkpoint.path, trained_on.empty() ? "none" : trained_on, data_hash, checkpoint.path));
}

void read_pieces(const std::string& path, const Manifest& manifest, const std::vector<WantedPiece>& wanted,
                 const LoadOptions& options) {
    Reader reader(path, manifest);
    for (const WantedPiece& w : wanted) reader.plan(w);
    reader.run(options);
}

void clear_padding(const ParameterTable& table, float* flat) {
    int64_t end = 0;  // of the tensor before
    for (const Parameter& p : table.all()) {
        std::fill(flat + end, flat + p.offset, 0.0f);
        end = p.offset + p.elems;
    }
    std::fill(flat + end, flat + table.flat_elems(), 0.0f);
}

void load_state(const FoundCheckpoint& checkpoint, const ParameterTable& table, const FlatState& flat,
                const LoadOptions& options) {
    const Manifest manifest = read_manifest(checkpoint.path);
    check_tensors(checkpoint.path, manifest, table);
    std::vector<WantedPiece> wanted;
    for (const StateKind kind : state_kinds) {
        float* to = kind == StateKind::master ? flat.master : kind == StateKind::m ? flat.m : flat.v;
        if (!to) continue;
        clear_padding(table, to);
        for (const Parameter& p : table.all())
            wanted.push_back({{p.name, kind, Box::whole(p.shape), 0, p.elems}, to + p.offset});
    }
    read_pieces(checkpoint.path, manifest, wanted, options);
}

}  // namespace trifold
