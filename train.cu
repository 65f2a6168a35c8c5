// train.cu   Trifold: one optimizer step, the loop around it, and the commands.
//
// Reading path of one training step: train_step (here) -> model/stage.cpp -> model/block.cpp -> kernels/ops.h (the table of
// operations) -> kernels/cpu/attention_forward.cpp or kernels/cuda/attention_forward.cu (or any other) -> back through
// model/block.cpp -> model/head.cpp -> model/optimizer.cpp -> kernels/cpu/optimizer.cpp or kernels/cuda/optimizer.cu.
#include <cstdio>
#include <cstring>
#include <string>
#include <vector>

#include "base/error.h"            // problems and exit codes
#include "commands/commands.h"     // eval, sample
#include "commands/data.h"         // data tokenize, inspect, convert
#include "commands/export.h"       // export to Hugging Face
#include "commands/plan.h"         // plan: parameters, FLOPs, memory
#include "commands/run.h"          // Run: data, logs and checkpoints around the steps
#include "model/options.h"         // the configuration
#include "model/trainer.h"         // Trainer: stage, optimizer, memory

namespace trifold {

TokenBatch view(const MicroBatch& b) {
    return {b.tokens.data(), b.targets.data(), b.positions.data(), b.doc_start.empty() ? nullptr : b.doc_start.data()};
}

// One optimizer step. Gradients of all micro-batches are summed in fp32, seeded with 1 / nominal tokens; the optimizer turns
// them into gradients of the mean over the valid tokens of the global batch, clips, and applies them only if they are finite.
StepResult train_step(Trainer& trainer, const GlobalBatch& batch, Run& run) {
    const Config& config = trainer.config();
    Stage& stage = trainer.stage();
    Optimizer& optimizer = trainer.optimizer();
    Stream& compute = trainer.compute();
    const double nominal = static_cast<double>(config.train.global_batch * config.train.seq);
    const float unit = batch.valid_tokens > 0 ? static_cast<float>(nominal / static_cast<double>(batch.valid_tokens)) : 0.0f;

    stage.reset_loss(compute);
    for (size_t m = 0; m < batch.micro.size(); ++m) {
        stage.forward(compute, view(batch.micro[m]));
        stage.backward(compute, static_cast<float>(1.0 / nominal), optimizer.accumulate(m));
        optimizer.fold_gradients(compute, m);
    }
    run.after_backward(unit);

    const double lr = learning_rate(config.optim, trainer.step + 1, config.train.steps);
    optimizer.step(compute, lr, trainer.updates + 1, unit);
    const Optimizer::Outcome outcome = optimizer.outcome(compute);
    const double loss = stage.loss_sum(compute) / static_cast<double>(std::max<int64_t>(batch.valid_tokens, 1));
    return {.loss = loss, .grad_norm = outcome.grad_norm, .lr = lr, .applied = outcome.applied, .tokens = batch.valid_tokens};
}

// Mean loss of the validation batches. Training state is not touched.
double evaluate(Trainer& trainer, Run& run) {
    Stage& stage = trainer.stage();
    int64_t valid = 0;
    stage.reset_loss(trainer.compute());
    for (int64_t i = 0; i < run.validation_batches(); ++i) {
        const GlobalBatch batch = run.validation_batch(i);
        for (const MicroBatch& micro : batch.micro) {
            stage.forward(trainer.compute(), view(micro));
            stage.loss(trainer.compute());
        }
        valid += batch.valid_tokens;
        trainer.engine().wait(trainer.compute().last());  // the batch must live until it was read
    }
    return stage.loss_sum(trainer.compute()) / static_cast<double>(std::max<int64_t>(valid, 1));
}

int train_command(int argc, char** argv) {
    const std::vector<std::string> args(argv + 1, argv + argc);
    if (wants_help(args)) {
        std::printf("trifold train [--config FILE]... [--section.option=value]...\n\n%s", help_text().c_str());
        return 0;
    }
    Run run(train_config(args));
    try {
        while (run.next()) {
            run.record(train_step(run.trainer(), run.batch(), run));
            if (run.evaluation_due()) run.record_evaluation(evaluate(run.trainer(), run));
            if (run.checkpoint_due()) run.save();
        }
    } catch (const Problem&) {  // bad data, too many bad steps: what was learnt before is kept
        run.save_last();
        throw;
    }
    return static_cast<int>(run.finish());
}

struct Command {
    const char* name;
    int (*run)(int, char**);
    const char* help;
};
constexpr Command commands[] = {
    {"train", train_command, "train a model, from random weights, a checkpoint or a Hugging Face folder"},
    {"eval", eval_command, "loss and perplexity of a model on a token file"},
    {"sample", sample_command, "generate text"},
    {"data", data_command, "text to tokens: tokenize, inspect, convert, unigram baseline"},
    {"export", export_command, "write a checkpoint as a Hugging Face folder"},
    {"plan", plan_command, "parameters, FLOPs and memory of a configuration, without running it"},
};

int usage(std::FILE* to) {
    std::fprintf(to, "trifold %s: trains large language models\n\n", TRIFOLD_VERSION);
    for (const Command& c : commands) std::fprintf(to, "  trifold %-8s %s\n", c.name, c.help);
    std::fprintf(to, "\n`trifold COMMAND --help` lists the options.\n");
    return to == stdout ? 0 : static_cast<int>(Exit::usage);
}

int run_command(int argc, char** argv) {
    if (argc < 2) return usage(stderr);
    if (!std::strcmp(argv[1], "--help") || !std::strcmp(argv[1], "-h") || !std::strcmp(argv[1], "help")) return usage(stdout);
    if (!std::strcmp(argv[1], "--version")) return std::printf("trifold %s\n", TRIFOLD_VERSION), 0;
    for (const Command& c : commands)
        if (!std::strcmp(argv[1], c.name)) return c.run(argc - 1, argv + 1);
    throw Problem(Exit::usage, std::string("unknown command \"") + argv[1] + "\": `trifold --help` lists the commands");
}

}  // namespace trifold

int main(int argc, char** argv) {
    using namespace trifold;
    try {
        return run_command(argc, argv);
    } catch (const Problem& problem) {
        std::fprintf(stderr, "trifold: %s\n", problem.what());
        return static_cast<int>(problem.code());
    } catch (const std::bad_alloc&) {
        std::fprintf(stderr, "trifold: the machine has no memory left; use a smaller model or --train.micro_batch\n");
        return static_cast<int>(Exit::fault);
    } catch (const std::exception& e) {
        std::fprintf(stderr, "trifold: internal error: %s\nThis is a bug in trifold; please report it with the command line.\n", e.what());
        return static_cast<int>(Exit::bug);
    }
}
