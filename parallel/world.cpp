#include "parallel/world.h"

#include <fmt/format.h>
#include <sys/resource.h>

#include <algorithm>
#include <mutex>
#include <utility>

#include "base/cpus.h"
#include "parallel/host_collectives.h"
#include "parallel/identity.h"
#include "parallel/launch.h"
#include "parallel/nccl.h"
#include "parallel/staged_collectives.h"
#include "parallel/store.h"

namespace trifold {
namespace {

constexpr double answer_s = 10;  // for the store to send what is due

// One connection per rank, and what the program opens besides.
void make_room_for_connections(int ranks) {
    rlimit limit{};
    const rlim_t needed = static_cast<rlim_t>(ranks) + 1000;
    if (::getrlimit(RLIMIT_NOFILE, &limit) != 0 || limit.rlim_cur >= needed) return;
    limit.rlim_cur = std::min(needed, limit.rlim_max);
    ::setrlimit(RLIMIT_NOFILE, &limit);
    if (limit.rlim_cur < static_cast<rlim_t>(ranks) + 100)
        throw Problem(Exit::usage, fmt::format("rank 0 may open only {} files, too few for the connections of {} ranks: raise the limit (ulimit -n)",
                                               limit.rlim_cur, ranks));
}

// connect(rank, size) makes the transport of a group. What was aborted says why the job has failed.
template <class Connect>
Group connected(const World& world, const std::string& name, const std::vector<int>& members, Stream& stream, Connect connect) {
    const auto place = std::ranges::find(members, world.rank());
    TRIFOLD_ASSERT(place != members.end());
    if (members.size() == 1) return Group();
    const int rank = static_cast<int>(place - members.begin()), size = static_cast<int>(members.size());
    try {
        return Group(name, rank, size, stream, connect(rank, size));
    } catch (const Problem&) {
        if (const auto failure = world.cause()) throw *failure;
        throw;
    }
}

}  // namespace

struct World::State {
    Launch launch;
    LaunchOptions options;
    std::vector<PeerAddress> peers;  // by rank
    uint64_t data_key = 0;
    int64_t clock_offset_ns = 0;
    std::atomic<int64_t> meetings = 0;
    std::atomic<bool> has_spoken = false;

    // A rank that is alone.
    std::optional<Problem> own_problem;

    // One of several. The client ends before the server, and both before the listener that they abort.
    std::unique_ptr<Listener> listener;
    std::mutex mutex;                                    // of the next four
    std::vector<std::weak_ptr<Collectives>> gpu_groups;  // those between hosts end with the listener
    bool aborted = false;
    int64_t waits = 0;  // for a GPU
    double longest_wait_s = 0;
    std::unique_ptr<StoreServer> server;
    std::unique_ptr<StoreClient> client;

    void abort_groups() {
        listener->abort();
        const std::lock_guard lock(mutex);
        aborted = true;
        for (const auto& group : gpu_groups)
            if (const auto alive = group.lock()) alive->abort();
    }

    bool alone() const { return launch.size == 1; }
    StoreLink link_to_store();
    StoreLink find_store(const std::string& host_id);
    void join(const std::string& ip);
    void read_peers(const std::string& welcome);
    std::string meet(const char* kind, const std::string& what, const std::string& value, Exit code, double deadline_s);
};

// Nobody can be asked who speaks: the first rank of each host does. On rank 0's that would be rank 0; whether it has said anything can be
// told from what answers in its place.
StoreLink World::State::find_store(const std::string& host_id) {
    try {
        return connect_to_store(parse_host_ports(launch.store, "--launch.store"), launch.job_key, host_id, options.start_s);
    } catch (const Problem& p) {
        const bool rank_0_is_silent = !dynamic_cast<const StrangerProblem*>(&p);
        if (launch.local_rank == 0 || (launch.rank == 1 && rank_0_is_silent)) throw;
        throw QuietProblem(p.code(), p.what());
    }
}

StoreLink World::State::link_to_store() {
    const std::string host_id = Listener::host_id();
    if (launch.rank != 0) return find_store(host_id);
    make_room_for_connections(launch.size);
    auto [servers_end, link] = link_inside_process();
    TRIFOLD_ASSERT(launch.store_socket && *launch.store_socket);
    server = std::make_unique<StoreServer>(std::move(*launch.store_socket), std::move(servers_end),
                                           StoreServer::Options{launch.size, options.start_s, launch.job_key, random_key(), host_id});
    return std::move(link);
}

// The one message of the rendezvous, and its answer.
void World::State::join(const std::string& ip) {
    const std::string body = pack(launch.rank, launch.size, options.build.empty() ? build_id() : options.build, host_name(), ip, Listener::host_id(),
                                  listener->endpoint(), cpu_list());
    try {
        read_peers(client->ask(Verb::join, body, after_seconds(options.start_s + answer_s),
                               fmt::format("rank 0 did not say within {} who the other ranks are", seconds_text(options.start_s + answer_s))));
    } catch (const Problem& p) {
        if (client->fail(p.code(), p.what())) throw;
        throw QuietProblem(p.code(), p.what());
    }
}

void World::State::read_peers(const std::string& welcome) {
    Unpacker in(welcome);
    size_t count = 0, host = 0;
    in(data_key, count);
    std::vector<PeerAddress> hosts(count);  // what its ranks share
    for (PeerAddress& h : hosts) in(h.host, h.host_id);
    for (int r = 0; r < launch.size; ++r) {
        in(host);
        PeerAddress peer = hosts.at(host);
        peer.rank = r;
        in(peer.ip, peer.endpoint, peer.cpus);
        peers.push_back(std::move(peer));
    }
    if (launch.local_size > 0) return;
    // The launcher did not say how many ranks this host has.
    launch.local_rank = 0;
    const std::string& here = peers[static_cast<size_t>(launch.rank)].host_id;
    for (const PeerAddress& p : peers) {
        launch.local_size += p.host_id == here;
        launch.local_rank += p.host_id == here && p.rank < launch.rank;
    }
}

std::string World::State::meet(const char* kind, const std::string& what, const std::string& value, Exit code, double deadline_s) {
    const double seconds = deadline_s > 0 ? deadline_s : options.stall_s;
    const std::string body = pack(meetings++, kind, what, value, code, seconds);
    const double limit_s = seconds + answer_s;  // the store keeps the first of them and says who is missing
    return client->ask(Verb::meet, body, after_seconds(limit_s), fmt::format("rank 0 did not answer at '{} {}' within {}", kind, what, seconds_text(limit_s)));
}

World::World() : state_(std::make_unique<State>()) {
    state_->peers.push_back({.rank = 0, .host = host_name(), .ip = "127.0.0.1"});
}

World::World(const Launch& launch, const LaunchOptions& options) : World() {
    if (launch.size == 1) return;
    State& s = *state_;
    s.launch = launch;
    s.options = options;
    s.peers.clear();
    const std::string given_ip = said_once_per_host(launch.local_rank, [&] { return options.interface.empty() ? "" : address_of_interface(options.interface); });
    s.listener = std::make_unique<Listener>(given_ip);
    StoreLink link = s.link_to_store();
    s.clock_offset_ns = link.clock_offset_ns;
    const std::string ip = !given_ip.empty() ? given_ip : launch.rank == 0 ? "127.0.0.1" : local_ip(link.socket);
    s.client = std::make_unique<StoreClient>(std::move(link), launch.rank, [&s] { s.abort_groups(); });
    s.join(ip);
}

World::~World() = default;

int World::rank() const { return state_->launch.rank; }
int World::size() const { return state_->launch.size; }
int World::local_rank() const { return state_->launch.local_rank; }
int World::local_size() const { return state_->launch.local_size; }

int World::ranks_sharing_cpus() const {
    const PeerAddress& own = state_->peers[static_cast<size_t>(rank())];
    return static_cast<int>(std::ranges::count_if(state_->peers, [&](const PeerAddress& p) { return p.host_id == own.host_id && p.cpus == own.cpus; }));
}
const std::string& World::host_of(int rank) const { return state_->peers.at(static_cast<size_t>(rank)).host; }
int64_t World::clock_offset_ns() const { return state_->clock_offset_ns; }

void World::agree(const std::string& what, const std::string& value, Exit code, double deadline_s) {
    if (!state_->alone()) state_->meet("agree", what, value, code, deadline_s);
}

std::string World::from_rank_0(const std::string& value, double deadline_s) {
    return state_->alone() ? value : state_->meet("share", "a value of rank 0", rank() == 0 ? value : "", Exit::usage, deadline_s);
}

void World::barrier(const std::string& what, double deadline_s) {
    if (!state_->alone()) state_->meet("barrier", what, "", Exit::usage, deadline_s);
}

void World::put(const std::string& key, const std::string& value) {
    TRIFOLD_ASSERT(!state_->alone());
    state_->client->tell(Verb::put, pack(key, value));
}

std::string World::take(const std::string& key, double deadline_s, int readers) {
    TRIFOLD_ASSERT(!state_->alone());
    return state_->client->ask(Verb::take, pack(key, readers), after_seconds(deadline_s), fmt::format("nobody has put '{}' within {}", key, seconds_text(deadline_s)));
}

bool World::fail(const Problem& problem) {
    if (!state_->alone()) return state_->client->fail(problem.code(), problem.what()) && !state_->has_spoken.exchange(true);
    if (!state_->own_problem) state_->own_problem = problem;
    return !state_->has_spoken.exchange(true);
}

std::optional<Problem> World::cause() const {
    if (state_->alone()) return state_->own_problem;
    const auto failure = state_->client->failure();
    return failure ? std::optional(Problem(failure->code, failure->sentence)) : std::nullopt;
}

Exit World::failed_elsewhere() const {
    const auto failure = state_->alone() ? std::nullopt : state_->client->failure();
    return failure && failure->rank != rank() ? failure->code : Exit::ok;
}

void World::finish() {
    if (!state_->alone()) state_->client->goodbye(state_->options.stall_s);
}

Group World::host_group(const std::string& name, const std::vector<int>& members, Stream& stream, int generation, Device memory) {
    return connected(*this, name, members, stream, [&](int index, int) -> std::shared_ptr<Collectives> {
        const State& s = *state_;
        NetOptions options{.job_key = s.data_key, .name = name, .generation = generation, .index = index, .connect_s = s.options.start_s};
        for (const int r : members) options.members.push_back(s.peers.at(static_cast<size_t>(r)));
        auto collectives = connect_host_collectives(*s.listener, options, s.options.stall_s);
        return memory == Device::cuda ? stage_through_host(std::move(collectives), index) : std::move(collectives);
    });
}

Group World::nccl_group(const std::string& name, const std::vector<int>& members, Stream& stream, int generation) {
    return connected(*this, name, members, stream, [&](int index, int size) {
        State& s = *state_;
        const NcclMember member{.name = name, .rank = index, .size = size, .key = fmt::format("nccl {} {} {}", name, members.front(), generation)};
        const NcclIds ids{.put = [this](const std::string& key, const std::string& value) { put(key, value); },
                          .take = [this](const std::string& key, double deadline_s, int readers) { return take(key, deadline_s, readers); }};
        std::shared_ptr<Collectives> collectives =
            nccl_collectives(member, ids, {.start_s = s.options.start_s, .stall_s = s.options.stall_s, .give_up = [this] { return cause().has_value(); }});
        const std::lock_guard lock(s.mutex);
        s.gpu_groups.push_back(collectives);
        if (s.aborted) collectives->abort();
        return collectives;
    });
}

void World::watch(double waited_s, bool over) {
    State& s = *state_;
    if (const auto failure = cause()) throw *failure;
    const std::lock_guard lock(s.mutex);
    for (const auto& group : s.gpu_groups) {
        const auto alive = group.lock();
        const std::string trouble = alive ? alive->trouble() : "";
        if (!trouble.empty()) throw Problem(Exit::fault, trouble);
    }
    constexpr int64_t waits_of_the_start = 20;  // the first steps load kernels and make connections
    const double stall_s = s.options.stall_s, limit_s = s.waits < waits_of_the_start ? 10 * stall_s : std::max(stall_s, 4 * s.longest_wait_s);
    if (over) {
        ++s.waits;
        s.longest_wait_s = std::max(s.longest_wait_s, waited_s);
    } else if (waited_s > limit_s) {
        throw Problem(Exit::fault, fmt::format("the GPU of rank {} on {} has not finished its work within {}: a kernel or the network hangs, or a rank that it waits for; "
                                               "look at what the others say, and whether `nvidia-smi` there shows healthy GPUs (--resilience.stall_s)",
                                               rank(), host_name(), seconds_text(limit_s)));
    }
}

World::Counts World::messages() const {
    if (state_->alone()) return {};
    return {state_->client->sent(), state_->server ? state_->server->received() : 0};
}

}  // namespace trifold
