// test/unit/tiny_training.h   A tiny model, batches for it, and gradients of its loss: what tests of the whole model share.
#pragma once
#include <algorithm>
#include <cmath>
#include <random>
#include <string>
#include <vector>

#include "model/options.h"
#include "model/trainer.h"

namespace trifold::test {

inline constexpr int64_t T = 24;

struct Batch {
    std::vector<int32_t> tokens, targets, positions, doc_start;
    int64_t valid = 0;
    TokenBatch view(bool isolated) const { return {tokens.data(), targets.data(), positions.data(), isolated ? doc_start.data() : nullptr}; }
};

// B sequences of random tokens in documents of 5 to 12 tokens; sequence b keeps every (b + 1)-th target.
inline Batch make_batch(int64_t B, int64_t vocab, bool isolated, bool masked, unsigned seed = 1) {
    std::mt19937 random(seed);
    Batch batch;
    for (int64_t b = 0; b < B; ++b) {
        int64_t start = 0, length = 5 + random() % 8;
        for (int64_t t = 0; t < T; ++t) {
            if (t - start == length) start = t, length = 5 + random() % 8;
            batch.tokens.push_back(static_cast<int32_t>(random() % static_cast<uint64_t>(vocab)));
            const bool counts = !masked || t % (b + 1) == 0;
            batch.targets.push_back(counts ? static_cast<int32_t>(random() % static_cast<uint64_t>(vocab)) : -1);
            batch.valid += counts;
            batch.positions.push_back(static_cast<int32_t>(isolated ? t - start : t));
            batch.doc_start.push_back(static_cast<int32_t>(start));
        }
    }
    return batch;
}

inline Batch rows_of(const Batch& all, int64_t first, int64_t count) {
    Batch part;
    const auto cut = [&](const std::vector<int32_t>& v) { return std::vector<int32_t>(v.begin() + first * T, v.begin() + (first + count) * T); };
    part.tokens = cut(all.tokens);
    part.targets = cut(all.targets);
    part.positions = cut(all.positions);
    part.doc_start = cut(all.doc_start);
    part.valid = static_cast<int64_t>(std::count_if(part.targets.begin(), part.targets.end(), [](int32_t t) { return t >= 0; }));
    return part;
}

inline Config tiny(const std::vector<std::string>& more = {}) {
    std::vector<std::string> args = {"--model.layers=3", "--model.hidden=32", "--model.heads=4", "--model.vocab=61", "--model.max_seq=32",
                                     "--model.init_std=0.2", "--train.dtype=fp32", "--train.steps=10", "--train.micro_batch=2",
                                     "--train.seq=" + std::to_string(T), "--run.dir=unused", "--data.train=unused"};
    args.insert(args.end(), more.begin(), more.end());
    Config c = parse_config(args);
    resolve(c);
    return c;
}

// One rank holds all weights; in fp32 on a CPU the buckets' weights, gradients and moments lie one after the other, as the table says.
inline float* weights_of(Trainer& t) { return t.optimizer().master(0).as<float>(); }
inline float* moments_of(Trainer& t) { return t.optimizer().m(0).as<float>(); }
inline float* gradients_of(Trainer& t) { return t.sharding().shard_gradient(0).as<float>(); }

// Weights that are not special: norms away from one, biases away from zero.
inline void randomize(Trainer& t) {
    t.initialize_weights();
    std::mt19937 random(7);
    std::normal_distribution<float> normal(0, 0.1f);
    float* w = t.read_state()[0].master;
    for (const Parameter& p : t.table().all())
        if (p.init != InitKind::normal)
            for (int64_t i = 0; i < p.elems; ++i) w[p.offset + i] += normal(random);
    t.host_state_changed();
}

struct Gradients {
    std::vector<float> flat;
    double loss = 0;
};

// Gradients of the mean loss over the valid tokens of all micro-batches together; the trainer is of one rank.
inline Gradients gradients(Trainer& t, const std::vector<Batch>& micro) {
    const bool isolated = t.config().data.documents == Documents::isolated;
    int64_t valid = 0, nominal = 0;
    std::vector<TokenBatch> views;
    for (const Batch& b : micro) {
        valid += b.valid, nominal += static_cast<int64_t>(b.tokens.size());
        views.push_back(b.view(isolated));
    }
    t.stage().begin_step(t.compute());
    t.pipeline().train(t.compute(), views, 1.0f / static_cast<float>(nominal));
    t.optimizer().settle_gradients(t.compute());
    Gradients g{t.read_gradients(), t.stage().loss_sum(t.compute()) / static_cast<double>(valid)};
    for (float& x : g.flat) x *= static_cast<float>(nominal) / static_cast<float>(valid);
    return g;
}

// After gradients().
inline Optimizer::Outcome update(Trainer& t, double lr, int64_t number, float unit) {
    const double request = 0;
    t.optimizer().step(t.compute(), lr, number, unit, &request);
    return t.optimizer().outcome(t.compute());
}

inline double loss_of(Trainer& t, const Batch& b) {
    t.optimizer().refresh_weights(t.compute());
    t.stage().begin_step(t.compute());
    t.pipeline().evaluate(t.compute(), {b.view(t.config().data.documents == Documents::isolated)});
    return t.stage().loss_sum(t.compute()) / static_cast<double>(b.valid);
}

inline double norm(const float* x, int64_t n) {
    double s = 0;
    for (int64_t i = 0; i < n; ++i) s += static_cast<double>(x[i]) * x[i];
    return std::sqrt(s);
}

// Largest norm(a - b) over norm(a) of any tensor; tensors below 1e-7 of the whole count with that as their norm (DESIGN 7).
inline double worst_difference(const ParameterTable& table, const Gradients& a, const Gradients& b) {
    const double whole = norm(a.flat.data(), table.flat_elems());
    double worst = 0;
    for (const Parameter& p : table.all()) {
        double s = 0;
        for (int64_t i = 0; i < p.elems; ++i) s += std::pow(static_cast<double>(a.flat[static_cast<size_t>(p.offset + i)]) - b.flat[static_cast<size_t>(p.offset + i)], 2);
        const double size = norm(a.flat.data() + p.offset, p.elems);
        if (std::sqrt(s) > 1e-7 * whole) worst = std::max(worst, (std::sqrt(s) - 1e-7 * whole) / std::max(size, 1e-300));
    }
    return worst;
}

}  // namespace trifold::test
