// test/cuda/test_utility.cpp   Addition and conversion, copies, zeroing and sums on the device; and that parity.h can
// fail.
#include "test/catch.h"
#include "test/cuda/parity.h"

using namespace trifold;
using test::Operand;
using test::parity;

namespace {

constexpr DType f32 = DType::f32;
constexpr double exact = 0.0;

// An addition that is wrong in one element: of the device, or at every second run.
void wrong_add(CUstream_st* stream, const AddInto& a) {
    cuda::add_into(stream, a);
    cuda::zero(stream, {.y = a.y.slice(a.y.elems - 1, 1)});
}
void changing_add(CUstream_st* stream, const AddInto& a) {
    static int runs = 0;
    cuda::add_into(stream, a);
    if (++runs % 2 == 0) cuda::add_into(stream, {.x = a.x.slice(0, 1), .y = a.y.slice(0, 1)});
}
void no_add(CUstream_st*, const AddInto&) {}

}  // namespace

TEST_CASE("add_into on the device between all pairs of types", "[utility]") {
    for (const DType from : {f32, DType::bf16})
        for (const DType to : {f32, DType::bf16})
            for (const int64_t n : {1, 3, 100, 4096, 5000, 70004})
                for (const Accumulate accumulate : {Accumulate::overwrite, Accumulate::add}) {
                    CAPTURE(name_of(from), name_of(to), n, static_cast<int>(accumulate));
                    Operand x = Operand::random(from, n, 1),
                            y = accumulate == Accumulate::add ? Operand::random(to, n, 2) : Operand::nans(to, n);
                    CHECK(parity(cpu::add_into, cuda::add_into,
                                 {.x = x.tensor(), .y = y.tensor(), .accumulate = accumulate}, exact) <= 1e-9);
                }
}

TEST_CASE("sum_parts on the device", "[utility]") {
    for (const DType act : {f32, DType::bf16})
        for (const int64_t ranks : {1, 2, 3, 4})
            for (const int64_t n : {0, 1, 33, 4096, 5000}) {
                Operand own = Operand::random(act, n, 1), others = Operand::random(act, (ranks - 1) * n, 2, 8.0),
                        y = Operand::nans(act, n);
                for (int64_t rank = 0; rank < ranks; ++rank) {
                    CAPTURE(name_of(act), ranks, n, rank);
                    SumParts a{.own = own.tensor(), .others = others.tensor(), .y = y.tensor(), .rank = rank, .ranks = ranks};
                    CHECK(parity(cpu::sum_parts, cuda::sum_parts, a, exact) <= 1e-9);
                    CHECK(parity(cpu::sum_parts, test::unaligned<cuda::sum_parts, SumParts>, a, exact) <= 1e-9);
                    Operand in_place = own;
                    a.own = in_place.tensor(), a.y = in_place.tensor();
                    test::on_device(cuda::sum_parts, a);
                    CHECK(in_place.bytes() == y.bytes());
                }
            }
}

TEST_CASE("copy and zero on the device", "[utility]") {
    for (const int64_t n : {1, 7, 4096}) {
        Operand x = Operand::random(f32, n, 3), y = Operand::nans(f32, n);
        test::on_device(cuda::copy, Copy{.x = x.tensor(), .y = y.tensor()});
        CHECK(y.bytes() == x.bytes());
        test::on_device(cuda::zero, Zero{.y = y.tensor().slice(0, n - 1)});
        CHECK((y[n - 1] == x[n - 1] && (n == 1 || y[0] == 0.0)));
    }
}

TEST_CASE("extend_cache on the device", "[utility]") {
    for (const DType act : {f32, DType::bf16})
        for (const int64_t width : {1, 24, 1040})
            for (const int64_t B : {1, 3})
                for (const int64_t T : {0, 1, 5}) {
                    CAPTURE(name_of(act), width, B, T);
                    const int64_t stride = 4 * width + 8, capacity = 9;
                    Operand kv = Operand::random(act, B * T * stride, 1), k = Operand::random(act, B * capacity * width, 2), v = Operand::random(act, k.elems(), 3);
                    const ExtendCache a{.kv_NS = kv.tensor().from(T > 0 ? 2 * width : 0), .k_BLW = k.tensor(), .v_BLW = v.tensor(),
                                        .B = B, .T = T, .length = 4, .capacity = capacity, .width = width, .stride = stride};
                    CHECK(parity(cpu::extend_cache, cuda::extend_cache, a, exact) == 0.0);
                    CHECK(parity(cpu::extend_cache, test::unaligned<cuda::extend_cache, ExtendCache>, a, exact) == 0.0);
                    // Sequence by sequence, row by row.
                    bool same = true;
                    for (int64_t b = 0; b < B; ++b)
                        for (int64_t t = 0; t < T; ++t)
                            for (int64_t c = 0; c < width; ++c) {
                                const int64_t from = (b * T + t) * stride + 2 * width + c, to = (b * capacity + 4 + t) * width + c;
                                same = same && k[to] == kv[from] && v[to] == kv[from + width];
                            }
                    CHECK(same);
                }
}

TEST_CASE("sum on the device", "[utility]") {
    for (const int64_t n : {0, 1, 3, 1000, 20001})
        for (const Accumulate accumulate : {Accumulate::overwrite, Accumulate::add}) {
            CAPTURE(n, static_cast<int>(accumulate));
            Operand x = Operand::random(f32, n, 1), sum = accumulate == Accumulate::add
                                                              ? Operand::filled(DType::f64, 1, 3.0)
                                                              : Operand::nans(DType::f64, 1);
            CHECK(parity(cpu::sum, cuda::sum, {.x = x.tensor(), .sum = sum.tensor(), .accumulate = accumulate},
                         1e-12) <= 1);
        }
}

TEST_CASE("parity sees what is wrong, missing or changes from run to run", "[utility]") {
    Operand x = Operand::random(f32, 100, 1, 0.5, 2.0), y = Operand::random(f32, 100, 2),
            never = Operand::nans(f32, 100);
    const AddInto a{.x = x.tensor(), .y = y.tensor()};
    CHECK(parity(cpu::add_into, cuda::add_into, a, exact) <= 1);
    CHECK(parity(cpu::add_into, wrong_add, a, exact) > 1e3);
    CHECK(std::isinf(parity(cpu::add_into, changing_add, a, exact)));
    CHECK(std::isinf(parity(cpu::add_into, no_add,
                            {.x = x.tensor(), .y = never.tensor(), .accumulate = Accumulate::overwrite}, exact)));
}
