#include "commands/train_config.h"

#include <fmt/ranges.h>
#include <omp.h>

#include "base/refuse.h"
#include "kernels/cuda/runtime.h"
#include "model/options.h"
#include "model/trainer.h"

namespace trifold {
namespace {

// Every rank compares its options with those of rank 0; nobody goes on before all have. Ranks may have different numbers of CPUs, and
// hosts different interfaces.
void check_same_options(const Config& config, World& world) {
    Config own = config;
    own.run.threads = 1;
    own.launch = {};
    const std::string json = to_json(own), json_of_rank_0 = world.from_rank_0(json);
    if (json != json_of_rank_0)
        refuse(Exit::usage, "rank 0 and rank {} do not have the same options ({}): start all ranks with the same command, on the same files",
               world.rank(), fmt::join(differences(config_from_json(json_of_rank_0, "rank 0"), own), "; "));
    world.barrier("the options");
}

}  // namespace

Config train_config(const Config& parsed, World& world) {
    Config config = parsed;
    if (world.size() > 1 && config.run.device != Device::cpu) cuda::prefer(world.local_rank());
    resolve(config, world.size(), world.ranks_sharing_cpus());
    const std::string dir_of_rank_0 = world.from_rank_0(config.run.dir);
    if (config.origin.at("run.dir") == "derived") {  // from the time, and ranks may start in different seconds
        const bool own_checkpoints = config.origin.at("checkpoint.dir") == "derived";
        config.run.dir = dir_of_rank_0;
        if (own_checkpoints) config.checkpoint.dir = config.run.dir + "/checkpoints";
    }
    check_same_options(config, world);
    if (!config.origin.contains("train.steps")) throw Problem(Exit::usage, "train.steps is not given: --train.steps=N says how long the run is");
    prepare_device(config.run, world.local_rank());  // before anything is written
    omp_set_num_threads(static_cast<int>(config.run.threads));
    return config;
}

}  // namespace trifold
