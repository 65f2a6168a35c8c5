// model/resolve.cpp   Fills in derived values and refuses, before anything is allocated, what cannot work.
#include <fmt/format.h>

#include <algorithm>
#include <ctime>

#include "base/cpus.h"
#include "base/error.h"
#include "base/text.h"
#include "kernels/cuda/runtime.h"
#include "model/options.h"
#include "model/options_json.h"

namespace trifold {
namespace {

template <class... Args>
void require(bool condition, fmt::format_string<Args...> sentence, Args&&... args) {
    if (!condition) throw Problem(Exit::usage, fmt::format(sentence, std::forward<Args>(args)...));
}

template <class T>
void derive(Config& c, const char* name, T& value, const T& not_given, const T& computed) {
    if (value != not_given) return;
    value = computed;
    c.origin[name] = "derived";
}

void check_complete(const Config& c) {
    std::vector<std::string> missing;
    for (const char* name : {"model.layers", "model.hidden", "model.heads", "model.vocab", "model.max_seq"})
        if (is_unset(*find_option(name), c)) missing.emplace_back(name);
    require(missing.empty(),
            "the model is incomplete, {} {} not given: name a preset (--model.preset=gpt2-124m) or give {}",
            join_words(missing), missing.size() == 1 ? "is" : "are", missing.size() == 1 ? "it" : "them");
}

void derive_model(Config& c) {
    ModelConfig& m = c.model;
    derive(c, "model.kv_heads", m.kv_heads, int64_t{0}, m.heads);
    require(m.head_dim > 0 || m.hidden % m.heads == 0,
            "model.hidden = {} is not divisible by model.heads = {}: change one of them, or give model.head_dim",
            m.hidden, m.heads);
    derive(c, "model.head_dim", m.head_dim, int64_t{0}, m.hidden / m.heads);
    const int64_t two_matrices = 4 * m.hidden, three_matrices = ((8 * m.hidden + 2) / 3 + 63) / 64 * 64;
    derive(c, "model.ffn_hidden", m.ffn_hidden, int64_t{0}, m.swiglu() ? three_matrices : two_matrices);
}

std::string date_time() {
    const std::time_t now = std::time(nullptr);
    std::tm local{};
    localtime_r(&now, &local);
    char text[32];
    std::strftime(text, sizeof text, "%Y%m%d-%H%M%S", &local);
    return text;
}

bool gpu_head_size(const ModelConfig& m) { return m.head_dim == 64 || m.head_dim == 96 || m.head_dim == 128; }

void derive_run(Config& c) {
    derive(c, "train.seq", c.train.seq, int64_t{0}, c.model.max_seq);
    derive(c, "train.global_batch", c.train.global_batch, int64_t{0}, c.train.micro_batch);
    derive(c, "optim.min_lr", c.optim.min_lr, -1.0, c.optim.lr / 10);
    if (c.optim.schedule != LrSchedule::constant && c.train.steps > 0) {
        // A run shorter than its warm-up is only that: a cosine never starts before warm-up ends.
        const int64_t whole = std::max(c.train.steps, c.optim.warmup_steps),
                      fifth = std::max<int64_t>(1, c.train.steps / 5);
        derive(c, "optim.decay_steps", c.optim.decay_steps, int64_t{0},
               c.optim.schedule == LrSchedule::wsd ? fifth : whole);
    }
    derive(c, "run.dir", c.run.dir, std::string(), "runs/" + date_time());
    if (c.run.device == Device::automatic) {
        const cuda::Gpu gpu = cuda::probe();
        require(gpu.state != cuda::GpuState::unusable, "{}; or compute on the processor with --run.device=cpu", gpu.text);
        const bool fits = gpu_head_size(c.model) && c.debug.streams == StreamMode::normal;
        derive(c, "run.device", c.run.device, Device::automatic, gpu.state == cuda::GpuState::found && fits ? Device::cuda : Device::cpu);
    }
    derive(c, "run.threads", c.run.threads, int64_t{0}, int64_t{usable_cpus()});
    derive(c, "checkpoint.dir", c.checkpoint.dir, std::string(), c.run.dir + "/checkpoints");
}

// Values of files and flags were checked when they were read; this covers those of Hugging Face folders and of code.
void check_ranges(const Config& c) {
    for (const Option& o : option_table()) {
        if (is_unset(o, c)) continue;
        Config copy;
        const std::string name(o.name);
        const auto origin = c.origin.find(name);
        assign(copy, {&o, value_of(o, c),
                      origin == c.origin.end() ? name : fmt::format("{} (from {})", name, origin->second), ""});
    }
}

void check_model(const ModelConfig& m) {
    require(m.heads % m.kv_heads == 0,
            "model.heads = {} is not divisible by model.kv_heads = {}: each key head serves equally many query heads",
            m.heads, m.kv_heads);
    require(m.heads * m.head_dim <= 1 << 20, "model.heads * model.head_dim = {} * {} is more than {}", m.heads,
            m.head_dim, 1 << 20);
    const bool rope = m.position == Position::rope;
    require(!rope || m.head_dim % 2 == 0,
            "model.head_dim = {} is odd, but rotary positions turn pairs: make it even, or use model.position=learned",
            m.head_dim);
    const RopeScaling& scaling = m.rope_scaling;
    require(rope || scaling.kind == RopeScalingKind::none,
            "model.rope_scaling.kind needs model.position=rope: learned positions are not scaled");
    require(scaling.kind != RopeScalingKind::llama3 || scaling.low_freq_factor < scaling.high_freq_factor,
            "model.rope_scaling.low_freq_factor = {} must be below high_freq_factor = {}", scaling.low_freq_factor,
            scaling.high_freq_factor);
}

void check_training(const Config& c) {
    const TrainConfig& t = c.train;
    require(t.seq <= c.model.max_seq, "train.seq = {} is longer than model.max_seq = {}: shorten it{}", t.seq,
            c.model.max_seq,
            c.model.position == Position::rope
                ? fmt::format(", or give --model.max_seq={0} (rotary positions have no weights)", t.seq)
                : ", or train a model with more learned positions");
    const int64_t below = t.global_batch / t.micro_batch * t.micro_batch;
    require(t.global_batch % t.micro_batch == 0,
            "train.global_batch = {} is not a multiple of train.micro_batch = {}: try {}{}", t.global_batch, t.micro_batch,
            below > 0 ? fmt::format("{} or ", below) : "", below + t.micro_batch);
    require(t.micro_batch * t.seq <= 1 << 27,
            "train.micro_batch * train.seq = {} * {} tokens are more than {} at once: use a smaller micro_batch",
            t.micro_batch, t.seq, 1 << 27);
    const OptimConfig& o = c.optim;
    require(o.min_lr <= o.lr, "optim.min_lr = {} is above optim.lr = {}", o.min_lr, o.lr);
    require(o.schedule != LrSchedule::wsd || t.steps == 0 || o.warmup_steps + o.decay_steps <= t.steps,
            "optim.warmup_steps = {} and optim.decay_steps = {} are together more than train.steps = {}: wsd warms up, then "
            "decays at the end of the run", o.warmup_steps, o.decay_steps, t.steps);
    const bool ramp = o.schedule == LrSchedule::cosine || o.schedule == LrSchedule::linear;
    require(!ramp || t.steps == 0 || o.warmup_steps <= o.decay_steps,
            "optim.warmup_steps = {} is more than optim.decay_steps = {}, which includes the warm-up", o.warmup_steps,
            o.decay_steps);
    require(c.data.eval_every == 0 || !c.data.val.empty(),
            "data.eval_every = {} needs data.val: name a file to evaluate on", c.data.eval_every);
}

void check_build_limits(const Config& c) {
    const MeshConfig& m = c.mesh;
    const std::pair<const char*, int64_t> sizes[] = {{"tp", m.tp},
                                                     {"pp", m.pp},
                                                     {"dp", m.dp},
                                                     {"cp", m.cp},
                                                     {"ep", m.ep},
                                                     {"etp", m.etp},
                                                     {"virtual_stages", m.virtual_stages}};
    for (const auto& [name, size] : sizes)
        require(size == 1, "mesh.{} = {}, but this build runs one process: it must be 1", name, size);
    const bool gpu = c.run.device == Device::cuda;
    require(!gpu || cuda::compiled_in(), "run.device = cuda, but {}: use --run.device=cpu", cuda::probe().text);
    require(!gpu || gpu_head_size(c.model),
            "model.head_dim = {}, but attention on a GPU knows head sizes 64, 96 and 128: change the model, or use --run.device=cpu",
            c.model.head_dim);
    require(!gpu || c.debug.streams == StreamMode::normal,
            "debug.streams = adversarial is a check of the CPU backend: use --run.device=cpu with it");
    require(c.run.deterministic, "run.deterministic = off, but every operation is deterministic: leave it on");
}

}  // namespace

void resolve(Config& c) {
    check_complete(c);
    check_ranges(c);
    derive_model(c);
    derive_run(c);
    check_ranges(c);
    check_model(c.model);
    check_training(c);
    check_build_limits(c);
}

}  // namespace trifold
