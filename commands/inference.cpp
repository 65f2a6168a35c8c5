#include "commands/inference.h"

#include <fmt/format.h>
#include <omp.h>

#include "checkpoint/huggingface.h"
#include "checkpoint/load.h"

namespace trifold {

ModelConfig read_model_of(const std::string& path) {
    return is_hf_folder(path) ? read_hf_config(path) : model_of(open_checkpoint(path));
}

Inference inference_options(const std::vector<std::string>& args, std::vector<CommandFlag> flags) {
    std::string path;
    flags.push_back(checkpoint_flag(path));
    const auto parse = [&](const Config& base) {
        ParseContext context;
        context.base = base;
        context.read_model = read_model_of;
        context.flags = flags;
        return parse_config(args, context);
    };
    Inference result{parse({}), {}};
    if (path.empty() == result.config.init_from.empty())
        throw Problem(Exit::usage, "the model comes from either --checkpoint=PATH (a run or a step) or --init.from=FOLDER (Hugging Face): give one of them");
    if (!path.empty()) {
        result.checkpoint = open_checkpoint(path);
        const FoundCheckpoint& found = result.checkpoint;
        Config trained_with = config_from_json(found.state.config_json, found.path);
        trained_with.run.threads = 0;  // those of this machine
        trained_with.run.device = Device::automatic;
        trained_with.run.comm = Comm::automatic;
        trained_with.run.attention = AttentionProvider::automatic;
        trained_with.run.deterministic = RunConfig().deterministic;
        trained_with.mesh = {};  // one process, whatever it was trained on
        result.config = parse(trained_with);
        resolve(result.config);
        const std::vector<std::string> changed = differences(model_of(found), result.config.model);
        if (!changed.empty()) throw Problem(Exit::usage, fmt::format("{} is a checkpoint of another model: {}", found.path, changed[0]));
    } else {
        resolve(result.config);
    }
    omp_set_num_threads(static_cast<int>(result.config.run.threads));
    return result;
}

InferenceModel::InferenceModel(const Inference& options, const Reserve& reserve)
    : config_(options.config),
      table_(config_.model),
      engine_(config_.debug.streams, prepare_device(config_.run)),
      compute_(&engine_.add("compute", StreamKind::compute)) {
    Arena planned(config_.run.device);
    plan(reserve, planned);
    arena_ = std::make_unique<Arena>(planned, "this model");
    plan(reserve, *arena_);
    load(options.checkpoint);
}

void InferenceModel::plan(const Reserve& reserve, Arena& arena) {
    const int64_t n = table_.flat_elems();
    const DType type = config_.train.dtype;
    master_ = arena.reserve(MemoryClass::params, DType::f32, n);
    weight_ = type == DType::f32 ? master_ : arena.reserve(MemoryClass::params, type, n);
    reserve(table_, weight_, arena);
}

void InferenceModel::load(const FoundCheckpoint& checkpoint) {
    std::vector<float> staged(config_.run.device == Device::cuda ? static_cast<size_t>(master_.elems) : 0);
    float* master = staged.empty() ? master_.as<float>() : staged.data();
    if (!checkpoint.found()) {
        import_hf(config_.init_from, config_.model, whole_state(table_, master));
    } else {
        load_state(checkpoint, config_.model, whole_state(table_, master), {.threads = static_cast<int>(config_.run.threads)});
    }
    if (!staged.empty()) copy(*compute_, {.x = Tensor{master, DType::f32, master_.elems}, .y = master_});
    if (weight_.data != master_.data) add_into(*compute_, {.x = master_, .y = weight_, .accumulate = Accumulate::overwrite});
    engine_.wait_all();
}

}  // namespace trifold
