// model/options_table.cpp   The one declaration of every option: name, place in Config, meaning, and {range, unit,
// choices, default in words}.
//
// Defaults are those of the structs in config.h. The upper bounds keep every product of sizes far inside 64 bits.
#include "model/options_table.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <ranges>
#include <type_traits>

namespace trifold {
namespace {

// An enumeration is read and written as its underlying byte, which C++ lets alias anything.
template <class T>
auto& stored(T& value) {
    if constexpr (std::is_enum_v<T>) {
        static_assert(std::is_same_v<std::underlying_type_t<T>, uint8_t>);
        return reinterpret_cast<uint8_t&>(value);
    } else {
        return value;
    }
}
#define FIELD(path) (+[](Config & c) -> auto& { return stored(c.path); })
#define OPTION(path) #path, FIELD(path)

constexpr Range at_least(double min) { return {.min = min}; }
constexpr Range between(double min, double max) { return {.min = min, .max = max}; }
constexpr Range above(double min) { return {.min = min, .min_excluded = true}; }
constexpr Range seconds = {.min = 0, .max = 1e7, .min_excluded = true};
constexpr Range fraction = {.min = 0, .max = 1, .max_excluded = true};

constexpr double most_steps = 1e12, most_tokens = 1 << 27, most_sequences = 1 << 24, most_layers = 4096, most_ranks = 1 << 15;

// clang-format off
constexpr Option table[] = {
    {OPTION(model.preset), "named architecture, see the end of this list; the options below change it", {}},
    {OPTION(model.layers), "transformer blocks", {.range = between(1, most_layers), .derived = "from the preset"}},
    {OPTION(model.hidden), "width of the residual stream", {.range = between(1, 1 << 17), .derived = "from the preset"}},
    {OPTION(model.heads), "query heads", {.range = between(1, 1 << 14), .derived = "from the preset"}},
    {OPTION(model.kv_heads), "key and value heads (grouped-query attention)", {.range = between(1, 1 << 14), .derived = "model.heads"}},
    {OPTION(model.head_dim), "size of one head", {.range = between(1, 1 << 12), .derived = "hidden / heads"}},
    {OPTION(model.ffn_hidden), "width inside the feed-forward network", {.range = between(1, 1 << 20), .derived = "4 * hidden; swiglu: 8/3 * hidden, rounded up to 64"}},
    {OPTION(model.vocab), "size of the vocabulary, 257 for bytes; in memory rounded up to 128", {.range = between(1, 1 << 28), .unit = "ids", .derived = "from the preset"}},
    {OPTION(model.max_seq), "longest sequence", {.range = between(1, most_tokens), .unit = "tokens", .derived = "from the preset"}},
    {OPTION(model.norm), "normalisation", {.choices = "layernorm|rmsnorm"}},
    {OPTION(model.norm_eps), "added to the variance", {.range = above(0)}},
    {OPTION(model.position), "kind of positions", {.choices = "learned|rope"}},
    {OPTION(model.rope_base), "base of the rotary frequencies", {.range = above(0)}},
    {OPTION(model.rope_scaling.kind), "stretching of rotary positions to longer sequences", {.choices = "none|linear|llama3"}},
    {OPTION(model.rope_scaling.factor), "how far (linear, llama3)", {.range = at_least(1)}},
    {OPTION(model.rope_scaling.low_freq_factor), "frequencies with fewer turns are stretched whole (llama3)", {.range = above(0)}},
    {OPTION(model.rope_scaling.high_freq_factor), "frequencies with more turns stay (llama3)", {.range = above(0)}},
    {OPTION(model.rope_scaling.original_max_seq), "sequence over which turns are counted (llama3)", {.range = between(1, most_tokens), .unit = "tokens"}},
    {OPTION(model.activation), "of the feed-forward network; gelu is the tanh form", {.choices = "gelu|gelu_erf|swiglu"}},
    {OPTION(model.block), "parallel blocks add attention and feed-forward network of one norm", {.choices = "serial|parallel"}},
    {OPTION(model.window), "token i sees j with 0 <= i-j < window; 0: full attention", {.range = between(0, most_tokens), .unit = "tokens"}},
    {OPTION(model.full_attention_every), "every k-th layer has no window; 0: none", {.range = between(0, 4096), .unit = "layers"}},
    {OPTION(model.bias), "biases of linear layers; qkv: those of query, key and value only", {.choices = "all|none|qkv"}},
    {OPTION(model.qk_norm), "RMSNorm of every query and key head", {}},
    {OPTION(model.tied), "the head is the token embedding", {}},
    {OPTION(model.init_std), "standard deviation of initial weights; over sqrt(2 * layers) where a layer writes to the residual stream", {.range = at_least(0)}},

    {"init.from", FIELD(init_from), "Hugging Face folder or checkpoint to take weights from; else random from train.seed", {}},

    {OPTION(mesh.tp), "tensor parallel ranks; the sequence is split over them too", {.range = between(1, most_ranks)}},
    {OPTION(mesh.pp), "pipeline stages", {.range = between(1, most_ranks)}},
    {OPTION(mesh.dp), "data parallel ranks", {.range = between(1, most_ranks), .derived = "ranks / (tp * pp * cp)"}},
    {OPTION(mesh.cp), "context parallel ranks; not available yet, so 1", {.range = between(1, most_ranks)}},
    {OPTION(mesh.ep), "expert parallel ranks; not available yet, so 1", {.range = between(1, most_ranks)}},
    {OPTION(mesh.etp), "tensor parallel ranks inside an expert; not available yet, so 1", {.range = between(1, most_ranks)}},
    {OPTION(mesh.virtual_stages), "model chunks per stage (interleaved)", {.range = between(1, 1024)}},
    {OPTION(mesh.schedule), "order of the pipeline's work; zero_bubble moves weight gradients into the gaps", {.choices = "1f1b|interleaved|zero_bubble"}},
    {OPTION(mesh.layers_per_stage), "layers of each stage, or of each part in order, such as 12,13,12", {.range = between(1, most_layers), .derived = "balanced"}},

    {OPTION(train.steps), "length of the whole run", {.range = between(0, most_steps), .unit = "steps"}},
    {OPTION(train.seq), "length of a training sequence", {.range = between(1, most_tokens), .unit = "tokens", .derived = "model.max_seq"}},
    {OPTION(train.micro_batch), "what is computed at once", {.range = between(1, most_sequences), .unit = "sequences"}},
    {OPTION(train.global_batch), "what one optimizer step learns from; gradient accumulation follows", {.range = between(1, most_sequences), .unit = "sequences", .derived = "micro_batch * dp"}},
    {OPTION(train.dtype), "of weights and activations; master weights and gradients are fp32", {.choices = "fp32|bf16"}},
    {OPTION(train.seed), "decides initial weights and the order of samples", {}},
    {OPTION(train.recompute), "which activations backward computes again", {.choices = "none|selective|full"}},

    {OPTION(optim.name), "optimizer", {.choices = "adamw|lamb"}},
    {OPTION(optim.lr), "peak learning rate", {.range = at_least(0)}},
    {OPTION(optim.min_lr), "learning rate at the end of the decay", {.range = at_least(0), .derived = "optim.lr / 10"}},
    {OPTION(optim.warmup_steps), "linear warm-up; step 1 has lr / warmup_steps", {.range = between(0, most_steps), .unit = "steps"}},
    {OPTION(optim.schedule), "after warm-up; wsd is constant, then decays over the last decay_steps", {.choices = "cosine|linear|constant|wsd"}},
    {OPTION(optim.decay_steps), "where a cosine or line ends, warm-up included; wsd: length of the decay", {.range = between(1, most_steps), .unit = "steps", .derived = "train.steps; wsd: a fifth of it"}},
    {OPTION(optim.beta1), "decay of the first moment", {.range = fraction}},
    {OPTION(optim.beta2), "decay of the second moment", {.range = fraction}},
    {OPTION(optim.eps), "added to the root of the second moment", {.range = above(0)}},
    {OPTION(optim.weight_decay), "decoupled weight decay; norms and biases have none", {.range = at_least(0)}},
    {OPTION(optim.clip), "largest norm of the gradient; 0: no clipping", {.range = at_least(0)}},
    {OPTION(optim.zero), "sharded over data parallel ranks: 0 nothing, 1 optimizer state, 2 gradients too", {.range = between(0, 2), .unit = "stage"}},

    {OPTION(data.train), "token files: a path, a glob, or a list of {path, weight}", {}},
    {OPTION(data.val), "the same for evaluation", {}},
    {OPTION(data.tokenizer), "bytes, or a Hugging Face tokenizer.json", {}},
    {OPTION(data.documents), "isolated documents do not attend to each other, positions start again", {.choices = "joined|isolated"}},
    {OPTION(data.mask_prompt), "no loss on prompt tokens; needs the mask file beside the tokens", {}},
    {OPTION(data.shuffle), "random order of samples", {}},
    {OPTION(data.eval_every), "evaluate every so many steps; 0: never", {.range = between(0, most_steps), .unit = "steps"}},
    {OPTION(data.eval_batches), "length of an evaluation", {.range = between(1, most_steps), .unit = "micro-batches"}},

    {OPTION(checkpoint.dir), "folder of checkpoints, on a file system that all ranks share", {.derived = "run.dir/checkpoints"}},
    {OPTION(checkpoint.every), "save every so many steps; 0: only at the end", {.range = between(0, most_steps), .unit = "steps"}},
    {OPTION(checkpoint.keep), "how many of the newest stay; 0: all", {.range = between(0, 1e9), .unit = "checkpoints"}},
    {OPTION(checkpoint.keep_every), "checkpoints of every so many steps stay for good; 0: none", {.range = between(0, most_steps), .unit = "steps"}},
    {OPTION(checkpoint.async), "written by another thread from a copy in memory", {}},
    {OPTION(checkpoint.resume), "auto (the newest verified one of a given run.dir), none, or a path", {}},

    {OPTION(overlap.dp), "off: gradients are reduced after the whole backward pass, weights gathered before the next step", {}},
    {OPTION(overlap.tp), "off: tensor-parallel collectives as a whole, before or after their matrix products", {}},
    {OPTION(overlap.pp), "off: each message between stages is waited for where it is issued", {}},
    {OPTION(overlap.pp_ahead), "micro-batches more that a stage has in flight for each stage behind it; 1 hides messages as long as the computation, and costs the memory", {.range = between(0, 4)}},
    {OPTION(overlap.checkpoint), "off: training waits until a checkpoint is written", {}},
    {OPTION(overlap.tp_chunks), "pieces in which each tensor-parallel rank's rows travel", {.range = between(1, 64)}},
    {OPTION(overlap.dp_bucket), "layers are gathered and reduced together up to so many parameters", {.range = between(1, 1e12), .unit = "elements"}},

    {OPTION(resilience.on_nan), "when loss or gradients are not finite", {.choices = "skip|stop"}},
    {OPTION(resilience.max_skips), "the run gives up after more skipped steps in a row", {.range = between(0, 1e9), .unit = "steps"}},

    {OPTION(resilience.stall_s), "a collective in which nothing moves for so long is a fault (a message between stages, and the first 20 waits for a GPU: ten times as long)", {.range = seconds, .unit = "s"}},
    {OPTION(resilience.start_s), "all ranks must have come together by then", {.range = seconds, .unit = "s"}},

    {OPTION(run.dir), "folder of everything the run writes", {.derived = "runs/DATE-TIME"}},
    {OPTION(run.device), "where the model is computed", {.choices = "auto|cpu|cuda"}},
    {OPTION(run.comm), "what carries data between ranks: NCCL between GPUs, sockets between hosts' memories; host with GPUs copies through it, so that ranks may share one", {.choices = "auto|nccl|host"}},
    {OPTION(run.attention), "on GPUs in bf16: our own, or cuDNN's; auto is our own, and with run.deterministic=off cuDNN's where a trial at the start finds it right and at least 5 % faster", {.choices = "auto|own|cudnn"}},
    {OPTION(run.threads), "of this process on CPUs", {.range = between(1, 4096), .derived = "CPUs it may use / ranks of this host"}},
    {OPTION(run.log_every), "print a line every so many steps", {.range = between(1, most_steps), .unit = "steps"}},
    {OPTION(run.trace), "timeline for Perfetto in run.dir/trace", {}},
    {OPTION(run.tensorboard), "event files for TensorBoard in run.dir", {}},
    {OPTION(run.deterministic), "the same bits from run to run (CPU: always); off: NCCL chooses its fastest sums, and attention may be cuDNN's", {}},

    {OPTION(launch.store), "HOST:PORT of rank 0's store, where the launcher brings no MPI (Slurm, Hydra)", {.derived = "from MPI"}},
    {OPTION(launch.interface), "network interface, or address, at which other hosts reach this one", {.derived = "the one that reaches the store"}},

    {OPTION(debug.dump_grads), "safetensors file: gradients of the first step, before clipping", {}},
    {OPTION(debug.dump_params), "safetensors file: parameters at the end", {}},
    {OPTION(debug.streams), "adversarial: run everything as late as its declared buffers allow, and check them", {.choices = "normal|adversarial"}},
    {OPTION(debug.inject), "a planted fault, also --inject: kind=nan,step=3 makes a gradient of step 3 NaN", {}},
};

// Names of the documentation that belong to later versions, so that they are not taken for spelling mistakes.
constexpr std::string_view later[] = {
    "model.moe",
    "overlap.ep", "overlap.ep_chunks",
    "resilience.restarts", "resilience.heartbeat_s", "resilience.frozen_s", "resilience.save_s",
    "gpu",
};
// clang-format on

// 16777216 rather than 1.67772e+07
std::string plain(double x) {
    return std::floor(x) == x && std::abs(x) < 1e15 ? fmt::format("{:.0f}", x) : fmt::format("{}", x);
}

}  // namespace

std::span<const Option> option_table() { return table; }

const Option* find_option(std::string_view name) {
    const auto* found = std::ranges::find(table, name, &Option::name);
    return found == std::end(table) ? nullptr : found;
}

std::vector<std::string> option_names() {
    std::vector<std::string> names;
    for (const Option& o : table) names.emplace_back(o.name);
    return names;
}

std::vector<std::string> choices_of(const Details& details) {
    std::vector<std::string> names;
    for (const auto name : std::views::split(details.choices, '|')) names.emplace_back(name.begin(), name.end());
    return names;
}

bool is_unset(const Option& option, const Config& config) {
    static const Config defaults;
    return std::visit(
        [&](auto getter) {
            using T = std::decay_t<decltype(getter(std::declval<Config&>()))>;
            if constexpr (std::is_same_v<T, int64_t> || std::is_same_v<T, double>) {
                const T& value = value_at(getter, config);
                return value == value_at(getter, defaults) &&
                       !option.details.range.contains(static_cast<double>(value));
            } else {
                return false;
            }
        },
        option.field);
}

std::string describe_range(const Range& r) {
    const bool low = std::isfinite(r.min), high = std::isfinite(r.max);
    const std::string from = fmt::format("{} {}", r.min_excluded ? "above" : "at least", plain(r.min));
    const std::string to = fmt::format("{} {}", r.max_excluded ? "below" : "at most", plain(r.max));
    return "must be " + (low && high ? from + " and " + to : low ? from : to);
}

std::string not_available_yet(std::string_view name) {
    for (const std::string_view n : later) {
        const bool inside = name.starts_with(n) && (name.size() == n.size() || name[n.size()] == '.');
        if (inside) return fmt::format("{} is not available in this build yet", name);
    }
    return "";
}

}  // namespace trifold
