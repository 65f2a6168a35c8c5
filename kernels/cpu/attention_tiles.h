// kernels/cpu/attention_tiles.h   What forward and backward attention share: tiles, and the products of tiles.
//
// Tiles      64 queries by 64 keys, in fp32 whatever the inputs are: rows of bf16 are converted once per tile. Scores
//            are kept transposed, [key][query]: the softmax over keys runs lane by lane and needs no sum across lanes.
// Products   c[row][16 lanes] += a(row, k) * b[k][16 lanes]: one number of `a` is spread over all lanes; a block of 4
//            rows by up to 4 vectors of c stays in registers. Every product of attention has this form, with `a` read
//            by rows or by columns, so that only queries and output gradients are ever transposed.
// Order      an element of c is one chain of multiply-adds over k, whatever the block it is in, and a masked pair adds
//            an exact zero. So results depend neither on which parts of a tile are skipped nor on threads.
#pragma once
#include <omp.h>

#include <cfloat>
#include <cmath>
#include <utility>

#include "kernels/cpu/attention_mask.h"
#include "kernels/cpu/parallel.h"

namespace trifold::cpu::attention {

using simd::f32x16;

// Starts a running maximum: below any score, but the difference of two such values is a number.
inline constexpr float lowest_score = -FLT_MAX / 2;

// Scratch memory holds whole vectors only.
TRIFOLD_INLINE f32x16 load(const float* p) { return simd::load(p, simd::Full{}); }
TRIFOLD_INLINE void store(float* p, const f32x16& v) { simd::store(p, v, simd::Full{}); }

// ---------------------------------------------------------------- products

// Rows and 16-lane vectors of a block: registers hold it, a row of b and one spread number.
#if defined(__AVX512F__)
inline constexpr int64_t most_vectors = 4;
constexpr int64_t block_rows(int64_t vectors) { return vectors > 2 ? 4 : 8; }
#else
inline constexpr int64_t most_vectors = 1;
constexpr int64_t block_rows(int64_t) { return 8 / f32x16::parts; }
#endif

// Element (row, k) is data[row * row_stride + k * k_stride].
struct Spread {
    const float* data;
    int64_t row_stride, k_stride;
    Spread at(int64_t row, int64_t k) const { return {data + row * row_stride + k * k_stride, row_stride, k_stride}; }
};
// Row-major, 16-lane vectors along a row.
template <class T>
struct Rows {
    T* data;
    int64_t stride;
    Rows at(int64_t row, int64_t column = 0) const { return {data + row * stride + column, stride}; }
    T* operator[](int64_t row) const { return data + row * stride; }
};

// What c holds before the products are added: zero, itself, or itself times factor[row].
enum class Start : uint8_t { zero, add, scale };

// c[0..rows)[0..16 * vectors) over k in [0, depth).
struct Product {
    Spread a;
    Rows<const float> b;
    Rows<float> c;
    int64_t rows, vectors, depth;
    const float* factor = nullptr;
};

// In registers, not in f32x16: where that is several registers, compilers keep arrays of it in memory.
using Register = f32x16::Register;
inline constexpr int register_lanes = simd::register_bytes / 4;

TRIFOLD_INLINE Register load_register(const float* p) {
    Register r;
    std::memcpy(&r, p, sizeof r);
    return r;
}
TRIFOLD_INLINE void store_register(float* p, Register r) { std::memcpy(p, &r, sizeof r); }

template <Start start, int64_t rows, int64_t vectors>
TRIFOLD_INLINE void multiply_block(const Product& p, int64_t row, int64_t vector) {
    constexpr int64_t registers = vectors * f32x16::parts, w = register_lanes;
    const Rows<float> c = p.c.at(row, vector * lanes);
    Register sum[rows][registers];
    for (int64_t r = 0; r < rows; ++r)
        for (int64_t i = 0; i < registers; ++i) {
            sum[r][i] = start == Start::zero ? Register{} : load_register(c[r] + i * w);
            if constexpr (start == Start::scale) sum[r][i] *= p.factor[row + r];
        }
    const float *a = p.a.at(row, 0).data, *b = p.b.data + vector * lanes;
    const int64_t row_stride = p.a.row_stride, k_stride = p.a.k_stride, b_stride = p.b.stride;
    for (int64_t k = p.depth; k > 0; --k) {
        Register b_k[registers];
        for (int64_t i = 0; i < registers; ++i) b_k[i] = load_register(b + i * w);
        for (int64_t r = 0; r < rows; ++r)
            for (int64_t i = 0; i < registers; ++i) sum[r][i] += a[r * row_stride] * b_k[i];
        a += k_stride;
        b += b_stride;
    }
    for (int64_t r = 0; r < rows; ++r)
        for (int64_t i = 0; i < registers; ++i) store_register(c[r] + i * w, sum[r][i]);
}

template <Start start, int64_t vectors>
[[gnu::noinline]] void multiply_panel(const Product& p, int64_t vector) {
    constexpr int64_t most = block_rows(vectors);
    int64_t row = 0;
    for (; row + most <= p.rows; row += most) multiply_block<start, most, vectors>(p, row, vector);
    if constexpr (most > cell)
        for (; row < p.rows; row += cell) multiply_block<start, cell, vectors>(p, row, vector);
}

template <Start start>
void multiply(const Product& p) {
    for (int64_t v = 0, width; v < p.vectors; v += width) {
        const int64_t left = p.vectors - v;
        width = ceil_div(left, ceil_div(left, most_vectors));  // even shares: 5 vectors are 3 + 2
        if constexpr (most_vectors > 1) {
            if (width == 4) multiply_panel<start, 4>(p, v);
            if (width == 3) multiply_panel<start, 3>(p, v);
            if (width == 2) multiply_panel<start, 2>(p, v);
        }
        if (width == 1) multiply_panel<start, 1>(p, v);
    }
}

// ---------------------------------------------------------------- moving tiles

// fp32 copy of `rows` rows of D elements, padded with zeros to whole cells and whole vectors.
template <class T>
void load_rows(Rows<T> from, int64_t rows, int64_t D, Rows<float> to) {
    for (int64_t r = 0; r < rows; ++r)
        simd::for_groups(D,
                         [&](int64_t i, auto width) TRIFOLD_BODY { store(to[r] + i, simd::load(from[r] + i, width)); });
    for (int64_t r = rows; r < round_up(rows, cell); ++r) std::fill(to[r], to[r] + to.stride, 0.0f);
}

// to[r][0..D) = factor * from[r][0..D)
template <class T>
TRIFOLD_INLINE void store_row(const float* from, float factor, int64_t D, T* to) {
    simd::for_groups(D,
                     [&](int64_t i, auto width) TRIFOLD_BODY { simd::store(to + i, load(from + i) * factor, width); });
}

// Rows r and r + w/2 interleave into rows 2r and 2r + 1. Done log2(w) times, this transposes w registers of w lanes.
template <int... i>
TRIFOLD_INLINE void interleave(const Register* in, Register* out, std::integer_sequence<int, i...>) {
    constexpr int w = register_lanes;
    for (int r = 0; r < w / 2; ++r) {
        out[2 * r] = __builtin_shufflevector(in[r], in[r + w / 2], (i / 2 + i % 2 * w)...);
        out[2 * r + 1] = __builtin_shufflevector(in[r], in[r + w / 2], (w / 2 + i / 2 + i % 2 * w)...);
    }
}
// to[d][q] = factor * from[q][d]; columns from `queries` to 64 are zero.
inline void transpose(Rows<const float> from, int64_t queries, int64_t D, float factor, float* to) {
    constexpr int w = register_lanes;
    for (int64_t q = 0; q < tile; q += w)
        for (int64_t d = 0; d < D; d += w) {
            Register rows[w], half_way[w];
            for (int r = 0; r < w; ++r)
                rows[r] = q + r < queries ? load_register(from[q + r] + d) * factor : Register{};
            for (int step = 1; step < w; step *= 2) {
                interleave(rows, half_way, std::make_integer_sequence<int, w>());
                std::copy(half_way, half_way + w, rows);
            }
            for (int r = 0; r < w; ++r) store_register(to + (d + r) * tile + q, rows[r]);
        }
}

// Memory that is needed soon: inputs of the next step, and outputs, which are slow to write unless their lines are here
// already. They are short pieces of long rows, which no hardware foresees. A few rows are fetched between products.
class Ahead {
public:
    template <class T>
    void add(Rows<T> rows, int64_t count, int64_t D) {
        if (blocks_ == most || count <= 0) return;
        constexpr int64_t size = sizeof(T);
        block_[blocks_++] = {reinterpret_cast<const char*>(rows.data), rows.stride * size, D * size, count};
    }
    void clear() { blocks_ = 0; }
    void fetch_some() {
        for (int n = 0; n < 16 && blocks_ > 0; ++n) {
            Block& b = block_[blocks_ - 1];
            for (int64_t i = 0; i < b.bytes; i += 64) __builtin_prefetch(b.next + i, 0, 2);
            b.next += b.stride;
            if (--b.rows == 0) --blocks_;
        }
    }

private:
    static constexpr int most = 16;  // what does not fit is not fetched ahead
    struct Block {
        const char* next;
        int64_t stride, bytes, rows;
    };
    Block block_[most];
    int blocks_ = 0;
};

// ---------------------------------------------------------------- exponential, threads

// e^x for x up to 88; zero below -80 (also for the -infinity of a masked pair), so that products of probabilities with
// ordinary numbers are no denormals, which are slow. A NaN stays one.
TRIFOLD_INLINE f32x16 exp_or_zero(const f32x16& x) {
    return simd::select(x < -80.0f, f32x16(0.0f), simd::exp_in_range(x));
}

// Threads that the workspace was planned for.
inline int team_size(const Tensor& workspace, int64_t bytes_per_thread) {
    TRIFOLD_ASSERT(workspace.bytes() >= bytes_per_thread && reinterpret_cast<uintptr_t>(workspace.data) % 64 == 0);
    return static_cast<int>(std::min<int64_t>(omp_get_max_threads(), workspace.bytes() / bytes_per_thread));
}

// Cuts a thread's scratch memory into arrays, each starting on a cache line.
class Cutter {
public:
    explicit Cutter(float* base) : next_(base) {}
    float* floats(int64_t n) { return std::exchange(next_, next_ + round_up(n, 16)); }

private:
    float* next_;
};

}  // namespace trifold::cpu::attention
