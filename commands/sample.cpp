// commands/sample.cpp   trifold sample: a prompt, then tokens one by one from the KV cache.
#include <cstdio>
#include <optional>

#include "base/refuse.h"
#include "commands/commands.h"
#include "commands/inference.h"
#include "data/tokenizer.h"
#include "model/generate.h"

namespace trifold {
namespace {

struct SampleFlags {
    std::string prompt = "\n";
    int64_t tokens = 200;
    SamplingOptions sampling;

    std::vector<CommandFlag> list() {
        return {{"prompt", "TEXT", "what the text begins with [a line break]", &prompt},
                {"tokens", "N", "tokens to generate [200]", &tokens, {.min = 0}},
                {"temperature", "X", "1 samples the model's distribution, 0 always takes the likeliest token [1]", &sampling.temperature, {.min = 0}},
                {"top-k", "N", "only the N likeliest tokens [0: all]", &sampling.top_k, {.min = 0}},
                {"top-p", "X", "only the likeliest tokens that together have probability X [1: all]", &sampling.top_p, {.min = 0, .max = 1, .min_excluded = true}},
                {"seed", "N", "the same seed gives the same text [1234]", &sampling.seed}};
    }
};

void show(const std::string& text) {
    std::fwrite(text.data(), 1, text.size(), stdout);
    std::fflush(stdout);
}

// Prints the prompt and what the model makes of it. When the context is full, its second half is kept and fed again.
void generate(Generator& generator, Stream& compute, const Tokenizer& tokenizer, int64_t vocab, const SampleFlags& flags) {
    std::vector<int32_t> context = tokenizer.document_prefix();
    const std::vector<int32_t> prompt = tokenizer.encode(flags.prompt);
    context.insert(context.end(), prompt.begin(), prompt.end());
    if (context.empty()) context.push_back(tokenizer.end_of_document());
    const auto keep_last = [&](int64_t count) {
        if (static_cast<int64_t>(context.size()) > count) context.erase(context.begin(), context.end() - count);
    };
    show(flags.prompt);
    if (std::ssize(context) > generator.max_tokens())
        fmt::print(stderr, "trifold: the prompt has {} tokens, the model's context {}: it sees only the end of the prompt\n", context.size(), generator.max_tokens());
    keep_last(generator.max_tokens());
    generator.feed(compute, context);
    StreamDecoder decoder(tokenizer);
    for (int64_t i = 0; i < flags.tokens; ++i) {
        const int32_t token = choose_token(generator.next_logits(compute), vocab, flags.sampling, static_cast<uint64_t>(i));
        if (token == tokenizer.end_of_document()) break;
        show(decoder.push(token));
        context.push_back(token);
        if (generator.length() < generator.max_tokens()) {
            generator.feed(compute, {token});
        } else {
            keep_last(std::max<int64_t>(1, generator.max_tokens() / 2));
            generator.reset();
            generator.feed(compute, context);
        }
    }
    show(decoder.finish() + "\n");
}

}  // namespace

int sample_command(const Words& args) {
    SampleFlags flags;
    if (wants_help(args)) {
        std::string unused;
        auto list = flags.list();
        list.push_back(checkpoint_flag(unused));
        show("trifold sample --checkpoint PATH | --init.from FOLDER --data.tokenizer FILE   [options]\n\n" + help_text(list));
        return 0;
    }
    const Inference options = inference_options(args, flags.list());
    const Config& config = options.config;
    const Tokenizer tokenizer = Tokenizer::load(config.data.tokenizer);
    if (tokenizer.vocab_size() > config.model.vocab)
        refuse(Exit::usage, "tokenizer {} has {} ids, but the model has a vocabulary of {}: give the model's own with --data.tokenizer=FILE",
               tokenizer.name(), tokenizer.vocab_size(), config.model.vocab);
    std::optional<Generator> generator;
    constexpr int64_t prompt_chunk = 256;
    InferenceModel model(options, [&](const ParameterTable& table, const Tensor& weight, Arena& arena) {
        generator.emplace(config.model, table, weight, config.model.max_seq, prompt_chunk, arena);
    });
    generator->fill_constants(model.compute());
    generate(*generator, model.compute(), tokenizer, tokenizer.vocab_size(), flags);
    return 0;
}

}  // namespace trifold
