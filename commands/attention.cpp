#include "commands/attention.h"

#include <fmt/format.h>

#include <set>

#include "base/refuse.h"
#include "kernels/attention_trial.h"
#include "kernels/cuda/cudnn_attention.h"

namespace trifold {
namespace {

constexpr double patience_s = 600;  // of the others, while rank 0 tries

std::vector<AttentionCase> cases_of(const Config& c) {
    std::vector<AttentionCase> cases;
    for (const auto& [window, layers] : c.model.layers_by_window())
        cases.push_back({.B = c.train.micro_batch, .T = c.train.seq, .H = c.model.heads / c.mesh.tp, .K = c.model.kv_heads / c.mesh.tp, .D = c.model.head_dim,
                         .window = window, .layers = layers});
    return cases;
}

// What keeps cuDNN out on any host, told by the first rank of each; known to rank 0.
std::string problem_anywhere(World& world) {
    const std::string own = cuda::cudnn_problem();
    if (world.size() == 1) return own;
    const auto key = [](int rank) { return fmt::format("cudnn of rank {}", rank); };
    std::set<std::string> hosts;
    std::string first;
    for (int r = 0; r < world.size(); ++r) {
        if (!hosts.insert(world.host_of(r)).second) continue;
        if (r == world.rank()) world.put(key(r), own);
        if (world.rank() != 0) continue;
        const std::string problem = world.take(key(r), patience_s);
        if (first.empty() && !problem.empty()) first = fmt::format("{}: {}", world.host_of(r), problem);
    }
    return first;
}

}  // namespace

std::string settle_attention(Config& c, World& world) {
    if (c.run.attention == AttentionProvider::own) return "";
    if (c.run.attention == AttentionProvider::cudnn) {
        const std::string problem = cuda::cudnn_problem();
        if (!problem.empty()) refuse(Exit::usage, "run.attention = cudnn, but {}: use --run.attention=own", problem);
        return "";
    }
    const std::string problem = problem_anywhere(world);
    AttentionVerdict verdict{AttentionProvider::own, problem};
    if (world.rank() == 0 && problem.empty()) {
        StreamEngine::Watch watch;
        if (world.size() > 1) watch = [&world](double waited_s, bool over) { world.watch(waited_s, over); };
        verdict = try_attention(cases_of(c), watch);
    }
    const std::string decided = world.from_rank_0((verdict.provider == AttentionProvider::cudnn ? "+" : "-") + verdict.reason, patience_s);
    c.run.attention = decided.starts_with('+') ? AttentionProvider::cudnn : AttentionProvider::own;
    c.origin["run.attention"] = "derived";
    return decided.substr(1);
}

}  // namespace trifold
