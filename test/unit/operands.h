// test/unit/operands.h   Operands of kernel tests: typed memory that tests fill, read and compare as doubles.
#pragma once
#include <omp.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <functional>
#include <limits>
#include <vector>

#include "kernels/tensor.h"

namespace trifold::test {

using Values = std::vector<double>;

// Deterministic numbers in [-1, 1).
class Numbers {
public:
    explicit Numbers(uint64_t seed) : state_(seed) {}
    double next() {
        uint64_t z = (state_ += 0x9e3779b97f4a7c15u);
        z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
        z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
        return static_cast<double>((z ^ (z >> 31)) >> 11) * 0x1p-52 - 1.0;
    }

private:
    uint64_t state_;
};

class Operand {
public:
    Operand() = default;
    Operand(DType type, int64_t elems)
        : type_(type), elems_(elems), memory_(static_cast<size_t>(elems * size_of(type))) {}

    // `centre` plus or minus `spread`, rounded to the type.
    static Operand random(DType type, int64_t elems, uint64_t seed, double spread = 1.0, double centre = 0.0) {
        Operand o(type, elems);
        Numbers numbers(seed);
        for (int64_t i = 0; i < elems; ++i) o.set(i, centre + spread * numbers.next());
        return o;
    }
    static Operand filled(DType type, int64_t elems, double value) {
        Operand o(type, elems);
        for (int64_t i = 0; i < elems; ++i) o.set(i, value);
        return o;
    }
    static Operand nans(DType type, int64_t elems) {
        return filled(type, elems, std::numeric_limits<double>::quiet_NaN());
    }
    static Operand integers(const std::vector<int32_t>& values) {
        Operand o(DType::i32, static_cast<int64_t>(values.size()));
        std::copy(values.begin(), values.end(), o.tensor().as<int32_t>());
        return o;
    }

    Tensor tensor() { return {memory_.data(), type_, elems_}; }
    int64_t elems() const { return elems_; }
    const std::vector<std::byte>& bytes() const { return memory_; }
    double operator[](int64_t i) const {
        Tensor t = const_cast<Operand*>(this)->tensor();
        switch (type_) {
            case DType::f32:
                return t.as<float>()[i];
            case DType::bf16:
                return static_cast<float>(t.as<bf16>()[i]);
            case DType::f64:
                return t.as<double>()[i];
            case DType::i32:
                return t.as<int32_t>()[i];
            case DType::u8:
                return t.as<uint8_t>()[i];
        }
        return 0;
    }
    void set(int64_t i, double value) {
        Tensor t = tensor();
        switch (type_) {
            case DType::f32:
                t.as<float>()[i] = static_cast<float>(value);
                return;
            case DType::bf16:
                t.as<bf16>()[i] = bf16(static_cast<float>(value));
                return;
            case DType::f64:
                t.as<double>()[i] = value;
                return;
            case DType::i32:
                t.as<int32_t>()[i] = static_cast<int32_t>(value);
                return;
            case DType::u8:
                t.as<uint8_t>()[i] = static_cast<uint8_t>(value);
                return;
        }
    }
    Values values() const {
        Values v(static_cast<size_t>(elems_));
        for (int64_t i = 0; i < elems_; ++i) v[static_cast<size_t>(i)] = (*this)[i];
        return v;
    }

private:
    DType type_ = DType::f32;
    int64_t elems_ = 0;
    std::vector<std::byte> memory_;
};

// Largest |got - want| in units of what one rounding to `type` of |want| plus `sums` times the largest |want| allows
// (the errors of fp32 sums before that rounding). At most 1 is a pass; NaN counts as infinite.
inline double worst(const Operand& got, const Values& want, DType type, double sums) {
    if (got.elems() != static_cast<int64_t>(want.size())) return std::numeric_limits<double>::infinity();
    double largest = 0, result = 0;
    for (const double w : want) largest = std::max(largest, std::abs(w));
    const double rounding = type == DType::bf16 ? 0x1p-8 : 0x1p-24;
    for (size_t i = 0; i < want.size(); ++i) {
        const double error = std::abs(got[static_cast<int64_t>(i)] - want[i]);
        const double units = error / (rounding * std::abs(want[i]) + sums * largest + 1e-37);
        result = units <= result ? result : std::isnan(units) ? std::numeric_limits<double>::infinity() : units;
    }
    return result;
}

inline Values slice(const Values& v, int64_t begin, int64_t count) {
    return Values(v.begin() + begin, v.begin() + begin + count);
}

// d f / d x[i] for every i by central differences, f in double.
inline Values gradient(const std::function<double(const Values&)>& f, Values x) {
    Values g(x.size());
    for (size_t i = 0; i < x.size(); ++i) {
        const double at = x[i], h = 1e-5 * std::max(1.0, std::abs(at));
        x[i] = at + h;
        const double above = f(x);
        x[i] = at - h;
        g[i] = (above - f(x)) / (2 * h);
        x[i] = at;
    }
    return g;
}

// Runs `work` with one and with two threads and returns whether the bytes it gives are the same.
inline bool same_for_thread_counts(const std::function<std::vector<std::byte>()>& work) {
    const int before = omp_get_max_threads();
    omp_set_num_threads(1);
    const auto one = work();
    omp_set_num_threads(2);
    const auto two = work();
    omp_set_num_threads(before);
    return one == two;
}

// Tokens or the like: `count` numbers of [0, below].
inline std::vector<int32_t> some_integers(int64_t count, int64_t below, uint64_t seed) {
    test::Numbers numbers(seed);
    std::vector<int32_t> v;
    for (int64_t i = 0; i < count; ++i)
        v.push_back(static_cast<int32_t>((numbers.next() + 1) / 2 * static_cast<double>(below)));
    return v;
}

// The cuts of `total` rows into ranks; with 4, one rank has none.
inline std::vector<int64_t> cuts(int64_t total, int64_t ranks) {
    std::vector<int64_t> c{0, total};
    if (ranks > 1) c.insert(c.begin() + 1, total / 3);
    if (ranks > 2) c.insert(c.begin() + 2, total / 3 + 1);
    if (ranks > 3) c.insert(c.begin() + 3, total / 3 + 1);
    return c;
}

}  // namespace trifold::test
