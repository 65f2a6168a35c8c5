// test/unit/test_model.cpp   The whole model: gradients against finite differences, and what must not change them.
#include "test/catch.h"

#include <omp.h>

#include <cmath>
#include <numeric>
#include <random>

#include "test/unit/tiny_training.h"

using namespace trifold;
using namespace trifold::test;

namespace {

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
    World world;
    for (const auto& family : families) {
        Trainer t(tiny(family), world);
        randomize(t);
        const bool isolated = t.config().data.documents == Documents::isolated;
        const Batch batch = make_batch(2, 61, isolated, true);
        const Gradients g = gradients(t, {batch});
        REQUIRE(std::isfinite(g.loss));
        float* w = weights_of(t);
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
    World world;
    for (const std::string dtype : {"fp32", "bf16"})
        for (auto family : families) {
            family.push_back("--train.dtype=" + dtype);
            std::vector<Gradients> g;
            for (const std::string mode : {"none", "selective", "full"}) {
                auto args = family;
                args.push_back("--train.recompute=" + mode);
                Trainer t(tiny(args), world);
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
    World world;
    for (const auto& family : families) {
        auto args = family;
        args.push_back("--train.micro_batch=4");
        Trainer whole(tiny(args), world);
        randomize(whole);
        args.back() = "--train.micro_batch=1";
        args.push_back("--train.global_batch=4");
        Trainer split(tiny(args), world);
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
    World world;
    const Batch batch = make_batch(1, 61, false, false);
    const auto with = [&](const char* global_batch, size_t count) {
        Trainer t(tiny({"--train.micro_batch=1", global_batch}), world);
        randomize(t);
        return gradients(t, std::vector<Batch>(count, batch));
    };
    const Gradients one = with("--train.global_batch=1", 1), many = with("--train.global_batch=256", 256);
    CHECK(std::abs(one.loss - many.loss) < 1e-6 * one.loss);
    CHECK(worst_difference(ParameterTable(tiny().model), one, many) < 1e-6);
}

TEST_CASE("thread counts agree within rounding") {
    World world;
    const int threads = omp_get_max_threads();
    for (const auto& family : families) {
        std::vector<Gradients> g;
        for (const int n : {1, 2}) {
            omp_set_num_threads(n);
            Trainer t(tiny(family), world);
            randomize(t);
            g.push_back(gradients(t, {make_batch(2, 61, t.config().data.documents == Documents::isolated, true)}));
            if (n == 2) CHECK(worst_difference(t.table(), g[0], g[1]) < 1e-6);
        }
    }
    omp_set_num_threads(threads);
}

TEST_CASE("a document does not see the one before it") {
    World world;
    Trainer t(tiny(families[4]), world);
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
    World world;
    Trainer a(tiny(), world), b(tiny(), world);
    randomize(a);
    randomize(b);
    const Batch batch = make_batch(2, 61, false, false), other = make_batch(2, 61, false, false, 9);
    loss_of(b, other);
    CHECK(gradients(a, {batch}).flat == gradients(b, {batch}).flat);
}

TEST_CASE("clipping scales to the norm, small gradients stay") {
    World world;
    const auto moment = [&](double factor) {  // |m| after one step is (1 - beta1) |g as applied|
        Trainer t(tiny({"--optim.clip=1"}), world);
        randomize(t);
        gradients(t, {make_batch(2, 61, false, false)});
        const int64_t n = t.table().flat_elems();
        float* g = gradients_of(t);
        const double before = norm(g, n);
        for (int64_t i = 0; i < n; ++i) g[i] *= static_cast<float>(factor / before);
        CHECK(std::abs(update(t, 1e-3, 1, 1.0f).grad_norm / factor - 1) < 1e-5);
        return norm(moments_of(t), n) / 0.1;
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
    World world;
    for (const std::string name : {"adamw", "lamb"}) {
        Trainer t(tiny({"--optim.name=" + name, "--optim.clip=1"}), world);
        randomize(t);
        gradients(t, {make_batch(2, 61, false, false)});
        const int64_t n = t.table().flat_elems();
        float* g = gradients_of(t);
        const std::vector<float> before(weights_of(t), weights_of(t) + n);
        for (const Parameter& p : t.table().all())  // a place inside a tensor, not in padding
            if (p.role == Role::matrix) g[p.offset + 1] = std::nanf("");
        CHECK_FALSE(update(t, 1e-2, 1, 1.0f).applied);
        CHECK(std::equal(before.begin(), before.end(), weights_of(t)));
        gradients(t, {make_batch(2, 61, false, false)});
        CHECK(update(t, 1e-2, 1, 1.0f).applied);
        CHECK_FALSE(std::equal(before.begin(), before.end(), weights_of(t)));
    }
}

TEST_CASE("the plan is what is allocated") {
    World world;
    for (const std::string recompute : {"none", "selective", "full"}) {
        const Config c = tiny({"--train.recompute=" + recompute, "--checkpoint.every=5", "--train.dtype=bf16"});
        const MemoryByClass plan = plan_memory(c);
        const Trainer t(c, world);
        CHECK(std::accumulate(plan.begin(), plan.end(), int64_t{0}) == t.memory_bytes());
    }
    CHECK(plan_memory(tiny({"--train.recompute=full"}))[3] < plan_memory(tiny({"--train.recompute=selective"}))[3]);
    CHECK(plan_memory(tiny({"--train.recompute=selective"}))[3] < plan_memory(tiny())[3]);
}

TEST_CASE("a model that does not fit is refused before anything is allocated, with sizes") {
    World world;
    const Config c = tiny({"--model.hidden=65536", "--model.heads=512", "--model.layers=100"});
    try {
        Trainer t(c, world);
        FAIL("it was accepted");
    } catch (const Problem& p) {
        CHECK(p.code() == Exit::usage);
        CHECK(std::string(p.what()).find("GiB are available") != std::string::npos);
    }
}

TEST_CASE("every operation declares what orders it: the adversarial engine gives the same bits and finds nothing") {
    World world;
    for (auto family : families) {
        std::vector<Gradients> g;
        std::vector<std::vector<float>> weights;
        family.push_back("--train.global_batch=4");
        for (const std::string mode : {"normal", "adversarial"}) {
            family.push_back("--debug.streams=" + mode);
            Trainer t(tiny(family), world);
            randomize(t);
            const bool isolated = t.config().data.documents == Documents::isolated;
            g.push_back(gradients(t, {make_batch(2, 61, isolated, true), make_batch(2, 61, isolated, true, 5)}));
            REQUIRE(update(t, 1e-2, 1, 1.0f).applied);
            t.engine().wait_all();
            weights.emplace_back(weights_of(t), weights_of(t) + t.table().flat_elems());
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
    initialize(whole_state(table, a.data()), 1234);
    initialize(whole_state(table, b.data()), 1235);
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
    initialize(whole_state(more, d.data()), 1234);
    CHECK(d[more.at("layers.1.ffn.up.weight").offset + 5] == a[other.offset + 5]);
}
