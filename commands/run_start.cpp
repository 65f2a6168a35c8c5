// commands/run_start.cpp   A run up to its first step: folder, data, weights from where they are to come, logs.
#include <fmt/format.h>

#include <filesystem>

#include "base/text.h"
#include "checkpoint/files.h"
#include "checkpoint/huggingface.h"
#include "commands/run_parts.h"
#include "kernels/cuda/runtime.h"
#include "model/flops.h"
#include "parallel/schedule_simulation.h"

namespace trifold {
namespace {

// Ranks start together, but one may have to read and verify a large checkpoint, alone or from a slow disk.
constexpr double start_up_s = 3600;

}  // namespace

Run::Run(const Config& config, World& world) {
    std::error_code error;
    if (world.rank() == 0) std::filesystem::create_directories(config.run.dir, error);
    if (world.rank() == 0 && (error || !std::filesystem::is_directory(config.run.dir)))
        throw Problem(Exit::usage, fmt::format("cannot create the run directory {}: {}; give another with --run.dir", config.run.dir,
                                               error ? error.message() : "a file has this name"));
    world.barrier("the run directory");
    parts_ = std::make_unique<Parts>(config, world);
    Parts& p = *parts_;
    if (!config.data.val.empty()) p.validation.emplace(open_data(config.data.val, validation_data(config, p.place.dp), world));
    p.data_hash = fmt::format("{:016x}", p.train.content_hash());
    world.agree("data.train", p.data_hash, Exit::data, start_up_s);
    p.store.prepare(checkpoint_bytes(ParameterTable(config.model), world.size()));
    if (p.trace.on()) p.trainer.engine().observe(p.trace.stream_observer());
    p.load_weights();
    p.peak = find_peak(config, world, p.trainer.compute());
    p.start_logs();
    if (config.checkpoint.async && config.overlap.checkpoint && config.checkpoint.every > 0)
        p.saver.emplace(p.store, p.config.model, p.trainer.snapshot(), static_cast<int>(config.run.threads));
    if (config.mesh.pp > 1) {
        const ScheduleShape shape = schedule_shape(config, micro_batches(config));
        p.bubble = simulate(make_schedule(shape), shape.virtual_stages, {}).bubble;
    }
    world.barrier("the first step", start_up_s);  // nobody's first step waits for what rank 0 did alone
}

// A path outside this run is where the run begins: once the run has checkpoints of its own, starting it again goes on with these.
FoundCheckpoint Run::Parts::checkpoint_to_resume() const {
    const LoadOptions options{.threads = static_cast<int>(config.run.threads)};
    const std::string& resume = config.checkpoint.resume;
    if (resume == "none") return {};
    const bool elsewhere = resume != "auto" && std::filesystem::exists(resume) && !is_own_checkpoint(resume);
    if (resume == "auto" || (elsewhere && !list_checkpoints(config.checkpoint.dir).complete.empty())) return find_newest(config.checkpoint.dir, options);
    return open_checkpoint(resume, options);
}

bool Run::Parts::is_own_checkpoint(const std::string& path) const {
    std::error_code error;
    const auto own = std::filesystem::weakly_canonical(config.checkpoint.dir, error), other = std::filesystem::weakly_canonical(path, error);
    return other == own || other.parent_path() == own;
}

// Rank 0 looks for it and verifies it; the others take its word.
FoundCheckpoint Run::Parts::agreed_checkpoint() const {
    FoundCheckpoint found;
    if (leads()) found = checkpoint_to_resume();
    const std::string path = world.from_rank_0(found.path, start_up_s);
    if (!leads() && !path.empty()) found = {.path = path, .state = read_manifest(path).state};
    return found;
}

void Run::Parts::load_weights() {
    const FoundCheckpoint found = agreed_checkpoint();
    damaged = found.damaged;
    if (found.found()) return resume(found);
    if (config.init_from.empty()) return trainer.initialize_weights();
    std::vector<StateSlice> weights = trainer.state_to_fill();
    for (StateSlice& s : weights) s.m = s.v = nullptr;
    if (is_hf_folder(config.init_from)) {
        import_hf(config.init_from, config.model, weights);
    } else {
        load_state(open_checkpoint(config.init_from), config.model, weights);
    }
    world.barrier("the weights", start_up_s);
    trainer.host_state_changed();
    origin_of_weights = config.init_from;
}

// The position in the data is a number of samples; it means the same only if samples are made in the same way.
void Run::Parts::check_same_samples(const FoundCheckpoint& found) const {
    const Config before = config_from_json(found.state.config_json, found.path);
    const auto same = [&](const char* option, auto then, auto now) {
        if (then == now) return;
        throw Problem(Exit::checkpoint, fmt::format("{} was trained with {} = {}, not {}: samples would be seen twice or never; keep the value, or start a new run "
                                                    "from these weights with --init.from={} and another --run.dir", found.path, option, then, now, found.path));
    };
    same("train.seq", before.train.seq, config.train.seq);
    same("train.seed", before.train.seed, config.train.seed);
    same("data.shuffle", before.data.shuffle ? "on" : "off", config.data.shuffle ? "on" : "off");
}

// Goes on where the checkpoint was written. Samples are functions of their number, so the position is one integer.
void Run::Parts::resume(const FoundCheckpoint& found) {
    check_resumable(found, config.model, data_hash);
    check_same_samples(found);
    const TrainingState& s = found.state;
    if (s.samples % config.train.global_batch != 0)
        throw Problem(Exit::checkpoint, fmt::format("{} stands at sample {}, which is no multiple of --train.global_batch={}: a step would see samples twice; "
                                                    "use a batch that divides it", found.path, s.samples, config.train.global_batch));
    load_state(found, config.model, trainer.state_to_fill(), {.threads = static_cast<int>(config.run.threads)});
    trainer.step = resumed_step = s.step;
    if (is_own_checkpoint(found.path)) saved_step = s.step;
    trainer.updates = s.updates;
    trainer.skipped = s.skipped;
    tokens = s.tokens;
    train.seek(s.samples / config.train.global_batch);
    world.barrier("the weights", start_up_s);
    trainer.host_state_changed();
    origin_of_weights = fmt::format("{} (step {})", found.path, s.step);
}

void Run::Parts::start_logs() {
    if (!leads()) return;
    replace_text(config.run.dir + "/config.json", to_json(config, Origins::with) + "\n");
    print_start();
    log.emplace(config.run.dir, TelemetryOptions{.steps = config.train.steps, .resumed_step = resumed_step, .log_every = config.run.log_every,
                                                 .tensorboard = config.run.tensorboard, .mfu_convention = fmt::format("of {:.0f} GFLOP/s", peak.flops * 1e-9)});
    for (const std::string& sentence : damaged) {
        std::fprintf(stderr, "trifold: %s\n", sentence.c_str());
        log->event("damaged_checkpoint", {{"problem", sentence}});
    }
    log->event(resumed_step > 0 ? "resume" : "start", {{"step", resumed_step}, {"weights", origin_of_weights}});
}

void Run::Parts::print_start() const {
    std::fputs(describe(config).c_str(), stdout);
    const auto line = [](const char* label, const std::string& text) { fmt::print("{:<12}{}\n", label, wrapped(text, 12)); };
    const cuda::Gpu gpu = cuda::probe();
    const bool passed_over = gpu.state == cuda::GpuState::found && config.origin.at("run.device") == "derived";
    line("device", config.run.device == Device::cuda ? gpu.text
                                                     : fmt::format("cpu, {} thread{}{}", config.run.threads, config.run.threads == 1 ? "" : "s",
                                                                   passed_over ? "; the GPU knows head sizes 64, 96 and 128 only" : ""));
    if (world.size() > 1)
        line("mesh", fmt::format("{} ranks on {} host{}: tp {}, pp {}{}, dp {}; {}, zero {}, {} micro-batches a step", world.size(), hosts(), hosts() == 1 ? "" : "s",
                                 config.mesh.tp, config.mesh.pp, config.mesh.virtual_stages > 1 ? fmt::format(" x {}", config.mesh.virtual_stages) : "", config.mesh.dp,
                                 config.mesh.pp > 1 ? name_of(config.mesh.schedule) : "no pipeline", config.optim.zero, micro_batches(config)));
    line("data", fmt::format("{}{}", train.description(), config.data.documents == Documents::isolated ? ", documents isolated" : ""));
    line("weights", origin_of_weights);
    line("memory", fmt::format("{}, allocated before the first step", human_bytes(trainer.memory_bytes())));
    line("FLOPs", fmt::format("{} per token: {}", with_prefix(flops_per_token(config.model, config.train.seq)), flops_convention()));
    line("peak", fmt::format("{:.0f} GFLOP/s: {}", peak.flops * 1e-9, peak.origin));
    line("run", config.run.dir);
    std::fflush(stdout);
}

}  // namespace trifold
