// train.cu   Trifold: one optimizer step, the loop around it, and the commands.
//
// Reading path of one training step: train_step (here) -> model/pipeline.cpp (parallel/schedule.cpp) -> model/stage.cpp -> model/block.cpp
// (parallel/tensor_parallel.h) -> kernels/ops.h (the table of operations) -> kernels/cpu/attention_forward.cpp or
// kernels/cuda/attention_forward.cu (or any other) -> back through model/block.cpp -> model/head.cpp -> model/sharding.cpp ->
// model/optimizer.cpp -> kernels/cpu/optimizer.cpp or kernels/cuda/optimizer.cu.
#include <cstdio>
#include <cstring>
#include <string>
#include <vector>

#include "base/error.h"            // problems and exit codes
#include "commands/commands.h"     // data, eval, export, plan, sample
#include "commands/job.h"          // Job: launch, and one voice when a rank fails
#include "commands/run.h"          // Run: data, logs and checkpoints around the steps
#include "commands/train_config.h" // one configuration for all ranks
#include "model/options.h"         // the configuration
#include "model/trainer.h"         // Trainer: stage, optimizer, memory

namespace trifold {

std::vector<TokenBatch> views(const std::vector<MicroBatch>& micros) {
    std::vector<TokenBatch> v;
    for (const MicroBatch& b : micros) v.push_back(view(b));
    return v;
}

// One optimizer step, on every rank. Gradients of all micro-batches are summed in fp32, seeded with 1 / nominal tokens, and over the ranks
// while the backward pass goes on; the optimizer turns them into gradients of the mean over the valid tokens of the global batch, clips, and
// applies them everywhere only if they are finite everywhere.
StepResult train_step(Trainer& trainer, const GlobalBatch& batch, Run& run) {
    const Config& config = trainer.config();
    Stream& compute = trainer.compute();
    Optimizer& optimizer = trainer.optimizer();
    const double nominal = static_cast<double>(config.train.global_batch * config.train.seq), valid = static_cast<double>(batch.valid_tokens);
    const float unit = valid > 0 ? static_cast<float>(nominal / valid) : 0.0f;

    trainer.stage().begin_step(compute);
    trainer.pipeline().train(compute, views(batch.micro), static_cast<float>(1.0 / nominal));
    optimizer.settle_gradients(compute);
    run.after_backward(unit);

    const double lr = learning_rate(config.optim, trainer.step + 1, config.train.steps), request = number_of(run.stop_requested());
    optimizer.step(compute, lr, trainer.updates + 1, unit, &request);
    const Optimizer::Outcome outcome = optimizer.outcome(compute);
    return {.loss = outcome.loss_sum / std::max(valid, 1.0), .grad_norm = outcome.grad_norm, .lr = lr, .applied = outcome.applied,
            .tokens = batch.valid_tokens, .stop = request_of(outcome.requests)};
}

// Mean loss of the validation batches. Training state is not touched.
double evaluate(Trainer& trainer, Run& run) {
    Stream& compute = trainer.compute();
    int64_t valid = 0;
    trainer.stage().begin_step(compute);
    run.begin_validation();
    while (const std::optional<std::vector<MicroBatch>> micros = run.next_validation()) {
        trainer.pipeline().evaluate(compute, views(*micros));
        for (const MicroBatch& m : *micros) valid += m.valid;
        trainer.engine().wait(compute.last());  // the batch must live until it was read
    }
    const Optimizer::Evaluation all = trainer.optimizer().evaluation(compute, static_cast<double>(valid));
    return all.loss_sum / std::max(all.tokens, 1.0);
}

// The loop of one rank. What it throws on one rank ends all of them.
Exit train(Run& run, Job& job) {
    try {
        while (run.next()) {
            run.record(train_step(run.trainer(), run.batch(), run));
            if (run.evaluation_due()) run.record_evaluation(evaluate(run.trainer(), run));
            if (run.checkpoint_due()) run.save();
        }
        return run.finish();
    } catch (const Problem& p) {
        run.save_after(p);
        job.fail();
        throw;
    } catch (...) {
        job.fail();
        throw;
    }
}

int train_command(const Words& args) {
    if (wants_help(args)) {
        std::printf("trifold train [--config FILE]... [--section.option=value]...\n\n%s", help_text().c_str());
        return 0;
    }
    Job job(args);
    return job.run([&](const Config& parsed, World& world) {
        Run run(train_config(parsed, world), world);
        const Exit code = train(run, job);
        world.finish();
        return code;
    });
}

struct Command {
    const char* name;
    int (*run)(const Words& args);
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
    for (const Command& c : commands) {
        if (std::strcmp(argv[1], c.name)) continue;
        if (c.run != train_command) refuse_launcher(c.name);
        return c.run({argv + 2, argv + argc});
    }
    throw Problem(Exit::usage, std::string("unknown command \"") + argv[1] + "\": `trifold --help` lists the commands");
}

}  // namespace trifold

int main(int argc, char** argv) {
    using namespace trifold;
    try {
        return run_command(argc, argv);
    } catch (const QuietProblem& problem) {  // another rank says it
        return static_cast<int>(problem.code());
    } catch (const std::exception&) {
        const Problem problem = caught();
        std::fprintf(stderr, "trifold: %s\n", problem.what());
        return static_cast<int>(problem.code());
    }
}
