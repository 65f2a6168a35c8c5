// test/unit/test_attention.cpp   Attention against softmax(q k^T) v written out in double precision.
#include "test/catch.h"

#include <cmath>
#include <limits>
#include <vector>

#include "test/unit/attention_case.h"

using namespace trifold;
using test::canary;
using test::Case;
using test::Reference;
using test::Shape;
using test::view;
using test::Workspace;

namespace {

// norm(x - reference) / norm(reference) over elements for which `counts` is true
template <class T, class Counts>
double error(const std::vector<T>& x, const std::vector<double>& reference, Counts counts) {
    double difference = 0.0, norm = 0.0;
    for (size_t i = 0; i < x.size(); ++i) {
        if (!counts(static_cast<int64_t>(i))) continue;
        const double d = static_cast<double>(static_cast<float>(x[i])) - reference[i];
        difference += d * d;
        norm += reference[i] * reference[i];
    }
    REQUIRE(norm > 0.0);
    return std::sqrt(difference / norm);
}
template <class T>
double error(const std::vector<T>& x, const std::vector<double>& reference) {
    return error(x, reference, [](int64_t) { return true; });
}

template <class T>
bool same_bits(const std::vector<T>& a, const std::vector<T>& b) {
    return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(T)) == 0;
}

template <class T>
void compare(const Shape& s, uint64_t seed, double forward_bound, double backward_bound) {
    INFO(s.name() << ", " << name_of(dtype_of<T>()));
    Case<T> c(s, seed);
    c.run();
    const Reference r(c);
    CHECK(error(c.o, r.o) < forward_bound);
    CHECK(error(c.lse, r.lse) < 1e-5);
    const auto part = [&](int64_t first, int64_t last) {
        return [&s, first, last](int64_t i) {
            const int64_t in_batch = i % s.batch_stride(), column = in_batch % s.stride();
            return in_batch < s.T * s.stride() && column >= first * s.D && column < last * s.D;
        };
    };
    CHECK(error(c.dqkv, r.dqkv, part(s.H + s.K, s.H + 2 * s.K)) < backward_bound);
    bool several_keys = false;  // otherwise P is constant: dq and dk are zero but for rounding
    for (int64_t t = 0; t < s.T; ++t) several_keys = several_keys || (t > 0 && s.sees(t, t - 1));
    if (several_keys) {
        CHECK(error(c.dqkv, r.dqkv, part(0, s.H)) < backward_bound);
        CHECK(error(c.dqkv, r.dqkv, part(s.H, s.H + s.K)) < backward_bound);
    }
    const T untouched(canary);
    for (int64_t b = 0; b < s.B; ++b)
        for (int64_t i = 0; i < s.batch_stride(); ++i) {
            if (i < s.T * s.stride() && i % s.stride() < (s.H + 2 * s.K) * s.D) continue;
            REQUIRE(std::memcmp(&c.dqkv[b * s.batch_stride() + i], &untouched, sizeof(T)) == 0);
        }
}

std::vector<Shape> shapes() {
    const int64_t heads[][2] = {{1, 1}, {4, 4}, {4, 2}, {6, 1}};
    const int64_t windows[] = {0, 1, 7, 64, 0};
    std::vector<Shape> out;
    int64_t i = 0;
    for (int64_t T : {1, 5, 17, 64, 100, 257})
        for (int64_t D : {8, 33, 64, 96, 128})
            for (const auto& [H, K] : heads) {
                Shape s{.B = 1 + i % 3, .T = T, .H = H, .K = K, .D = D, .window = windows[i / 2 % 5]};
                if (T == 257) s.B = 1;  // the reference is slow
                if (i / 3 % 2)
                    for (int64_t d : {2, 3, 13, 61, 70, 130, 256})
                        if (d < T) s.documents.push_back(d);
                out.push_back(s);
                ++i;
            }
    return out;
}

// The rows [first, first + count) of every sequence, computed with the keys before them as a cache.
template <class T>
std::vector<T> with_cache(const Case<T>& c, int64_t first, int64_t count) {
    const Shape& s = c.s;
    std::vector<T> o(s.B * count * s.H * s.D);
    std::vector<int32_t> doc_start;
    AttentionForward a = c.forward_args();
    a.q_NHD = a.q_NHD.from(first * s.stride());
    if (!c.doc_start.empty()) {
        for (int64_t b = 0; b < s.B; ++b)
            for (int64_t t = first; t < first + count; ++t) doc_start.push_back(c.doc_start[b * s.T + t]);
        a.doc_start_N = view(doc_start);
    }
    a.o_NHD = view(o);
    a.lse_BHT = {};
    a.Tq = count, a.Tk = first + count, a.q_offset = first;
    Workspace w(cpu::attention_workspace(a));
    a.workspace = w.tensor();
    cpu::attention_forward(a);
    REQUIRE(w.intact());
    return o;
}

template <class T>
void compare_cache(const Shape& s, const std::vector<int64_t>& chunks, double bound) {
    INFO(s.name());
    Case<T> c(s);
    const Reference r(c);
    for (int64_t first = 0, i = 0; first < s.T; ++i) {
        const int64_t count = std::min(chunks[static_cast<size_t>(i) % chunks.size()], s.T - first);
        const std::vector<T> o = with_cache(c, first, count);
        std::vector<double> expected;
        for (int64_t b = 0; b < s.B; ++b)
            expected.insert(expected.end(), r.o.begin() + s.dense(b, first, 0),
                            r.o.begin() + s.dense(b, first + count, 0));
        INFO("queries from " << first << ", " << count);
        CHECK(error(o, expected) < bound);
        first += count;
    }
}

class Threads {
public:
    explicit Threads(int n) : before_(omp_get_max_threads()) { omp_set_num_threads(n); }
    ~Threads() { omp_set_num_threads(before_); }

private:
    int before_;
};

}  // namespace

TEST_CASE("attention agrees with double precision", "[attention]") {
    uint64_t seed = 0;
    for (const Shape& s : shapes()) {
        compare<float>(s, ++seed, 1e-6, 2e-6);
        // One rounding of o, dq, dk, dv to 8 bits: at most 2^-9 of each element, about 1.1e-3 in the norm. dq and dk
        // also see the rounded o through delta.
        compare<bf16>(s, seed, 2e-3, 5e-3);
    }
}

TEST_CASE("attention does not depend on threads", "[attention]") {
    // The first two make the backward pass of two threads run in two passes, that of one thread in one.
    for (Shape s : {Shape{.B = 1, .T = 600, .H = 1, .K = 1, .D = 64},
                    Shape{.B = 1, .T = 530, .H = 3, .K = 1, .D = 40, .window = 200},
                    Shape{.B = 3, .T = 100, .H = 4, .K = 2, .D = 33, .window = 7, .documents = {20, 66}},
                    Shape{.B = 2, .T = 3, .H = 4, .K = 2, .D = 64}}) {
        INFO(s.name());
        Case<float> one(s), two(s);
        {
            const Threads threads(1);
            one.run();
        }
        {
            const Threads threads(2);
            two.run();
        }
        CHECK(same_bits(one.o, two.o));
        CHECK(same_bits(one.lse, two.lse));
        CHECK(same_bits(one.dqkv, two.dqkv));
        CHECK(error(two.dqkv, Reference(two).dqkv) < 2e-6);
    }
}

TEST_CASE("attention of a sequence does not depend on the batch", "[attention]") {
    for (int64_t T : {2, 130, 600}) {
        Case<float> batch({.B = 3, .T = T, .H = 4, .K = 2, .D = 64});
        batch.run();
        const std::vector<float> last = with_cache(batch, T - 1, 1);
        for (int64_t b = 0; b < 3; ++b) {
            Shape s = batch.s;
            s.B = 1;
            Case<float> alone(s);
            const int64_t fused = s.batch_stride(), row = s.H * s.D, dense = s.T * row;
            std::copy_n(batch.qkv.begin() + b * fused, fused, alone.qkv.begin());
            std::copy_n(batch.dO.begin() + b * dense, dense, alone.dO.begin());
            alone.run();
            CHECK(std::memcmp(&batch.o[b * dense], alone.o.data(), dense * 4) == 0);
            CHECK(std::memcmp(&batch.dqkv[b * fused], alone.dqkv.data(), fused * 4) == 0);
            CHECK(std::memcmp(&last[b * row], with_cache(alone, T - 1, 1).data(), row * 4) == 0);
        }
    }
}

TEMPLATE_TEST_CASE("isolated documents do not see each other", "[attention]", float, bf16) {
    const int64_t border = 75;
    Case<TestType> before({.B = 2, .T = 150, .H = 4, .K = 2, .D = 64, .documents = {border}}), after(before);
    test::Numbers numbers(77);
    for (int64_t b = 0; b < 2; ++b)
        for (int64_t t = 0; t < border; ++t) {
            // q and k of usual size, v so large that even the smallest fp32 probability of it would show.
            for (int64_t i = 0; i < 6 * 64; ++i)
                after.qkv[after.s.at(b, t, 0, i)] = TestType(static_cast<float>(30.0 * numbers.next()));
            for (int64_t i = 6 * 64; i < 8 * 64; ++i)
                after.qkv[after.s.at(b, t, 0, i)] = TestType(static_cast<float>(1e30 * numbers.next()));
            for (int64_t i = 0; i < 4 * 64; ++i)
                after.dO[after.s.dense(b, t, 0, i)] = TestType(static_cast<float>(30.0 * numbers.next()));
        }
    before.run();
    after.run();
    CHECK(!same_bits(before.o, after.o));
    for (int64_t b = 0; b < 2; ++b)
        for (int64_t t = border; t < 150; ++t) {
            REQUIRE(std::memcmp(&before.o[before.s.dense(b, t, 0)], &after.o[before.s.dense(b, t, 0)],
                                4 * 64 * sizeof(TestType)) == 0);
            REQUIRE(std::memcmp(&before.dqkv[before.s.at(b, t, 0)], &after.dqkv[before.s.at(b, t, 0)],
                                8 * 64 * sizeof(TestType)) == 0);
        }
}

TEST_CASE("attention with a key/value cache equals the whole computation", "[attention]") {
    const std::vector<int64_t> mixed = {1, 3, 64, 7, 1, 1, 40}, single = {1};
    compare_cache<float>({.B = 2, .T = 150, .H = 4, .K = 2, .D = 64}, mixed, 1e-6);
    compare_cache<float>({.B = 1, .T = 150, .H = 6, .K = 1, .D = 33, .window = 40}, mixed, 1e-6);
    compare_cache<float>({.B = 2, .T = 70, .H = 2, .K = 2, .D = 96, .documents = {10, 60}}, single, 1e-6);
    compare_cache<bf16>({.B = 2, .T = 70, .H = 4, .K = 2, .D = 128}, mixed, 2e-3);
    // Chunks of more than a few queries follow the same steps as the whole: the same bits.
    Case<float> c({.B = 1, .T = 150, .H = 2, .K = 1, .D = 64});
    c.run();
    const std::vector<float> o = with_cache(c, 90, 60);
    CHECK(std::memcmp(o.data(), &c.o[c.s.dense(0, 90, 0)], o.size() * 4) == 0);
}

TEST_CASE("a few queries read a long cache in parts", "[attention]") {
    for (int64_t window : {0, 1000}) {
        Shape s{.B = 1, .T = 5000, .H = 4, .K = 2, .D = 64, .window = window};
        Case<float> c(s);
        Reference r(Case<float>({.T = 1}));
        r.o.assign(c.o.size(), 0.0), r.lse.assign(c.lse.size(), 0.0), r.dqkv.assign(c.qkv.size(), 0.0);
        for (int64_t count : {1, 4}) {
            std::fill(r.o.begin(), r.o.end(), 0.0);
            for (int64_t h = 0; h < s.H; ++h)
                for (int64_t t = s.T - count; t < s.T; ++t) r.row(c, 0, h, t);
            const std::vector<double> expected(r.o.begin() + s.dense(0, s.T - count, 0), r.o.end());
            std::vector<float> one, two;
            {
                const Threads threads(1);
                one = with_cache(c, s.T - count, count);
            }
            {
                const Threads threads(2);
                two = with_cache(c, s.T - count, count);
            }
            CHECK(error(one, expected) < 1e-6);
            CHECK(same_bits(one, two));
        }
    }
}

TEST_CASE("attention survives large scores", "[attention]") {
    for (int64_t T : {4, 100}) {
        Case<float> c({.B = 1, .T = T, .H = 2, .K = 1, .D = 64}, 3, 120.0f);  // scores up to about 1e4
        c.run();
        const Reference r(c);
        double highest = 0.0;
        for (double x : r.lse) highest = std::max(highest, std::abs(x));
        CHECK(highest > 3000.0);
        for (float x : c.dqkv) REQUIRE(std::isfinite(x));
        // fp32 scores of that size are known to about 1e-3, and so are probabilities.
        CHECK(error(c.o, r.o) < 1e-3);
        CHECK(error(c.dqkv, r.dqkv) < 1e-2);
    }
}

TEST_CASE("attention passes NaN on", "[attention]") {
    for (int64_t T : {3, 70}) {
        Case<float> clean({.B = 1, .T = T, .H = 2, .K = 2, .D = 64}), broken(clean);
        broken.qkv[broken.s.at(0, 1, 0, 5)] = std::numeric_limits<float>::quiet_NaN();  // one query of head 0
        clean.run();
        broken.run();
        CHECK(std::isnan(broken.o[broken.s.dense(0, 1, 0)]));
        CHECK(std::isnan(broken.dqkv[broken.s.at(0, 1, 0)]));
        broken.o[broken.s.dense(0, 1, 0)] = 0.0f;
        CHECK(std::memcmp(&clean.o[clean.s.dense(0, 2, 0)], &broken.o[clean.s.dense(0, 2, 0)], 2 * 64 * 4) == 0);
        Case<float> value(clean.s);
        value.qkv[value.s.at(0, 0, 4, 5)] = std::numeric_limits<float>::infinity();  // a value that everyone sees
        value.run();
        CHECK(!std::isfinite(value.o[value.s.dense(0, T - 1, 0, 5)]));
    }
}

TEST_CASE("attention workspace does not grow with fewer queries or more keys", "[attention]") {
    AttentionForward train{};
    train.B = 4, train.Tq = train.Tk = 1024, train.H = train.K = 12, train.D = 64;
    AttentionForward decode = train;
    decode.Tq = 1, decode.Tk = 100000;
    CHECK(cpu::attention_workspace(train) == cpu::attention_workspace(decode));
    CHECK(cpu::attention_workspace(train) % 4 == 0);
}
