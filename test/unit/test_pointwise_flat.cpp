// test/unit/test_pointwise_flat.cpp   The lanes of kernels/cpu/simd.h, the operations on flat buffers, and the
// optimizers against references in double.
#include "test/catch.h"

#include <cstring>

#include "kernels/cpu/parallel.h"
#include "test/unit/operands.h"

using namespace trifold;
using test::Operand;
using test::Values;
using test::worst;

namespace {

constexpr DType f32 = DType::f32;
constexpr double ulp = 0x1p-23;

// ---------------------------------------------------------------- functions of lanes

template <class F>
float lane(F f, float x) {
    float out[simd::lanes];
    simd::store(out, f(simd::f32x16(x)), simd::Full{});
    return out[5];
}

// Largest relative error of f over [from, to], in ulp; `allowed` says how many at x.
template <class F, class Want, class Allowed>
double worst_ulp(F f, Want want, Allowed allowed, double from, double to) {
    double result = 0;
    for (int i = 0; i <= 20000; ++i) {
        const float x = static_cast<float>(from + (to - from) * i / 20000);
        const double w = want(static_cast<double>(x));
        result = std::max(result, std::abs(lane(f, x) - w) / (ulp * std::abs(w)) / allowed(x));
    }
    return result;
}

// ---------------------------------------------------------------- optimizers

// Tensors of many sizes with gaps: several chunks share the largest, and one chunk holds several small ones.
const std::vector<Segment> segments = {{0, 5000, 0.1f},     {5003, 1, 0.0f, false},     {5010, 33, 0.1f},
                                       {5043, 30001, 0.1f}, {35100, 4096, 0.0f, false}, {39200, 7, 0.0f}};
constexpr int64_t flat = 39300;
// The same elements with other cuts.
const std::vector<Segment> finer = {
    {0, 17, 0.1f},       {17, 4983, 0.1f},     {5003, 1, 0.0f, false},     {5010, 33, 0.1f},
    {5043, 12345, 0.1f}, {17388, 17656, 0.1f}, {35100, 4096, 0.0f, false}, {39200, 7, 0.0f}};

bool in_some_segment(int64_t i) {
    for (const Segment& s : segments)
        if (i >= s.offset && i < s.offset + s.elems) return true;
    return false;
}

struct State {
    Operand master = Operand::random(f32, flat, 1), m = Operand::filled(f32, flat, 0), v = m, grad = m;
    Operand param = Operand::nans(DType::bf16, flat), control = Operand::filled(f32, 2, 1.0);

    void adamw(int64_t step, const std::vector<Segment>& cut = segments) {
        grad = Operand::random(f32, flat, 100 + static_cast<uint64_t>(step), 1e-2);
        cpu::adamw({.master = master.tensor(),
                    .m = m.tensor(),
                    .v = v.tensor(),
                    .grad = grad.tensor(),
                    .control = control.tensor(),
                    .param = param.tensor(),
                    .segments = cut.data(),
                    .segment_count = static_cast<int64_t>(cut.size()),
                    .lr = 1e-2f,
                    .step = step});
    }
    Operand norms = Operand(DType::f64, 2 * static_cast<int64_t>(segments.size()));
    void lamb_direction(int64_t step, const std::vector<Segment>& cut = segments) {
        grad = Operand::random(f32, flat, 100 + static_cast<uint64_t>(step), 1e-2);
        cpu::lamb_direction({.master = master.tensor(),
                             .control = control.tensor(),
                             .m = m.tensor(),
                             .v = v.tensor(),
                             .grad = grad.tensor(),
                             .norms = norms.tensor(),
                             .segments = cut.data(),
                             .segment_count = static_cast<int64_t>(cut.size()),
                             .eps = 1e-6f,
                             .step = step});
    }
    void lamb_update(const std::vector<Segment>& cut = segments) {
        cpu::lamb_update({.master = master.tensor(),
                          .direction = grad.tensor(),
                          .norms = norms.tensor(),
                          .control = control.tensor(),
                          .param = param.tensor(),
                          .segments = cut.data(),
                          .segment_count = static_cast<int64_t>(cut.size()),
                          .lr = 1e-2f});
    }
    std::vector<std::byte> bytes() const {
        std::vector<std::byte> all;
        for (const Operand* o : {&master, &m, &v, &param, &grad, &norms})
            all.insert(all.end(), o->bytes().begin(), o->bytes().end());
        return all;
    }
};

// m^ / (sqrt(v^) + eps) in double; the moments are kept by the caller.
double direction(double g, double& m, double& v, double eps, int64_t step) {
    const double b1 = 0.9f, b2 = 0.95f;
    m = b1 * m + (1 - b1) * g;
    v = b2 * v + (1 - b2) * g * g;
    return m / (1 - std::pow(b1, step)) / (std::sqrt(v / (1 - std::pow(b2, step))) + eps);
}

bool rounded_from_master(State& s) {
    for (int64_t i = 0; i < flat; ++i)
        if (in_some_segment(i) && s.param.tensor().as<bf16>()[i].bits != bf16(s.master.tensor().as<float>()[i]).bits)
            return false;
    return true;
}

}  // namespace

TEST_CASE("exp, sigmoid and normal keep their stated bounds", "[pointwise][simd]") {
    using simd::f32x16;
    const auto exact_exp = [](double x) { return std::exp(x); };
    const auto exponential = [](const f32x16& x) { return simd::exp(x); };
    CHECK(worst_ulp(
              exponential, exact_exp, [](double) { return 1.0; }, -87, 88) <= 1);
    CHECK((lane(exponential, 0.0f) == 1 && lane(exponential, -88.0f) == 0 && lane(exponential, -1e30f) == 0));
    CHECK((lane(exponential, -INFINITY) == 0 && std::isnan(lane(exponential, NAN))));

    const auto three = [](double) { return 3.0; };
    CHECK(worst_ulp([](const f32x16& z) { return simd::sigmoid(z).value; },
                    [](double z) { return 1 / (1 + std::exp(-z)); }, three, -80, 80) <= 1);
    CHECK(worst_ulp([](const f32x16& z) { return simd::sigmoid(z).complement; },
                    [](double z) { return 1 / (1 + std::exp(z)); }, three, -80, 80) <= 1);
    CHECK(std::isnan(lane([](const f32x16& z) { return simd::sigmoid(z).complement; }, NAN)));

    const auto tail = [](double x) { return 4 + x * x / 2; };
    const auto integral = [](const f32x16& x) { return simd::normal(x).integral; };
    const auto density = [](const f32x16& x) { return simd::normal(x).density; };
    CHECK(worst_ulp(
              integral, [](double x) { return 0.5 * std::erfc(-x / std::sqrt(2.0)); }, tail, -13, 13) <= 1);
    CHECK(worst_ulp(
              density, [](double x) { return std::exp(-x * x / 2) / std::sqrt(2 * M_PI); }, tail, -13, 13) <= 1);
    CHECK((std::isnan(lane(integral, NAN)) && std::isnan(lane(density, NAN)) && lane(integral, 1e30f) == 1));
}

TEST_CASE("sixteen lanes round to bf16 as one number does", "[pointwise][simd]") {
    const uint32_t lower[] = {0, 1, 0x7fff, 0x8000, 0x8001, 0xffff};
    int64_t different = 0;
    for (uint32_t upper = 0; upper < 65536; upper += simd::lanes)
        for (const uint32_t low : lower) {
            float x[simd::lanes];
            bf16 got[simd::lanes];
            for (uint32_t i = 0; i < simd::lanes; ++i) {
                const uint32_t bits = (upper + i) << 16 | low;
                std::memcpy(&x[i], &bits, sizeof bits);
            }
            simd::store(got, simd::load(x, simd::Full{}), simd::Full{});
            for (uint32_t i = 0; i < simd::lanes; ++i) different += got[i].bits != bf16(x[i]).bits;
        }
    CHECK(different == 0);
}

TEST_CASE("short groups touch their elements only and sum like full ones", "[pointwise][simd]") {
    for (int64_t count = 1; count < simd::lanes; ++count) {
        float x[simd::lanes + 1] = {}, y[simd::lanes + 1];
        for (int64_t i = 0; i <= simd::lanes; ++i) y[i] = 7;
        for (int64_t i = 0; i < count; ++i) x[i] = 1.0f / static_cast<float>(i + 3);
        simd::for_groups(count, [&](int64_t i, auto w) { simd::store(y + i, load(x + i, w) + 1.0f, w); });
        CHECK((y[count - 1] == x[count - 1] + 1 && y[count] == 7));
        CHECK(simd::sum(simd::load(x, simd::Part{count})) == simd::sum(simd::load(x, simd::Full{})));
        CHECK(simd::max(keep(simd::load(x, simd::Full{}) - 1.0f, simd::Part{count}, -5.0f)) == x[0] - 1.0f);
    }
}

TEST_CASE("add_into between all pairs of types; copy; zero", "[pointwise]") {
    for (const DType from : {f32, DType::bf16})
        for (const DType to : {f32, DType::bf16})
            for (const int64_t n : {1, 3, 100, 40000}) {
                CAPTURE(name_of(from), name_of(to), n);
                Operand x = Operand::random(from, n, 1), y = Operand::random(to, n, 2), set = y;
                Values both = y.values();
                for (int64_t i = 0; i < n; ++i) both[static_cast<size_t>(i)] += x[i];
                cpu::add_into({.x = x.tensor(), .y = y.tensor()});
                cpu::add_into({.x = x.tensor(), .y = set.tensor(), .accumulate = Accumulate::overwrite});
                CHECK(worst(y, both, to, 0) <= 1);
                CHECK(worst(set, x.values(), to, 0) <= 1);
            }
    Operand x = Operand::random(f32, 200001, 3), y = Operand::nans(f32, 200001);
    cpu::copy({.x = x.tensor(), .y = y.tensor()});
    CHECK(y.bytes() == x.bytes());
    cpu::zero({.y = y.tensor().slice(1, 199999)});
    CHECK((y[0] == x[0] && y[1] == 0 && y[100000] == 0 && y[199999] == 0 && y[200000] == x[200000]));
}

TEST_CASE("sum_parts adds what the ranks have in rank order and rounds once", "[pointwise]") {
    for (const DType act : {f32, DType::bf16})
        for (const int64_t ranks : {1, 2, 3, 4})
            for (const int64_t n : {0, 1, 33, 20000}) {
                CAPTURE(name_of(act), ranks, n);
                std::vector<Operand> parts;
                // Over many powers of two, so that another order gives another rounding.
                for (int64_t q = 0; q < ranks; ++q) {
                    parts.push_back(Operand::random(act, n, static_cast<uint64_t>(10 + q)));
                    for (int64_t i = 0; i < n; ++i)
                        parts.back().set(i, parts.back()[i] * std::exp2(static_cast<double>((i + 5 * q) % 7)));
                }
                Operand want(act, n);
                for (int64_t i = 0; i < n; ++i) {
                    float total = static_cast<float>(parts[0][i]);
                    for (size_t q = 1; q < parts.size(); ++q) total += static_cast<float>(parts[q][i]);
                    want.set(i, total);
                }
                for (int64_t rank = 0; rank < ranks; ++rank) {
                    Operand own = parts[static_cast<size_t>(rank)], others(act, (ranks - 1) * n),
                            y = Operand::nans(act, n);
                    for (int64_t q = 0, to = 0; q < ranks; ++q)
                        if (q != rank)
                            for (int64_t i = 0; i < n; ++i) others.set(to++, parts[static_cast<size_t>(q)][i]);
                    SumParts a{.own = own.tensor(),
                               .others = others.tensor(),
                               .y = y.tensor(),
                               .rank = rank,
                               .ranks = ranks};
                    cpu::sum_parts(a);
                    CHECK(y.bytes() == want.bytes());
                    a.y = own.tensor();
                    cpu::sum_parts(a);
                    CHECK(own.bytes() == want.bytes());
                }
            }
}

TEST_CASE("a rank that owns nothing of some tensors, or of all", "[pointwise]") {
    // The same tensors with empty segments in between: nothing changes, and their norms are zero.
    std::vector<Segment> with_empty = segments;
    for (const int64_t offset : {5003, 39207}) {
        const auto at = std::find_if(with_empty.begin(), with_empty.end(), [&](const Segment& s) { return s.offset >= offset; });
        with_empty.insert(at, Segment{offset, 0, 0.1f});
    }
    with_empty.insert(with_empty.begin(), Segment{0, 0, 0.1f});
    State plain, empty = plain;
    plain.adamw(1);
    empty.adamw(1, with_empty);
    CHECK(plain.bytes() == empty.bytes());
    plain.lamb_direction(2);
    empty.norms = Operand::nans(DType::f64, 2 * static_cast<int64_t>(with_empty.size()));
    empty.lamb_direction(2, with_empty);
    for (size_t s = 0, of_plain = 0; s < with_empty.size(); ++s)
        for (int64_t k = 0; k < 2; ++k)
            CHECK(empty.norms[2 * static_cast<int64_t>(s) + k] ==
                  (with_empty[s].elems == 0 ? 0.0 : plain.norms[2 * static_cast<int64_t>(k == 1 ? of_plain++ : of_plain) + k]));
    plain.lamb_update();
    empty.lamb_update(with_empty);
    CHECK(plain.master.bytes() == empty.master.bytes());
    CHECK(plain.param.bytes() == empty.param.bytes());

    // No buffer at all, with segments and without.
    const std::vector<Segment> none, two(2);
    for (const auto* table : {&none, &two}) {
        const int64_t count = static_cast<int64_t>(table->size());
        Operand buffer(f32, 0), param(DType::bf16, 0), control = Operand::filled(f32, 2, 1.0);
        Operand norms = Operand::nans(DType::f64, 2 * count), sums = Operand::filled(DType::f64, 1, 3.0);
        cpu::squared_norm({.grad = buffer.tensor(), .sums = sums.tensor(), .segments = table->data(), .segment_count = count});
        cpu::sum({.x = buffer.tensor(), .sum = sums.tensor()});
        CHECK(sums[0] == 3.0);
        cpu::sum({.x = buffer.tensor(), .sum = sums.tensor(), .accumulate = Accumulate::overwrite});
        CHECK(sums[0] == 0.0);
        const Tensor b = buffer.tensor();
        cpu::adamw({.master = b, .m = b, .v = b, .grad = b, .control = control.tensor(), .param = param.tensor(),
                    .segments = table->data(), .segment_count = count});
        cpu::lamb_direction({.master = b, .control = control.tensor(), .m = b, .v = b, .grad = b, .norms = norms.tensor(),
                             .segments = table->data(), .segment_count = count});
        for (int64_t i = 0; i < norms.elems(); ++i) CHECK(norms[i] == 0.0);
        cpu::lamb_update({.master = b, .direction = b, .norms = norms.tensor(), .control = control.tensor(),
                          .param = param.tensor(), .segments = table->data(), .segment_count = count});
    }
}

TEST_CASE("sum and squared_norm in double, in an order of their own", "[pointwise]") {
    Operand x = Operand::random(f32, flat, 4), total = Operand::filled(DType::f64, 1, 10.0), squares = total;
    // Over 80 powers of two, so that another order gives another rounding.
    for (int64_t i = 0; i < flat; ++i) x.set(i, x[i] * std::exp2(static_cast<double>(i * 7 % 80 - 60)));
    long double want = 10, magnitude = 10, want_squares = 10;
    for (int64_t i = 0; i < flat; ++i) {
        want += x[i];
        magnitude += std::abs(x[i]);
        if (in_some_segment(i)) want_squares += x[i] * x[i];
    }
    const SquaredNorm norm{.grad = x.tensor(),
                           .sums = squares.tensor(),
                           .segments = segments.data(),
                           .segment_count = static_cast<int64_t>(segments.size())};
    cpu::sum({.x = x.tensor(), .sum = total.tensor()});
    cpu::squared_norm(norm);
    CHECK(std::abs(total[0] - want) < 1e-14L * magnitude);
    CHECK(std::abs(squares[0] - want_squares) < 1e-14L * want_squares);
    CHECK(test::same_for_thread_counts([&] {
        squares.set(0, 0);
        cpu::squared_norm(norm);
        cpu::sum({.x = x.tensor(), .sum = total.tensor(), .accumulate = Accumulate::overwrite});
        auto bytes = squares.bytes();
        bytes.insert(bytes.end(), total.bytes().begin(), total.bytes().end());
        return bytes;
    }));
}

TEST_CASE("clip_control scales to the limit and refuses what is not finite", "[pointwise]") {
    const auto control = [](double squared, float unit, float clip) {
        Operand s = Operand::filled(DType::f64, 1, squared), c(f32, 2), n(f32, 1);
        cpu::clip_control(
            {.squared_norm = s.tensor(), .control = c.tensor(), .norm = n.tensor(), .unit = unit, .clip = clip});
        return Values{c[0], c[1], n[0]};
    };
    CHECK(control(16.0, 0.5f, 0.0f) == Values{0.5, 1, 2});
    CHECK(control(16.0, 0.5f, 3.0f) == Values{0.5, 1, 2});
    CHECK(control(16.0, 0.5f, 1.0f) == Values{0.25, 1, 2});
    CHECK(control(0.0, 1.0f, 1.0f) == Values{1, 1, 0});
    for (const double bad : {static_cast<double>(NAN), static_cast<double>(INFINITY), 1e80})
        CHECK(control(bad, 1.0f, 1.0f)[1] == 0);

    for (const float bad : {NAN, INFINITY, -INFINITY})
        for (const int64_t where : {0, 5003, 35043, 39206}) {
            Operand x = Operand::random(f32, flat, 4), squares = Operand::filled(DType::f64, 1, 0.0);
            x.set(where, bad);
            cpu::squared_norm({.grad = x.tensor(),
                               .sums = squares.tensor(),
                               .segments = segments.data(),
                               .segment_count = static_cast<int64_t>(segments.size())});
            CHECK(control(squares[0], 1.0f, 1.0f)[1] == 0);
        }
}

TEST_CASE("AdamW: ten steps against double, whatever the cuts and the threads", "[pointwise]") {
    State s, other = s;
    s.control.set(0, 0.5);
    other.control.set(0, 0.5);
    Values w = s.master.values(), m(w.size()), v(w.size());
    for (int64_t step = 1; step <= 10; ++step) {
        s.adamw(step);
        other.adamw(step, finer);
        for (const Segment& segment : segments)
            for (int64_t k = segment.offset; k < segment.offset + segment.elems; ++k) {
                const size_t i = static_cast<size_t>(k);
                w[i] -= 1e-2f * (direction(0.5 * s.grad[k], m[i], v[i], 1e-8f, step) + segment.weight_decay * w[i]);
            }
    }
    CHECK(worst(s.master, w, f32, 1e-6) <= 1);
    CHECK(worst(s.m, m, f32, 1e-6) <= 1);
    CHECK(worst(s.v, v, f32, 1e-6) <= 1);
    CHECK(s.bytes() == other.bytes());
    CHECK(rounded_from_master(s));
    CHECK(test::same_for_thread_counts([] {
        State t;
        for (int64_t step = 1; step <= 3; ++step) t.adamw(step);
        return t.bytes();
    }));
}

TEST_CASE("LAMB: ten steps against double, a ratio of 1 for zero norms and undecayed tensors", "[pointwise]") {
    State s;
    for (int64_t i = 0; i < 7; ++i) s.master.set(39200 + i, 0.0);  // a tensor that is decayed, but zero
    Values w = s.master.values(), m(w.size()), v(w.size());
    for (int64_t step = 1; step <= 10; ++step) {
        s.lamb_direction(step);
        const Values gradient = Operand::random(f32, flat, 100 + static_cast<uint64_t>(step), 1e-2).values();
        for (size_t t = 0; t < segments.size(); ++t) {
            const Segment& segment = segments[t];
            Values u;
            double w2 = 0, u2 = 0;
            for (int64_t k = segment.offset; k < segment.offset + segment.elems; ++k) {
                const size_t i = static_cast<size_t>(k);
                u.push_back(direction(gradient[i], m[i], v[i], 1e-6f, step) + segment.weight_decay * w[i]);
                w2 += w[i] * w[i];
                u2 += u.back() * u.back();
            }
            CHECK(std::abs(s.norms[2 * static_cast<int64_t>(t)] - w2) <= 1e-5 * w2);
            CHECK(std::abs(s.norms[2 * static_cast<int64_t>(t) + 1] - u2) <= 1e-5 * u2);
            const double ratio = segment.trust_ratio && w2 > 0 && u2 > 0 ? std::sqrt(w2 / u2) : 1.0;
            for (int64_t k = 0; k < segment.elems; ++k)
                w[static_cast<size_t>(segment.offset + k)] -= 1e-2f * ratio * u[static_cast<size_t>(k)];
        }
        s.lamb_update();
    }
    CHECK(worst(s.master, w, f32, 2e-6) <= 1);
    CHECK(rounded_from_master(s));
    CHECK(test::same_for_thread_counts([] {
        State t;
        for (int64_t step = 1; step <= 3; ++step) {
            t.lamb_direction(step);
            t.lamb_update();
        }
        return t.bytes();
    }));
}

TEST_CASE("a refused step changes nothing", "[pointwise]") {
    State s;
    s.adamw(1);
    s.control.set(1, 0.0);
    const State before = s;
    s.adamw(2);
    CHECK((s.master.bytes() == before.master.bytes() && s.m.bytes() == before.m.bytes() &&
           s.v.bytes() == before.v.bytes()));
    CHECK(s.param.bytes() == before.param.bytes());
    s.lamb_direction(2);
    s.lamb_update();
    CHECK((s.master.bytes() == before.master.bytes() && s.m.bytes() == before.m.bytes() &&
           s.v.bytes() == before.v.bytes()));
    CHECK(s.param.bytes() == before.param.bytes());
}
