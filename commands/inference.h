// commands/inference.h   A trained model without optimizer: what `eval` and `sample` work with.
#pragma once
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "checkpoint/load.h"
#include "kernels/arena.h"
#include "model/options.h"
#include "model/parameters.h"
#include "model/trainer.h"

namespace trifold {

// Reads the model of --init.from: a Hugging Face folder or a checkpoint of ours.
ModelConfig read_model_of(const std::string& path);

inline CommandFlag checkpoint_flag(std::string& path) {
    return {"checkpoint", "PATH", "a step, a folder of checkpoints, or a run directory (its newest verified one)", &path};
}

// The resolved options of a command whose model comes from --checkpoint (a step, a checkpoint folder or a run) or from
// --init.from. With a checkpoint its configuration is the base that files and flags change; the model itself cannot be changed.
struct Inference {
    Config config;
    FoundCheckpoint checkpoint;  // verified; empty when --init.from names the model
};
Inference inference_options(const std::vector<std::string>& args, std::vector<CommandFlag> flags);

// Weights in the type of train.dtype plus whatever `reserve` plans beside them, allocated once.
class InferenceModel {
public:
    // `reserve` runs twice: on the planning arena and on the real one. What it makes the second time may be kept.
    using Reserve = std::function<void(const ParameterTable&, const Tensor& weight, Arena&)>;
    InferenceModel(const Inference&, const Reserve& reserve);
    ~InferenceModel() { engine_.drain(); }  // what still runs uses the memory
    InferenceModel(const InferenceModel&) = delete;
    InferenceModel& operator=(const InferenceModel&) = delete;

    const Config& config() const { return config_; }
    const ParameterTable& table() const { return table_; }
    Stream& compute() { return *compute_; }

private:
    void load(const FoundCheckpoint& checkpoint);
    void plan(const Reserve& reserve, Arena& arena);

    Config config_;
    ParameterTable table_;
    StreamEngine engine_;
    Stream* compute_;
    std::unique_ptr<Arena> arena_;
    Tensor master_, weight_;
};

}  // namespace trifold
