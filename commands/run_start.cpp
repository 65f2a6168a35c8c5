// commands/run_start.cpp   A run up to its first step: folder, data, weights from where they are to come, logs.
#include <filesystem>
#include <set>

#include "base/refuse.h"
#include "base/text.h"
#include "checkpoint/files.h"
#include "checkpoint/huggingface.h"
#include "commands/attention.h"
#include "commands/run.h"
#include "kernels/cuda/cudnn_attention.h"
#include "kernels/cuda/runtime.h"
#include "model/flops.h"
#include "model/options.h"
#include "parallel/schedule_simulation.h"

namespace trifold {
namespace {

// Ranks start together, but one may have to read and verify a large checkpoint, alone or from a slow disk.
constexpr double start_up_s = 3600;

void make_run_directory(const Config& config, World& world) {
    std::error_code error;
    if (world.rank() == 0) std::filesystem::create_directories(config.run.dir, error);
    if (world.rank() == 0 && (error || !std::filesystem::is_directory(config.run.dir)))
        refuse(Exit::usage, "cannot create the run directory {}: {}; give another with --run.dir", config.run.dir,
               error ? error.message() : "a file has this name");
    world.barrier("the run directory");
}

// What is still open can be decided now that the GPU and the folder are there.
Config settled(const Config& config, World& world, std::string& attention_reason) {
    make_run_directory(config, world);
    Config c = config;
    attention_reason = settle_attention(c, world);
    return c;
}

StoreOptions store_options(const Config& c, World& world) {
    return {.dir = c.checkpoint.dir, .keep = c.checkpoint.keep, .keep_every = c.checkpoint.keep_every, .threads = static_cast<int>(c.run.threads),
            .tool = std::string("trifold ") + TRIFOLD_VERSION, .world = world.size() > 1 ? &world : nullptr};
}

size_t hosts_of(const World& world) {
    std::set<std::string> names;
    for (int r = 0; r < world.size(); ++r) names.insert(world.host_of(r));
    return names.size();
}

}  // namespace

Run::Run(const Config& config, World& world)
    : config_(settled(config, world, attention_reason_)),
      world_(world),
      place_(mesh_of(config).at(world.rank())),
      trace_(config.run.trace ? Trace(config.run.dir, world.rank(), world.clock_offset_ns()) : Trace()),
      train_(open_data(config.data.train, training_data(config, place_.dp), world)),
      trainer_(config_, world),
      store_(store_options(config, world)) {
    if (!config.data.val.empty()) validation_.emplace(open_data(config.data.val, validation_data(config, place_.dp), world));
    data_hash_ = fmt::format("{:016x}", train_.content_hash());
    world.agree("data.train", data_hash_, Exit::data, start_up_s);
    store_.prepare(checkpoint_bytes(ParameterTable(config.model), world.size()));
    if (trace_.on()) trainer_.engine().observe(trace_.stream_observer());
    load_weights();
    peak_ = find_peak(config, world, trainer_.compute());
    start_logs();
    if (config.checkpoint.async && config.overlap.checkpoint && config.checkpoint.every > 0)
        saver_.emplace(store_, config_.model, trainer_.snapshot(), static_cast<int>(config.run.threads));
    if (config.mesh.pp > 1) {
        const ScheduleShape shape = schedule_shape(config, micro_batches(config));
        bubble_ = simulate(make_schedule(shape), shape.virtual_stages, {}).bubble;
    }
    world.barrier("the first step", start_up_s);  // nobody's first step waits for what rank 0 did alone
}

// A path outside this run is where the run begins: once the run has checkpoints of its own, starting it again goes on with these.
FoundCheckpoint Run::checkpoint_to_resume() const {
    const LoadOptions options{.threads = static_cast<int>(config_.run.threads)};
    const std::string& resume = config_.checkpoint.resume;
    if (resume == "none") return {};
    const bool elsewhere = resume != "auto" && std::filesystem::exists(resume) && !is_own_checkpoint(resume);
    if (resume == "auto" || (elsewhere && !list_checkpoints(config_.checkpoint.dir).complete.empty())) return find_newest(config_.checkpoint.dir, options);
    return open_checkpoint(resume, options);
}

bool Run::is_own_checkpoint(const std::string& path) const {
    std::error_code error;
    const auto own = std::filesystem::weakly_canonical(config_.checkpoint.dir, error), other = std::filesystem::weakly_canonical(path, error);
    return other == own || other.parent_path() == own;
}

// Rank 0 looks for it and verifies it; the others take its word.
FoundCheckpoint Run::agreed_checkpoint() const {
    FoundCheckpoint found;
    if (leads()) found = checkpoint_to_resume();
    const std::string path = world_.from_rank_0(found.path, start_up_s);
    if (!leads() && !path.empty()) found = {.path = path, .state = read_manifest(path).state};
    return found;
}

void Run::load_weights() {
    const FoundCheckpoint found = agreed_checkpoint();
    damaged_ = found.damaged;
    if (found.found()) return resume(found);
    if (config_.init_from.empty()) return trainer_.initialize_weights();
    std::vector<StateSlice> weights = trainer_.state_to_fill();
    for (StateSlice& s : weights) s.m = s.v = nullptr;
    if (is_hf_folder(config_.init_from)) {
        import_hf(config_.init_from, config_.model, weights);
    } else {
        load_state(open_checkpoint(config_.init_from), config_.model, weights);
    }
    world_.barrier("the weights", start_up_s);
    trainer_.host_state_changed();
    origin_of_weights_ = config_.init_from;
}

// The position in the data is a number of samples; it means the same only if samples are made in the same way.
void Run::check_same_samples(const FoundCheckpoint& found) const {
    const Config before = config_from_json(found.state.config_json, found.path);
    const auto same = [&](const char* option, auto then, auto now) {
        if (then == now) return;
        refuse(Exit::checkpoint, "{} was trained with {} = {}, not {}: samples would be seen twice or never; keep the value, or start a new run "
               "from these weights with --init.from={} and another --run.dir", found.path, option, then, now, found.path);
    };
    same("train.seq", before.train.seq, config_.train.seq);
    same("train.seed", before.train.seed, config_.train.seed);
    same("data.shuffle", before.data.shuffle ? "on" : "off", config_.data.shuffle ? "on" : "off");
}

// Goes on where the checkpoint was written. Samples are functions of their number, so the position is one integer.
void Run::resume(const FoundCheckpoint& found) {
    check_resumable(found, config_.model, data_hash_);
    check_same_samples(found);
    const TrainingState& s = found.state;
    if (s.samples % config_.train.global_batch != 0)
        refuse(Exit::checkpoint, "{} stands at sample {}, which is no multiple of --train.global_batch={}: a step would see samples twice; "
               "use a batch that divides it", found.path, s.samples, config_.train.global_batch);
    load_state(found, config_.model, trainer_.state_to_fill(), {.threads = static_cast<int>(config_.run.threads)});
    trainer_.step = resumed_step_ = s.step;
    if (is_own_checkpoint(found.path)) saved_step_ = s.step;
    trainer_.updates = s.updates;
    trainer_.skipped = s.skipped;
    tokens_ = s.tokens;
    train_.seek(s.samples / config_.train.global_batch);
    world_.barrier("the weights", start_up_s);
    trainer_.host_state_changed();
    origin_of_weights_ = fmt::format("{} (step {})", found.path, s.step);
}

void Run::start_logs() {
    if (!leads()) return;
    replace_text(config_.run.dir + "/config.json", to_json(config_, Origins::with) + "\n");
    print_start();
    log_.emplace(config_.run.dir, TelemetryOptions{.steps = config_.train.steps, .resumed_step = resumed_step_, .log_every = config_.run.log_every,
                                                 .tensorboard = config_.run.tensorboard, .mfu_convention = fmt::format("of {:.0f} GFLOP/s", peak_.flops * 1e-9)});
    for (const std::string& sentence : damaged_) {
        std::fprintf(stderr, "trifold: %s\n", sentence.c_str());
        log_->event("damaged_checkpoint", {{"problem", sentence}});
    }
    log_->event(resumed_step_ > 0 ? "resume" : "start", {{"step", resumed_step_}, {"weights", origin_of_weights_}});
}

void Run::print_start() const {
    std::fputs(describe(config_).c_str(), stdout);
    const auto line = [](const char* label, const std::string& text) { fmt::print("{:<12}{}\n", label, wrapped(text, 12)); };
    const cuda::Gpu gpu = cuda::probe();
    const bool passed_over = gpu.state == cuda::GpuState::found && config_.origin.at("run.device") == "derived";
    line("device", config_.run.device == Device::cuda ? gpu.text
                                                     : fmt::format("cpu, {} thread{}{}", config_.run.threads, config_.run.threads == 1 ? "" : "s",
                                                                   passed_over ? "; the GPU knows head sizes 64, 96 and 128 only" : ""));
    if (config_.run.device == Device::cuda) {
        const bool cudnn = config_.run.attention == AttentionProvider::cudnn;
        line("attention", fmt::format("{}{}", cudnn ? "cuDNN " + cuda::cudnn_version() : "our own", attention_reason_.empty() ? "" : ": " + attention_reason_));
    }
    const size_t hosts = hosts_of(world_);
    if (world_.size() > 1)
        line("mesh", fmt::format("{} ranks on {} host{}: tp {}, pp {}{}, dp {}; {}, zero {}, {} micro-batches a step", world_.size(), hosts, hosts == 1 ? "" : "s",
                                 config_.mesh.tp, config_.mesh.pp, config_.mesh.virtual_stages > 1 ? fmt::format(" x {}", config_.mesh.virtual_stages) : "", config_.mesh.dp,
                                 config_.mesh.pp > 1 ? name_of(config_.mesh.schedule) : "no pipeline", config_.optim.zero, micro_batches(config_)));
    line("data", fmt::format("{}{}", train_.description(), config_.data.documents == Documents::isolated ? ", documents isolated" : ""));
    line("weights", origin_of_weights_);
    line("memory", fmt::format("{}, allocated before the first step", human_bytes(trainer_.memory_bytes())));
    line("FLOPs", fmt::format("{} per token: {}", with_prefix(flops_per_token(config_.model, config_.train.seq)), flops_convention()));
    line("peak", fmt::format("{:.0f} GFLOP/s: {}", peak_.flops * 1e-9, peak_.origin));
    line("run", config_.run.dir);
    std::fflush(stdout);
}

}  // namespace trifold
