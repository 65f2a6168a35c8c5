// checkpoint/store.cpp   Saving, see store.h.
#include "checkpoint/store.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <chrono>
#include <cstring>
#include <exception>
#include <filesystem>
#include <utility>

#include "base/jobs.h"
#include "base/refuse.h"
#include "base/text.h"
#include "checkpoint/piece.h"
#include "checkpoint/safetensors.h"

namespace fs = std::filesystem;

namespace trifold {
namespace {

constexpr const char* temporary = ".tmp";      // being written
constexpr const char* deleting = ".deleting";  // being deleted
constexpr const char* replaced = ".replaced";  // moved aside while another save of the same step takes its name

// Cuts the pieces into files of about equal size, none much larger than `file_elems`.
std::vector<std::vector<PieceInMemory>> cut_into_files(const std::vector<PieceInMemory>& pieces, int64_t file_elems) {
    int64_t total = 0;
    for (const PieceInMemory& s : pieces) total += s.piece.elems();
    const int64_t files = std::max<int64_t>(1, (total + file_elems - 1) / file_elems), per_file = (total + files - 1) / files;
    std::vector<std::vector<PieceInMemory>> cut(1);
    int64_t room = per_file;
    for (PieceInMemory rest : pieces) {
        while (rest.piece.elems() > 0) {
            if (room == 0) {
                cut.emplace_back();
                room = per_file;
            }
            PieceInMemory head = rest;
            head.piece.last = std::min(rest.piece.last, rest.piece.first + room);
            room -= head.piece.elems();
            rest.piece.first = head.piece.last;
            rest.data += head.piece.elems();
            cut.back().push_back(std::move(head));
        }
    }
    return cut;
}

bool has_suffix(const std::string& name, const char* suffix) {
    return name.ends_with(suffix) && step_of(name.substr(0, name.size() - std::strlen(suffix))).has_value();
}

// Removes what a dead process left; nothing else in the directory is touched.
void clean_leftovers(const std::string& dir) {
    std::vector<std::string> names;
    for (const auto& entry : fs::directory_iterator(dir)) names.push_back(entry.path().filename().string());
    for (const std::string& name : names) {
        const std::string path = dir + "/" + name;
        if (has_suffix(name, replaced)) {
            const std::string original = path.substr(0, path.size() - std::strlen(replaced));
            if (!fs::exists(original)) rename_path(path, original);  // it died before the new one had the name
        }
        if (has_suffix(name, temporary) || has_suffix(name, deleting) || has_suffix(name, replaced)) remove_tree(path);
    }
}

Fd lock_for_writing(const std::string& dir) {
    const std::string path = dir + "/.writer";
    Fd fd(::open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0644));
    if (!fd) refuse(Exit::checkpoint, "cannot create {}: {}", path, std::strerror(errno));
    if (::flock(fd.get(), LOCK_EX | LOCK_NB) != 0) {
        // A file system without locks cannot tell; everything else works there.
        if (errno != EWOULDBLOCK) return fd;
        refuse(Exit::checkpoint, "another process ({}) is writing checkpoints to {}; wait for it to end", read_text(path, Exit::checkpoint), dir);
    }
    const std::string pid = std::to_string(::getpid());
    if (::ftruncate(fd.get(), 0) != 0 || ::pwrite(fd.get(), pid.data(), pid.size(), 0) != static_cast<ssize_t>(pid.size()))
        refuse(Exit::checkpoint, "cannot write to {}: {}", path, std::strerror(errno));
    return fd;
}

// Creating, filling, syncing and removing a small file.
void probe(const std::string& dir) {
    replace_text(dir + "/.probe", std::string(4096, 'x'));
    remove_tree(dir + "/.probe");
}

// Manifest and sizes agree. Throws Problem when not.
Manifest complete_manifest(const std::string& path, int64_t step) {
    Manifest manifest = read_manifest(path);
    if (manifest.state.step != step) refuse(Exit::checkpoint, "{}/{} is of step {}", path, manifest_name, manifest.state.step);
    for (const ShardFile& shard : manifest.shards) {
        const std::string file = path + "/" + shard.file;
        struct stat info {};
        if (::stat(file.c_str(), &info) != 0) refuse(Exit::checkpoint, "{}: {}", file, std::strerror(errno));
        if (info.st_size != shard.digest.bytes)
            refuse(Exit::checkpoint, "{} ends at byte {} instead of byte {}", file, info.st_size, shard.digest.bytes);
    }
    return manifest;
}

}  // namespace

std::string step_name(int64_t step) { return fmt::format("step-{:08}", step); }

std::optional<int64_t> step_of(const std::string& name) {
    int64_t step = -1;
    if (name.starts_with("step-")) std::from_chars(name.data() + 5, name.data() + name.size(), step);
    return step >= 0 && step_name(step) == name ? std::optional(step) : std::nullopt;
}

CheckpointList list_checkpoints(const std::string& dir) {
    CheckpointList list;
    std::error_code ignored;  // a directory that is not there holds nothing
    for (const auto& entry : fs::directory_iterator(dir, ignored)) {
        const std::optional<int64_t> step = step_of(entry.path().filename().string());
        if (!step) continue;
        ListedCheckpoint c{.path = entry.path().string(), .step = *step};
        const bool has_manifest = fs::exists(c.path + "/" + manifest_name, ignored);
        try {
            if (!has_manifest) refuse(Exit::checkpoint, "it has no {}, so its save did not end", manifest_name);
            c.save_number = complete_manifest(c.path, c.step).save_number;
            list.complete.push_back(c);
        } catch (const Problem& e) {
            list.incomplete.push_back(fmt::format("checkpoint {} is not complete: {}", c.path, e.what()));
            list.damaged |= has_manifest;
        }
    }
    std::ranges::sort(list.complete, std::ranges::greater(), [](const ListedCheckpoint& c) { return std::pair(c.save_number, c.step); });
    return list;
}

int64_t checkpoint_bytes(const ParameterTable& table, int ranks) {
    constexpr int64_t names_of_piece = 320;  // in a shard's header and in the manifest
    constexpr int64_t fixed = 16 << 10;      // the configuration and the rest of the manifest
    return fixed + 3 * (table.count() * static_cast<int64_t>(sizeof(float)) + static_cast<int64_t>(table.all().size()) * ranks * names_of_piece);
}

CheckpointStore::CheckpointStore(StoreOptions options) : options_(std::move(options)) {}

void CheckpointStore::phase(const char* name) const {
    if (options_.on_phase) options_.on_phase(name);
}

void CheckpointStore::prepare(int64_t needed_bytes) {
    if (rank() > 0) return;
    const std::string& dir = options_.dir;
    try {
        make_directories(dir);
        writer_lock_ = Fd();
        writer_lock_ = lock_for_writing(dir);
        clean_leftovers(dir);
        probe(dir);
        const auto free = static_cast<int64_t>(fs::space(dir).available);
        if (free < needed_bytes)
            refuse(Exit::checkpoint, "a checkpoint takes {} and {} has {} free", human_bytes(needed_bytes), dir, human_bytes(free));
    } catch (const std::exception& e) {
        refuse(Exit::checkpoint, "checkpoints cannot be saved: {}; --checkpoint.dir or --run.dir gives another place", e.what());
    }
}

std::vector<ShardFile> CheckpointStore::write_shards(const std::string& dir, const std::vector<StateSlice>& state) const {
    if (state.empty()) return {};
    const auto files = cut_into_files(pieces_of(state), options_.shard_bytes / static_cast<int64_t>(sizeof(float)));
    std::vector<ShardFile> shards(files.size());
    run_jobs(static_cast<int64_t>(files.size()), options_.threads, [&](int64_t i) {
        const auto& pieces = files[static_cast<size_t>(i)];
        ShardFile& shard = shards[static_cast<size_t>(i)];
        shard.file = fmt::format("rank-{:05}-of-{:05}-part-{:03}.safetensors", rank(), ranks(), i);
        std::vector<SafetensorsWriter::Entry> entries;
        for (const PieceInMemory& s : pieces) {
            shard.pieces.push_back(key_of(s.piece));
            // A whole box keeps its shape, for other programs that look into the file.
            entries.push_back(
                {shard.pieces.back(), SafeType::f32, s.piece.whole_box() ? s.piece.box.shape() : std::vector<int64_t>{s.piece.elems()}});
        }
        phase("create shard");
        SafetensorsWriter writer(dir + "/" + shard.file, entries);
        for (const PieceInMemory& s : pieces) {
            phase("write shard");
            writer.write(s.data, s.piece.elems() * static_cast<int64_t>(sizeof(float)));
        }
        phase("sync shard");
        shard.digest = writer.finish();
    });
    return shards;
}

void CheckpointStore::publish(const std::string& temporary_path, const std::string& final_path) const {
    const std::string aside = final_path + replaced;
    const bool replaces = fs::exists(final_path);
    if (replaces) {
        remove_tree(aside);
        phase("move aside");
        rename_path(final_path, aside);
    }
    phase("rename checkpoint");
    try {
        rename_path(temporary_path, final_path);
    } catch (const Problem&) {
        if (replaces) rename_path(aside, final_path);
        throw;
    }
    phase("sync directory");
    sync_directory(options_.dir);
    if (replaces) {
        phase("delete replaced");
        remove_tree(aside);
    }
}

void CheckpointStore::delete_old(SaveOutcome& outcome) const {
    try {
        int64_t kept = 0;
        for (const ListedCheckpoint& c : list_checkpoints(options_.dir).complete) {
            const bool for_good = options_.keep_every > 0 && c.step % options_.keep_every == 0;
            if (kept++ < options_.keep || options_.keep == 0 || for_good || c.path == outcome.path) continue;
            phase("set aside old checkpoint");
            rename_path(c.path, c.path + deleting);  // half of a checkpoint must not look like a damaged one
            phase("delete old checkpoint");
            remove_tree(c.path + deleting);
            outcome.deleted.push_back(c.path);
        }
    } catch (const std::exception& e) {
        outcome.warning = fmt::format("an old checkpoint was not deleted: {}", e.what());
    }
}

namespace {

// What the ranks tell each other during a save, by key at rank 0.
constexpr double save_deadline_s = 3600;
std::string key(int64_t save, const std::string& what) { return fmt::format("save {} {}", save, what); }

}  // namespace

// This rank's files; a problem goes to rank 0 in their place.
void CheckpointStore::write_own(const std::string& dir, const std::vector<StateSlice>& slices) const {
    std::string line;
    try {
        line = to_line(write_shards(dir, slices));
    } catch (const std::exception& e) {
        line = fmt::format("!rank {}: {}", rank(), e.what());
    }
    options_.world->put(key(saves_, std::to_string(rank())), line);
}

std::vector<ShardFile> CheckpointStore::all_shards() const {
    std::vector<ShardFile> all;
    std::string problem;
    for (int r = 1; r < ranks(); ++r) {
        const std::string line = options_.world->take(key(saves_, std::to_string(r)), save_deadline_s);
        if (line.starts_with('!')) {
            if (problem.empty()) problem = line.substr(1);
            continue;
        }
        for (ShardFile& s : from_line(line)) all.push_back(std::move(s));
    }
    if (!problem.empty()) throw Problem(Exit::checkpoint, problem);
    return all;
}

// What rank 0 does.
void CheckpointStore::lead(SaveOutcome& outcome, const ModelConfig& model, const std::vector<StateSlice>& slices, const TrainingState& state) const {
    const std::string filling = outcome.path + temporary;
    bool others_wait = ranks() > 1;
    const auto start_others = [&](const std::string& word) {
        if (std::exchange(others_wait, false)) options_.world->put(key(saves_, "start"), word);
    };
    try {
        make_directories(options_.dir);  // it may have been removed since prepare()
        remove_tree(filling);
        Manifest manifest{.tool = options_.tool, .ranks = ranks(), .state = state};
        const ParameterTable table(model);
        for (const Parameter& p : table.all()) manifest.tensors[p.name] = p.shape;
        for (const ListedCheckpoint& c : list_checkpoints(options_.dir).complete)
            manifest.save_number = std::max(manifest.save_number, c.save_number + 1);

        phase("create directory");
        make_directories(filling);
        start_others("go");
        std::exception_ptr own;
        try {
            manifest.shards = write_shards(filling, slices);
        } catch (...) {
            own = std::current_exception();  // the others are writing: they come to an end first
        }
        for (ShardFile& shard : all_shards()) manifest.shards.push_back(std::move(shard));
        if (own) std::rethrow_exception(own);
        for (const ShardFile& shard : manifest.shards) outcome.bytes += shard.digest.bytes;
        phase("write manifest");
        replace_text(filling + "/" + manifest_name, to_text(manifest));  // also syncs the names of the shards
        publish(filling, outcome.path);
    } catch (const std::exception& e) {
        outcome.problem = fmt::format("the checkpoint of step {} was not saved: {}", state.step, e.what());
        start_others("stop");
        std::error_code ignored;
        fs::remove_all(filling, ignored);
    }
    if (outcome.ok()) delete_old(outcome);
}

SaveOutcome CheckpointStore::save(const ModelConfig& model, const std::vector<StateSlice>& slices, const TrainingState& state) {
    const auto start = std::chrono::steady_clock::now();
    ++saves_;
    SaveOutcome outcome{.step = state.step, .path = options_.dir + "/" + step_name(state.step)};
    try {
        if (rank() == 0) {
            lead(outcome, model, slices, state);
            if (ranks() > 1) options_.world->put(key(saves_, "end"), outcome.problem);
        } else {
            if (options_.world->take(key(saves_, "start"), save_deadline_s, ranks() - 1) == "go") write_own(outcome.path + temporary, slices);
            outcome.problem = options_.world->take(key(saves_, "end"), save_deadline_s, ranks() - 1);
        }
    } catch (const std::exception& e) {  // another rank has gone; the training thread learns it too
        outcome.problem = fmt::format("the checkpoint of step {} was not saved: {}", state.step, e.what());
    }
    outcome.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    return outcome;
}

}  // namespace trifold
