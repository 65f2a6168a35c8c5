// kernels/cpu/utility.cpp   Addition and conversion, sums of ranks' parts, copies, zeroing, and a sum in double. All
// memory bound.
#include "kernels/cpu/parallel.h"

namespace trifold::cpu {

void add_into(const AddInto& a) {
    TRIFOLD_ASSERT(a.x.elems == a.y.elems);
    with_act(a.x.dtype, [&](auto from) {
        with_act(a.y.dtype, [&](auto to) {
            const auto* x = a.x.as<decltype(from)>();
            auto* y = a.y.as<decltype(to)>();
            const bool add = a.accumulate == Accumulate::add;
            parallel_elems(a.x.elems, [=](int64_t begin, int64_t end) {
                simd::for_groups(end - begin, [&](int64_t i, auto w) TRIFOLD_BODY {
                    simd::f32x16 v = load(x + begin + i, w);
                    if (add) v += load(y + begin + i, w);
                    store(y + begin + i, v, w);
                });
            });
        });
    });
}

void sum_parts(const SumParts& a) {
    const int64_t n = a.y.elems;
    TRIFOLD_ASSERT(a.ranks > 0 && a.rank >= 0 && a.rank < a.ranks && a.own.elems == n &&
                   a.others.elems == (a.ranks - 1) * n);
    TRIFOLD_ASSERT(a.own.dtype == a.y.dtype && (!a.others || a.others.dtype == a.y.dtype));
    with_act(a.y.dtype, [&](auto type) {
        using T = decltype(type);
        const T *own = a.own.as<T>(), *others = a.others.as<T>();
        T* y = a.y.as<T>();
        const auto part = [=, &a](int64_t q) {
            return q == a.rank ? own : others + (q - (q > a.rank)) * n;
        };
        parallel_elems(n, [=, &a](int64_t begin, int64_t end) {
            simd::for_groups(end - begin, [&](int64_t i, auto w) TRIFOLD_BODY {
                simd::f32x16 v = load(part(0) + begin + i, w);
                for (int64_t q = 1; q < a.ranks; ++q) v += load(part(q) + begin + i, w);
                store(y + begin + i, v, w);
            });
        });
    });
}

void extend_cache(const ExtendCache& a) {
    const int64_t N = a.B * a.T, size = size_of(a.kv_NS.dtype);
    TRIFOLD_ASSERT(a.k_BLW.dtype == a.kv_NS.dtype && a.v_BLW.dtype == a.kv_NS.dtype);
    TRIFOLD_ASSERT(N == 0 || a.kv_NS.elems >= (N - 1) * a.stride + 2 * a.width);
    TRIFOLD_ASSERT(a.length + a.T <= a.capacity && a.k_BLW.elems >= a.B * a.capacity * a.width && a.v_BLW.elems >= a.B * a.capacity * a.width);
    parallel_rows(N, 2 * a.width, [&](int64_t n) {
        const auto* from = static_cast<const std::byte*>(a.kv_NS.data) + n * a.stride * size;
        const int64_t bytes = a.width * size, to = (n / a.T * a.capacity + a.length + n % a.T) * bytes;
        std::memcpy(static_cast<std::byte*>(a.k_BLW.data) + to, from, static_cast<size_t>(bytes));
        std::memcpy(static_cast<std::byte*>(a.v_BLW.data) + to, from + bytes, static_cast<size_t>(bytes));
    });
}

void copy(const Copy& a) {
    TRIFOLD_ASSERT(a.x.bytes() == a.y.bytes());
    const auto* from = static_cast<const std::byte*>(a.x.data);
    auto* to = static_cast<std::byte*>(a.y.data);
    const Blocks blocks{a.y.bytes(), 1 << 18};
    parallel_for(blocks.count(), [&](int64_t b) {
        std::memcpy(to + blocks.begin(b), from + blocks.begin(b), static_cast<size_t>(blocks.end(b) - blocks.begin(b)));
    });
}

void zero(const Zero& a) {
    auto* bytes = static_cast<std::byte*>(a.y.data);
    const Blocks blocks{a.y.bytes(), 1 << 18};
    parallel_for(blocks.count(), [&](int64_t b) {
        std::memset(bytes + blocks.begin(b), 0, static_cast<size_t>(blocks.end(b) - blocks.begin(b)));
    });
}

// Every block keeps 16 partial sums; blocks are added in their order.
void sum(const Sum& a) {
    const float* x = a.x.as<float>();
    double partials[256];
    const Blocks blocks = at_most(256, a.x.elems, 4096);
    parallel_for(blocks.count(), [&](int64_t b) {
        simd::f64x16 total = 0.0;
        const int64_t begin = blocks.begin(b);
        simd::for_groups(blocks.end(b) - begin,
                         [&](int64_t i, auto w) TRIFOLD_BODY { total += widen(load(x + begin + i, w)); });
        partials[b] = sum(total);
    });
    double total = a.accumulate == Accumulate::add ? *a.sum.as<double>() : 0.0;
    for (int64_t b = 0; b < blocks.count(); ++b) total += partials[b];
    *a.sum.as<double>() = total;
}

}  // namespace trifold::cpu
