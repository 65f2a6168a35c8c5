#include "commands/job.h"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <new>
#include <thread>
#include <utility>

#include "commands/inference.h"
#include "model/options.h"
#include "parallel/launch.h"

namespace trifold {
namespace {

// Launchers end all ranks as soon as one has left. Without a store nobody can be asked whether the one that speaks has spoken.
void let_others_speak() { std::this_thread::sleep_for(std::chrono::milliseconds(500)); }

// How to meet the other ranks, out of arguments that are wrong elsewhere: without files too when these are what is wrong.
Config options_to_meet(const std::vector<std::string>& args) {
    for (const std::vector<std::string>& kinds : {std::vector<std::string>{"--launch.", "--resilience.", "--config"}, {"--launch."}}) {
        std::vector<std::string> kept;
        for (size_t i = 0; i < args.size(); ++i) {
            if (std::ranges::none_of(kinds, [&](const std::string& k) { return args[i].starts_with(k); })) continue;
            kept.push_back(args[i]);
            const bool value_follows = args[i].find('=') == std::string::npos && i + 1 < args.size() && !args[i + 1].starts_with("--");
            if (value_follows) kept.push_back(args[++i]);
        }
        try {
            return parse_config(kept);
        } catch (const Problem&) {
            continue;
        }
    }
    return {};
}

}  // namespace

Problem caught() {
    try {
        throw;
    } catch (const Problem& p) {
        return p;
    } catch (const std::bad_alloc&) {
        return {Exit::fault, "the machine has no memory left; use a smaller model or --train.micro_batch"};
    } catch (const std::exception& e) {
        return {Exit::bug, std::string("internal error: ") + e.what() + "\nThis is a bug in trifold; please report it with the command line."};
    }
}

void refuse_launcher(const std::string& command) {
    const std::optional<Launch> launcher = read_launcher();
    if (!launcher || launcher->size == 1) return;
    const std::string sentence = fmt::format("trifold {} works in one process, but {} has started {}: start it by itself", command, launcher->launcher, launcher->size);
    if (launcher->rank == 0) throw Problem(Exit::usage, sentence);
    let_others_speak();
    throw QuietProblem(Exit::usage, sentence);
}

Job::Job(const std::vector<std::string>& args) {
    try {
        ParseContext context;
        context.read_model = read_model_of;
        parsed_ = parse_config(args, context);
    } catch (const Problem& p) {
        refusal_ = p;
        parsed_ = options_to_meet(args);
    }
}

int Job::run(const std::function<Exit(const Config&, World&)>& body) {
    try {
        const LaunchOptions options{.store = parsed_.launch.store, .interface = parsed_.launch.interface, .start_s = parsed_.resilience.start_s,
                                    .stall_s = parsed_.resilience.stall_s};
        const Launch launch = detect_launch(options);
        if (launch.size > 1)
            world_.emplace(launch, options);
        else
            world_.emplace();
    } catch (const QuietProblem& p) {
        let_others_speak();
        return static_cast<int>(p.code());
    } catch (const Problem& p) {
        std::fprintf(stderr, "trifold: %s\n", refusal_ ? refusal_->what() : p.what());
        return static_cast<int>(refusal_ ? refusal_->code() : p.code());
    }
    try {
        if (refusal_) throw *refusal_;
        return static_cast<int>(body(parsed_, *world_));
    } catch (const std::exception&) {
        fail();
        return static_cast<int>(world_->cause()->code());
    }
}

void Job::fail() {
    if (std::exchange(others_know_, true)) return;
    if (world_->fail(caught())) std::fprintf(stderr, "trifold: %s\n", world_->cause()->what());
}

}  // namespace trifold
