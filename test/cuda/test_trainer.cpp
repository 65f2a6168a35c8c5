// test/cuda/test_trainer.cpp   The whole trainer on the device against the CPU: gradients of every parameter, 20 steps of training,
// and what must repeat bit for bit.
#include "test/catch.h"
#include "test/cuda/with_cudnn.h"
#include "test/unit/tiny_training.h"
#if defined(TRIFOLD_EMULATION)
#include "test/emulation/cuda_runtime.h"
#endif

using namespace trifold;
using namespace trifold::test;

namespace {

// Adam's eps is large here: gradients that are zero in exact arithmetic (key biases) are noise, which a small eps turns into steps.
// All that the CUDA kernels can do: head size 64, GQA, windows, documents, both norms, all activations.
const std::vector<std::vector<std::string>> families = {
    {},
    {"--model.block=parallel", "--model.activation=gelu_erf", "--model.window=9"},
    {"--model.norm=rmsnorm", "--model.position=rope", "--model.activation=swiglu", "--model.bias=none", "--model.tied=off", "--model.kv_heads=1"},
    {"--model.norm=rmsnorm", "--model.position=rope", "--model.activation=swiglu", "--model.bias=qkv", "--model.kv_heads=1", "--model.qk_norm=on",
     "--model.window=7", "--model.full_attention_every=2", "--data.documents=isolated"},
};

Config config(Device device, std::vector<std::string> more) {
    const std::vector<std::string> base = {"--model.layers=2", "--model.hidden=64", "--model.head_dim=64", "--model.heads=2", "--model.ffn_hidden=96",
                                           "--optim.lr=0.001", "--optim.eps=1e-5", "--optim.warmup_steps=2", "--optim.schedule=constant", std::string("--run.device=") + name_of(device)};
    more.insert(more.begin(), base.begin(), base.end());
    return tiny(more);
}

struct Curve {
    std::vector<double> loss, grad_norm;
    std::vector<float> weights;
};

// `steps` optimizer steps over three batches in turn.
Curve train(Device device, const std::vector<std::string>& more, int steps) {
    World world;
    Trainer t(config(device, more), world);
    randomize(t);
    const bool isolated = t.config().data.documents == Documents::isolated;
    std::vector<Batch> batches;
    for (unsigned seed = 1; seed <= 3; ++seed) batches.push_back(make_batch(2, 61, isolated, true, seed));
    Curve curve;
#if defined(TRIFOLD_EMULATION)
    const size_t held = emulation::holding_copies().size();
#endif
    for (int step = 1; step <= steps; ++step) {
        const Batch& b = batches[static_cast<size_t>(step) % batches.size()];
        const float nominal = static_cast<float>(b.tokens.size());
        t.stage().begin_step(t.compute());
        t.pipeline().train(t.compute(), {b.view(isolated)}, 1 / nominal);
        t.optimizer().settle_gradients(t.compute());
        const Optimizer::Outcome outcome = update(t, learning_rate(t.config().optim, step, steps), step, nominal / static_cast<float>(b.valid));
        REQUIRE(outcome.applied);
        curve.grad_norm.push_back(outcome.grad_norm);
        curve.loss.push_back(outcome.loss_sum / static_cast<double>(b.valid));
    }
#if defined(TRIFOLD_EMULATION)
    CHECK(emulation::holding_copies().size() == held);  // every wait for the GPU is one that is watched
#endif
    const float* w = t.read_state()[0].master;
    curve.weights.assign(w, w + t.table().flat_elems());
    return curve;
}

double largest_relative(const std::vector<double>& a, const std::vector<double>& b) {
    double largest = 0;
    for (size_t i = 0; i < a.size(); ++i) largest = std::max(largest, std::abs(a[i] - b[i]) / std::abs(b[i]));
    return largest;
}

Gradients first_gradients(Device device, const std::vector<std::string>& more, const std::vector<Batch>& micro) {
    World world;
    Trainer t(config(device, more), world);
    randomize(t);
    return gradients(t, micro);
}

// norm(a - b) of one tensor.
double distance(const Parameter& p, const Gradients& a, const Gradients& b) {
    double sum = 0;
    for (size_t i = static_cast<size_t>(p.offset); i < static_cast<size_t>(p.offset + p.elems); ++i) sum += std::pow(static_cast<double>(a.flat[i]) - b.flat[i], 2);
    return std::sqrt(sum);
}

// bf16: both sides round at the same places, but values near a boundary may fall to either side, and everything behind them differs. So the device
// must be no farther from fp32 than the CPU is, by half as much at most; gradients that are zero in exact arithmetic count by the noise of the whole.
void check_half(const ParameterTable& table, const Gradients& exact, const Gradients& cpu16, const Gradients& gpu16) {
    const double whole = norm(exact.flat.data(), table.flat_elems());
    for (const Parameter& p : table.all()) {
        CAPTURE(p.name, norm(exact.flat.data() + p.offset, p.elems));
        CHECK(distance(p, gpu16, exact) <= 1.5 * distance(p, cpu16, exact) + 1e-3 * norm(exact.flat.data() + p.offset, p.elems) + 1e-4 * whole);
    }
    CHECK(std::abs(gpu16.loss - exact.loss) < 5e-3 * exact.loss);
}

// Whatever a test did, the emulated device must have found every access ordered.
struct Ordered {
#if defined(TRIFOLD_EMULATION)
    size_t before = emulation::unordered_accesses().size();
    ~Ordered() {
        const std::vector<std::string> found = emulation::unordered_accesses();
        for (size_t i = before; i < found.size(); ++i) UNSCOPED_INFO(found[i]);
        CHECK(found.size() == before);
    }
#endif
};

}  // namespace

TEST_CASE("gradients of every parameter on the device are those of the CPU", "[trainer]") {
    [[maybe_unused]] const Ordered ordered;
    for (const auto& family : families) {
        auto args = family;
        args.push_back("--train.global_batch=4");
        CAPTURE(Catch::StringMaker<std::vector<std::string>>::convert(args));
        const Config tiny = config(Device::cpu, args);
        const ParameterTable table(tiny.model);
        const bool isolated = tiny.data.documents == Documents::isolated;
        const std::vector<Batch> micro = {make_batch(2, 61, isolated, true, 1), make_batch(2, 61, isolated, true, 2)};
        const Gradients exact = first_gradients(Device::cpu, args, micro), gpu = first_gradients(Device::cuda, args, micro);
        CHECK(worst_difference(table, exact, gpu) < 1e-5);
        CHECK(std::abs(exact.loss - gpu.loss) < 1e-6 * exact.loss);

        args.push_back("--train.dtype=bf16");
        const Gradients cpu16 = first_gradients(Device::cpu, args, micro);
        check_half(table, exact, cpu16, first_gradients(Device::cuda, args, micro));
        if (isolated) continue;  // not cuDNN's
        const WithCudnn cudnn;
        args.push_back("--run.attention=cudnn");
        if (cudnn.here()) check_half(table, exact, cpu16, first_gradients(Device::cuda, args, micro));
    }
}

TEST_CASE("20 steps on the device follow the CPU", "[trainer][long]") {
    [[maybe_unused]] const Ordered ordered;
    for (const std::string optimizer : {"adamw", "lamb"})
        for (const auto& family : families) {
            if (optimizer == "lamb" && &family != &families[2]) continue;
            auto args = family;
            args.push_back("--optim.name=" + optimizer);
            CAPTURE(Catch::StringMaker<std::vector<std::string>>::convert(args));
            const Curve cpu = train(Device::cpu, args, 20), gpu = train(Device::cuda, args, 20);
            CHECK(largest_relative(gpu.loss, cpu.loss) < 1e-5);
            // A norm of gradients reacts to a change of weights more strongly than a loss, which is flat to first order where
            // training has led: ten times the bar.
            CHECK(largest_relative(gpu.grad_norm, cpu.grad_norm) < 1e-4);
            CHECK(gpu.loss.back() < 0.8 * gpu.loss.front());
        }
}

TEST_CASE("20 steps in bf16 on the device stay close to fp32", "[trainer][long]") {
    [[maybe_unused]] const Ordered ordered;
    const Curve fp32 = train(Device::cuda, families[2], 20);
    auto args = families[2];
    args.push_back("--train.dtype=bf16");
    const Curve half = train(Device::cuda, args, 20);
    // Twenty steps at this rate amplify bf16's 2^-8 about eightfold.
    CHECK(largest_relative(half.loss, fp32.loss) < 3e-2);
    CHECK(half.loss.back() < 0.8 * half.loss.front());
}

TEST_CASE("the same run on the device gives the same bits, whatever is recomputed", "[trainer]") {
    [[maybe_unused]] const Ordered ordered;
    auto args = families[3];
    args.push_back("--train.dtype=bf16");
    const Curve once = train(Device::cuda, args, 3);
    for (const std::string mode : {"none", "selective", "full"}) {
        auto again = args;
        again.push_back("--train.recompute=" + mode);
        CAPTURE(mode);
        CHECK((train(Device::cuda, again, 3).weights == once.weights));
    }
}

TEST_CASE("with cuDNN's attention training follows our own", "[trainer][cudnn]") {
    [[maybe_unused]] const Ordered ordered;
    const WithCudnn cudnn;
    if (!cudnn.here()) return;
    for (const size_t f : {1, 2}) {  // a window; grouped heads
        auto args = families[f];
        args.push_back("--train.dtype=bf16");
        auto own = args;
        args.push_back("--run.attention=cudnn"), own.push_back("--run.attention=own");
        CAPTURE(f);
        const Curve of_cudnn = train(Device::cuda, args, 3), of_own = train(Device::cuda, own, 3);
        CHECK(largest_relative(of_cudnn.loss, of_own.loss) < 0x1p-8);  // one rounding of bf16: three steps hardly amplify it
        CHECK((of_cudnn.weights != of_own.weights));  // or it was not there
        args.push_back("--train.recompute=full");
        CHECK((train(Device::cuda, args, 3).weights == of_cudnn.weights));
    }
}

#if defined(TRIFOLD_EMULATION)
TEST_CASE("layers have names in profilers", "[trainer]") {
    const size_t before = emulation::ranges().names.size();
    train(Device::cuda, {}, 1);
    const std::vector<std::string> seen(emulation::ranges().names.begin() + static_cast<std::ptrdiff_t>(before), emulation::ranges().names.end());
    CHECK(seen == std::vector<std::string>{"layer 0 forward", "layer 1 forward", "layer 1 backward", "layer 0 backward"});
    CHECK(emulation::ranges().open == 0);
}
#endif

TEST_CASE("initial values and loaded states are the same on both devices", "[trainer]") {
    [[maybe_unused]] const Ordered ordered;
    World world;
    Trainer cpu(config(Device::cpu, {}), world), gpu(config(Device::cuda, {}), world);
    cpu.initialize_weights();
    gpu.initialize_weights();
    const int64_t n = cpu.table().flat_elems();
    const float* initial = cpu.read_state()[0].master;
    CHECK(std::equal(initial, initial + n, gpu.read_state()[0].master));
    const std::vector<StateShard> state = gpu.host_state();
    REQUIRE(state.size() > 3);
    for (const StateShard& s : state)
        for (int64_t i = 0; i < s.elems; ++i) {
            const auto x = static_cast<float>(s.first + i);
            s.master[i] = x, s.m[i] = -x, s.v[i] = 0.5f;
        }
    gpu.host_state_changed();
    std::fill_n(gpu.snapshot().as<float>(), gpu.snapshot().elems, 0.0f);
    int64_t wrong = 0;
    for (const StateShard& s : gpu.read_state())
        for (int64_t i = 0; i < s.elems; ++i) {
            const auto x = static_cast<float>(s.first + i);
            wrong += s.master[i] != x || s.m[i] != -x || s.v[i] != 0.5f;
        }
    CHECK(wrong == 0);
}
