#if __has_include(<catch2/catch_all.hpp>)
#include <catch2/catch_all.hpp>
#else
#include <catch2/catch.hpp>
#endif
// test/unit/test_model.cpp   The whole model: gradients against finite differences, and what must not change them.

#include <omp.h>

#include <cmath>
#include <numeric>
#include <random>

#include "model/options.h"
#include "model/trainer.h"

using namespace trifold;

namespace {

constexpr int64_t T = 24;

struct Batch {
    std::vector<int32_t> tokens, targets, positions, doc_start;
    int64_t valid = 0;
    TokenBatch view(bool isolated) const { return {tokens.data(), targets.data(), positions.data(), isolated ? doc_start.data() : nullptr}; }
};

// B sequences of random tokens in documents of 5 to 12 tokens; sequence b keeps every (b + 1)-th target.
Batch make_batch(int64_t B, int64_t vocab, bool isolated, bool masked, unsigned seed = 1) {
    std::mt19937 random(seed);
    Batch batch;
    for (int64_t b = 0; b < B; ++b) {
        int64_t start = 0, length = 5 + random() % 8;
        for (int64_t t = 0; t < T; ++t) {
            if (t - start == length) start = t, length = 5 + random() % 8;
            batch.tokens.push_back(static_cast<int32_t>(random() % vocab));
            const bool counts = !masked || t % (b + 1) == 0;
            batch.targets.push_back(counts ? static_cast<int32_t>(random() % vocab) : -1);
            batch.valid += counts;
            batch.positions.push_back(static_cast<int32_t>(isolated ? t - start : t));
            batch.doc_start.push_back(static_cast<int32_t>(start));
        }
    }
    return batch;
}

Batch rows_of(const Batch& all, int64_t first, int64_t count) {
    Batch part;
    const auto cut = [&](const std::vector<int32_t>& v) { return std::vector<int32_t>(v.begin() + first * T, v.begin() + (first + count) * T); };
    part.tokens = cut(all.tokens);
    part.targets = cut(all.targets);
    part.positions = cut(all.positions);
    part.doc_start = cut(all.doc_start);
    part.valid = static_cast<int64_t>(std::count_if(part.targets.begin(), part.targets.end(), [](int32_t t) { return t >= 0; }));
    return part;
}

Config tiny(const std::vector<std::string>& more = {}) {
    std::vector<std::string> args = {"--model.layers=3", "--model.hidden=32", "--model.heads=4", "--model.vocab=61", "--model.max_seq=32",
                                     "--model.init_std=0.2", "--train.dtype=fp32", "--train.steps=10", "--train.micro_batch=2",
                                     "--train.seq=" + std::to_string(T), "--run.dir=unused", "--data.train=unused"};
    args.insert(args.end(), more.begin(), more.end());
    Config c = parse_config(args);
    resolve(c);
    return c;
}

// Weights that are not special: norms away from one, biases away from zero.
void randomize(Trainer& t) {
    t.initialize_weights();
    std::mt19937 random(7);
    std::normal_distribution<float> normal(0, 0.1f);
    float* w = t.optimizer().master().as<float>();
    for (const Parameter& p : t.table().all())
        if (p.init != InitKind::normal)
            for (int64_t i = 0; i < p.elems; ++i) w[p.offset + i] += normal(random);
    t.optimizer().refresh_weights(t.compute());
}

struct Gradients {
    std::vector<float> flat;
    double loss = 0;
};

// Gradients of the mean loss over the valid tokens of all micro-batches together.
Gradients gradients(Trainer& t, const std::vector<Batch>& micro) {
    const bool isolated = t.config().data.documents == Documents::isolated;
    int64_t valid = 0, nominal = 0;
    t.stage().reset_loss(t.compute());
    for (const Batch& b : micro) valid += b.valid, nominal += static_cast<int64_t>(b.tokens.size());
    for (size_t m = 0; m < micro.size(); ++m) {
        t.stage().forward(t.compute(), micro[m].view(isolated));
        t.stage().backward(t.compute(), 1.0f / static_cast<float>(nominal), t.optimizer().accumulate(m));
        t.optimizer().fold_gradients(t.compute(), m);
    }
    t.engine().wait_all();
    Gradients g{std::vector<float>(t.optimizer().grad().as<float>(), t.optimizer().grad().as<float>() + t.table().flat_elems()), 0};
    for (float& x : g.flat) x *= static_cast<float>(nominal) / static_cast<float>(valid);
    g.loss = t.stage().loss_sum(t.compute()) / static_cast<double>(valid);
    return g;
}

double loss_of(Trainer& t, const Batch& b) {
    t.optimizer().refresh_weights(t.compute());
    t.stage().reset_loss(t.compute());
    t.stage().forward(t.compute(), b.view(t.config().data.documents == Documents::isolated));
    t.stage().loss(t.compute());
    return t.stage().loss_sum(t.compute()) / static_cast<double>(b.valid);
}

double norm(const float* x, int64_t n) {
    double s = 0;
    for (int64_t i = 0; i < n; ++i) s += static_cast<double>(x[i]) * x[i];
    return std::sqrt(s);
}

// Largest norm(a - b) over norm(a) of any tensor; tensors below 1e-7 of the whole count with that as their norm (DESIGN 7).
double worst_difference(const ParameterTable& table, const Gradients& a, const Gradients& b) {
    const double whole = norm(a.flat.data(), table.flat_elems());
    double worst = 0;
    for (const Parameter& p : table.all()) {
        double s = 0;
        for (int64_t i = 0; i < p.elems; ++i) s += std::pow(static_cast<double>(a.flat[p.offset + i]) - b.flat[p.offset + i], 2);
        const double size = norm(&a.flat[p.offset], p.elems);
        if (std::sqrt(s) > 1e-7 * whole) worst = std::max(worst, (std::sqrt(s) - 1e-7 * whole) / std::max(size, 1e-300));
    }
    return worst;
}

const std::vector<std::vector<std::string>> families = {
    {},
    {"--model.block=parallel"},
    {"--model.norm=rmsnorm", "--model.position=rope", "--model.activation=swiglu", "--model.bias=none", "--model.tied=off", "--model.kv_heads=2"},
    {"--model.norm=rmsnorm", "--model.position=rope", "--model.activation=swiglu", "--model.bias=qkv", "--model.block=parallel",
     "--model.kv_heads=1", "--model.qk_norm=on", "--model.window=7", "--model.full_attention_every=2"},
    {"--model.activation=gelu_erf", "--model.window=5", "--model.head_dim=16", "--data.documents=isolated"},
    {"--model.position=rope", "--data.documents=isolated", "--model.qk_norm=on", "--model.tied=off", "--model.bias=none"},
};

}  // namespace

TEST_CASE("every gradient of the model agrees with finite differences of its loss") {
    for (const auto& family : families) {
        Trainer t(tiny(family));
        randomize(t);
        const bool isolated = t.config().data.documents == Documents::isolated;
        const Batch batch = make_batch(2, 61, isolated, true);
        const Gradients g = gradients(t, {batch});
        REQUIRE(std::isfinite(g.loss));
        float* w = t.optimizer().master().as<float>();
        std::mt19937 random(3);
        std::normal_distribution<float> normal;
        for (const Parameter& p : t.table().all()) {
            // Along a random direction of unit length: (L(w + e u) - L(w - e u)) / 2e = <g, u>.
            std::vector<float> u(static_cast<size_t>(p.elems)), saved(w + p.offset, w + p.offset + p.elems);
            for (float& x : u) x = normal(random);
            // Half of the direction is the gradient itself, so that the slope is never lost in rounding.
            const double length = norm(u.data(), p.elems), slope = norm(&g.flat[p.offset], p.elems);
            double expected = 0;
            for (int64_t i = 0; i < p.elems; ++i) {
                u[i] = static_cast<float>(u[i] / length + (slope > 0 ? g.flat[p.offset + i] / slope : 0));
                expected += static_cast<double>(u[i]) * g.flat[p.offset + i];
            }
            const double e = 1e-2;
            double side[2];
            for (int k = 0; k < 2; ++k) {
                for (int64_t i = 0; i < p.elems; ++i) w[p.offset + i] = saved[i] + static_cast<float>(k ? -e : e) * u[i];
                side[k] = loss_of(t, batch);
            }
            std::copy(saved.begin(), saved.end(), w + p.offset);
            const double measured = (side[0] - side[1]) / (2 * e);
            INFO("family " << (&family - families.data()) << " tensor " << p.name << " measured " << measured << " expected " << expected);
            CHECK(std::abs(measured - expected) < 2e-2 * std::abs(expected) + 2e-4);
        }
    }
}

TEST_CASE("recomputation changes no bit") {
    for (const std::string dtype : {"fp32", "bf16"})
        for (auto family : families) {
            family.push_back("--train.dtype=" + dtype);
            std::vector<Gradients> g;
            for (const std::string mode : {"none", "selective", "full"}) {
                auto args = family;
                args.push_back("--train.recompute=" + mode);
                Trainer t(tiny(args));
                randomize(t);
                g.push_back(gradients(t, {make_batch(2, 61, t.config().data.documents == Documents::isolated, true)}));
            }
            REQUIRE(norm(g[0].flat.data(), static_cast<int64_t>(g[0].flat.size())) > 0);
            CHECK(g[0].flat == g[1].flat);
            CHECK(g[0].flat == g[2].flat);
            CHECK(g[0].loss == g[2].loss);
        }
}

TEST_CASE("the gradient of the global mean does not depend on micro-batches, even with unequal numbers of valid tokens") {
    for (const auto& family : families) {
        auto args = family;
        args.push_back("--train.micro_batch=4");
        Trainer whole(tiny(args));
        randomize(whole);
        args.back() = "--train.micro_batch=1";
        args.push_back("--train.global_batch=4");
        Trainer split(tiny(args));
        randomize(split);
        const bool isolated = whole.config().data.documents == Documents::isolated;
        const Batch batch = make_batch(4, 61, isolated, true);
        const Gradients a = gradients(whole, {batch});
        const Gradients b = gradients(split, {rows_of(batch, 0, 1), rows_of(batch, 1, 1), rows_of(batch, 2, 1), rows_of(batch, 3, 1)});
        CHECK(std::abs(a.loss - b.loss) < 1e-6 * a.loss);
        CHECK(worst_difference(whole.table(), a, b) < 1e-6);
    }
}

TEST_CASE("256 identical micro-batches are one") {
    const Batch batch = make_batch(1, 61, false, false);
    const auto with = [&](const char* global_batch, size_t count) {
        Trainer t(tiny({"--train.micro_batch=1", global_batch}));
        randomize(t);
        return gradients(t, std::vector<Batch>(count, batch));
    };
    const Gradients one = with("--train.global_batch=1", 1), many = with("--train.global_batch=256", 256);
    CHECK(std::abs(one.loss - many.loss) < 1e-6 * one.loss);
    CHECK(worst_difference(ParameterTable(tiny().model), one, many) < 1e-6);
}

TEST_CASE("thread counts agree within rounding") {
    const int threads = omp_get_max_threads();
    for (const auto& family : families) {
        std::vector<Gradients> g;
        for (const int n : {1, 2}) {
            omp_set_num_threads(n);
            Trainer t(tiny(family));
            randomize(t);
            g.push_back(gradients(t, {make_batch(2, 61, t.config().data.documents == Documents::isolated, true)}));
            if (n == 2) CHECK(worst_difference(t.table(), g[0], g[1]) < 1e-6);
        }
    }
    omp_set_num_threads(threads);
}

TEST_CASE("a document does not see the one before it") {
    Trainer t(tiny(families[4]));
    randomize(t);
    Batch batch = make_batch(2, 61, true, false);
    const auto second = std::find_if(batch.doc_start.begin(), batch.doc_start.end(), [](int32_t s) { return s > 0; });
    const int64_t boundary = second - batch.doc_start.begin();
    // Only tokens of the second and later documents are asked for.
    for (int64_t i = 0; i < boundary; ++i) batch.targets[i] = -1;
    batch.valid = 2 * T - boundary;
    const double before = loss_of(t, batch);
    for (int64_t i = 0; i < boundary; ++i) batch.tokens[i] = (batch.tokens[i] + 17) % 61;
    CHECK(loss_of(t, batch) == before);
    batch.tokens[boundary] = (batch.tokens[boundary] + 17) % 61;
    CHECK(loss_of(t, batch) != before);
}

TEST_CASE("evaluation leaves no trace in a training step") {
    Trainer a(tiny()), b(tiny());
    randomize(a);
    randomize(b);
    const Batch batch = make_batch(2, 61, false, false), other = make_batch(2, 61, false, false, 9);
    loss_of(b, other);
    CHECK(gradients(a, {batch}).flat == gradients(b, {batch}).flat);
}

TEST_CASE("clipping scales to the norm, small gradients stay") {
    const auto moment = [](double factor) {  // |m| after one step is (1 - beta1) |g as applied|
        Trainer t(tiny({"--optim.clip=1"}));
        randomize(t);
        gradients(t, {make_batch(2, 61, false, false)});
        const int64_t n = t.table().flat_elems();
        float* g = t.optimizer().grad().as<float>();
        const double before = norm(g, n);
        for (int64_t i = 0; i < n; ++i) g[i] *= static_cast<float>(factor / before);
        t.optimizer().step(t.compute(), 1e-3, 1, 1.0f);
        CHECK(std::abs(t.optimizer().outcome(t.compute()).grad_norm / factor - 1) < 1e-5);
        return norm(t.optimizer().m().as<float>(), n) / 0.1;
    };
    CHECK(std::abs(moment(100.0) - 1.0) < 1e-5);
    CHECK(std::abs(moment(0.5) - 0.5) < 1e-5);
}

TEST_CASE("learning rates") {
    OptimConfig o = tiny({"--optim.lr=1", "--optim.min_lr=0.1", "--optim.warmup_steps=4", "--train.steps=20"}).optim;
    CHECK(learning_rate(o, 1, 20) == 0.25);
    CHECK(learning_rate(o, 4, 20) == 1.0);
    CHECK(std::abs(learning_rate(o, 12, 20) - 0.55) < 1e-12);
    CHECK(std::abs(learning_rate(o, 20, 20) - 0.1) < 1e-12);
    CHECK(std::abs(learning_rate(o, 30, 20) - 0.1) < 1e-12);
    o.schedule = LrSchedule::linear;
    CHECK(std::abs(learning_rate(o, 12, 20) - 0.55) < 1e-12);
    o.schedule = LrSchedule::wsd;
    o.decay_steps = 4;
    CHECK(learning_rate(o, 16, 20) == 1.0);
    CHECK(std::abs(learning_rate(o, 17, 20) - 0.55) < 1e-12);
    CHECK(std::abs(learning_rate(o, 20, 20) - 0.1) < 1e-12);
    o.warmup_steps = 0;
    o.schedule = LrSchedule::constant;
    CHECK(learning_rate(o, 1, 20) == 1.0);
}

TEST_CASE("NaN changes nothing") {
    for (const std::string name : {"adamw", "lamb"}) {
        Trainer t(tiny({"--optim.name=" + name, "--optim.clip=1"}));
        randomize(t);
        gradients(t, {make_batch(2, 61, false, false)});
        const int64_t n = t.table().flat_elems();
        float* g = t.optimizer().grad().as<float>();
        const std::vector<float> before(t.optimizer().master().as<float>(), t.optimizer().master().as<float>() + n);
        for (const Parameter& p : t.table().all())  // a place inside a tensor, not in padding
            if (p.role == Role::matrix) g[p.offset + 1] = std::nanf("");
        t.optimizer().step(t.compute(), 1e-2, 1, 1.0f);
        CHECK_FALSE(t.optimizer().outcome(t.compute()).applied);
        CHECK(std::equal(before.begin(), before.end(), t.optimizer().master().as<float>()));
        gradients(t, {make_batch(2, 61, false, false)});
        t.optimizer().step(t.compute(), 1e-2, 1, 1.0f);
        CHECK(t.optimizer().outcome(t.compute()).applied);
        CHECK_FALSE(std::equal(before.begin(), before.end(), t.optimizer().master().as<float>()));
    }
}

TEST_CASE("the plan is what is allocated") {
    for (const std::string recompute : {"none", "selective", "full"}) {
        const Config c = tiny({"--train.recompute=" + recompute, "--checkpoint.every=5", "--train.dtype=bf16"});
        const MemoryByClass plan = plan_memory(c);
        const Trainer t(c);
        CHECK(std::accumulate(plan.begin(), plan.end(), int64_t{0}) == t.memory_bytes());
    }
    CHECK(plan_memory(tiny({"--train.recompute=full"}))[3] < plan_memory(tiny({"--train.recompute=selective"}))[3]);
    CHECK(plan_memory(tiny({"--train.recompute=selective"}))[3] < plan_memory(tiny())[3]);
}

TEST_CASE("a model that does not fit is refused before anything is allocated, with sizes") {
    const Config c = tiny({"--model.hidden=65536", "--model.heads=512", "--model.layers=100"});
    try {
        Trainer t(c);
        FAIL("it was accepted");
    } catch (const Problem& p) {
        CHECK(p.code() == Exit::usage);
        CHECK(std::string(p.what()).find("GiB are available") != std::string::npos);
    }
}

TEST_CASE("every operation declares what orders it: the adversarial engine gives the same bits and finds nothing") {
    for (auto family : families) {
        std::vector<Gradients> g;
        std::vector<std::vector<float>> weights;
        for (const std::string mode : {"normal", "adversarial"}) {
            family.push_back("--debug.streams=" + mode);
            Trainer t(tiny(family));
            randomize(t);
            const bool isolated = t.config().data.documents == Documents::isolated;
            g.push_back(gradients(t, {make_batch(2, 61, isolated, true), make_batch(2, 61, isolated, true, 5)}));
            t.optimizer().step(t.compute(), 1e-2, 1, 1.0f);
            REQUIRE(t.optimizer().outcome(t.compute()).applied);
            t.engine().wait_all();
            weights.emplace_back(t.optimizer().master().as<float>(), t.optimizer().master().as<float>() + t.table().flat_elems());
            CHECK(t.engine().findings().empty());
        }
        CHECK(g[0].flat == g[1].flat);
        CHECK(g[0].loss == g[1].loss);
        CHECK(weights[0] == weights[1]);
    }
}

TEST_CASE("initial values: normal, independent of the layout, different everywhere") {
    const Config c = tiny({"--model.layers=2", "--model.hidden=64", "--model.init_std=0.02"});
    const ParameterTable table(c.model);
    std::vector<float> a(static_cast<size_t>(table.flat_elems())), b(a.size());
    initialize(table, 1234, a.data());
    initialize(table, 1235, b.data());
    double sum = 0, squares = 0;
    const Parameter& w = table.at("layers.0.ffn.up.weight");
    for (int64_t i = 0; i < w.elems; ++i) sum += a[w.offset + i], squares += std::pow(a[w.offset + i], 2);
    const double n = static_cast<double>(w.elems);
    CHECK(std::abs(sum / n) < 4 * 0.02 / std::sqrt(n));
    CHECK(std::abs(std::sqrt(squares / n) / 0.02 - 1) < 4 / std::sqrt(2 * n));
    const Parameter& other = table.at("layers.1.ffn.up.weight");
    CHECK(a[w.offset] != a[other.offset]);
    CHECK(a[w.offset] != b[w.offset]);
    // Rows are the same whatever the number of rows before them: the value depends on the element's global index alone.
    Config deeper = c;
    deeper.model.layers = 4;
    const ParameterTable more(deeper.model);
    std::vector<float> d(static_cast<size_t>(more.flat_elems()));
    initialize(more, 1234, d.data());
    CHECK(d[more.at("layers.1.ffn.up.weight").offset + 5] == a[other.offset + 5]);
}
