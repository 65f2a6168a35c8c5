// test/unit/layout_training.h   Trains a tiny model in any layout, ranks as threads of the test, and brings the results together.
#pragma once
#include <omp.h>

#include <cmath>
#include <memory>
#include <mutex>
#include <random>
#include <string>
#include <vector>

#include "checkpoint/gather.h"
#include "model/options.h"
#include "model/trainer.h"
#include "test/unit/run_ranks.h"

namespace trifold::test {

using Args = std::vector<std::string>;
inline Args with(Args a, const Args& b) {
    a.insert(a.end(), b.begin(), b.end());
    return a;
}

// One global batch of random tokens in documents of 5 to 12, the same on every rank; sequence b keeps every (b % 3 + 1)-th target.
struct RandomBatch {
    std::vector<int32_t> tokens, targets, positions, doc_start;
    int64_t seq = 0, valid = 0;

    RandomBatch(const Config& c, unsigned seed) : seq(c.train.seq) {
        std::mt19937 random(seed);
        const bool isolated = c.data.documents == Documents::isolated;
        const auto vocab = static_cast<uint64_t>(c.model.vocab);
        for (int64_t b = 0; b < c.train.global_batch; ++b) {
            int64_t start = 0, length = 5 + static_cast<int64_t>(random() % 8);
            for (int64_t t = 0; t < seq; ++t) {
                if (t - start == length) start = t, length = 5 + static_cast<int64_t>(random() % 8);
                tokens.push_back(static_cast<int32_t>(random() % vocab));
                const int32_t target = static_cast<int32_t>(random() % vocab);
                targets.push_back(t % (b % 3 + 1) == 0 ? target : -1);
                valid += targets.back() >= 0;
                positions.push_back(static_cast<int32_t>(isolated ? t - start : t));
                doc_start.push_back(static_cast<int32_t>(start));
            }
        }
    }
    std::vector<TokenBatch> of_rank(const Config& c, int dp_rank) const {
        std::vector<TokenBatch> micros;
        const int64_t own = c.train.global_batch / c.mesh.dp;
        for (int64_t first = dp_rank * own; first < (dp_rank + 1) * own; first += c.train.micro_batch) {
            const int64_t at = first * seq;
            micros.push_back({tokens.data() + at, targets.data() + at, positions.data() + at, c.data.documents == Documents::isolated ? doc_start.data() + at : nullptr});
        }
        return micros;
    }
};

struct LayoutResult {
    std::vector<float> initial, gradients, final;  // whole tensors, as ParameterTable(model) lays them out
    std::vector<double> loss, grad_norm;
    std::vector<std::string> findings;             // of the access checker, all ranks
    int64_t orderings = 0;                         // of rank 0, in the second step
    std::string unordered;                         // what rank 0 found with one of them left out
};

struct LayoutRun {
    int ranks = 1;
    std::vector<std::string> args;
    int steps = 20;
    int64_t leave_out = 0;  // this ordering of rank 0's second step is left out
};

inline Config layout_config(const LayoutRun& run) {
    std::vector<std::string> args = {"--model.layers=6", "--model.hidden=48", "--model.heads=12", "--model.vocab=61", "--model.max_seq=24", "--model.init_std=0.15",
                                     "--train.dtype=fp32", "--train.steps=20", "--train.micro_batch=1", "--train.seq=24", "--train.global_batch=8", "--optim.lr=1e-3",
                                     "--overlap.dp_bucket=9000", "--run.dir=unused", "--run.threads=1", "--run.device=cpu", "--data.train=unused"};
    args.insert(args.end(), run.args.begin(), run.args.end());
    Config c = parse_config(args);
    resolve(c, run.ranks, run.ranks);
    return c;
}

// Norms away from one and biases away from zero, the same numbers in every layout.
inline void disturb(Trainer& t) {
    for (const StateSlice& s : t.state_to_fill())
        if (s.parameter->init != InitKind::normal) {
            const std::vector<int64_t> begin = s.parameter->box_begin();
            for (int64_t i = s.first; i < s.last; ++i) s.master[i - s.first] += 0.1f * std::sin(static_cast<float>(begin[0] + i) + static_cast<float>(s.parameter->name.size()));
        }
    t.host_state_changed();
}

inline LayoutResult train_layout(const LayoutRun& run) {
    LayoutResult result;
    std::mutex mutex;
    const Config config = layout_config(run);
    const auto rank = [&](World& world) {
        omp_set_num_threads(1);
        Trainer t(config, world);
        const int dp_rank = mesh_of(config).at(world.rank()).dp;
        t.initialize_weights();
        disturb(t);
        const auto gather = [&](std::vector<float>& into, const std::vector<StateShard>& shards) {
            std::vector<float> all = gather_tensors(world, config.model, t.owned_state(shards));
            if (world.rank() == 0) into = std::move(all);
        };
        gather(result.initial, t.read_state());
        int64_t before = 0;
        try {
            for (int step = 1; step <= run.steps; ++step) {
                if (world.rank() == 0 && step == 2) {
                    before = t.engine().orderings();
                    if (run.leave_out > 0) t.engine().leave_out_ordering(before + run.leave_out);
                }
                if (world.rank() == 0 && step == 3) result.orderings = t.engine().orderings() - before;
                const RandomBatch batch(config, static_cast<unsigned>(step));
                const double nominal = static_cast<double>(config.train.global_batch * config.train.seq), request = 0;
                const float unit = static_cast<float>(nominal / static_cast<double>(batch.valid));
                t.stage().begin_step(t.compute());
                t.pipeline().train(t.compute(), batch.of_rank(config, dp_rank), static_cast<float>(1.0 / nominal));
                t.optimizer().settle_gradients(t.compute());
                if (step == 1 && run.leave_out == 0) {
                    std::vector<float> own = t.read_gradients();
                    for (float& g : own) g *= unit;
                    gather(result.gradients, t.shards_in(own.data()));
                }
                t.optimizer().step(t.compute(), 1e-3, step, unit, &request);
                const Optimizer::Outcome outcome = t.optimizer().outcome(t.compute());
                if (world.rank() > 0) continue;
                result.loss.push_back(outcome.loss_sum / static_cast<double>(batch.valid));
                result.grad_norm.push_back(outcome.grad_norm);
            }
        } catch (const std::runtime_error& e) {
            if (world.rank() == 0) result.unordered = e.what();
            throw;
        }
        const std::vector<StateShard> state = t.read_state();
        gather(result.final, state);
        const std::lock_guard lock(mutex);
        for (const std::string& f : t.engine().findings()) result.findings.push_back("rank " + std::to_string(world.rank()) + ": " + f);
    };
    try {
        run_ranks(run.ranks, rank);
    } catch (const std::exception&) {
        if (run.leave_out == 0) throw;
    }
    return result;
}

inline double norm_of(const float* x, int64_t n) {
    double s = 0;
    for (int64_t i = 0; i < n; ++i) s += static_cast<double>(x[i]) * x[i];
    return std::sqrt(s);
}

struct Difference {
    double relative = 0;  // norm(a - b) - 1e-7 * norm(all), over norm(a)
    std::string tensor;
};
inline Difference worst_difference_of(const ModelConfig& model, const std::vector<float>& a, const std::vector<float>& b) {
    const ParameterTable table(model);
    const double whole = norm_of(a.data(), table.flat_elems());
    Difference worst;
    for (const Parameter& p : table.all()) {
        std::vector<float> d(static_cast<size_t>(p.elems));
        for (int64_t i = 0; i < p.elems; ++i) d[static_cast<size_t>(i)] = a[static_cast<size_t>(p.offset + i)] - b[static_cast<size_t>(p.offset + i)];
        const double r = std::max(0.0, norm_of(d.data(), p.elems) - 1e-7 * whole) / std::max(norm_of(a.data() + p.offset, p.elems), 1e-300);
        if (!(r <= worst.relative)) worst = {r, p.name};
    }
    return worst;
}

}  // namespace trifold::test
