#include "commands/run.h"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <omp.h>
#include <sys/resource.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <filesystem>
#include <limits>
#include <optional>
#include <set>
#include <sstream>

#include "base/cpus.h"
#include "base/text.h"
#include "checkpoint/async_saver.h"
#include "checkpoint/files.h"
#include "checkpoint/gather.h"
#include "checkpoint/huggingface.h"
#include "checkpoint/load.h"
#include "commands/inference.h"
#include "data/tokenizer.h"
#include "kernels/cpu/linear_rate.h"
#include "kernels/cuda/runtime.h"
#include "kernels/gpu_rate.h"
#include "model/flops.h"
#include "parallel/schedule_simulation.h"
#include "parallel/signals.h"
#include "parallel/telemetry.h"
#include "parallel/trace.h"

namespace trifold {
namespace {

using Clock = std::chrono::steady_clock;
// Ranks start together, but one may have to read and verify a large checkpoint, alone or from a slow disk.
constexpr double start_up_s = 3600;

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

// Data-parallel rank d takes the d-th part of every global batch; the ranks of one model replica read the same.
LoaderOptions training_data(const Config& c, int dp_rank) {
    const int64_t own = c.train.global_batch / c.mesh.dp;
    return {.name = "data.train", .seq = c.train.seq, .micro_batch = c.train.micro_batch, .global_batch = c.train.global_batch,
            .first_sequence = dp_rank * own, .sequence_count = own, .seed = c.train.seed, .vocab = c.model.vocab, .shuffle = c.data.shuffle ? Shuffle::on : Shuffle::off,
            .documents = c.data.documents, .end_of_document = end_of_document(c.data),
            .mask_prompt = c.data.mask_prompt ? PromptMask::on : PromptMask::off};
}
// Micro-batch k*dp + d of an evaluation belongs to data-parallel rank d.
LoaderOptions validation_data(const Config& c, int dp_rank) {
    LoaderOptions o = training_data(c, dp_rank);
    o.name = "data.val";
    o.global_batch = c.train.micro_batch * c.mesh.dp;
    o.first_sequence = dp_rank * c.train.micro_batch;
    o.sequence_count = c.train.micro_batch;
    o.shuffle = Shuffle::off;
    return o;
}

// Files may be missing on one host only: there the sentence says which it is.
Loader open_data(const std::vector<DataSource>& sources, const LoaderOptions& options, const World& world) {
    try {
        return Loader(sources, options);
    } catch (const Problem& p) {
        if (world.size() == 1) throw;
        throw Problem(p.code(), fmt::format("rank {} on {}: {}", world.rank(), world.host_of(world.rank()), p.what()));
    }
}

// Every rank compares its options with those of rank 0; nobody goes on before all have. Ranks may have different numbers of CPUs, and
// hosts different interfaces.
void check_same_options(const Config& config, World& world) {
    Config own = config;
    own.run.threads = 1;
    own.launch = {};
    const std::string json = to_json(own), json_of_rank_0 = world.from_rank_0(json);
    if (json != json_of_rank_0)
        throw Problem(Exit::usage, fmt::format("rank 0 and rank {} do not have the same options ({}): start all ranks with the same command, on the same files",
                                               world.rank(), fmt::join(differences(config_from_json(json_of_rank_0, "rank 0"), own), "; ")));
    world.barrier("the options");
}

// Ranks of this host that may use the same CPUs as this one: all of them, or fewer where the launcher binds each to its own. One message
// from each rank, and the answer to all.
int ranks_sharing_cpus(World& world) {
    if (world.size() == 1) return 1;
    const auto key = [](int rank) { return fmt::format("cpus {}", rank); };
    world.put(key(world.rank()), cpu_list());
    std::string lists;  // one line per rank
    for (int r = 0; r < world.size() && world.rank() == 0; ++r) lists += world.host_of(r) + " " + world.take(key(r), start_up_s) + "\n";
    std::istringstream lines(world.from_rank_0(lists));
    const std::string own = world.host_of(world.rank()) + " " + cpu_list();
    int sharing = 0;
    for (std::string line; std::getline(lines, line);) sharing += line == own;
    return std::max(sharing, 1);
}

}  // namespace

Config train_config(const Config& parsed, World& world) {
    Config config = parsed;
    if (world.size() > 1 && config.run.device != Device::cpu) cuda::prefer(world.local_rank());
    resolve(config, world.size(), ranks_sharing_cpus(world));
    const std::string dir_of_rank_0 = world.from_rank_0(config.run.dir);
    if (config.origin.at("run.dir") == "derived") {  // from the time, and ranks may start in different seconds
        const bool own_checkpoints = config.origin.at("checkpoint.dir") == "derived";
        config.run.dir = dir_of_rank_0;
        if (own_checkpoints) config.checkpoint.dir = config.run.dir + "/checkpoints";
    }
    check_same_options(config, world);
    if (!config.origin.contains("train.steps")) throw Problem(Exit::usage, "train.steps is not given: --train.steps=N says how long the run is");
    prepare_device(config.run, world.local_rank());  // before anything is written
    omp_set_num_threads(static_cast<int>(config.run.threads));
    return config;
}

// Everything of a run beside the numbers. Members are made in this order and end in the reverse one.
struct Run::Parts {
    Parts(const Config& config, World& world)
        : config(config),
          world(world),
          place(mesh_of(config).at(world.rank())),
          trace(make_trace(config, world)),
          train(open_data(config.data.train, training_data(config, place.dp), world)),
          trainer(config, world),
          store(store_options(config, world)) {}

    static Trace make_trace(const Config& c, const World& world) {
        return c.run.trace ? Trace(c.run.dir, world.rank(), world.clock_offset_ns()) : Trace();
    }
    static StoreOptions store_options(const Config& c, World& world) {
        return {.dir = c.checkpoint.dir, .keep = c.checkpoint.keep, .keep_every = c.checkpoint.keep_every,
                .threads = static_cast<int>(c.run.threads), .tool = std::string("trifold ") + TRIFOLD_VERSION,
                .world = world.size() > 1 ? &world : nullptr};
    }
    bool leads() const { return world.rank() == 0; }  // prints and logs
    void event(const std::string& kind, const std::vector<EventField>& fields) {
        if (log) log->event(kind, fields);
    }
    void say(const std::string& line) {
        if (log) log->say(line);
    }
    std::array<double, 4> waited() const { return {trainer.waited_s(Axis::tp), trainer.waited_s(Axis::dp), trainer.waited_s(Axis::pp), trainer.waited_s(Axis::cp)}; }

    FoundCheckpoint checkpoint_to_resume() const;
    bool is_own_checkpoint(const std::string& path) const;
    void dump(const std::string& path, const std::vector<StateSlice>& slices);
    FoundCheckpoint agreed_checkpoint() const;
    void load_weights();
    void check_same_samples(const FoundCheckpoint& found) const;
    void resume(const FoundCheckpoint& found);
    void start_logs();
    void print_start() const;
    size_t hosts() const {
        std::set<std::string> names;
        for (int r = 0; r < world.size(); ++r) names.insert(world.host_of(r));
        return names.size();
    }
    TrainingState state() const;
    ExposedSeconds exposed(double step_s, double& bubble_s);
    void report(const std::optional<SaveOutcome>& outcome);
    void find_peak();

    const Config config;
    World& world;
    const Coordinates place;
    SignalHandlers signals;
    Trace trace;
    Loader train;
    Trainer trainer;
    CheckpointStore store;
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
    StopRequest stop = StopRequest::none;  // agreed by all ranks
    std::array<double, 4> waited_before{};  // tp, dp, pp, cp at the start of the step
    double bubble = 0;                     // of the schedule: idle over ideal time
    int64_t validated = 0;                 // rounds of micro-batches of this evaluation
    Clock::time_point step_start, started = Clock::now();
};

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
    p.find_peak();
    p.start_logs();
    if (config.checkpoint.async && config.overlap.checkpoint && config.checkpoint.every > 0)
        p.saver.emplace(p.store, p.config.model, p.trainer.snapshot(), static_cast<int>(config.run.threads));
    if (config.mesh.pp > 1) {
        const ScheduleShape shape = schedule_shape(config, micro_batches(config));
        p.bubble = simulate(make_schedule(shape), shape.virtual_stages, {}).bubble;
    }
    world.barrier("the first step", start_up_s);  // nobody's first step waits for what rank 0 did alone
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

// What MFU refers to: the data sheet of a GPU that we know, else what products reach here and now.
void Run::Parts::find_peak() {
    const DType type = config.train.dtype;
    const char* precision = name_of(type);
    const bool gpu = config.run.device == Device::cuda;
    if (gpu) peak_flops = type == DType::bf16 ? cuda::probe().bf16_flops : cuda::probe().fp32_flops;
    if (peak_flops > 0) {
        peak_flops *= world.size();
        peak_origin = fmt::format("{} by the data sheet of the GPU, without sparsity", precision);
        return;
    }
    // One process measures for all that share its processors.
    const int threads = world.size() > 1 ? usable_cpus() : static_cast<int>(config.run.threads);
    const int ranks_sharing = ranks_sharing_cpus(world);
    double rate = 0;
    if (gpu) {
        rate = measure_gpu_rate(trainer.compute(), type) * world.size();
    } else if (leads()) {
        omp_set_num_threads(threads);
        rate = measure_matmul_rate(type) * world.size() / ranks_sharing;
        omp_set_num_threads(static_cast<int>(config.run.threads));
    }
    peak_flops = rate;
    peak_origin = gpu ? fmt::format("{} matrix products on the GPU, measured just now", precision)
                      : fmt::format("{} matrix products on {} thread{}{}, measured just now", precision, threads, threads == 1 ? "" : "s",
                                  world.size() > ranks_sharing ? fmt::format(", times {}", world.size() / ranks_sharing) : "");
}

void Run::Parts::start_logs() {
    if (!leads()) return;
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
    if (world.size() > 1)
        line("mesh", fmt::format("{} ranks on {} host{}: tp {}, pp {}{}, dp {}; {}, zero {}, {} micro-batches a step", world.size(), hosts(), hosts() == 1 ? "" : "s",
                                 config.mesh.tp, config.mesh.pp, config.mesh.virtual_stages > 1 ? fmt::format(" x {}", config.mesh.virtual_stages) : "", config.mesh.dp,
                                 config.mesh.pp > 1 ? name_of(config.mesh.schedule) : "no pipeline", config.optim.zero, micro_batches(config)));
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
    if (const std::optional<Problem> cause = world.cause()) throw *cause;  // the job ends, so it needs no word about the save
    last_save_failed = !outcome->ok();
    if (outcome->ok()) {
        event("checkpoint", {{"step", outcome->step}, {"path", outcome->path}, {"bytes", outcome->bytes}, {"seconds", outcome->seconds}});
    } else {
        event("checkpoint_failed", {{"step", outcome->step}, {"problem", outcome->problem}});
        if (leads()) std::fprintf(stderr, "trifold: %s; training goes on, older checkpoints are untouched\n", outcome->problem.c_str());
    }
    if (!outcome->warning.empty()) event("checkpoint_warning", {{"problem", outcome->warning}});
}

Trainer& Run::trainer() { return parts_->trainer; }
const GlobalBatch& Run::batch() const { return parts_->batch; }

bool Run::next() {
    Parts& p = *parts_;
    if (p.saver) p.report(p.saver->poll());
    if (p.world.size() == 1) p.stop = p.signals.requested();
    if (p.trainer.step >= p.config.train.steps || p.stop != StopRequest::none) return false;
    p.step_start = Clock::now();
    p.waited_before = p.waited();
    p.batch = p.train.next();
    return true;
}

// The longest waits of any rank. What a pipeline waits for in any case, with messages that take no time, is its bubble.
ExposedSeconds Run::Parts::exposed(double step_s, double& bubble_s) {
    std::array<double, 4> now = waited();
    double busy = step_s;
    for (size_t i = 0; i < now.size(); ++i) busy -= now[i] -= waited_before[i];
    bubble_s = std::min(now[2], bubble * busy);
    now[2] -= bubble_s;
    now[3] = bubble_s;
    trainer.max_over_all(now);
    bubble_s = now[3];
    return {.dp = now[1], .tp = now[0], .pp = now[2]};
}

void Run::record(const StepResult& r) {
    Parts& p = *parts_;
    Trainer& t = p.trainer;
    const double step_s = seconds_since(p.step_start);
    double bubble_s = 0;
    const ExposedSeconds exposed = p.exposed(step_s, bubble_s);
    p.stop = std::max(p.stop, r.stop);
    const double tokens = static_cast<double>(p.config.train.global_batch * p.config.train.seq);
    ++t.step;
    ++p.steps_here;
    p.tokens += r.tokens;
    if (p.log) p.log->step({.step = t.step, .loss = r.loss, .grad_norm = r.grad_norm, .lr = r.lr, .tokens = r.tokens, .step_s = step_s,
                 .tokens_per_s = tokens / step_s, .mfu = flops_per_token(p.config.model, p.config.train.seq) * tokens / step_s / p.peak_flops,
                 .exposed_s = exposed, .bubble_s = bubble_s, .mem_bytes = t.memory_bytes()});
    if (r.applied) {
        ++t.updates;
        t.skipped_in_a_row = 0;
        return;
    }
    ++t.skipped;
    ++t.skipped_in_a_row;
    p.event("skipped_step", {{"step", t.step}, {"loss", r.loss}, {"grad_norm", static_cast<double>(r.grad_norm)}});
    p.say(fmt::format("step {}: loss or gradients are not finite; the step is skipped, weights are unchanged ({} skipped so far)", t.step, t.skipped));
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

void Run::begin_validation() {
    parts_->validated = 0;
    parts_->validation->seek(0);
}

// A round is one micro-batch for each data-parallel rank; in the last one some may have none. As many rounds at once as there are stages.
std::optional<std::vector<MicroBatch>> Run::next_validation() {
    Parts& p = *parts_;
    const int64_t dp = p.config.mesh.dp, batches = validation_batches(), rounds = (batches + dp - 1) / dp;
    if (p.validated == rounds) return std::nullopt;
    std::vector<MicroBatch> own;
    for (int64_t i = 0; i < p.config.mesh.pp && p.validated < rounds; ++i, ++p.validated) {
        GlobalBatch batch = p.validation->next();
        if (p.validated * dp + p.place.dp < batches) own.push_back(std::move(batch.micro.at(0)));
    }
    return own;
}

void Run::record_evaluation(double loss) {
    if (parts_->log) parts_->log->evaluation(parts_->trainer.step, loss);
}

StopRequest Run::stop_requested() const { return parts_->signals.requested(); }

bool Run::checkpoint_due() const {
    const int64_t every = parts_->config.checkpoint.every;
    return every > 0 && parts_->trainer.step % every == 0 && parts_->trainer.step < parts_->config.train.steps;
}

void Run::save() {
    Parts& p = *parts_;
    p.saved_step = p.trainer.step;
    if (p.saver) p.report(p.saver->wait());  // beside a GPU it still reads what read_state() is about to overwrite
    const std::vector<StateSlice> state = p.trainer.owned_state(p.trainer.read_state());
    p.report(p.saver ? p.saver->begin(state, p.state()) : p.store.save(p.config.model, state, p.state()));
}

void Run::after_backward(float unit) {
    Parts& p = *parts_;
    Trainer& t = p.trainer;
    const int64_t step = t.step + 1;
    if (p.config.debug.inject.kind == InjectKind::nan && step == p.config.debug.inject.step && p.leads()) {
        float nan = std::numeric_limits<float>::quiet_NaN();
        t.engine().wait(copy(t.compute(), {.x = Tensor{&nan, DType::f32, 1}, .y = t.sharding().shard_gradient(0).slice(0, 1)}));
    }
    if (p.steps_here > 0 || p.config.debug.dump_grads.empty()) return;
    std::vector<float> scaled = t.read_gradients();
    for (float& g : scaled) g *= unit;
    std::vector<StateShard> shards = t.optimizer().shards();
    for (size_t b = 0; b < shards.size(); ++b) shards[b].master = shards[b].m = shards[b].v = scaled.data() + t.sharding().shard(b).compact;
    p.dump(p.config.debug.dump_grads, t.owned_state(shards));
}

// All tensors together at rank 0, which writes them.
void Run::Parts::dump(const std::string& path, const std::vector<StateSlice>& slices) {
    const std::vector<float> flat = gather_tensors(world, config.model, slices);
    if (leads()) dump_tensors(path, config.model, ParameterTable(config.model), flat.data());
}

void Run::save_last() {
    Parts& p = *parts_;
    if (p.saver) p.report(p.saver->wait());
    if (p.saved_step == p.trainer.step && !p.last_save_failed) return;
    p.saved_step = p.trainer.step;
    p.report(p.store.save(p.config.model, p.trainer.owned_state(p.trainer.read_state()), p.state()));
}

void Run::save_after(const Problem& problem) {
    if (parts_->world.size() == 1 || problem.code() == Exit::gave_up) save_last();
}

Exit Run::finish() {
    Parts& p = *parts_;
    save_last();
    if (!p.config.debug.dump_params.empty())
        p.dump(p.config.debug.dump_params, p.trainer.owned_state(p.trainer.read_state()));
    const bool complete = p.trainer.step >= p.config.train.steps;
    p.event(complete ? "done" : "stopped", {{"step", p.trainer.step}});
    p.say(fmt::format("{} at step {} after {:.1f} s; memory {} allocated, {} peak of the process; checkpoint {}",
                           complete ? "done" : "stopped", p.trainer.step, seconds_since(p.started), human_bytes(p.trainer.memory_bytes()),
                           human_bytes(process_peak_bytes()), p.last_save_failed ? "NOT SAVED" : p.config.checkpoint.dir + "/" + step_name(p.saved_step)));
    for (const std::string& finding : p.trainer.engine().findings()) std::fprintf(stderr, "trifold: unordered access: %s\n", finding.c_str());
    if (!p.trainer.engine().findings().empty()) return Exit::bug;
    if (p.last_save_failed) return Exit::checkpoint;
    return complete ? Exit::ok : exit_code(p.stop);
}

}  // namespace trifold
