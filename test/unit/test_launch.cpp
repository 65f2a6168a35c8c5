// test/unit/test_launch.cpp   Launchers' variables, addresses, and how ranks are named in sentences.
#include "test/catch.h"

#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <functional>
#include <map>
#include <string>

#include "parallel/launch.h"
#include "parallel/rank_text.h"
#include "parallel/host_port.h"
#include "parallel/world.h"
#include "test/unit/problems.h"

using namespace trifold;

namespace {

std::string usage_of(const std::function<void()>& act) {
    try {
        act();
    } catch (const Problem& p) {
        CHECK(p.code() == Exit::usage);
        return p.what();
    }
    return "";
}

using Environment = std::map<std::string, std::string>;

std::optional<Launch> read_launcher(const Environment& e) {
    return trifold::read_launcher([&](const char* name) { return e.contains(name) ? e.at(name).c_str() : nullptr; });
}

// Sets variables of this process for as long as it lives.
class Variables {
public:
    explicit Variables(const Environment& e) : environment_(e) {
        for (const auto& [name, value] : environment_) ::setenv(name.c_str(), value.c_str(), 1);
    }
    ~Variables() {
        for (const auto& [name, value] : environment_) ::unsetenv(name.c_str());
    }

private:
    Environment environment_;
};

const Environment open_mpi{{"OMPI_COMM_WORLD_RANK", "5"}, {"OMPI_COMM_WORLD_SIZE", "8"}, {"OMPI_COMM_WORLD_LOCAL_RANK", "1"}, {"OMPI_COMM_WORLD_LOCAL_SIZE", "4"}};
const Environment srun{{"SLURM_JOB_ID", "77"}, {"SLURM_STEP_ID", "3"}, {"SLURM_PROCID", "9"}, {"SLURM_STEP_NUM_TASKS", "11"}, {"SLURM_NTASKS", "64"},
                       {"SLURM_LOCALID", "1"}, {"SLURM_NODEID", "2"}, {"SLURM_STEP_TASKS_PER_NODE", "4(x2),3"}};

Environment with(Environment e, const Environment& more) {
    for (const auto& [name, value] : more) e[name] = value;
    return e;
}

Environment without(Environment e, const std::string& name) {
    e.erase(name);
    return e;
}

Launch said(const std::string& launcher, int rank, int size, int local_rank, int local_size, const std::string& job) {
    return {.rank = rank, .size = size, .local_rank = local_rank, .local_size = local_size, .launcher = launcher, .job = job};
}

}  // namespace

TEST_CASE("launchers are known by their variables", "[launch]") {
    CHECK_FALSE(read_launcher({{"HOME", "/root"}}));
    CHECK(read_launcher(open_mpi) == said("Open MPI", 5, 8, 1, 4, ""));
    CHECK(read_launcher({{"PMI_RANK", "1"}, {"PMI_SIZE", "3"}, {"MPI_LOCALRANKID", "1"}, {"MPI_LOCALNRANKS", "3"}}) == said("Hydra", 1, 3, 1, 3, ""));
    CHECK(read_launcher({{"PMI_RANK", "1"}, {"PMI_SIZE", "3"}}) == said("Hydra", 1, 3, 0, 0, ""));
    CHECK(read_launcher(srun) == said("Slurm", 9, 11, 1, 3, "77.3"));
    CHECK(read_launcher(without(srun, "SLURM_STEP_NUM_TASKS"))->size == 64);
    CHECK(read_launcher(with(srun, {{"SLURM_NODEID", "1"}}))->local_size == 4);
}

TEST_CASE("a batch script and an interactive shell of Slurm are no ranks", "[launch]") {
    CHECK_FALSE(read_launcher({{"SLURM_JOB_ID", "77"}, {"SLURM_NTASKS", "64"}}));                                                 // salloc
    CHECK_FALSE(read_launcher({{"SLURM_JOB_ID", "77"}, {"SLURM_NTASKS", "64"}, {"SLURM_PROCID", "0"}, {"SLURM_LOCALID", "0"}}));  // sbatch
    // srun --pty bash: a step with one task.
    CHECK(read_launcher({{"SLURM_JOB_ID", "77"}, {"SLURM_NTASKS", "64"}, {"SLURM_PROCID", "0"}, {"SLURM_STEP_ID", "0"}, {"SLURM_STEP_NUM_TASKS", "1"}})->size == 1);
}

TEST_CASE("mpirun and mpiexec inside a Slurm job count, not srun that started their helpers", "[launch]") {
    CHECK(read_launcher(with(srun, open_mpi))->launcher == "Open MPI");
    CHECK(read_launcher(with(srun, {{"PMI_RANK", "1"}, {"PMI_SIZE", "3"}, {"MPI_LOCALRANKID", "0"}}))->launcher == "Hydra");
    CHECK(read_launcher(with(srun, {{"PMI_RANK", "9"}, {"PMI_SIZE", "11"}}))->launcher == "Slurm");  // srun --mpi=pmi2
}

TEST_CASE("variables that make no sense are named", "[launch]") {
    CHECK(has(usage_of([] { read_launcher(with(open_mpi, {{"OMPI_COMM_WORLD_SIZE", "many"}})); }), "OMPI_COMM_WORLD_SIZE is 'many'"));
    CHECK(has(usage_of([] { read_launcher(with(open_mpi, {{"OMPI_COMM_WORLD_RANK", "-1"}})); }), "at least 0"));
    CHECK(has(usage_of([] { read_launcher(with(open_mpi, {{"OMPI_COMM_WORLD_RANK", "8"}})); }), "rank 8 of 8"));
}

TEST_CASE("HOST:PORT", "[launch]") {
    const auto parsed = [](const std::string& text) { return parse_host_port(text, "launch.store").text(); };
    CHECK(parsed("node-01:29500") == "node-01:29500");
    CHECK(parsed("[fd00::1]:29500") == "[fd00::1]:29500");
    CHECK(parse_host_port("[fd00::1]:29500", "launch.store").host == "fd00::1");
    for (const char* bad : {"", "node-01", "node-01:", ":29500", "node-01:0", "node-01:65536", "node-01:29500x", "node-01:-1"})
        CHECK(has(usage_of([&] { parse_host_port(bad, "launch.store"); }), "HOST:PORT"));
    CHECK(parse_host_ports("10.0.0.1:1,10.0.0.2:2", "x").size() == 2);
}

TEST_CASE("interfaces by name and by address", "[launch]") {
    CHECK(is_loopback(address_of_interface("lo")));
    CHECK(address_of_interface("127.0.0.1") == "127.0.0.1");
    const std::string refused = usage_of([] { address_of_interface("ib7"); });
    CHECK(has(refused, "'ib7'"));
    CHECK(has(refused, "lo (127.0.0.1)"));
}

// detect_launch() ties this process to its parent when there is a launcher, so these run in children.
TEST_CASE("what detect_launch makes of it", "[launch]") {
    const auto in_child = [](const Environment& variables, const LaunchOptions& options) {
        int ends[2];
        REQUIRE(::pipe(ends) == 0);
        const pid_t child = ::fork();
        if (child == 0) {
            std::string said;
            try {
                const Variables set(variables);
                const Launch launch = detect_launch(options);
                said = std::to_string(launch.rank) + " of " + std::to_string(launch.size) + (launch.store_socket ? " listens at " : " at ") + launch.store;
            } catch (const QuietProblem& p) {
                said = "quiet: " + std::string(p.what());
            } catch (const Problem& p) {
                said = std::to_string(static_cast<int>(p.code())) + ": " + p.what();
            }
            const ssize_t written = ::write(ends[1], said.data(), said.size());
            ::_exit(written == static_cast<ssize_t>(said.size()) ? 0 : 1);
        }
        ::close(ends[1]);
        std::string said(4096, '\0');
        const ssize_t got = ::read(ends[0], said.data(), said.size());
        ::close(ends[0]);
        ::waitpid(child, nullptr, 0);
        said.resize(got > 0 ? static_cast<size_t>(got) : 0);
        return said;
    };
    const Environment rank_0 = with(srun, {{"SLURM_PROCID", "0"}});

    CHECK(in_child({}, {}) == "0 of 1 at ");
    CHECK(in_child(with(open_mpi, {{"OMPI_COMM_WORLD_RANK", "0"}, {"OMPI_COMM_WORLD_SIZE", "1"}}), {}) == "0 of 1 at ");
    CHECK(in_child(srun, {.store = "localhost:29511"}) == "9 of 11 at 127.0.0.1:29511");
    CHECK(has(in_child(rank_0, {}), "2: Slurm has started 11 ranks"));
    CHECK(has(in_child(rank_0, {}), "launch.store=HOST:PORT"));
    CHECK(has(in_child(srun, {}), "quiet: Slurm has started 11 ranks"));
    CHECK(has(in_child(srun, {.store = "no-such-host.invalid:29511"}), "'no-such-host.invalid' of --launch.store does not resolve"));
    CHECK(has(in_child(rank_0, {.store = "192.0.2.1:29511"}), "2: the address 192.0.2.1 is not one of this host"));

    const Socket taken = listen_at("127.0.0.1", 0);
    const std::string store = "127.0.0.1:" + std::to_string(address_of(taken).port());
    CHECK(has(in_child(rank_0, {.store = store}), "2: port " + std::to_string(address_of(taken).port()) + " of this host is taken"));
}

TEST_CASE("ranks in sentences", "[launch]") {
    CHECK(ranks_text({3}) == "rank 3");
    CHECK(ranks_text({5, 7}) == "ranks 5 and 7");
    CHECK(ranks_text({5, 6}) == "ranks 5 and 6");
    CHECK(ranks_text({3, 5, 6, 7, 9}) == "ranks 3, 5-7 and 9");
    std::vector<int> even;
    for (int r = 0; r < 100; r += 2) even.push_back(r);
    CHECK(has(ranks_text(even), "22 and 38 more"));
}

TEST_CASE("who disagrees with most", "[launch]") {
    CHECK(disagreement("data", {"a", "a", "a"}).empty());
    CHECK(disagreement("data", {"a", "a", "b", "a"}) == "rank 2 has data 'b', the others 'a'");
    CHECK(disagreement("data", {"a", "b", "a", "b", "b", "b"}) == "ranks 0 and 2 have data 'a', the others 'b'");
    CHECK(disagreement("data", {"a", "b"}) == "rank 1 has data 'b', rank 0 'a'");
    CHECK(disagreement("data", {"a", "b", "c", "a"}) == "rank 2 has data 'c', rank 1 'b', most 'a'");
    CHECK(disagreement("data", {"n", "n", "a", "b", "c", "d", "e"}) == "rank 6 has data 'e', rank 5 'd', rank 4 'c', others 2 more values, most 'n'");
}

TEST_CASE("long values are shown where they differ", "[launch]") {
    const std::string same(1000, 'x');
    const std::string said = disagreement("config", {same + "lr=1" + same, same + "lr=2" + same, same + "lr=1" + same});
    CHECK(said.size() < 250);
    CHECK(has(said, "xlr=2x"));
    CHECK(has(said, "xlr=1x"));
    CHECK(has(disagreement("config", {same, same + "more", same}), "xmore'"));
}
