// kernels/tensor.h   Element types and views. A view names memory in some arena; it owns nothing.
//
// Operations take In, Out and InOut views, so each argument list says which buffers it reads and which it writes. The
// stream engine (stream.h) records exactly these accesses.
#pragma once
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "base/error.h"

namespace trifold {

// bfloat16: the upper half of an fp32. Rounded to nearest even; NaN stays NaN.
struct bf16 {
    uint16_t bits;
    bf16() = default;
    explicit bf16(float f) {
        uint32_t u;
        std::memcpy(&u, &f, 4);
        const uint32_t rounded = (u + 0x7fffu + ((u >> 16) & 1u)) >> 16;
        const uint32_t quiet_nan = (u >> 16) | 0x0040u;
        bits = static_cast<uint16_t>((u & 0x7fffffffu) > 0x7f800000u ? quiet_nan : rounded);
    }
    explicit operator float() const {
        const uint32_t u = static_cast<uint32_t>(bits) << 16;
        float f;
        std::memcpy(&f, &u, 4);
        return f;
    }
};

enum class DType : uint8_t { f32, bf16, f64, i32, u8 };

constexpr int64_t size_of(DType t) {
    switch (t) {
        case DType::f32: case DType::i32: return 4;
        case DType::bf16: return 2;
        case DType::f64: return 8;
        case DType::u8: return 1;
    }
    return 0;
}
constexpr const char* name_of(DType t) {
    switch (t) {
        case DType::f32: return "fp32";
        case DType::bf16: return "bf16";
        case DType::f64: return "fp64";
        case DType::i32: return "int32";
        case DType::u8: return "uint8";
    }
    return "?";
}
template <class T> constexpr DType dtype_of();
template <> constexpr DType dtype_of<float>() { return DType::f32; }
template <> constexpr DType dtype_of<bf16>() { return DType::bf16; }
template <> constexpr DType dtype_of<double>() { return DType::f64; }
template <> constexpr DType dtype_of<int32_t>() { return DType::i32; }
template <> constexpr DType dtype_of<uint8_t>() { return DType::u8; }

// A contiguous run of elements. Shapes and strides are arguments of the operations.
struct Tensor {
    void* data = nullptr;
    DType dtype = DType::f32;
    int64_t elems = 0;

    explicit operator bool() const { return elems > 0; }
    int64_t bytes() const { return elems * size_of(dtype); }
    template <class T> T* as() const {
        TRIFOLD_ASSERT(elems == 0 || dtype_of<T>() == dtype);
        return static_cast<T*>(data);
    }
    // Elements [first, first + count).
    Tensor slice(int64_t first, int64_t count) const {
        TRIFOLD_ASSERT(first >= 0 && count >= 0 && first + count <= elems);
        return {static_cast<std::byte*>(data) + first * size_of(dtype), dtype, count};
    }
    Tensor from(int64_t first) const { return slice(first, elems - first); }
};

enum class Access : uint8_t { read = 1, write = 2, read_write = 3 };

template <Access A> struct View : Tensor {
    static constexpr Access access = A;
    View() = default;
    View(const Tensor& t) : Tensor(t) {}  // NOLINT: implicit on purpose, the argument list states the access
};
using In = View<Access::read>;
using Out = View<Access::write>;
using InOut = View<Access::read_write>;

}  // namespace trifold
