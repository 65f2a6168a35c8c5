#include "parallel/launch.h"

#include <sys/prctl.h>
#include <unistd.h>
#include <xxhash.h>

#include <charconv>
#include <csignal>
#include <cstring>

#include "base/refuse.h"
#include "parallel/host_port.h"
#include "parallel/identity.h"
#include "parallel/mpi_bootstrap.h"

namespace trifold {
namespace {

// Throws for a variable that is there and is no number from `least` on; empty when it is not there.
std::optional<int> number_in(const Variable& variable, const char* name, int least) {
    const char* text = variable(name);
    if (!text) return {};
    const char* last = text + std::strlen(text);
    int value = 0;
    const auto [end, error] = std::from_chars(text, last, value);
    if (error != std::errc() || end != last || value < least)
        refuse(Exit::usage, "the launcher's variable {} is '{}', but it must be a number of at least {}", name, text, least);
    return value;
}

std::string text_in(const Variable& variable, const char* name) {
    const char* text = variable(name);
    return text ? text : "";
}

// "4(x2),3": 4 tasks on each of two nodes, 3 on the next. 0 when it cannot be read.
int tasks_on_node(std::string_view list, int node) {
    while (!list.empty()) {
        const std::string_view entry = list.substr(0, list.find(','));
        list.remove_prefix(std::min(entry.size() + 1, list.size()));
        int tasks = 0, nodes = 1;
        const char* end = entry.data() + entry.size();
        const char* at = std::from_chars(entry.data(), end, tasks).ptr;
        if (end - at > 2 && at[0] == '(' && at[1] == 'x') std::from_chars(at + 2, end, nodes);
        if (node < nodes) return tasks;
        node -= nodes;
    }
    return 0;
}

struct MpiNames {
    const char *rank, *size, *local_rank, *local_size, *job;
};

std::optional<Launch> read_mpi(const Variable& e, const std::string& launcher, const MpiNames& names) {
    const std::optional<int> r = number_in(e, names.rank, 0), n = number_in(e, names.size, 1);
    if (!r || !n) return {};
    return Launch{.rank = *r,
                  .size = *n,
                  .local_rank = number_in(e, names.local_rank, 0).value_or(0),
                  .local_size = number_in(e, names.local_size, 1).value_or(0),
                  .launcher = launcher,
                  .job = text_in(e, names.job)};
}

std::optional<Launch> read_slurm(const Variable& e) {
    const std::optional<int> rank = number_in(e, "SLURM_PROCID", 0);
    if (!rank || !e("SLURM_STEP_ID")) return {};
    const std::optional<int> size = number_in(e, e("SLURM_STEP_NUM_TASKS") ? "SLURM_STEP_NUM_TASKS" : "SLURM_NTASKS", 1);
    if (!size) return {};
    const int node = number_in(e, "SLURM_NODEID", 0).value_or(0);
    const char* per_node = e("SLURM_STEP_TASKS_PER_NODE") ? "SLURM_STEP_TASKS_PER_NODE" : "SLURM_TASKS_PER_NODE";
    return Launch{.rank = *rank,
                  .size = *size,
                  .local_rank = number_in(e, "SLURM_LOCALID", 0).value_or(0),
                  .local_size = tasks_on_node(text_in(e, per_node), node),
                  .launcher = "Slurm",
                  .job = text_in(e, "SLURM_JOB_ID") + "." + text_in(e, "SLURM_STEP_ID")};
}

// Ranks end with the process that started them, also when that is killed. The signal comes when the *thread* that forked ends; launchers
// fork from their main thread.
void die_with_parent() {
    const pid_t parent = ::getppid();
    ::prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (::getppid() != parent) ::_exit(static_cast<int>(Exit::fault));  // it died before the request
}

// Rank 0's socket, and the addresses at which others find it.
void open_store(Launch& launch, const std::string& ip) {
    launch.store_socket = std::make_shared<Socket>(listen_at(ip, 0));
    const int port = address_of(*launch.store_socket).port();
    const std::vector<std::string> everywhere = ip.empty() ? addresses_of_this_host() : std::vector<std::string>{ip};
    launch.store = host_ports_text(everywhere, port);
    if (launch.store.empty())
        refuse(Exit::usage, "this host, where rank 0 runs, has no network interface that is up, so ranks on other hosts cannot reach it: "
                            "name one in --launch.interface");
}

void launch_by_mpi(Launch& launch, const LaunchOptions& options) {
    const auto note_of_rank_0 = [&] {
        const bool one_host = launch.local_size == launch.size;
        const std::string ip = !options.interface.empty() ? address_of_interface(options.interface) : one_host ? "127.0.0.1" : "";
        launch.job_key = random_key();
        open_store(launch, ip);
        return fmt::format("{} {}", launch.job_key, launch.store);
    };
    const std::string note = exchange_by_mpi(launch, options.start_s, note_of_rank_0);
    const size_t space = note.find(' ');
    std::from_chars(note.data(), note.data() + space, launch.job_key);
    launch.store = note.substr(space + 1);
}

void launch_by_variables(Launch& launch, const LaunchOptions& options) {
    if (options.store.empty()) {
        const char* why = launch.launcher == "Open MPI" ? "but this program was built without MPI" : "and only Open MPI's launcher passes an address on";
        said_once_per_host(launch.rank, [&] {
            refuse(Exit::usage, "{} has started {} ranks, {}, so they cannot find each other: "
                                "give --launch.store=HOST:PORT with the host of rank 0 and a free port there", launch.launcher, launch.size, why);
        });
    }
    const HostPort at = said_once_per_host(launch.rank, [&] { return parse_host_port(options.store, "--launch.store"); });
    const auto ips = said_once_per_host(launch.local_rank, [&] { return at.host == "localhost" ? std::vector<std::string>{"127.0.0.1"} : resolve(at.host); });
    launch.store = host_ports_text(ips, at.port);
    const std::string known_to_all = fmt::format("{} {} {} {} {}", launch.launcher, launch.job, launch.size, options.store, ::getuid());
    launch.job_key = XXH3_64bits(known_to_all.data(), known_to_all.size());
    if (launch.rank == 0) {
        // A name may stand for 127.0.1.1 on its own host (Debian's /etc/hosts): listen everywhere, unless an address was given.
        const bool is_address = at.host == "localhost" || ips.front() == at.host;
        const std::string everywhere = ips.front().find(':') == std::string::npos ? "0.0.0.0" : "::";
        launch.store_socket = std::make_shared<Socket>(listen_at(is_address ? ips.front() : everywhere, at.port));
    }
}

}  // namespace

std::optional<Launch> read_launcher(const Variable& e) {
    std::optional<Launch> found = read_mpi(e, "Open MPI", {"OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK",
                                                           "OMPI_COMM_WORLD_LOCAL_SIZE", "OMPI_MCA_orte_ess_jobid"});
    // Slurm's own PMI sets PMI_RANK as well, but not Hydra's local rank.
    if (!found && (e("MPI_LOCALRANKID") || !e("SLURM_PROCID")))
        found = read_mpi(e, "Hydra", {"PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS", "SLURM_JOB_ID"});
    if (!found) found = read_slurm(e);
    if (found && found->rank >= found->size)
        refuse(Exit::usage, "{} says that this is rank {} of {} ranks, which cannot be: start it with one launcher only", found->launcher, found->rank,
               found->size);
    return found;
}

Launch detect_launch(const LaunchOptions& options) {
    std::optional<Launch> launch = read_launcher();
    if (!launch) return {};
    die_with_parent();
    if (launch->size == 1) return {};
    const bool by_mpi = launch->launcher == "Open MPI" && options.store.empty() && mpi_is_built_in();
    (by_mpi ? launch_by_mpi : launch_by_variables)(*launch, options);
    return *std::move(launch);
}

}  // namespace trifold
