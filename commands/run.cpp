// commands/run.cpp   A run from its first step to its last: counting, metrics, evaluation, checkpoints, the end.
#include "commands/run.h"

#include <fmt/format.h>
#include <sys/resource.h>

#include <algorithm>
#include <limits>

#include "base/text.h"
#include "checkpoint/gather.h"
#include "checkpoint/huggingface.h"
#include "commands/run_parts.h"
#include "model/flops.h"

namespace trifold {
namespace {

double seconds_since(Clock::time_point t) { return std::chrono::duration<double>(Clock::now() - t).count(); }

int64_t process_peak_bytes() {
    rusage usage{};
    getrusage(RUSAGE_SELF, &usage);
    return usage.ru_maxrss * 1024;
}

}  // namespace

Run::~Run() = default;

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
                 .tokens_per_s = tokens / step_s, .mfu = flops_per_token(p.config.model, p.config.train.seq) * tokens / step_s / p.peak.flops,
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
    p.dump(p.config.debug.dump_grads, t.owned_state(t.shards_in(scaled.data())));
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
