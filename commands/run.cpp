#include "commands/run.h"

#include <fmt/format.h>
#include <omp.h>
#include <sys/resource.h>

#include <chrono>
#include <filesystem>
#include <limits>
#include <optional>

#include "base/text.h"
#include "checkpoint/async_saver.h"
#include "checkpoint/files.h"
#include "checkpoint/huggingface.h"
#include "checkpoint/load.h"
#include "commands/inference.h"
#include "data/tokenizer.h"
#include "kernels/cpu/linear_rate.h"
#include "kernels/cuda/runtime.h"
#include "kernels/gpu_rate.h"
#include "model/flops.h"
#include "parallel/signals.h"
#include "parallel/telemetry.h"
#include "parallel/trace.h"

namespace trifold {
namespace {

using Clock = std::chrono::steady_clock;
double seconds_since(Clock::time_point t) { return std::chrono::duration<double>(Clock::now() - t).count(); }

int64_t process_peak_bytes() {
    rusage usage{};
    getrusage(RUSAGE_SELF, &usage);
    return usage.ru_maxrss * 1024;
}

// Isolated documents need to know which id ends one; joined ones do not care.
int32_t end_of_document(const DataConfig& data) {
    return data.documents == Documents::isolated ? Tokenizer::load(data.tokenizer).end_of_document() : -1;
}

LoaderOptions training_data(const Config& c) {
    return {.name = "data.train", .seq = c.train.seq, .micro_batch = c.train.micro_batch, .global_batch = c.train.global_batch,
            .seed = c.train.seed, .vocab = c.model.vocab, .shuffle = c.data.shuffle ? Shuffle::on : Shuffle::off,
            .documents = c.data.documents, .end_of_document = end_of_document(c.data),
            .mask_prompt = c.data.mask_prompt ? PromptMask::on : PromptMask::off};
}
LoaderOptions validation_data(const Config& c) {
    LoaderOptions o = training_data(c);
    o.name = "data.val";
    o.global_batch = c.train.micro_batch;
    o.shuffle = Shuffle::off;
    return o;
}

}  // namespace

Config train_config(const std::vector<std::string>& args) {
    ParseContext context;
    context.read_model = read_model_of;
    Config config = parse_config(args, context);
    resolve(config);
    if (!config.origin.contains("train.steps")) throw Problem(Exit::usage, "train.steps is not given: --train.steps=N says how long the run is");
    prepare_device(config.run);  // before anything is written
    omp_set_num_threads(static_cast<int>(config.run.threads));
    return config;
}

// Everything of a run beside the numbers. Members are made in this order and end in the reverse one.
struct Run::Parts {
    explicit Parts(const Config& config)
        : config(config), trace(make_trace(config)), trainer(config), store(store_options(config)), train(config.data.train, training_data(config)) {}

    static Trace make_trace(const Config& c) { return c.run.trace ? Trace(c.run.dir, 0) : Trace(); }
    static StoreOptions store_options(const Config& c) {
        return {.dir = c.checkpoint.dir, .keep = c.checkpoint.keep, .keep_every = c.checkpoint.keep_every,
                .threads = static_cast<int>(c.run.threads), .tool = std::string("trifold ") + TRIFOLD_VERSION};
    }

    FoundCheckpoint checkpoint_to_resume() const;
    bool is_own_checkpoint(const std::string& path) const;
    void load_weights();
    void check_same_samples(const FoundCheckpoint& found) const;
    void resume(const FoundCheckpoint& found);
    void start_logs();
    void print_start() const;
    TrainingState state() const;
    void report(const std::optional<SaveOutcome>& outcome);
    void find_peak();

    const Config config;
    SignalHandlers signals;
    Trace trace;
    Trainer trainer;
    CheckpointStore store;
    Loader train;
    std::optional<Loader> validation;
    std::optional<Telemetry> log;
    std::optional<AsyncSaver> saver;
    std::vector<std::string> damaged;   // checkpoints that could not be used, for the log

    GlobalBatch batch;
    std::string data_hash, origin_of_weights = "random initial values";
    double peak_flops = 0;              // of one step's matrix products, for the MFU
    std::string peak_origin;
    int64_t resumed_step = 0, saved_step = -1, steps_here = 0, tokens = 0;
    bool last_save_failed = false;
    Clock::time_point step_start, started = Clock::now();
};

Run::Run(const Config& config) {
    std::error_code error;
    std::filesystem::create_directories(config.run.dir, error);
    if (error || !std::filesystem::is_directory(config.run.dir))
        throw Problem(Exit::usage, fmt::format("cannot create the run directory {}: {}; give another with --run.dir", config.run.dir,
                                               error ? error.message() : "a file has this name"));
    parts_ = std::make_unique<Parts>(config);
    Parts& p = *parts_;
    if (!config.data.val.empty()) p.validation.emplace(config.data.val, validation_data(config));
    p.data_hash = fmt::format("{:016x}", p.train.content_hash());
    p.store.prepare(checkpoint_bytes(p.trainer.table()));
    if (p.trace.on()) p.trainer.engine().observe(p.trace.stream_observer());
    p.load_weights();
    p.find_peak();
    p.start_logs();
    if (config.checkpoint.async && config.overlap_checkpoint && config.checkpoint.every > 0)
        p.saver.emplace(p.store, p.trainer.table(), p.trainer.snapshot(), static_cast<int>(config.run.threads));
}

Run::~Run() = default;

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

void Run::Parts::load_weights() {
    const FoundCheckpoint found = checkpoint_to_resume();
    damaged = found.damaged;
    if (found.found()) return resume(found);
    if (config.init_from.empty()) return trainer.initialize_weights();
    float* master = trainer.host_state().master;
    if (is_hf_folder(config.init_from)) {
        import_hf(config.init_from, trainer.table(), master);
    } else {
        load_state(open_checkpoint(config.init_from), trainer.table(), {master, nullptr, nullptr});
    }
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
    load_state(found, trainer.table(), trainer.host_state(), {.threads = static_cast<int>(config.run.threads)});
    trainer.step = resumed_step = s.step;
    if (is_own_checkpoint(found.path)) saved_step = s.step;
    trainer.updates = s.updates;
    trainer.skipped = s.skipped;
    tokens = s.tokens;
    train.seek(s.samples / config.train.global_batch);
    trainer.host_state_changed();
    origin_of_weights = fmt::format("{} (step {})", found.path, s.step);
}

// What MFU refers to: the data sheet of a GPU that we know, else what products reach here and now.
void Run::Parts::find_peak() {
    const DType type = config.train.dtype;
    const char* precision = name_of(type);
    const bool gpu = config.run.device == Device::cuda;
    if (gpu) peak_flops = type == DType::bf16 ? cuda::probe().bf16_flops : cuda::probe().fp32_flops;
    if (peak_flops > 0) {
        peak_origin = fmt::format("{} by the data sheet of the GPU, without sparsity", precision);
        return;
    }
    peak_flops = gpu ? measure_gpu_rate(trainer.compute(), type) : measure_matmul_rate(type);
    peak_origin = gpu ? fmt::format("{} matrix products on the GPU, measured just now", precision)
                      : fmt::format("{} matrix products on {} thread{}, measured just now", precision, config.run.threads, config.run.threads == 1 ? "" : "s");
}

void Run::Parts::start_logs() {
    replace_text(config.run.dir + "/config.json", to_json(config, Origins::with) + "\n");
    print_start();
    log.emplace(config.run.dir, TelemetryOptions{.steps = config.train.steps, .resumed_step = resumed_step, .log_every = config.run.log_every,
                                                 .tensorboard = config.run.tensorboard, .mfu_convention = fmt::format("of {:.0f} GFLOP/s", peak_flops * 1e-9)});
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
    line("data", fmt::format("{}{}", train.description(), config.data.documents == Documents::isolated ? ", documents isolated" : ""));
    line("weights", origin_of_weights);
    line("memory", fmt::format("{}, allocated before the first step", human_bytes(trainer.memory_bytes())));
    line("FLOPs", fmt::format("{} per token: {}", with_prefix(flops_per_token(config.model, config.train.seq)), flops_convention()));
    line("peak", fmt::format("{:.0f} GFLOP/s: {}", peak_flops * 1e-9, peak_origin));
    line("run", config.run.dir);
    std::fflush(stdout);
}

TrainingState Run::Parts::state() const {
    return {.step = trainer.step, .updates = trainer.updates, .skipped = trainer.skipped, .samples = train.position() * config.train.global_batch,
            .tokens = tokens, .seed = config.train.seed, .config_json = to_json(config), .data_hash = data_hash};
}

void Run::Parts::report(const std::optional<SaveOutcome>& outcome) {
    if (!outcome) return;
    last_save_failed = !outcome->ok();
    if (outcome->ok()) {
        log->event("checkpoint", {{"step", outcome->step}, {"path", outcome->path}, {"bytes", outcome->bytes}, {"seconds", outcome->seconds}});
    } else {
        log->event("checkpoint_failed", {{"step", outcome->step}, {"problem", outcome->problem}});
        std::fprintf(stderr, "trifold: %s; training goes on, older checkpoints are untouched\n", outcome->problem.c_str());
    }
    if (!outcome->warning.empty()) log->event("checkpoint_warning", {{"problem", outcome->warning}});
}

Trainer& Run::trainer() { return parts_->trainer; }
const GlobalBatch& Run::batch() const { return parts_->batch; }

bool Run::next() {
    Parts& p = *parts_;
    if (p.saver) p.report(p.saver->poll());
    if (p.trainer.step >= p.config.train.steps || p.signals.requested() != StopRequest::none) return false;
    p.step_start = Clock::now();
    p.batch = p.train.next();
    return true;
}

void Run::record(const StepResult& r) {
    Parts& p = *parts_;
    Trainer& t = p.trainer;
    const double step_s = seconds_since(p.step_start);
    const double tokens = static_cast<double>(p.config.train.global_batch * p.config.train.seq);
    ++t.step;
    ++p.steps_here;
    p.tokens += r.tokens;
    p.log->step({.step = t.step, .loss = r.loss, .grad_norm = r.grad_norm, .lr = r.lr, .tokens = r.tokens, .step_s = step_s,
                 .tokens_per_s = tokens / step_s, .mfu = flops_per_token(p.config.model, p.config.train.seq) * tokens / step_s / p.peak_flops,
                 .exposed_s = {}, .bubble_s = 0, .mem_bytes = t.memory_bytes()});
    if (r.applied) {
        ++t.updates;
        t.skipped_in_a_row = 0;
        return;
    }
    ++t.skipped;
    ++t.skipped_in_a_row;
    p.log->event("skipped_step", {{"step", t.step}, {"loss", r.loss}, {"grad_norm", static_cast<double>(r.grad_norm)}});
    p.log->say(fmt::format("step {}: loss or gradients are not finite; the step is skipped, weights are unchanged ({} skipped so far)", t.step, t.skipped));
    if (p.config.resilience.on_nan == OnNan::stop || t.skipped_in_a_row > p.config.resilience.max_skips)
        throw Problem(Exit::gave_up, fmt::format("{} step{} in a row had a loss or gradients that are not finite (step {}): lower --optim.lr, look at the data, "
                                                 "or resume from an older checkpoint with --checkpoint.resume=PATH",
                                                 t.skipped_in_a_row, t.skipped_in_a_row == 1 ? "" : "s", t.step));
}

bool Run::evaluation_due() const {
    const Parts& p = *parts_;
    const int64_t every = p.config.data.eval_every;
    return p.validation && every > 0 && (p.trainer.step % every == 0 || p.trainer.step == p.config.train.steps);
}

int64_t Run::validation_batches() const {
    const Parts& p = *parts_;
    const int64_t once_through = p.validation->samples_per_epoch() / p.config.train.micro_batch;
    return std::max<int64_t>(1, std::min(p.config.data.eval_batches, once_through));
}

GlobalBatch Run::validation_batch(int64_t index) {
    Loader& data = *parts_->validation;
    if (index == 0) data.seek(0);
    return data.next();
}

void Run::record_evaluation(double loss) { parts_->log->evaluation(parts_->trainer.step, loss); }

bool Run::checkpoint_due() const {
    const int64_t every = parts_->config.checkpoint.every;
    return every > 0 && parts_->trainer.step % every == 0 && parts_->trainer.step < parts_->config.train.steps;
}

void Run::save() {
    Parts& p = *parts_;
    p.saved_step = p.trainer.step;
    if (p.saver) p.report(p.saver->wait());  // beside a GPU it still reads what read_state() is about to overwrite
    const FlatState state = p.trainer.read_state();
    p.report(p.saver ? p.saver->begin(state, p.state()) : p.store.save(p.trainer.table(), state, p.state()));
}

void Run::after_backward(float unit) {
    Parts& p = *parts_;
    const Tensor& grad = p.trainer.optimizer().grad();
    const int64_t step = p.trainer.step + 1;
    if (p.config.debug.inject.kind == InjectKind::nan && step == p.config.debug.inject.step) {
        float nan = std::numeric_limits<float>::quiet_NaN();
        p.trainer.engine().wait(copy(p.trainer.compute(), {.x = Tensor{&nan, DType::f32, 1}, .y = grad.slice(0, 1)}));
    }
    if (p.steps_here > 0 || p.config.debug.dump_grads.empty()) return;
    std::vector<float> scaled(static_cast<size_t>(grad.elems));
    p.trainer.engine().wait(copy(p.trainer.compute(), {.x = grad, .y = Tensor{scaled.data(), DType::f32, grad.elems}}));
    for (float& g : scaled) g *= unit;
    dump_tensors(p.config.debug.dump_grads, p.config.model, p.trainer.table(), scaled.data());
}

void Run::save_last() {
    Parts& p = *parts_;
    if (p.saver) p.report(p.saver->wait());
    if (p.saved_step == p.trainer.step && !p.last_save_failed) return;
    p.saved_step = p.trainer.step;
    p.report(p.store.save(p.trainer.table(), p.trainer.read_state(), p.state()));
}

Exit Run::finish() {
    Parts& p = *parts_;
    save_last();
    if (!p.config.debug.dump_params.empty())
        dump_tensors(p.config.debug.dump_params, p.config.model, p.trainer.table(), p.trainer.read_state().master);
    const StopRequest request = p.signals.requested();
    const bool complete = p.trainer.step >= p.config.train.steps;
    p.log->event(complete ? "done" : "stopped", {{"step", p.trainer.step}});
    p.log->say(fmt::format("{} at step {} after {:.1f} s; memory {} allocated, {} peak of the process; checkpoint {}",
                           complete ? "done" : "stopped", p.trainer.step, seconds_since(p.started), human_bytes(p.trainer.memory_bytes()),
                           human_bytes(process_peak_bytes()), p.last_save_failed ? "NOT SAVED" : p.config.checkpoint.dir + "/" + step_name(p.saved_step)));
    for (const std::string& finding : p.trainer.engine().findings()) std::fprintf(stderr, "trifold: unordered access: %s\n", finding.c_str());
    if (!p.trainer.engine().findings().empty()) return Exit::bug;
    if (p.last_save_failed) return Exit::checkpoint;
    return complete ? Exit::ok : exit_code(request);
}

}  // namespace trifold
