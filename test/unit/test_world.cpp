// test/unit/test_world.cpp   Rendezvous, values, agreement and groups of a job.
#include "test/catch.h"

#include <sched.h>

#include <array>
#include <atomic>
#include <string>
#include <thread>
#include <vector>

#include "parallel/identity.h"
#include "parallel/mesh.h"
#include "test/unit/outcomes.h"
#include "test/unit/problems.h"

using namespace trifold;

TEST_CASE("ranks meet", "[world]") {
    for (const int ranks : {1, 2, 8, 64}) {
        std::atomic<int> met = 0;
        std::atomic<int64_t> sent = 0, received = 0;
        std::atomic<bool> counted = false;
        run_ranks(ranks, [&](World& world) {
            const World::Counts counts = world.messages();
            sent += counts.sent;
            received += counts.received;
            if (world.rank() == 0) counted = true, counted.notify_all();
            counted.wait(false);  // before anybody sends more
            require(world.size() == ranks, "size");
            require(world.local_size() == ranks && world.local_rank() == world.rank(), "local rank");
            require(world.clock_offset_ns() == 0, "one host has one clock");
            for (int r = 0; r < ranks; ++r) require(world.host_of(r) == host_name(), "host");
            require(world.failed_elsewhere() == Exit::ok && !world.cause(), "no failure");
            ++met;
        });
        CHECK(met == ranks);
        // A ping and the join from each rank, and no ping from rank 0.
        CHECK(sent == (ranks == 1 ? 0 : 2 * ranks - 1));
        CHECK(received == sent);
    }
}

TEST_CASE("messages grow with the ranks, not with their pairs or groups", "[world]") {
    for (const int ranks : {8, 64}) {
        std::atomic<int64_t> sent = 0;
        run_ranks(ranks, [&](World& world) {
            world.agree("config", "same");
            world.barrier("before the first step");
            require(world.from_rank_0(world.rank() == 0 ? "seed 7" : "ignored") == "seed 7", "rank 0's value");
            sent += world.messages().sent;
        });
        CHECK(sent == 5 * ranks - 1);
    }
}

TEST_CASE("ranks that the launcher bound to other CPUs do not share them", "[world]") {
    cpu_set_t all;
    REQUIRE(::sched_getaffinity(0, sizeof all, &all) == 0);
    std::vector<int> cpus;
    for (int c = 0; c < CPU_SETSIZE; ++c)
        if (CPU_ISSET(c, &all)) cpus.push_back(c);
    const int sets = cpus.size() > 1 ? 2 : 1;
    Sayings said(4);
    run_threads(launches_on_this_host(4), [&](const Launch& launch) {
        cpu_set_t own;
        CPU_ZERO(&own);
        CPU_SET(cpus[static_cast<size_t>(launch.rank % sets)], &own);
        ::sched_setaffinity(0, sizeof own, &own);  // of this thread
        World world(launch, patient);
        said.add(launch.rank, std::to_string(world.ranks_sharing_cpus()));
        world.finish();
    });
    CHECK(said.with(std::to_string(4 / sets)) == 4);
    CHECK(World().ranks_sharing_cpus() == 1);
}

TEST_CASE("a local rank that the launcher does not say is counted", "[world]") {
    auto launches = launches_on_this_host(3);
    for (Launch& launch : launches) launch.local_rank = launch.local_size = 0;
    Sayings said(3);
    run_threads(launches, [&](const Launch& launch) {
        World world(launch, patient);
        said.add(world.rank(), std::to_string(world.local_rank()) + "/" + std::to_string(world.local_size()));
        world.finish();
    });
    CHECK(said.all() == std::vector<std::string>{"0/3", "1/3", "2/3"});
}

TEST_CASE("every rank hears who disagrees", "[world]") {
    Sayings said(8);
    run_ranks(8, [&](World& world) {
        const std::string value = world.rank() == 2 || world.rank() >= 5 ? "lr=0.1" : "lr=0.2";
        said.add(world.rank(), outcome_of([&] { world.agree("the configuration", world.rank() == 3 ? "lr=0.3" : value, Exit::data); }));
        world.agree("afterwards", "all go on");
    });
    const std::string expected = "3: the ranks do not agree: rank 3 has the configuration 'lr=0.3', ranks 0, 1 and 4 'lr=0.2', most 'lr=0.1'";
    for (const std::string& s : said.all()) CHECK(has(s, expected));
}

TEST_CASE("ranks that do different things are named", "[world]") {
    Sayings said(3);
    run_ranks(3, [&](World& world) {
        said.add(world.rank(), outcome_of([&] {
                     if (world.rank() == 1) world.barrier("end");
                     else world.agree("data", "x");
                 }));
    });
    CHECK(said.with("70: the ranks do not do the same: rank 1 has come to 'barrier end', the others 'agree data'") == 3);
}

TEST_CASE("ranks that do not come to a barrier are named", "[world]") {
    Sayings said(4);
    LaunchOptions options = patient;
    options.stall_s = 1;
    run_threads(launches_on_this_host(4), [&](const Launch& launch) {
        World world(launch, options);
        said.add(launch.rank, last_words(world, [&] {
                     if (launch.rank < 2) world.barrier("save");
                     world.take("never", 30);
                 }));
    });
    CHECK(said.with("75: ranks 2 and 3 did not come to 'barrier save' within 1 s") == 4);
    CHECK(said.with("speaks") == 1);
}

TEST_CASE("values go from rank to rank", "[world]") {
    run_ranks(4, [](World& world) {
        const auto key = [](int from, int thread) { return "key " + std::to_string(from) + "." + std::to_string(thread); };
        // Two threads of each rank at once: each puts a value for the next rank and takes that of the rank before.
        std::array<std::thread, 2> threads;
        std::array<std::string, 2> got;
        for (int t = 0; t < 2; ++t)
            threads[static_cast<size_t>(t)] = std::thread([&, t] {
                const int before = (world.rank() + 3) % 4;
                for (int i = 0; i < 20; ++i) {
                    world.put(key(world.rank(), t), std::string(static_cast<size_t>(i), 'x') + std::to_string(world.rank()));
                    got[static_cast<size_t>(t)] = world.take(key(before, t), 30);
                    if (got[static_cast<size_t>(t)] != std::string(static_cast<size_t>(i), 'x') + std::to_string(before)) return;
                    world.put("done " + key(before, t), "");
                    world.take("done " + key(world.rank(), t), 30);
                }
                got[static_cast<size_t>(t)] = "all";
            });
        for (std::thread& t : threads) t.join();
        require(got[0] == "all" && got[1] == "all", "values in order: " + got[0] + " " + got[1]);
    });
}

TEST_CASE("a value is for all its readers, then it is gone", "[world]") {
    const std::string large(3 << 20, 'v');
    run_ranks(3, [&](World& world) {
        if (world.rank() == 1) world.put("unique id", large);
        require(world.take("unique id", 30, 3) == large, "the value");
        world.barrier("everybody has it");
        const std::string late = outcome_of([&] { world.take("unique id", 0.05); });
        require(late == "75: nobody has put 'unique id' within 0.05 s", late);
        world.barrier("nobody waits any more");
        // Who stopped waiting does not get what comes later.
        if (world.rank() == 2) world.put("unique id", "new");
        if (world.rank() == 2) require(world.take("unique id", 30) == "new", "the later value");
    });
}

TEST_CASE("alone, everything works without sockets", "[world]") {
    World world;
    CHECK(world.size() == 1);
    CHECK(world.host_of(0) == host_name());
    world.agree("config", "x");
    world.barrier("start");
    CHECK(world.from_rank_0("seed") == "seed");
    StreamEngine engine;
    CHECK(world.host_group("dp", {0}, engine.add("dp", StreamKind::communication)).alone());
    CHECK(world.messages().sent == 0);
    CHECK(world.fail(Problem(Exit::data, "no such file")));
    CHECK_FALSE(world.fail(Problem(Exit::data, "no such file")));
    CHECK(world.cause()->what() == std::string("no such file"));
    CHECK(world.failed_elsewhere() == Exit::ok);
    world.finish();
}

TEST_CASE("groups along the axes of a mesh, on streams of their own", "[world]") {
    const Mesh mesh{.tp = 2, .dp = 2, .pp = 2};
    run_ranks(8, [&](World& world) {
        StreamEngine engine;
        std::vector<float> sums(3, static_cast<float>(1 << world.rank()));
        const int64_t before = world.messages().sent;
        {
            std::vector<Group> groups;
            for (const Axis axis : {Axis::tp, Axis::dp, Axis::pp})
                groups.push_back(world.host_group(name_of(axis), mesh.members(axis, world.rank()), engine.add(name_of(axis), StreamKind::communication)));
            for (size_t i = 0; i < groups.size(); ++i) engine.wait(groups[i].all_reduce(Tensor{&sums[i], DType::f32, 1}));
        }
        const std::array axes{Axis::tp, Axis::dp, Axis::pp};
        for (size_t i = 0; i < axes.size(); ++i) {
            float expected = 0;
            for (const int r : mesh.members(axes[i], world.rank())) expected += static_cast<float>(1 << r);
            require(sums[i] == expected, name_of(axes[i]));
        }
        require(world.messages().sent == before, "groups cost no messages");
    });
}

TEST_CASE("ranks leave in any order", "[world]") {
    for (const int last : {0, 1, 2}) {
        const auto said = run_processes(3, patient, [&](World& world) {
            // The last one goes when the pipes of the others are closed by their ends; rank 0 keeps the store until then.
            if (world.rank() != last) world.finish();
            if (world.rank() == last) {
                world.put("still here", "yes");
                world.take("still here", 30);
                world.finish();
            }
            return std::string("left");
        });
        CHECK(count(said, "left") == 3);
    }
}

TEST_CASE("a rank that does not finish is named", "[world]") {
    LaunchOptions options = patient;
    options.stall_s = 0.3;
    Sayings said(3);
    std::atomic<bool> over = false;
    run_threads(launches_on_this_host(3), [&](const Launch& launch) {
        World world(launch, options);
        if (launch.rank == 1) over.wait(false);
        said.add(launch.rank, outcome_of([&] { world.finish(); }));
        if (launch.rank == 0) over = true, over.notify_all();
    });
    CHECK(has(said.all()[0], "75: rank 1 did not finish within 0.3 s after rank 0"));
}
