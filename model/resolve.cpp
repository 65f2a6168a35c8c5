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
#include "model/pipeline.h"
#include "model/placement.h"

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

// What the mesh says about ranks, before anything depends on it.
void derive_mesh(Config& c, int ranks) {
    MeshConfig& m = c.mesh;
    const int64_t others = m.tp * m.pp * m.cp;
    require(others <= ranks && ranks % others == 0,
            "mesh.tp * pp * cp = {} * {} * {} = {}, but the job has {} rank{}: change the mesh, or start a multiple of {} ranks (mpirun -n)", m.tp, m.pp, m.cp,
            others, ranks, ranks == 1 ? "" : "s", others);
    derive(c, "mesh.dp", m.dp, int64_t{0}, ranks / others);
    require(m.dp * others == ranks, "mesh.dp * tp * pp * cp = {} * {} * {} * {} = {}, but the job has {} rank{}: leave mesh.dp out, or start {} ranks", m.dp, m.tp,
            m.pp, m.cp, m.dp * others, ranks, ranks == 1 ? "" : "s", m.dp * others);
    const auto schedule = c.origin.find("mesh.schedule");
    const bool given = schedule != c.origin.end() && schedule->second != "default" && schedule->second != "derived";
    if (m.virtual_stages > 1 && !given) {
        m.schedule = ScheduleKind::interleaved;
        c.origin["mesh.schedule"] = "derived";
    }
}

void derive_run(Config& c, int local_ranks) {
    derive(c, "train.seq", c.train.seq, int64_t{0}, c.model.max_seq);
    derive(c, "train.global_batch", c.train.global_batch, int64_t{0}, c.train.micro_batch * c.mesh.dp);
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
    derive(c, "run.comm", c.run.comm, Comm::automatic, c.run.device == Device::cuda ? Comm::nccl : Comm::host);
    // Who is faster is found by a stopwatch, which need not say the same twice.
    const bool open = c.run.device == Device::cuda && c.train.dtype == DType::bf16 && c.data.documents == Documents::joined && !c.run.deterministic;
    if (!open) derive(c, "run.attention", c.run.attention, AttentionProvider::automatic, AttentionProvider::own);
    derive(c, "run.threads", c.run.threads, int64_t{0}, std::max<int64_t>(1, usable_cpus() / local_ranks));
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
    const int64_t at_once = t.micro_batch * c.mesh.dp, below = t.global_batch / at_once * at_once;
    require(t.global_batch % at_once == 0, "train.global_batch = {} is not a multiple of train.micro_batch{} = {}: try {}{}", t.global_batch,
            c.mesh.dp > 1 ? fmt::format(" * mesh.dp = {} * {}", t.micro_batch, c.mesh.dp) : "", at_once, below > 0 ? fmt::format("{} or ", below) : "",
            below + at_once);
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

void check_mesh(const Config& c) {
    const MeshConfig& mesh = c.mesh;
    const ModelConfig& m = c.model;
    for (const auto& [name, size] : {std::pair{"cp", mesh.cp}, {"ep", mesh.ep}, {"etp", mesh.etp}})
        require(size == 1, "mesh.{} = {}, but this axis is not available yet: it must be 1", name, size);
    const auto divides = [&](const char* what, int64_t size, const char* hint) {
        require(size % mesh.tp == 0, "{} = {} is not divisible by mesh.tp = {}: {}", what, size, mesh.tp, hint);
    };
    divides("model.heads", m.heads, "every tensor-parallel rank has the same number of heads");
    divides("model.kv_heads", m.kv_heads, "every tensor-parallel rank needs key and value heads of its own; use at most as many ranks as kv_heads");
    divides("model.ffn_hidden", m.ffn_hidden, "the feed-forward network is split evenly");
    divides("train.micro_batch * train.seq", c.train.micro_batch * c.train.seq, "the tokens of a micro-batch are split evenly (sequence parallelism)");
    require(mesh.pp > 1 || mesh.virtual_stages == 1, "mesh.virtual_stages = {} needs a pipeline: give mesh.pp > 1", mesh.virtual_stages);
    require(mesh.pp > 1 || mesh.schedule != ScheduleKind::zero_bubble, "mesh.schedule = zero_bubble needs a pipeline: give mesh.pp > 1");
    check_shape(schedule_shape(c, 1));
    require(mesh.schedule != ScheduleKind::zero_bubble || c.train.recompute != Recompute::full,
            "mesh.schedule = zero_bubble with train.recompute = full would run each forward pass three times: use selective or none");
    require(c.optim.zero < 2 || mesh.pp == 1, "optim.zero = 2 is not available with pipeline stages (mesh.pp = {}): use optim.zero=1", mesh.pp);
    layers_of_parts(m, static_cast<int>(mesh.pp), static_cast<int>(mesh.virtual_stages), mesh.layers_per_stage);
}

void check_build_limits(const Config& c) {
    const bool gpu = c.run.device == Device::cuda;
    require(!gpu || cuda::compiled_in(), "run.device = cuda, but {}: use --run.device=cpu", cuda::probe().text);
    require(!gpu || gpu_head_size(c.model),
            "model.head_dim = {}, but attention on a GPU knows head sizes 64, 96 and 128: change the model, or use --run.device=cpu",
            c.model.head_dim);
    require(c.run.comm != Comm::nccl || gpu, "run.comm = nccl carries data between GPUs: use --run.device=cuda, or --run.comm=host");
    require(c.run.attention != AttentionProvider::cudnn || (gpu && c.train.dtype == DType::bf16 && c.data.documents == Documents::joined),
            "run.attention = cudnn is for GPUs, in bf16, on joined documents (here: {}, {}, {}): leave it out, and our own attention does it", name_of(c.run.device),
            name_of(c.train.dtype), c.data.documents == Documents::joined ? "joined" : "isolated");
    require(!gpu || c.debug.streams == StreamMode::normal,
            "debug.streams = adversarial is a check of the CPU backend: use --run.device=cpu with it");
    require(c.run.deterministic || gpu, "run.deterministic = off lets NCCL choose its fastest sums; on CPUs every operation is deterministic: leave it on");
}

}  // namespace

void resolve(Config& c, int ranks, int local_ranks) {
    check_complete(c);
    check_ranges(c);
    derive_model(c);
    derive_mesh(c, ranks);
    derive_run(c, local_ranks);
    check_ranges(c);
    check_model(c.model);
    check_training(c);
    check_mesh(c);
    check_build_limits(c);
}

}  // namespace trifold
