// commands/eval.cpp   trifold eval: the mean loss of a model over a token file, once through (or data.eval_batches batches).
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>
#include <optional>

#include "base/text.h"
#include "commands/commands.h"
#include "commands/inference.h"
#include "commands/loading.h"
#include "commands/progress_line.h"
#include "model/stage.h"

namespace trifold {
namespace {

struct Evaluation {
    double loss_sum = 0;
    int64_t tokens = 0;
};

// Samples beyond the end of the data (the last micro-batch wraps to its beginning) do not count.
void drop_samples_from(MicroBatch& micro, int64_t count) {
    for (int64_t i = std::max<int64_t>(count, 0) * micro.seq; i < micro.sequences * micro.seq; ++i) {
        micro.valid -= micro.targets[static_cast<size_t>(i)] >= 0;
        micro.targets[static_cast<size_t>(i)] = -1;
    }
}

Evaluation evaluate(Stage& stage, Stream& compute, Loader& data, int64_t samples) {
    Evaluation e;
    ProgressLine line("evaluating");
    stage.begin_step(compute);
    for (int64_t seen = 0; seen < samples;) {
        GlobalBatch batch = data.next();
        for (MicroBatch& micro : batch.micro) {
            drop_samples_from(micro, samples - seen);
            stage.forward(compute, 0, 0, view(micro));
            stage.loss(compute, 0);
            e.tokens += micro.valid;
            seen += micro.sequences;
        }
        e.loss_sum = stage.loss_sum(compute);  // waits, so the batch may go
        const auto done = static_cast<double>(std::min(seen, samples));
        line.show(done / static_cast<double>(samples), fmt::format("{} of {} sequences", done, samples), [&](double s) { return with_prefix(done / s) + " sequences/s"; });
    }
    return e;
}

}  // namespace

int eval_command(const Words& args) {
    std::string unused;
    bool json = false;
    int64_t batches = 0;
    const std::vector<CommandFlag> flags = {{"json", "", "print one JSON object", &json},
                                            {"batches", "N", "only the first N micro-batches of each file of data.val [0: all]", &batches, {.min = 0, .max = 1e9}}};
    if (wants_help(args)) {
        auto list = flags;
        list.push_back(checkpoint_flag(unused));
        fmt::print("trifold eval --checkpoint PATH | --init.from FOLDER   --data.val=FILE [options]\n\n"
                   "Goes once through every source of data.val.\n\n{}", help_text(list));
        return 0;
    }
    const Inference options = inference_options(args, flags);
    const Config& config = options.config;
    if (config.data.val.empty()) throw Problem(Exit::usage, "eval needs --data.val=FILE: the tokens to compute the loss of");
    // Source by source, so that each counts once and not by its weight in a blend.
    std::vector<Loader> sources;
    for (const DataSource& source : config.data.val) sources.emplace_back(std::vector{source}, validation_data(config, 0));

    std::optional<Stage> stage;
    InferenceModel model(options, [&](const ParameterTable& table, const Tensor& weight, Arena& arena) {
        const StageOptions shape{.type = config.train.dtype, .B = config.train.micro_batch, .T = config.train.seq, .passes = Passes::forward_only,
                                 .documents = config.data.documents};
        stage.emplace(config.model, table, FlatBuffers{weight}, shape, TensorParallel(), nullptr, arena.reserve(MemoryClass::workspace, DType::f64, 1), arena);
    });
    stage->fill_constants(model.compute());
    Evaluation e;
    for (Loader& data : sources) {
        const int64_t limit = batches > 0 ? batches * config.train.micro_batch : data.samples_per_epoch();
        const Evaluation part = evaluate(*stage, model.compute(), data, std::min(limit, data.samples_per_epoch()));
        e.loss_sum += part.loss_sum;
        e.tokens += part.tokens;
    }
    const double loss = e.loss_sum / static_cast<double>(std::max<int64_t>(e.tokens, 1));
    if (json) {
        fmt::print("{}\n", nlohmann::json{{"loss", loss}, {"tokens", e.tokens}, {"perplexity", std::exp(loss)}}.dump());
    } else {
        fmt::print("loss {:.5f} nats per token, perplexity {:.3f}, over {} tokens\n", loss, std::exp(loss), e.tokens);
    }
    return 0;
}

}  // namespace trifold
