// test/unit/test_text.cpp   Numbers and near misses as people read them; CPU limits.
#include "test/catch.h"

#include <unistd.h>

#include <filesystem>
#include <fstream>

#include "base/cpus.h"
#include "base/text.h"

using namespace trifold;

TEST_CASE("numbers for people") {
    CHECK(with_commas(0) == "0");
    CHECK(with_commas(999) == "999");
    CHECK(with_commas(1000) == "1,000");
    CHECK(with_commas(-124439808) == "-124,439,808");
    CHECK(with_prefix(999) == "999");
    CHECK(with_prefix(999.6) == "1 k");
    CHECK(with_prefix(124439808) == "124 M");
    CHECK(human_bytes(1023) == "1023 B");
    CHECK(human_bytes(1536) == "1.50 KiB");
    CHECK(human_bytes(int64_t{1} << 40) == "1.00 TiB");
    CHECK(human_bytes((int64_t{1} << 30) - 1) == "1.00 GiB");
    CHECK(join_words({"a", "b", "c"}) == "a, b and c");
    CHECK(join_words({"a"}) == "a");
}

TEST_CASE("wrapped text") {
    CHECK(wrapped("aa bb cc", 2, 7) == "aa bb\n  cc");
    CHECK(wrapped("aa bb cc", 2, 10) == "aa bb cc");
    CHECK(wrapped("toolongaword b", 2, 6) == "toolongaword\n  b");
    CHECK(wrapped("", 2, 6).empty());
}

TEST_CASE("near misses") {
    CHECK(edit_distance("kitten", "sitting") == 3);
    CHECK(edit_distance("ab", "ba") == 1);
    CHECK(edit_distance("", "abc") == 3);
    CHECK(near_misses("lrr", {"lr", "steps"}) == std::vector<std::string>{"lr"});
    CHECK(near_misses("lr", {"optim.lr", "steps"}) == std::vector<std::string>{"optim.lr"});
    CHECK(near_misses("qqqq", {"lr", "steps"}).empty());
    CHECK(near_misses("", {"lr"}).empty());
}

TEST_CASE("CPU quota of control groups, both versions, the tightest one counts") {
    std::string name = (std::filesystem::temp_directory_path() / "trifold-cpus-XXXXXX").string();
    const std::filesystem::path root = mkdtemp(name.data());
    const auto write = [&](const std::string& path, const std::string& text) {
        std::filesystem::create_directories((root / path).parent_path());
        std::ofstream(root / path) << text;
    };
    CHECK(cpu_quota(root.string()) == 0);
    write("proc/self/cgroup", "4:cpu,cpuacct:/job/step\n0::/user/job\n");
    write("sys/fs/cgroup/user/job/cpu.max", "max 100000\n");
    CHECK(cpu_quota(root.string()) == 0);
    write("sys/fs/cgroup/cpu/job/cpu.cfs_quota_us", "-1\n");
    write("sys/fs/cgroup/cpu/job/cpu.cfs_period_us", "100000\n");
    CHECK(cpu_quota(root.string()) == 0);
    write("sys/fs/cgroup/user/cpu.max", "350000 100000\n");
    CHECK(cpu_quota(root.string()) == 3.5);
    write("sys/fs/cgroup/cpu/cpu.cfs_quota_us", "150000\n");
    write("sys/fs/cgroup/cpu/cpu.cfs_period_us", "100000\n");
    CHECK(cpu_quota(root.string()) == 1.5);
    std::filesystem::remove_all(root);
    CHECK(usable_cpus() >= 1);
}
