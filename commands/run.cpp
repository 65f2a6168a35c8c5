// commands/run.cpp   A run from its first step to its last: counting, metrics, evaluation, checkpoints, the end.
#include "commands/run.h"

#include <sys/resource.h>

#include <algorithm>
#include <limits>

#include "base/refuse.h"
#include "base/text.h"
#include "checkpoint/gather.h"
#include "checkpoint/huggingface.h"
#include "model/flops.h"
#include "model/options.h"

namespace trifold {
namespace {

double seconds_since(std::chrono::steady_clock::time_point t) { return std::chrono::duration<double>(std::chrono::steady_clock::now() - t).count(); }

int64_t process_peak_bytes() {
    rusage usage{};
    getrusage(RUSAGE_SELF, &usage);
    return usage.ru_maxrss * 1024;
}

}  // namespace

void Run::event(const std::string& kind, const std::vector<EventField>& fields) {
    if (log_) log_->event(kind, fields);
}

void Run::say(const std::string& line) {
    if (log_) log_->say(line);
}

std::array<double, 4> Run::waited() const {
    return {trainer_.waited_s(Axis::tp), trainer_.waited_s(Axis::dp), trainer_.waited_s(Axis::pp), trainer_.waited_s(Axis::cp)};
}

TrainingState Run::state() const {
    return {.step = trainer_.step, .updates = trainer_.updates, .skipped = trainer_.skipped, .samples = train_.position() * config_.train.global_batch,
            .tokens = tokens_, .seed = config_.train.seed, .config_json = to_json(config_), .data_hash = data_hash_};
}

void Run::report(const std::optional<SaveOutcome>& outcome) {
    if (!outcome) return;
    if (const std::optional<Problem> cause = world_.cause()) throw *cause;  // the job ends, so it needs no word about the save
    last_save_failed_ = !outcome->ok();
    if (outcome->ok()) {
        event("checkpoint", {{"step", outcome->step}, {"path", outcome->path}, {"bytes", outcome->bytes}, {"seconds", outcome->seconds}});
    } else {
        event("checkpoint_failed", {{"step", outcome->step}, {"problem", outcome->problem}});
        if (leads()) std::fprintf(stderr, "trifold: %s; training goes on, older checkpoints are untouched\n", outcome->problem.c_str());
    }
    if (!outcome->warning.empty()) event("checkpoint_warning", {{"problem", outcome->warning}});
}

bool Run::next() {
    if (saver_) report(saver_->poll());
    if (world_.size() == 1) stop_ = signals_.requested();
    if (trainer_.step >= config_.train.steps || stop_ != StopRequest::none) return false;
    step_start_ = Clock::now();
    waited_before_ = waited();
    batch_ = train_.next();
    return true;
}

// The longest waits of any rank. What a pipeline waits for in any case, with messages that take no time, is its bubble.
ExposedSeconds Run::exposed(double step_s, double& bubble_s) {
    std::array<double, 4> now = waited();
    double busy = step_s;
    for (size_t i = 0; i < now.size(); ++i) busy -= now[i] -= waited_before_[i];
    bubble_s = std::min(now[2], bubble_ * busy);
    now[2] -= bubble_s;
    now[3] = bubble_s;
    trainer_.max_over_all(now);
    bubble_s = now[3];
    return {.dp = now[1], .tp = now[0], .pp = now[2]};
}

void Run::record(const StepResult& r) {
    Trainer& t = trainer_;
    const double step_s = seconds_since(step_start_);
    double bubble_s = 0;
    const ExposedSeconds waits = exposed(step_s, bubble_s);
    stop_ = std::max(stop_, r.stop);
    const double tokens = static_cast<double>(config_.train.global_batch * config_.train.seq);
    ++t.step;
    ++steps_here_;
    tokens_ += r.tokens;
    if (log_) log_->step({.step = t.step, .loss = r.loss, .grad_norm = r.grad_norm, .lr = r.lr, .tokens = r.tokens, .step_s = step_s,
                 .tokens_per_s = tokens / step_s, .mfu = flops_per_token(config_.model, config_.train.seq) * tokens / step_s / peak_.flops,
                 .exposed_s = waits, .bubble_s = bubble_s, .mem_bytes = t.memory_bytes()});
    if (r.applied) {
        ++t.updates;
        t.skipped_in_a_row = 0;
        return;
    }
    ++t.skipped;
    ++t.skipped_in_a_row;
    event("skipped_step", {{"step", t.step}, {"loss", r.loss}, {"grad_norm", static_cast<double>(r.grad_norm)}});
    say(fmt::format("step {}: loss or gradients are not finite; the step is skipped, weights are unchanged ({} skipped so far)", t.step, t.skipped));
    if (config_.resilience.on_nan == OnNan::stop || t.skipped_in_a_row > config_.resilience.max_skips)
        refuse(Exit::gave_up, "{} step{} in a row had a loss or gradients that are not finite (step {}): lower --optim.lr, look at the data, "
               "or resume from an older checkpoint with --checkpoint.resume=PATH",
               t.skipped_in_a_row, t.skipped_in_a_row == 1 ? "" : "s", t.step);
}

bool Run::evaluation_due() const {
    const int64_t every = config_.data.eval_every;
    return validation_ && every > 0 && (trainer_.step % every == 0 || trainer_.step == config_.train.steps);
}

void Run::begin_validation() {
    validated_ = 0;
    validation_->seek(0);
}

// A round is one micro-batch for each data-parallel rank; in the last one some may have none. As many rounds at once as there are stages.
std::optional<std::vector<MicroBatch>> Run::next_validation() {
    const int64_t dp = config_.mesh.dp, once_through = validation_->samples_per_epoch() / config_.train.micro_batch;
    const int64_t batches = std::max<int64_t>(1, std::min(config_.data.eval_batches, once_through)), rounds = (batches + dp - 1) / dp;
    if (validated_ == rounds) return std::nullopt;
    std::vector<MicroBatch> own;
    for (int64_t i = 0; i < config_.mesh.pp && validated_ < rounds; ++i, ++validated_) {
        GlobalBatch batch = validation_->next();
        if (validated_ * dp + place_.dp < batches) own.push_back(std::move(batch.micro.at(0)));
    }
    return own;
}

void Run::record_evaluation(double loss) {
    if (log_) log_->evaluation(trainer_.step, loss);
}

bool Run::checkpoint_due() const {
    const int64_t every = config_.checkpoint.every;
    return every > 0 && trainer_.step % every == 0 && trainer_.step < config_.train.steps;
}

void Run::save() {
    saved_step_ = trainer_.step;
    if (saver_) report(saver_->wait());  // beside a GPU it still reads what read_state() is about to overwrite
    const std::vector<StateSlice> slices = trainer_.owned_state(trainer_.read_state());
    report(saver_ ? saver_->begin(slices, state()) : store_.save(config_.model, slices, state()));
}

void Run::after_backward(float unit) {
    Trainer& t = trainer_;
    const int64_t step = t.step + 1;
    if (config_.debug.inject.kind == InjectKind::nan && step == config_.debug.inject.step && leads()) {
        float nan = std::numeric_limits<float>::quiet_NaN();
        t.engine().wait(copy(t.compute(), {.x = Tensor{&nan, DType::f32, 1}, .y = t.sharding().shard_gradient(0).slice(0, 1)}));
    }
    if (steps_here_ > 0 || config_.debug.dump_grads.empty()) return;
    std::vector<float> scaled = t.read_gradients();
    for (float& g : scaled) g *= unit;
    dump(config_.debug.dump_grads, t.owned_state(t.shards_in(scaled.data())));
}

// All tensors together at rank 0, which writes them.
void Run::dump(const std::string& path, const std::vector<StateSlice>& slices) {
    const std::vector<float> flat = gather_tensors(world_, config_.model, slices);
    if (leads()) dump_tensors(path, config_.model, ParameterTable(config_.model), flat.data());
}

void Run::save_last() {
    if (saver_) report(saver_->wait());
    if (saved_step_ == trainer_.step && !last_save_failed_) return;
    saved_step_ = trainer_.step;
    report(store_.save(config_.model, trainer_.owned_state(trainer_.read_state()), state()));
}

void Run::save_after(const Problem& problem) {
    if (world_.size() == 1 || problem.code() == Exit::gave_up) save_last();
}

Exit Run::finish() {
    save_last();
    if (!config_.debug.dump_params.empty())
        dump(config_.debug.dump_params, trainer_.owned_state(trainer_.read_state()));
    const bool complete = trainer_.step >= config_.train.steps;
    event(complete ? "done" : "stopped", {{"step", trainer_.step}});
    say(fmt::format("{} at step {} after {:.1f} s; memory {} allocated, {} peak of the process; checkpoint {}",
                           complete ? "done" : "stopped", trainer_.step, seconds_since(started_), human_bytes(trainer_.memory_bytes()),
                           human_bytes(process_peak_bytes()), last_save_failed_ ? "NOT SAVED" : config_.checkpoint.dir + "/" + step_name(saved_step_)));
    for (const std::string& finding : trainer_.engine().findings()) std::fprintf(stderr, "trifold: unordered access: %s\n", finding.c_str());
    if (!trainer_.engine().findings().empty()) return Exit::bug;
    if (last_save_failed_) return Exit::checkpoint;
    return complete ? Exit::ok : exit_code(stop_);
}

}  // namespace trifold
