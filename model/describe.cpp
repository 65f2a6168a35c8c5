// model/describe.cpp   The few lines about a configuration that stand at the start of a run and of a plan.
#include <fmt/format.h>

#include "base/text.h"
#include "model/flops.h"
#include "model/options.h"
#include "model/options_json.h"

namespace trifold {
namespace {

std::string text(const Config& c, const char* option) { return text_of(*find_option(option), c); }

std::string model_line(const Config& c) {
    const ModelConfig& m = c.model;
    const std::string heads = m.kv_heads == m.heads ? fmt::format("{} heads", m.heads)
                                                    : fmt::format("{} heads on {} keys", m.heads, m.kv_heads);
    std::string line = fmt::format("{}: {} layers, width {}, {} of {}, ffn {} {}, {}, {} positions, {} block",
                                   m.preset.empty() ? "model" : m.preset, m.layers, m.hidden, heads, m.head_dim,
                                   text(c, "model.activation"), m.ffn_hidden, text(c, "model.norm"),
                                   text(c, "model.position"), text(c, "model.block"));
    if (m.window > 0) line += fmt::format(", window {}", m.window);
    if (m.window > 0 && m.full_attention_every > 0)
        line += fmt::format(" (full attention every {} layers)", m.full_attention_every);
    return line + fmt::format(", vocabulary {}, {} head", with_commas(m.vocab), m.tied ? "tied" : "own");
}

std::string steps_line(const Config& c) {
    const TrainConfig& t = c.train;
    const int64_t tokens = t.global_batch * t.seq;
    return fmt::format("{} steps of {} x {} = {} tokens, micro-batch {}, {}, recompute {}, seed {}",
                       with_commas(t.steps), t.global_batch, t.seq, with_commas(tokens), t.micro_batch,
                       name_of(t.dtype), text(c, "train.recompute"), t.seed);
}

std::string optimizer_line(const Config& c) {
    const OptimConfig& o = c.optim;
    std::string line =
        fmt::format("{}, lr {:g} {} to {:g}, warm-up {} steps", text(c, "optim.name"), o.lr, text(c, "optim.schedule"),
                    o.schedule == LrSchedule::constant ? o.lr : o.min_lr, with_commas(o.warmup_steps));
    return line + fmt::format(", weight decay {:g}, clip {}", o.weight_decay,
                              o.clip > 0 ? fmt::format("{:g}", o.clip) : "off");
}

}  // namespace

std::string describe(const Config& c) {
    std::string lines = fmt::format("model       {}\n", wrapped(model_line(c), 12));
    lines += fmt::format("training    {}\n", steps_line(c));
    lines += fmt::format("optimizer   {}\n", optimizer_line(c));
    return lines;
}

}  // namespace trifold
