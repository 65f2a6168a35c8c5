// test/drills/ranks.cpp   A job without a model, for run_launch.sh: ranks meet, form tensor and data groups, sum something step by step, and
// one of them may come to grief.
//   drill_ranks [steps=N] [store=HOST:PORT] [interface=NAME] [start_s=S] [stall_s=S] [trouble=kill|exit|data|hang] [rank=R] [step=S]
#include <fmt/format.h>
#include <unistd.h>

#include <chrono>
#include <csignal>
#include <cstdio>
#include <map>
#include <string>
#include <thread>

#include "kernels/stream.h"
#include "parallel/mesh.h"
#include "parallel/signals.h"
#include "parallel/world.h"

using namespace trifold;

namespace {

using Arguments = std::map<std::string, std::string>;

void print(const std::string& line) {
    std::fprintf(stderr, "%s\n", line.c_str());
    std::fflush(stderr);
}

void come_to_grief(const std::string& trouble) {
    if (trouble == "kill") ::raise(SIGKILL);
    if (trouble == "exit") ::_exit(70);
    if (trouble == "data") throw Problem(Exit::data, "tokens.bin ends at byte 7");
    if (trouble == "hang") std::this_thread::sleep_for(std::chrono::hours(1));
}

void work(World& world, Arguments& arguments) {
    const int tp = world.size() % 2 == 0 ? 2 : 1;
    const Mesh mesh{.tp = tp, .dp = world.size() / tp};
    StreamEngine engine;
    const Group tensor = world.host_group("tp", mesh.members(Axis::tp, world.rank()), engine.add("tp", StreamKind::communication));
    const Group data = world.host_group("dp", mesh.members(Axis::dp, world.rank()), engine.add("dp", StreamKind::communication));
    world.agree("the number of steps", arguments["steps"]);
    const int steps = std::stoi(arguments["steps"]);
    for (int step = 0; step < steps; ++step) {
        if (arguments["rank"] == std::to_string(world.rank()) && arguments["step"] == std::to_string(step)) come_to_grief(arguments["trouble"]);
        float x = static_cast<float>(world.rank() + step), expected = 0;
        for (int r = 0; r < world.size(); ++r) expected += static_cast<float>(r + step);
        if (!tensor.alone()) engine.wait(tensor.all_reduce({&x, DType::f32, 1}));
        if (!data.alone()) engine.wait(data.all_reduce({&x, DType::f32, 1}));
        if (x != expected) throw Problem(Exit::bug, fmt::format("step {}: the sum is {}, but should be {}", step, x, expected));
        std::this_thread::sleep_for(std::chrono::milliseconds(10));
    }
}

int run(Arguments& arguments) {
    const LaunchOptions options{.store = arguments["store"], .interface = arguments["interface"], .start_s = std::stod(arguments["start_s"]), .stall_s = std::stod(arguments["stall_s"])};
    World world(detect_launch(options), options);
    try {
        work(world, arguments);
        world.finish();
        if (world.rank() == 0) print(fmt::format("{} ranks of {} on {} did {} steps", world.size(), world.local_size(), world.host_of(0), arguments["steps"]));
        return 0;
    } catch (const Problem& p) {
        if (world.fail(p)) print(fmt::format("rank {} says: {}", world.rank(), world.cause()->what()));
        return static_cast<int>(world.cause()->code());
    }
}

}  // namespace

int main(int argc, char** argv) {
    Arguments arguments{{"steps", "20"}, {"start_s", "30"}, {"stall_s", "30"}};
    for (int i = 1; i < argc; ++i) {
        const std::string text = argv[i];
        const size_t equals = text.find('=');
        arguments[text.substr(0, equals)] = text.substr(equals + 1);
    }
    const SignalHandlers handlers;  // a launcher that ends the job asks first
    try {
        return run(arguments);
    } catch (const QuietProblem& p) {
        std::this_thread::sleep_for(std::chrono::milliseconds(300));  // launchers end the job when the first rank leaves: let the other speak
        return static_cast<int>(p.code());
    } catch (const Problem& p) {
        print(fmt::format("a rank says: {}", p.what()));
        return static_cast<int>(p.code());
    }
}
