// test/unit/test_checkpoint_damage.cpp   Damaged files, crashes between any two steps of a save, and disks that refuse.
#include "test/catch.h"

#include <sys/mount.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <random>

#include "checkpoint/digest.h"
#include "test/unit/fake_run.h"

using namespace trifold;
namespace fs = std::filesystem;

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
    CHECK(has(problem_of([&] { verify_file(file, digest); }), "is damaged between byte 16777216 and byte 33554432"));
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
            _exit(store.save(run.model, run.slices(), run.state).ok() ? 0 : 1);
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
            for (const std::string& name : names_in(folder.path())) REQUIRE(step_of(name));
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
        const SaveOutcome outcome = store.save(run.model, run.slices(), run.state);
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
        const SaveOutcome outcome = store.save(run.model, run.slices(), run.state);  // no signal ends the test
        REQUIRE(setrlimit(RLIMIT_FSIZE, &old) == 0);
        CHECK(has(outcome.problem, "File too large"));
        CHECK(names_in(folder.path()) == std::vector<std::string>{"step-00000001"});
    }
    write_bytes(folder / "step-00000002.tmp", "a file in the way");
    CHECK(store.save(run.model, run.slices(), run.state).ok());
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
        REQUIRE(store.save(run.model, run.slices(), run.state).ok());
        run = FakeRun(2);
        for (int attempt = 0; attempt < 2; ++attempt) {
            CHECK(has(CheckpointStore(store_options(dir)).save(run.model, run.slices(), run.state).problem,
                      "No space left on device"));
            CHECK(load_exactly(dir) == 1);
            CHECK(names_in(dir) == std::vector<std::string>{"step-00000001"});
        }
    }

    REQUIRE(mount("", disk.c_str(), "", MS_REMOUNT | MS_RDONLY, "") == 0);
    CHECK(has(CheckpointStore(store_options(dir)).save(run.model, run.slices(), run.state).problem,
              "Read-only file system"));
    CHECK(has(problem_of([&] { CheckpointStore(store_options(disk + "/d")).prepare(0); }), "Read-only file system"));
}
