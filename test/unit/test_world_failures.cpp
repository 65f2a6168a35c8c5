// test/unit/test_world_failures.cpp   Jobs that do not start, ranks that fail and ranks that die; one rank speaks.
#include "test/catch.h"

#include <atomic>
#include <csignal>
#include <string>
#include <thread>
#include <vector>

#include "parallel/board.h"
#include "parallel/identity.h"
#include "parallel/store.h"
#include "test/unit/outcomes.h"
#include "test/unit/problems.h"

using namespace trifold;

TEST_CASE("different builds do not start", "[world]") {
    Sayings said(4);
    run_threads(launches_on_this_host(4), [&](const Launch& launch) {
        LaunchOptions options = patient;
        if (launch.rank == 2) options.build = "0.1.0-other";
        said.add(launch.rank, outcome_of([&] { World world(launch, options); }));
    });
    CHECK(said.with("2: the ranks do not run the same program: rank 2 has the build '0.1.0-other', the others 'test'") == 4);
    CHECK(said.with("quiet") == 3);
    CHECK_FALSE(build_id().empty());
    CHECK(build_id() == build_id());
}

TEST_CASE("ranks that never came are named", "[world]") {
    Sayings said(4);
    auto launches = launches_on_this_host(4);
    launches.resize(2);
    LaunchOptions options = patient;
    options.start_s = 0.3;
    run_threads(launches, [&](const Launch& launch) { said.add(launch.rank, outcome_of([&] { World world(launch, options); })); });
    CHECK(said.with("2: ranks 2 and 3 of 4 did not come within 0.3 s") == 2);
    CHECK(said.with("quiet") == 1);
}

TEST_CASE("a store that nobody keeps, and one of another job", "[world]") {
    LaunchOptions options = patient;
    options.start_s = 0.2;
    auto launches = launches_on_this_host(2);
    const Launch alone = launches[1];
    SECTION("nobody listens") {
        launches[0].store_socket.reset();
        launches.clear();
        CHECK(outcome_of([&] { World world(alone, options); }).starts_with("2: rank 0's store at 127.0.0.1:"));  // rank 0 cannot say it
        Launch third = alone;
        third.rank = 2;
        third.size = 3;
        CHECK(has(outcome_of([&] { World world(third, options); }), "quiet 2: rank 0's store at 127.0.0.1:"));
        Launch other_host = third;
        other_host.local_rank = 0;
        const std::string said = outcome_of([&] { World world(other_host, options); });
        CHECK(has(said, "could not be reached within 0.2 s (Connection refused)"));
        CHECK_FALSE(said.starts_with("quiet"));
    }
    SECTION("another job's") {
        const std::string said = outcome_of([&] {
            std::thread keeper([&] { outcome_of([&] { World world(launches[0], options); }); });
            Launch stranger = alone;
            stranger.job_key = 1;
            const std::string refused = outcome_of([&] { World world(stranger, options); });
            keeper.join();
            throw Problem(Exit::usage, refused);
        });
        CHECK(has(said, "is not the store of this job"));
    }
}

TEST_CASE("two processes with one rank, and a rank of another size", "[world]") {
    Sayings said(3);
    auto launches = launches_on_this_host(3);
    SECTION("twice rank 1") {
        launches[2].rank = 1;
        run_threads(launches, [&](const Launch& launch) { said.add(launch.rank, outcome_of([&] { World world(launch, patient); })); });
        CHECK(said.with("say that they are rank 1 of 3") == 2);
    }
    SECTION("rank 2 of 4") {
        launches[2].size = 4;
        run_threads(launches, [&](const Launch& launch) { said.add(launch.rank, outcome_of([&] { World world(launch, patient); })); });
        CHECK(said.with("says that it is rank 2 of 4, but this job has 3 ranks") == 3);
    }
}

TEST_CASE("a failure ends what the others wait for", "[world]") {
    Sayings said(5);
    std::string end_of_operation;
    std::atomic<bool> ended = false;
    LaunchOptions options = patient;
    options.stall_s = 10;
    run_threads(launches_on_this_host(5), [&](const Launch& launch) {
        World world(launch, options);
        StreamEngine engine;
        Group group;
        if (launch.rank >= 3) group = world.host_group("tp", {3, 4}, engine.add("tp", StreamKind::communication));
        float x = 0;
        said.add(launch.rank, last_words(world, [&] {
                     if (launch.rank == 0) world.barrier("never");
                     if (launch.rank == 1) world.take("never", 30);
                     if (launch.rank == 2) world.agree("never", "x");
                     if (launch.rank == 3) {
                         end_of_operation = outcome_of([&] { engine.wait(group.all_reduce(Tensor{&x, DType::f32, 1})); });
                         ended = true, ended.notify_all();
                         throw Problem(Exit::fault, end_of_operation);
                     }
                     throw Problem(Exit::data, "tokens.bin ends at byte 7");
                 }));
        if (launch.rank == 4) ended.wait(false);  // its group lives as long as that
        require(world.failed_elsewhere() == (launch.rank == 4 ? Exit::ok : Exit::data), "exit code");
        require(!world.fail(Problem(Exit::data, "again")), "one speaks once");
        const int other = launch.rank == 0 ? 1 : 0;
        const std::string late = outcome_of([&] { world.host_group("late", {launch.rank, other}, engine.add("late", StreamKind::communication)); });
        require(late == "3: tokens.bin ends at byte 7", "a group after the failure: " + late);
    });
    CHECK(said.with("3: tokens.bin ends at byte 7") == 5);
    CHECK(said.with("speaks") == 1);
    CHECK(has(said.all()[4], "speaks"));
    CHECK(end_of_operation.starts_with("75: "));
    CHECK(end_of_operation.find("nothing has moved") == std::string::npos);  // it did not wait for its own deadline
}

TEST_CASE("a rank that dies is named, not the rank that noticed", "[world]") {
    const auto said = run_processes(4, patient, [](World& world) {
        StreamEngine engine;
        const Group group = world.host_group("dp", {0, 1, 2, 3}, engine.add("dp", StreamKind::communication));
        world.barrier("connected");
        if (world.rank() == 2) ::raise(SIGKILL);
        float x = 1;
        // Rank 1 hears it from the store, the others first from the group.
        return last_words(world, [&] {
            if (world.rank() == 1) world.take("never", 30);
            engine.wait(group.all_reduce(Tensor{&x, DType::f32, 1}));
        });
    });
    CHECK(said[2] == "signal 9");
    CHECK(count(said, "75: rank 2 on " + host_name() + " ended without a word") == 3);
    CHECK(count(said, "speaks") == 1);
}

TEST_CASE("when rank 0 dies, rank 1 speaks", "[world]") {
    const auto said = run_processes(4, patient, [](World& world) {
        return last_words(world, [&] {
            world.barrier("connected");
            if (world.rank() == 0) ::raise(SIGKILL);
            world.barrier("never");
        });
    });
    CHECK(said[0] == "signal 9");
    CHECK(count(said, "75: rank 0, which keeps the store of the job, ended without a word") == 3);
    CHECK(has(said[1], "speaks"));
    CHECK(count(said, "speaks") == 1);
}

TEST_CASE("a rank that dies during the rendezvous is named", "[world]") {
    Sayings said(3);
    auto launches = launches_on_this_host(4);
    launches.pop_back();  // so that it does not end
    run_threads(launches, [&](const Launch& launch) {
        if (launch.rank < 2) return said.add(launch.rank, outcome_of([&] { World world(launch, patient); }));
        const StoreLink link = connect_to_store(parse_host_ports(launch.store, ""), launch.job_key, "another host", 30);
        const Message join = make_message(Verb::join, 1, pack(2, 4, "test", "node-9", "", "", "", ""));
        send_all(link.socket.get(), header_of(join) + *join.body, after_seconds(30));
    });
    CHECK(said.with("75: rank 2 on node-9 ended during the rendezvous") == 2);
    CHECK(said.with("quiet") == 1);
}

TEST_CASE("a fault that no death explains is the reporter's", "[world]") {
    Sayings said(3);
    run_threads(launches_on_this_host(3), [&](const Launch& launch) {
        World world(launch, patient);
        said.add(launch.rank, last_words(world, [&] {
                     if (launch.rank == 1) throw Problem(Exit::fault, "the disk is gone");
                     world.barrier("never");
                 }));
    });
    CHECK(said.with("75: the disk is gone") == 3);
    CHECK(said.with("speaks") == 1);
    CHECK(has(said.all()[1], "speaks"));
}

TEST_CASE("a cause that explains itself goes before its echoes", "[world]") {
    Sayings said(3);
    std::atomic<bool> echoed = false;
    run_threads(launches_on_this_host(3), [&](const Launch& launch) {
        World world(launch, patient);
        said.add(launch.rank, last_words(world, [&] {
                     if (launch.rank == 1) throw Problem(Exit::fault, "rank 2 closed the connection");
                     try {
                         world.barrier("never");
                     } catch (const Problem&) {
                         echoed = true;
                     }
                     if (launch.rank == 2) throw Problem(Exit::data, "the file is damaged");
                     throw Problem(Exit::fault, "stopped waiting");
                 }));
    });
    CHECK(echoed);
    CHECK(said.with("3: the file is damaged") == 3);
    CHECK(has(said.all()[2], "speaks"));
    CHECK(said.with("speaks") == 1);
}

TEST_CASE("a death explains the fault that another rank reported before; who speaks hears first", "[world]") {
    Board board(3, 30, 0);
    for (int r = 0; r < 3; ++r) {
        REQUIRE(board.join(make_message(Verb::join, 1, pack(r, 3, "build", "node", "", "", "", "")), "") == r);
    }
    board.outgoing();
    const auto fault = [](uint64_t id) { return make_message(Verb::fail, id, pack(Failure{Exit::fault, "rank 2 closed the connection"})); };
    const auto answers = [&] {  // of the questions whether to speak
        std::vector<std::pair<int, Failure>> found;
        for (const auto& [rank, message] : board.outgoing())
            if (message.verb == Verb::answer && !message.body->empty()) found.emplace_back(rank, unpack_failure(*message.body));
        return found;
    };
    board.handle(1, fault(7));
    CHECK(answers().empty());  // it may be an echo
    board.lost(2);
    const auto first = answers();
    REQUIRE(first.size() == 1);
    CHECK(first[0].first == 1);
    CHECK(first[0].second.speaker == 1);
    CHECK(first[0].second.rank == 2);
    CHECK(has(first[0].second.sentence, "rank 2 on node ended without a word"));
    board.handle(0, fault(8));
    CHECK(answers().empty());  // rank 1 is still speaking
    board.handle(1, make_message(Verb::goodbye, 9, pack(0.0)));
    const auto later = answers();  // the goodbye's own has no body
    REQUIRE(later.size() == 1);
    CHECK(later[0].first == 0);
    CHECK(later[0].second.speaker == 1);
}
