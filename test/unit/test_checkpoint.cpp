// test/unit/test_checkpoint.cpp   Saving and loading: round trips, which ones are kept, which ones are refused.
#include "test/catch.h"

#include <unistd.h>

#include <algorithm>
#include <cstring>

#include "checkpoint/async_saver.h"
#include "test/unit/fake_run.h"

using namespace trifold;
namespace fs = std::filesystem;

TEST_CASE("a checkpoint is loaded bit for bit") {
    const TemporaryFolder folder;
    FakeRun run(7);
    StoreOptions options = store_options(folder / "a/b");
    options.threads = 2;
    CheckpointStore store(options);
    const SaveOutcome outcome = store.save(run.model, run.slices(), run.state);
    CHECK(outcome.ok());
    CHECK(outcome.path == folder / "a/b/step-00000007");
    CHECK(names_in(outcome.path).size() > 3);  // several shards

    const FoundCheckpoint found = find_newest(folder / "a/b", {.threads = 2});
    REQUIRE(found.found());
    const TrainingState &s = found.state, &t = run.state;
    CHECK(std::tuple(s.step, s.updates, s.skipped, s.samples, s.tokens, s.seed, s.data_hash) ==
          std::tuple(t.step, t.updates, t.skipped, t.samples, t.tokens, t.seed, t.data_hash));
    CHECK(differences(model_of(found), run.model).empty());
    FakeRun loaded(1);
    load_state(found, loaded.model, loaded.slices(), {.threads = 2});
    CHECK(loaded.same_bits(run));
    std::fill(loaded.master.begin(), loaded.master.end(), 1.0f);  // tensors are filled to their last element, padding is left alone
    load_state(found, loaded.model, loaded.slices(), {.threads = 2});
    std::vector<float> expected(loaded.master.size(), 1.0f);
    for (const Parameter& p : run.table.all()) std::copy_n(run.master.begin() + p.offset, p.elems, expected.begin() + p.offset);
    CHECK(std::memcmp(loaded.master.data(), expected.data(), expected.size() * 4) == 0);
}

TEST_CASE("a step, a folder of steps and a run directory can be opened") {
    const TemporaryFolder folder;
    save(folder / "checkpoints", 3);
    for (const std::string& path : {folder.path(), folder.path() + "/", folder / "checkpoints",
                                    folder / "checkpoints/step-00000003", folder / "checkpoints/step-00000003/"}) {
        FakeRun run(0);
        const FoundCheckpoint found = open_checkpoint(path);
        load_state(found, run.model, whole_state(run.table, run.master.data()));  // weights only
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

TEST_CASE("the last ones and every n-th are kept") {
    const TemporaryFolder folder;
    StoreOptions options = store_options(folder.path());
    options.keep = 2;
    options.keep_every = 4;
    CheckpointStore store(options);
    std::vector<std::string> deleted;
    for (int64_t step = 1; step <= 9; ++step) {
        FakeRun run(step);
        const SaveOutcome outcome = store.save(run.model, run.slices(), run.state);
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
    CHECK(CheckpointStore(options).save(run.model, run.slices(), run.state).ok());
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
    const std::string shapes = problem_of([&] { load_state(found, run.model, run.slices()); });
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

TEST_CASE("a save in the background writes what was there when it began") {
    const TemporaryFolder folder;
    CheckpointStore store(store_options(folder.path()));
    const ModelConfig model = tiny_model();
    FakeRun run(1);
    std::vector<float> snapshot(3 * run.master.size());
    const Tensor buffer{snapshot.data(), DType::f32, static_cast<int64_t>(snapshot.size())};
    AsyncSaver saver(store, model, buffer, 2);
    CHECK_FALSE(saver.poll());
    CHECK_FALSE(saver.wait());
    CHECK_FALSE(saver.begin(run.slices(), run.state));
    run.become(2);  // training goes on at once
    std::optional<SaveOutcome> first = saver.begin(run.slices(), run.state);
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
    AsyncSaver failing(broken, model, buffer, 1);
    run.become(3);
    failing.begin(run.slices(), run.state);
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
        const SaveOutcome outcome = CheckpointStore(options).save(run.model, run.slices(), run.state);
        REQUIRE(outcome.ok());
        int64_t bytes = 0;
        for (const std::string& name : names_in(outcome.path))
            bytes += static_cast<int64_t>(fs::file_size(outcome.path + "/" + name));
        CHECK(bytes <= checkpoint_bytes(run.table));
        CHECK(bytes + 30'000 >= checkpoint_bytes(run.table));
    }
}
