#include "commands/attention.h"

#include <fmt/format.h>

#include "base/refuse.h"
#include "checkpoint/manifest.h"
#include "checkpoint/store.h"
#include "kernels/attention_trial.h"
#include "kernels/cuda/cudnn_attention.h"
#include "model/options.h"

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

// What the newest checkpoint was trained with; automatic where there is none, or none of a GPU. Whether it is whole is found out when it is loaded: what
// is older is of the same run.
AttentionLibrary library_before(const Config& c) {
    if (c.checkpoint.resume == "none") return AttentionLibrary::automatic;
    const std::vector<ListedCheckpoint> own = list_checkpoints(c.checkpoint.dir).complete;
    if (own.empty() && c.checkpoint.resume == "auto") return AttentionLibrary::automatic;
    const std::string path = own.empty() ? c.checkpoint.resume : own.front().path;
    try {
        const Config before = config_from_json(read_manifest(path).state.config_json, path);
        return before.run.device == Device::cuda ? before.run.attention : AttentionLibrary::automatic;
    } catch (const Problem&) {
        return AttentionLibrary::automatic;  // said when it is loaded
    }
}

AttentionVerdict decide(const Config& c) {
    const AttentionLibrary before = library_before(c);
    const std::string problem = cuda::cudnn_problem();
    if (before == AttentionLibrary::cudnn && !problem.empty()) return {AttentionLibrary::own, "the checkpoint was trained with cuDNN's, but " + problem};
    if (before != AttentionLibrary::automatic) return {before, "as in the checkpoint"};
    StreamEngine engine(StreamMode::normal, Device::cuda);
    return try_attention(engine.add("compute", StreamKind::compute), cases_of(c), c.run.deterministic);
}

}  // namespace

std::string settle_attention(Config& c, World& world) {
    const std::string problem = cuda::cudnn_problem();
    if (c.run.attention == AttentionLibrary::cudnn && !problem.empty())
        refuse(Exit::usage, "run.attention = cudnn, but {}: use --run.attention=own", problem);
    if (c.run.attention != AttentionLibrary::automatic) return "";
    std::string decided;
    if (world.rank() == 0) {
        const AttentionVerdict verdict = decide(c);
        decided = (verdict.library == AttentionLibrary::cudnn ? "+" : "-") + verdict.reason;
    }
    decided = world.from_rank_0(decided, patience_s);
    c.run.attention = decided.starts_with('+') ? AttentionLibrary::cudnn : AttentionLibrary::own;
    c.origin["run.attention"] = "derived";
    return decided.substr(1);
}

}  // namespace trifold
