// test/cuda/test_optimizer.cpp   Gradient norm, clipping, AdamW and LAMB on the device.
#include "test/catch.h"
#include "test/cuda/parity.h"

using namespace trifold;
using test::Operand;
using test::parity;

namespace {

constexpr DType f32 = DType::f32;
// Each element by itself, a few roundings apart (fused multiply-adds); where terms cancel these are steps of the terms.
constexpr double steps = 1e-7;

// Tensors of many sizes with gaps: several chunks share the largest, one chunk holds several small ones, most begin and
// end between packs; one is empty.
const std::vector<Segment> many = {{0, 5000, 0.1f},  {5003, 1, 0.0f, false}, {5010, 33, 0.1f},
                                   {5043, 0, 0.1f},  {5043, 40001, 0.1f},    {45100, 4096, 0.0f, false},
                                   {49200, 7, 0.0f}, {49210, 2, 0.1f},       {49213, 1, 0.1f}};
const std::vector<Segment> one_small = {{1, 5, 0.1f}}, one_aligned = {{0, 64, 0.0f}}, far = {{40000, 3000, 0.1f}};
const std::vector<Segment>* const tables[] = {&many, &one_small, &one_aligned, &far};

int64_t flat_of(const std::vector<Segment>& table) { return table.back().offset + table.back().elems + 88; }

struct State {
    const std::vector<Segment>& table;
    int64_t flat = flat_of(table), count = static_cast<int64_t>(table.size());
    Operand master = Operand::random(f32, flat, 1), m = Operand::random(f32, flat, 2, 1e-2),
            v = Operand::random(f32, flat, 3, 1e-4, 2e-4);
    Operand grad = Operand::random(f32, flat, 4, 1e-2), param = Operand::filled(DType::bf16, flat, 7.0),
            control = Operand::filled(f32, 2, 1.0);
    Operand norms = Operand::nans(DType::f64, 2 * count);
    Operand workspace = test::scratch(1, cuda::segment_sums_workspace(flat, count));

    AdamW adamw(bool with_param) {
        return {.master = master.tensor(),
                .m = m.tensor(),
                .v = v.tensor(),
                .grad = grad.tensor(),
                .control = control.tensor(),
                .param = with_param ? param.tensor() : Tensor{},
                .segments = table.data(),
                .segment_count = count,
                .lr = 1e-2f,
                .step = 3};
    }
    LambDirection lamb_direction() {
        return {.master = master.tensor(),
                .control = control.tensor(),
                .m = m.tensor(),
                .v = v.tensor(),
                .grad = grad.tensor(),
                .norms = norms.tensor(),
                .workspace = workspace.tensor(),
                .segments = table.data(),
                .segment_count = count,
                .eps = 1e-6f,
                .step = 3};
    }
    LambUpdate lamb_update(bool with_param) {
        return {.master = master.tensor(),
                .direction = grad.tensor(),
                .norms = norms.tensor(),
                .control = control.tensor(),
                .param = with_param ? param.tensor() : Tensor{},
                .segments = table.data(),
                .segment_count = count,
                .lr = 1e-2f};
    }
    // Whether padding between segments is what it was.
    bool padding_untouched() const {
        const State fresh{table};
        for (int64_t i = 0, s = 0; i < flat; ++i) {
            while (s < count && i >= table[static_cast<size_t>(s)].offset + table[static_cast<size_t>(s)].elems) ++s;
            if (s < count && i >= table[static_cast<size_t>(s)].offset) continue;
            if (master[i] != fresh.master[i] || m[i] != fresh.m[i] || v[i] != fresh.v[i] || grad[i] != fresh.grad[i] ||
                param[i] != 7.0)
                return false;
        }
        return true;
    }
};

}  // namespace

TEST_CASE("squared_norm on the device", "[optimizer]") {
    for (const auto* table : tables) {
        CAPTURE(table->size());
        State s{*table};
        for (int64_t i = 0; i < s.flat; ++i) {
            bool inside = false;
            for (const Segment& g : *table) inside = inside || (i >= g.offset && i < g.offset + g.elems);
            if (!inside) s.grad.set(i, std::numeric_limits<double>::quiet_NaN());
        }
        Operand sums = Operand::filled(DType::f64, 1, 0.25);
        CHECK(parity(cpu::squared_norm, cuda::squared_norm,
                     {.grad = s.grad.tensor(),
                      .sums = sums.tensor(),
                      .workspace = s.workspace.tensor(),
                      .segments = table->data(),
                      .segment_count = s.count},
                     1e-14) <= 1);
        s.grad.set(table->back().offset, std::numeric_limits<double>::infinity());
        test::on_device(cuda::squared_norm, SquaredNorm{.grad = s.grad.tensor(),
                                                        .sums = sums.tensor(),
                                                        .workspace = s.workspace.tensor(),
                                                        .segments = table->data(),
                                                        .segment_count = s.count});
        CHECK(std::isinf(sums[0]));
    }
}

TEST_CASE("clip_control on the device", "[optimizer]") {
    const double infinity = std::numeric_limits<double>::infinity();
    for (const double squared : {0.0, 0.09, 4.0, 1e80, infinity, -1.0})
        for (const float clip : {0.0f, 1.0f}) {
            CAPTURE(squared, clip);
            Operand sum = Operand::filled(DType::f64, 1, squared), control = Operand::nans(f32, 2),
                    norm = Operand::nans(f32, 1), want_control = control, want_norm = norm;
            ClipControl a{.squared_norm = sum.tensor(),
                          .control = want_control.tensor(),
                          .norm = want_norm.tensor(),
                          .unit = 1.5f,
                          .clip = clip};
            cpu::clip_control(a);
            a.control = control.tensor(), a.norm = norm.tensor();
            test::on_device(cuda::clip_control, a);
            CHECK(control.bytes() == want_control.bytes());
            CHECK((norm[0] == want_norm[0] || (std::isnan(norm[0]) && std::isnan(want_norm[0]))));
        }
}

TEST_CASE("AdamW on the device", "[optimizer]") {
    for (const auto* table : tables)
        for (const bool with_param : {false, true}) {
            CAPTURE(table->size(), with_param);
            State s{*table};
            s.control.set(0, 0.75);
            CHECK(parity(cpu::adamw, cuda::adamw, s.adamw(with_param), steps) <= 1);
            CHECK(s.padding_untouched());
            CHECK(s.master.bytes() != State{*table}.master.bytes());
        }
}

TEST_CASE("LAMB on the device", "[optimizer]") {
    for (const auto* table : tables)
        for (const bool with_param : {false, true}) {
            CAPTURE(table->size(), with_param);
            State s{*table};
            CHECK(parity(cpu::lamb_direction, cuda::lamb_direction, s.lamb_direction(), steps) <= 1);
            CHECK(parity(cpu::lamb_update, cuda::lamb_update, s.lamb_update(with_param), steps) <= 1);
            CHECK(s.master.bytes() != State{*table}.master.bytes());
        }
}

TEST_CASE("optimizers on the device take flat buffers that are not aligned", "[optimizer]") {
    State s{many};
    Operand sums = Operand::filled(DType::f64, 1, 0.25);
    const SquaredNorm norm{.grad = s.grad.tensor(),
                           .sums = sums.tensor(),
                           .workspace = s.workspace.tensor(),
                           .segments = many.data(),
                           .segment_count = s.count};
    CHECK(parity(cpu::squared_norm, test::unaligned<cuda::squared_norm, SquaredNorm>, norm, 1e-14) <= 1);
    CHECK(parity(cpu::adamw, test::unaligned<cuda::adamw, AdamW>, s.adamw(true), steps) <= 1);
    CHECK(parity(cpu::lamb_direction, test::unaligned<cuda::lamb_direction, LambDirection>, s.lamb_direction(),
                 steps) <= 1);
    CHECK(parity(cpu::lamb_update, test::unaligned<cuda::lamb_update, LambUpdate>, s.lamb_update(true), steps) <= 1);
}

TEST_CASE("a step that must not be applied changes nothing on the device", "[optimizer]") {
    State s{many};
    const State before = s;
    s.control.set(1, 0.0);
    test::on_device(cuda::adamw, s.adamw(true));
    test::on_device(cuda::lamb_direction, s.lamb_direction());
    test::on_device(cuda::lamb_update, s.lamb_update(true));
    CHECK((s.master.bytes() == before.master.bytes() && s.m.bytes() == before.m.bytes() &&
           s.v.bytes() == before.v.bytes()));
    CHECK((s.grad.bytes() == before.grad.bytes() && s.param.bytes() == before.param.bytes()));
    for (int64_t i = 0; i < s.norms.elems(); ++i) CHECK(s.norms[i] == 0.0);
}

TEST_CASE("a rank that owns nothing, on the device", "[optimizer]") {
    // Of every second tensor nothing; of the flat buffer nothing, with segments and without.
    std::vector<Segment> sparse = many;
    for (size_t i = 0; i < sparse.size(); i += 2) sparse[i].elems = 0;
    sparse.insert(sparse.begin(), Segment{});
    sparse.push_back({49300, 0, 0.1f});
    const std::vector<Segment> two(2), none;
    for (const std::vector<Segment>* table : std::initializer_list<const std::vector<Segment>*>{&sparse, &two, &none}) {
        const int64_t count = static_cast<int64_t>(table->size()), flat = table == &sparse ? flat_of(sparse) : 0;
        CAPTURE(count, flat);
        State s{.table = *table, .flat = flat};
        Operand sums = Operand::filled(DType::f64, 1, 3.0);
        CHECK(parity(cpu::squared_norm, cuda::squared_norm,
                     {.grad = s.grad.tensor(),
                      .sums = sums.tensor(),
                      .workspace = s.workspace.tensor(),
                      .segments = table->data(),
                      .segment_count = count},
                     1e-14) <= 1);
        if (flat == 0) CHECK(sums[0] == 3.0);
        CHECK(parity(cpu::adamw, cuda::adamw, s.adamw(true), steps) <= 1);
        CHECK(parity(cpu::lamb_direction, cuda::lamb_direction, s.lamb_direction(), steps) <= 1);
        for (int64_t i = 0; i < 2 * count; ++i)
            if ((*table)[static_cast<size_t>(i / 2)].elems == 0) CHECK(s.norms[i] == 0.0);
        CHECK(parity(cpu::lamb_update, cuda::lamb_update, s.lamb_update(true), steps) <= 1);
        if (flat > 0) CHECK(s.master.bytes() != State{.table = *table, .flat = flat}.master.bytes());
    }
}
