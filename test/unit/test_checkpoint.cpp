#if __has_include(<catch2/catch_all.hpp>)
#include <catch2/catch_all.hpp>
#else
#include <catch2/catch.hpp>
#endif
// test/unit/test_checkpoint.cpp   Saving and loading: round trips, every kind of damage, crashes between any two steps,
// full disks.
#include <sys/mount.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <random>

#include "base/error.h"
#include "checkpoint/async_saver.h"
#include "checkpoint/load.h"
#include "model/options.h"
#include "test/unit/temporary_folder.h"

using namespace trifold;
namespace fs = std::filesystem;

namespace {

ModelConfig tiny_model() {
    ModelConfig m;
    m.layers = 1;
    m.hidden = 12;
    m.heads = m.kv_heads = 3;
    m.head_dim = 4;
    m.ffn_hidden = 20;
    m.vocab = 37;
    m.max_seq = 9;
    return m;
}

std::string config_of(const ModelConfig& model) {
    Config c;
    c.model = model;
    return to_json(c);
}

// A run at some step: buffers of random bits (NaN payloads included), padding zero.
struct FakeRun {
    ModelConfig model = tiny_model();
    ParameterTable table{model};
    std::vector<float> master, m, v;
    TrainingState state;

    explicit FakeRun(int64_t step = 0, const ModelConfig& of = tiny_model()) : model(of), table(of) {
        std::mt19937 random(static_cast<uint32_t>(step));
        for (auto* buffer : {&master, &m, &v}) {
            buffer->resize(static_cast<size_t>(table.flat_elems()));
            for (float& x : *buffer) {
                const uint32_t bits = random();
                std::memcpy(&x, &bits, 4);
            }
            clear_padding(table, buffer->data());
        }
        state = {.step = step,
                 .updates = step - 1,
                 .skipped = 1,
                 .samples = 8 * step,
                 .tokens = 800 * step,
                 .seed = UINT64_MAX - 3,
                 .config_json = config_of(model),
                 .data_hash = "d1"};
    }
    FlatState flat() { return {master.data(), m.data(), v.data()}; }
    bool same_bits(const FakeRun& other) const {
        const auto same = [](const std::vector<float>& a, const std::vector<float>& b) {
            return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * 4) == 0;
        };
        return same(master, other.master) && same(m, other.m) && same(v, other.v);
    }
};

StoreOptions store_options(const std::string& dir) {
    return {.dir = dir, .keep = 3, .keep_every = 0, .threads = 1, .shard_bytes = 4000, .tool = "test", .on_phase = {}};
}

SaveOutcome save(const std::string& dir, int64_t step) {
    FakeRun run(step);
    CheckpointStore store(store_options(dir));
    SaveOutcome outcome = store.save(run.table, run.flat(), run.state);
    INFO(outcome.problem);
    REQUIRE(outcome.ok());
    return outcome;
}

// Loads the newest one and checks that it is exactly what was saved at its step. Returns the step, -1 for none.
int64_t load_exactly(const std::string& dir, std::vector<std::string>* damaged = nullptr) {
    const FoundCheckpoint found = find_newest(dir);
    if (damaged) *damaged = found.damaged;
    if (!found.found()) return -1;
    FakeRun loaded(-1);
    load_state(found, loaded.table, loaded.flat());
    const FakeRun expected(found.state.step);
    REQUIRE(loaded.same_bits(expected));
    REQUIRE(found.state.samples == expected.state.samples);
    return found.state.step;
}

std::vector<std::string> names_in(const std::string& dir) {
    std::vector<std::string> names;
    for (const auto& entry : fs::directory_iterator(dir))
        if (entry.path().filename() != ".writer") names.push_back(entry.path().filename().string());
    std::sort(names.begin(), names.end());
    return names;
}

template <class Act>
std::string problem_of(Act act) {
    try {
        act();
    } catch (const Problem& e) {
        CHECK(e.code() == Exit::checkpoint);
        return e.what();
    }
    return "";
}

bool has(const std::string& text, const std::string& part) {
    const bool found = text.find(part) != std::string::npos;
    if (!found) UNSCOPED_INFO("said: " << text << "\nwanted: " << part);
    return found;
}

}  // namespace

TEST_CASE("a checkpoint is loaded bit for bit") {
    const TemporaryFolder folder;
    FakeRun run(7);
    StoreOptions options = store_options(folder / "a/b");
    options.threads = 2;
    CheckpointStore store(options);
    const SaveOutcome outcome = store.save(run.table, run.flat(), run.state);
    CHECK(outcome.ok());
    CHECK(outcome.path == folder / "a/b/step-00000007");
    CHECK(names_in(outcome.path).size() > 3);  // several shards

    int64_t reported = 0;
    const FoundCheckpoint found = find_newest(folder / "a/b", {.threads = 2, .progress = [&](const Progress& p) {
                                                                   CHECK(p.done > reported);
                                                                   CHECK(p.done <= p.total);
                                                                   reported = p.done;
                                                               }});
    CHECK(reported == outcome.bytes);
    REQUIRE(found.found());
    const TrainingState &s = found.state, &t = run.state;
    CHECK(std::tuple(s.step, s.updates, s.skipped, s.samples, s.tokens, s.seed, s.data_hash) ==
          std::tuple(t.step, t.updates, t.skipped, t.samples, t.tokens, t.seed, t.data_hash));
    CHECK(differences(model_of(found), run.model).empty());
    FakeRun loaded(1);
    std::fill(loaded.master.begin(), loaded.master.end(), 1.0f);  // padding has to become zero again
    load_state(found, loaded.table, loaded.flat(), {.threads = 2});
    CHECK(loaded.same_bits(run));
}

TEST_CASE("a step, a folder of steps and a run directory can be opened") {
    const TemporaryFolder folder;
    save(folder / "checkpoints", 3);
    for (const std::string& path : {folder.path(), folder.path() + "/", folder / "checkpoints",
                                    folder / "checkpoints/step-00000003", folder / "checkpoints/step-00000003/"}) {
        FakeRun run(0);
        const FoundCheckpoint found = open_checkpoint(path);
        load_state(found, run.table, {run.master.data(), nullptr, nullptr});  // weights only
        CHECK(run.master.size() == FakeRun(3).master.size());
        CHECK(std::memcmp(run.master.data(), FakeRun(3).master.data(), run.master.size() * 4) == 0);
        CHECK(std::memcmp(run.m.data(), FakeRun(0).m.data(), run.m.size() * 4) == 0);
    }
    CHECK(has(problem_of([&] { open_checkpoint(folder / "none"); }), "does not exist"));
    fs::create_directory(folder / "empty");
    CHECK(has(problem_of([&] { open_checkpoint(folder / "empty"); }), "no complete checkpoint"));
    CHECK_FALSE(find_newest(folder / "empty").found());
    CHECK_FALSE(find_newest(folder / "none").found());
}

TEST_CASE("names of pieces") {
    const Piece piece{"layers.0.attention.q.weight", StateKind::m, {{0, 64}, {32, 128}}, 5, 1000};
    CHECK(key_of(piece) == "m/layers.0.attention.q.weight[0:32,64:128]@5:1000");
    CHECK(piece_of(key_of(piece)) == piece);
    for (const char* bad :
         {"", "m/", "m/a", "x/a[0:1]@0:1", "m/[0:1]@0:1", "m/a[]@0:1", "m/a[0:1]", "m/a[0:1]@0:2", "m/a[1:0]@0:0",
          "m/a[0:1]@0:1 ", "m/a[0:1,]@0:1", "m/a[-1:1]@0:1", "m/a[0:99999999999999999999]@0:1"}) {
        INFO(bad);
        CHECK_THROWS_AS(piece_of(bad), Problem);
    }
}

TEST_CASE("what two pieces share is the same as element by element") {
    std::mt19937 random(5);
    const auto number = [&](int64_t below) { return static_cast<int64_t>(random() % static_cast<uint32_t>(below)); };
    const auto any_piece = [&](const std::vector<int64_t>& shape) {
        Piece p{"t", StateKind::v, {}, 0, 1};
        int64_t volume = 1;
        for (const int64_t size : shape) {
            const bool whole = number(3) == 0;
            const int64_t begin = whole ? 0 : number(size), end = whole ? size : begin + 1 + number(size - begin);
            p.box.begin.push_back(begin);
            p.box.end.push_back(end);
            volume *= end - begin;
        }
        p.first = number(volume);
        p.last = p.first + 1 + number(volume - p.first);
        if (number(3) == 0) p.first = 0, p.last = volume;
        return p;
    };
    // the global index of every element of a piece
    const auto elements = [](const Piece& p, const std::vector<int64_t>& shape) {
        std::vector<int64_t> all;
        for (int64_t e = p.first; e < p.last; ++e) {
            int64_t global = 0, rest = e, scale = 1;
            for (size_t d = shape.size(); d-- > 0;) {
                const int64_t extent = p.box.end[d] - p.box.begin[d];
                global += (p.box.begin[d] + rest % extent) * scale;
                rest /= extent;
                scale *= shape[d];
            }
            all.push_back(global);
        }
        return all;
    };
    for (int trial = 0; trial < 5000; ++trial) {
        std::vector<int64_t> shape(static_cast<size_t>(1 + number(3)));
        for (int64_t& size : shape) size = 1 + number(7);
        const Piece stored = any_piece(shape), wanted = any_piece(shape);
        const auto have = elements(stored, shape), want = elements(wanted, shape);
        std::vector<int64_t> expected(want.size(), -1), filled(want.size(), -1);
        for (size_t i = 0; i < want.size(); ++i)
            if (const auto it = std::find(have.begin(), have.end(), want[i]); it != have.end())
                expected[i] = it - have.begin();
        for (const SharedRun& run : shared_runs(stored, wanted))
            for (int64_t i = 0; i < run.count; ++i) {
                REQUIRE(filled.at(static_cast<size_t>(run.to + i)) == -1);
                filled[static_cast<size_t>(run.to + i)] = run.from + i;
            }
        REQUIRE(filled == expected);
    }
    // whole rows of equal width are one run
    CHECK(shared_runs({"t", {}, {{0, 0}, {8, 6}}, 0, 48}, {"t", {}, {{2, 0}, {5, 6}}, 0, 18}) ==
          std::vector<SharedRun>{{12, 0, 18}});
}

TEST_CASE("a checkpoint loads into another layout") {
    const TemporaryFolder folder;
    const std::string path = save(folder.path(), 4).path;
    const FakeRun run(4);
    const Manifest manifest = read_manifest(path);
    // Columns split over two tensor-parallel ranks, each box over three data-parallel ranks.
    const Parameter& p = run.table.at("layers.0.ffn.down.weight");
    const int64_t rows = p.shape[0], columns = p.shape[1], half = columns / 2;
    for (int64_t tp = 0; tp < 2; ++tp) {
        std::vector<float> box(static_cast<size_t>(rows * half));
        std::vector<WantedPiece> wanted;
        for (int64_t dp = 0; dp < 3; ++dp) {
            const int64_t first = dp * rows * half / 3, last = (dp + 1) * rows * half / 3;
            wanted.push_back(
                {{p.name, StateKind::v, {{0, tp * half}, {rows, (tp + 1) * half}}, first, last}, box.data() + first});
        }
        read_pieces(path, manifest, wanted, {});
        int64_t wrong = 0;
        for (int64_t r = 0; r < rows; ++r)
            wrong += std::memcmp(&box[static_cast<size_t>(r * half)],
                                 &run.v[static_cast<size_t>(p.offset + r * columns + tp * half)],
                                 static_cast<size_t>(half) * 4) != 0;
        CHECK(wrong == 0);
    }
    std::vector<float> more(static_cast<size_t>(rows * columns + columns));
    const WantedPiece too_much{{p.name, StateKind::v, {{0, 0}, {rows + 1, columns}}, 0, (rows + 1) * columns},
                               more.data()};
    CHECK(has(problem_of([&] { read_pieces(path, manifest, {too_much}, {}); }),
              "has 240 of the 260 elements of v/layers.0.ffn.down.weight"));
    const WantedPiece unknown{{"nothing", StateKind::v, {{0}, {1}}, 0, 1}, more.data()};
    CHECK(has(problem_of([&] { read_pieces(path, manifest, {unknown}, {}); }), "has 0 of the 1 elements"));
}

TEST_CASE("a damaged checkpoint is reported and the one before is used") {
    const TemporaryFolder folder;
    save(folder.path(), 1);
    const std::string path = save(folder.path(), 2).path;
    REQUIRE(load_exactly(folder.path()) == 2);
    std::vector<std::string> damaged;
    const auto falls_back = [&](const std::string& file) {
        REQUIRE(load_exactly(folder.path(), &damaged) == 1);
        REQUIRE(damaged.size() == 1);
        REQUIRE(damaged[0].find(file) != std::string::npos);
        REQUIRE_FALSE(problem_of([&] { open_checkpoint(path); }).empty());
    };
    std::mt19937 random(3);
    const std::vector<std::string> files = names_in(path);
    REQUIRE(files.size() >= 4);
    for (const std::string& name : files) {
        const std::string file = path + "/" + name, content = file_bytes(file);
        for (size_t cut = 0; cut < content.size(); cut += 1 + content.size() / 13) {
            write_bytes(file, content.substr(0, cut));
            falls_back(file);
        }
        write_bytes(file, content + "\n");
        falls_back(file);
        for (int flip = 0; flip < 40; ++flip) {
            std::string bad = content;
            const size_t at = random() % bad.size();
            bad[at] = static_cast<char>(bad[at] ^ (1 << random() % 8));
            write_bytes(file, bad);
            falls_back(file);
        }
        std::string zeroed = content;
        std::fill(zeroed.begin() + 100, zeroed.begin() + 600, '\0');
        write_bytes(file, zeroed);
        falls_back(file);
        fs::remove(file);
        falls_back(path);
        write_bytes(file, content);
        REQUIRE(load_exactly(folder.path()) == 2);
    }
}

TEST_CASE("the report of a damaged shard names the damaged bytes") {
    const TemporaryFolder folder;
    const std::string file = folder / "big";
    std::string content(static_cast<size_t>(2 * digest_block_bytes + 1000), 'a');
    Hasher hasher;
    hasher.add(content.data(), static_cast<int64_t>(content.size()));
    const FileDigest digest = hasher.finish();
    CHECK(digest.blocks.size() == 3);
    CHECK(digest.xxh3 == xxh3(content));
    content[static_cast<size_t>(digest_block_bytes) + 5] ^= 4;
    write_bytes(file, content);
    ProgressCounter progress("verifying", digest.bytes, {});
    CHECK(has(problem_of([&] { verify_file(file, digest, progress); }),
              "is damaged between byte 16777216 and byte 33554432"));
}

TEST_CASE("shards of two steps are never mixed, and half-written checkpoints do not count") {
    const TemporaryFolder folder;
    const std::string first = save(folder.path(), 1).path, second = save(folder.path(), 2).path;
    std::vector<std::string> damaged;
    const std::string shard = "/rank-00000-of-00001-part-001.safetensors", content = file_bytes(second + shard);
    write_bytes(second + shard, file_bytes(first + shard));
    CHECK(load_exactly(folder.path(), &damaged) == 1);
    write_bytes(second + shard, content);
    CHECK(load_exactly(folder.path()) == 2);

    // the manifest of another step
    const std::string manifest = file_bytes(second + "/manifest.json");
    write_bytes(second + "/manifest.json", file_bytes(first + "/manifest.json"));
    CHECK(load_exactly(folder.path(), &damaged) == 1);
    CHECK(has(damaged.at(0), "is of step 1"));
    fs::remove(second + "/manifest.json");
    CHECK(load_exactly(folder.path(), &damaged) == 1);
    CHECK(has(damaged.at(0), "its save did not end"));
    CHECK(has(problem_of([&] { open_checkpoint(second); }), "manifest.json"));

    // Without any complete one: half-written ones are no obstacle to a start from step 0, a damaged one is.
    fs::remove(first + "/manifest.json");
    CHECK(load_exactly(folder.path(), &damaged) == -1);
    CHECK(damaged.size() == 2);
    write_bytes(second + "/manifest.json", manifest.substr(0, manifest.size() / 2));
    CHECK(has(problem_of([&] { find_newest(folder.path()); }), "no checkpoint in"));
    write_bytes(second + "/manifest.json", manifest);
    CHECK(load_exactly(folder.path()) == 2);
}

TEST_CASE("the last ones and every n-th are kept") {
    const TemporaryFolder folder;
    StoreOptions options = store_options(folder.path());
    options.keep = 2;
    options.keep_every = 4;
    CheckpointStore store(options);
    std::vector<std::string> deleted;
    for (int64_t step = 1; step <= 9; ++step) {
        FakeRun run(step);
        const SaveOutcome outcome = store.save(run.table, run.flat(), run.state);
        REQUIRE(outcome.ok());
        CHECK(outcome.warning.empty());
        deleted.insert(deleted.end(), outcome.deleted.begin(), outcome.deleted.end());
    }
    CHECK(names_in(folder.path()) == std::vector<std::string>{"step-00000004", "step-00000008", "step-00000009"});
    CHECK(deleted.size() == 6);
    fs::create_directory(folder / "step-5");  // not ours: no such name is ever written
    fs::create_directory(folder / "notes");
    options.keep = 1;
    options.keep_every = 0;
    FakeRun run(10);
    CHECK(CheckpointStore(options).save(run.table, run.flat(), run.state).ok());
    CHECK(names_in(folder.path()) == std::vector<std::string>{"notes", "step-00000010", "step-5"});
}

TEST_CASE("after going back to an older checkpoint the newer branch counts") {
    const TemporaryFolder folder;
    for (const int64_t step : {1, 2, 3}) save(folder.path(), step);
    save(folder.path(), 2);  // replaces step 2: a run went back to 1
    CHECK(load_exactly(folder.path()) == 2);
    save(folder.path(), 4);
    CHECK(load_exactly(folder.path()) == 4);
    CHECK(names_in(folder.path()) == std::vector<std::string>{"step-00000002", "step-00000003", "step-00000004"});
}

TEST_CASE("checkpoints of another model or other data are refused") {
    const TemporaryFolder folder;
    save(folder.path(), 5);
    const FoundCheckpoint found = find_newest(folder.path());
    CHECK_NOTHROW(check_resumable(found, tiny_model(), "d1"));
    CHECK_NOTHROW(check_resumable(found, tiny_model(), ""));
    CHECK(has(problem_of([&] { check_resumable(found, tiny_model(), "d2"); }),
              "other data (data.train has hash d1 there and d2 here)"));
    ModelConfig other = tiny_model();
    other.layers = 2;
    other.norm_eps = 1e-6;
    const std::string sentence = problem_of([&] { check_resumable(found, other, "d1"); });
    CHECK(has(sentence, "model.layers"));
    CHECK(has(sentence, "model.norm_eps"));
    CHECK(has(sentence, "--checkpoint.resume=none"));

    other = tiny_model();
    other.ffn_hidden = 24;
    other.tied = false;
    FakeRun run(0, other);
    const std::string shapes = problem_of([&] { load_state(found, run.table, run.flat()); });
    CHECK(has(shapes, "layers.0.ffn.up.weight is [20, 12] there and [24, 12] here"));
    CHECK(has(shapes, "head.weight is missing"));
}

TEST_CASE("saves can be ruled out before step 0") {
    const TemporaryFolder folder;
    CheckpointStore store(store_options(folder / "c"));
    store.prepare(1000);
    CHECK(names_in(folder / "c").empty());
    store.prepare(1000);  // again by the same owner
    CHECK(has(problem_of([&] { CheckpointStore(store_options(folder / "c")).prepare(0); }),
              "another process (" + std::to_string(getpid()) + ")"));
    CHECK(has(problem_of([&] { store.prepare(int64_t{1} << 60); }), "free; --checkpoint.dir"));
    write_bytes(folder / "file", "x");
    CHECK(has(problem_of([&] { CheckpointStore(store_options(folder / "file/c")).prepare(0); }),
              "cannot create the directory"));
    if (geteuid() != 0) {
        fs::create_directory(folder / "locked");
        fs::permissions(folder / "locked", fs::perms::owner_read | fs::perms::owner_exec);
        CHECK(has(problem_of([&] { CheckpointStore(store_options(folder / "locked")).prepare(0); }),
                  "Permission denied"));
    }
}

TEST_CASE("leftovers of a dead writer are removed, nothing else") {
    const TemporaryFolder folder;
    save(folder.path(), 1);
    save(folder.path(), 2);
    fs::rename(folder / "step-00000002", folder / "step-00000002.replaced");  // died between the two renames
    fs::copy(folder / "step-00000001", folder / "step-00000001.replaced", fs::copy_options::recursive);
    for (const char* name : {"step-00000003.tmp", "step-00000004.deleting", "other.tmp", "step-3.tmp"}) {
        fs::create_directory(folder / name);
        write_bytes(folder / name + "/x", "x");
    }
    CheckpointStore(store_options(folder.path())).prepare(0);
    CHECK(names_in(folder.path()) ==
          std::vector<std::string>{"other.tmp", "step-00000001", "step-00000002", "step-3.tmp"});
    CHECK(load_exactly(folder.path()) == 2);
}

TEST_CASE("a process that dies between any two steps of a save leaves the old or the new checkpoint") {
    const auto child_saves = [](const std::string& dir, int64_t step, int die_at) {
        const pid_t child = fork();
        if (child == 0) {
            StoreOptions options = store_options(dir);
            options.keep = 1;
            options.on_phase = [&, phases = 0](const char* phase) mutable {
                const bool counts = step == 2 || phase != std::string("write shard");  // these were tried with step 2
                if (counts && ++phases == die_at) _exit(9);
            };
            FakeRun run(step);
            CheckpointStore store(options);
            _exit(store.save(run.table, run.flat(), run.state).ok() ? 0 : 1);
        }
        int status = 0;
        waitpid(child, &status, 0);
        return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
    };
    for (const int64_t new_step : {2, 1}) {  // a new one, and one that takes the place of the old
        int crashes = 0, old_seen = 0, new_seen = 0;
        for (int die_at = 1;; ++die_at) {
            const TemporaryFolder folder;
            save(folder.path(), 1);
            const int code = child_saves(folder.path(), new_step, die_at);
            if (new_step == 2) {
                // A reader that does not clean up finds a whole one as well.
                const int64_t step = load_exactly(folder.path());
                REQUIRE((step == 1 || step == 2));
                (step == 1 ? old_seen : new_seen)++;
            }
            CheckpointStore(store_options(folder.path())).prepare(0);
            const int64_t step = load_exactly(folder.path());
            REQUIRE((step == 1 || step == 2));
            for (const std::string& name : names_in(folder.path())) REQUIRE(is_step_name(name));
            if (code == 0) break;
            REQUIRE(code == 9);
            ++crashes;
        }
        CHECK(crashes > 15);
        if (new_step == 2) CHECK(std::min(old_seen, new_seen) > 1);
    }
}

TEST_CASE("a failed write leaves the old checkpoint, no leftovers, and a sentence") {
    const TemporaryFolder folder;
    save(folder.path(), 1);
    FakeRun run(2);
    CheckpointStore store(store_options(folder.path()));
    const auto fails_with = [&](const std::string& reason) {
        const SaveOutcome outcome = store.save(run.table, run.flat(), run.state);
        CHECK_FALSE(outcome.ok());
        CHECK(has(outcome.problem, "the checkpoint of step 2 was not saved: "));
        CHECK(has(outcome.problem, reason));
        CHECK(names_in(folder.path()) == std::vector<std::string>{"step-00000001"});
        CHECK(load_exactly(folder.path()) == 1);
    };
    rlimit old{};
    REQUIRE(getrlimit(RLIMIT_FSIZE, &old) == 0);
    const rlim_t manifest = fs::file_size(folder / "step-00000001/manifest.json");
    for (const rlim_t most :
         {rlim_t{0}, rlim_t{100}, rlim_t{4000}, manifest - 1}) {  // the last one stops nothing but the manifest
        INFO(most);
        const rlimit low{most, old.rlim_max};
        REQUIRE(setrlimit(RLIMIT_FSIZE, &low) == 0);
        const SaveOutcome outcome = store.save(run.table, run.flat(), run.state);  // no signal ends the test
        REQUIRE(setrlimit(RLIMIT_FSIZE, &old) == 0);
        CHECK(has(outcome.problem, "File too large"));
        CHECK(names_in(folder.path()) == std::vector<std::string>{"step-00000001"});
    }
    write_bytes(folder / "step-00000002.tmp", "a file in the way");
    CHECK(store.save(run.table, run.flat(), run.state).ok());
    fs::remove_all(folder / "step-00000002");

    StoreOptions options = store_options(folder.path());
    for (const char* last : {"write shard", "write manifest", "rename checkpoint"}) {
        options.on_phase = [last](const char* phase) {
            if (phase == std::string(last)) throw Problem(Exit::checkpoint, "planted");
        };
        store = CheckpointStore(options);
        fails_with("planted");
    }
}

TEST_CASE("a full disk is reported and training can go on") {
    const TemporaryFolder folder;
    const std::string disk = folder / "disk";
    fs::create_directory(disk);
    int64_t pages = 0;  // of one checkpoint
    for (const auto& entry : fs::directory_iterator(save(folder / "elsewhere", 1).path))
        pages += static_cast<int64_t>(entry.file_size() + 4095) / 4096;
    const std::string size = "size=" + std::to_string(pages * 3 / 2 * 4096);  // room for one and a half
    if (geteuid() != 0 || mount("trifold-test", disk.c_str(), "tmpfs", 0, size.c_str()) != 0) {
        WARN("needs the right to mount a tmpfs: skipped");
        return;
    }
    struct Unmount {
        std::string at;
        ~Unmount() { umount(at.c_str()); }
    } const unmount{disk};
    const std::string dir = disk + "/c";
    FakeRun run(1);
    CHECK(
        has(problem_of([&] { CheckpointStore(store_options(dir)).prepare(1 << 20); }), "a checkpoint takes 1.00 MiB"));
    {
        CheckpointStore store(store_options(dir));
        store.prepare(0);
        REQUIRE(store.save(run.table, run.flat(), run.state).ok());
        run = FakeRun(2);
        for (int attempt = 0; attempt < 2; ++attempt) {
            CHECK(has(CheckpointStore(store_options(dir)).save(run.table, run.flat(), run.state).problem,
                      "No space left on device"));
            CHECK(load_exactly(dir) == 1);
            CHECK(names_in(dir) == std::vector<std::string>{"step-00000001"});
        }
    }

    REQUIRE(mount("", disk.c_str(), "", MS_REMOUNT | MS_RDONLY, "") == 0);
    CHECK(has(CheckpointStore(store_options(dir)).save(run.table, run.flat(), run.state).problem,
              "Read-only file system"));
    CHECK(has(problem_of([&] { CheckpointStore(store_options(disk + "/d")).prepare(0); }), "Read-only file system"));
}

TEST_CASE("a save in the background writes what was there when it began") {
    const TemporaryFolder folder;
    CheckpointStore store(store_options(folder.path()));
    const ParameterTable table(tiny_model());
    FakeRun run(1);
    std::vector<float> snapshot(3 * run.master.size());
    const Tensor buffer{snapshot.data(), DType::f32, static_cast<int64_t>(snapshot.size())};
    AsyncSaver saver(store, table, buffer, 2);
    CHECK_FALSE(saver.poll());
    CHECK_FALSE(saver.wait());
    CHECK_FALSE(saver.begin(run.flat(), run.state));
    run = FakeRun(2);  // training goes on at once
    std::optional<SaveOutcome> first = saver.begin(run.flat(), run.state);
    REQUIRE(first);
    CHECK(first->ok());
    CHECK(first->step == 1);
    CHECK(load_exactly(folder / "") >= 1);
    std::fill(run.master.begin(), run.master.end(), 0.0f);
    const std::optional<SaveOutcome> second = saver.wait();
    REQUIRE(second);
    CHECK(second->step == 2);
    CHECK_FALSE(saver.wait());
    CHECK(load_exactly(folder.path()) == 2);

    StoreOptions options = store_options(folder.path());
    options.on_phase = [](const char*) { throw Problem(Exit::checkpoint, "planted"); };
    CheckpointStore broken(options);
    AsyncSaver failing(broken, table, buffer, 1);
    run = FakeRun(3);
    failing.begin(run.flat(), run.state);
    std::optional<SaveOutcome> outcome;
    while (!outcome) outcome = failing.poll();
    CHECK(has(outcome->problem, "planted"));
    CHECK(load_exactly(folder.path()) == 2);
}

TEST_CASE("the size of a checkpoint is known before") {
    ModelConfig model = tiny_model();
    for (const int64_t hidden : {12, 96}) {
        model.hidden = hidden;
        model.head_dim = hidden / 3;
        model.ffn_hidden = 4 * hidden;
        const TemporaryFolder folder;
        FakeRun run(1, model);
        StoreOptions options = store_options(folder.path());
        options.shard_bytes = int64_t{256} << 20;
        const SaveOutcome outcome = CheckpointStore(options).save(run.table, run.flat(), run.state);
        REQUIRE(outcome.ok());
        int64_t bytes = 0;
        for (const std::string& name : names_in(outcome.path))
            bytes += static_cast<int64_t>(fs::file_size(outcome.path + "/" + name));
        CHECK(bytes <= checkpoint_bytes(run.table));
        CHECK(bytes + 30'000 >= checkpoint_bytes(run.table));
    }
}
