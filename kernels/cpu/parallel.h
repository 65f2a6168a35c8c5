// kernels/cpu/parallel.h   Work for the OpenMP team, cut into blocks that depend on the sizes alone.
//
// Because no block depends on the number of threads, neither does any sum whose partial results belong to blocks and
// are added in block order. A block is never split between threads.
#pragma once
#include <algorithm>
#include <cstdint>

#include "kernels/cpu/simd.h"
#include "kernels/ops.h"

namespace trifold::cpu {

// [0, total) in blocks of `size`; the last one may be shorter.
struct Blocks {
    int64_t total, size;
    int64_t count() const { return (total + size - 1) / size; }
    int64_t begin(int64_t b) const { return b * size; }
    int64_t end(int64_t b) const { return std::min(total, begin(b) + size); }
};

// At most `most` blocks, and none smaller than `least` unless it is the only or the last one.
inline Blocks at_most(int64_t most, int64_t total, int64_t least) {
    return {total, std::max(least, (total + most - 1) / most)};
}

// body(b) for every block, on all threads.
template <class Body>
void parallel_for(int64_t count, const Body& body) {
#pragma omp parallel for schedule(static) if (count > 1)
    for (int64_t b = 0; b < count; ++b) body(b);
}

// body(n) for every row; several short rows make one block, so that tiny operations do not wake the team.
template <class Body>
void parallel_rows(int64_t rows, int64_t elems_per_row, const Body& body) {
    const Blocks blocks{rows, std::max<int64_t>(1, 8192 / std::max<int64_t>(1, elems_per_row))};
    parallel_for(blocks.count(), [&](int64_t b) {
        for (int64_t n = blocks.begin(b); n < blocks.end(b); ++n) body(n);
    });
}

// body(begin, end) for pieces of a long run of elements.
template <class Body>
void parallel_elems(int64_t elems, const Body& body) {
    const Blocks blocks{elems, 16384};
    parallel_for(blocks.count(), [&](int64_t b) { body(blocks.begin(b), blocks.end(b)); });
}

// Calls body with a value of the activation type.
template <class Body>
void with_act(DType type, const Body& body) {
    TRIFOLD_ASSERT(type == DType::f32 || type == DType::bf16);
    if (type == DType::f32)
        body(float{});
    else
        body(bf16{});
}

// Sums over rows (gradients of norm weights): every block of rows adds into its own partial sums of `width` floats in
// the workspace; `finish` adds these in block order.
struct RowSums {
    Blocks rows;
    int64_t width;
    float* partials;

    static Blocks blocks(int64_t N) { return at_most(64, N, 16); }
    static int64_t bytes(int64_t N, int64_t width) {
        return blocks(N).count() * width * static_cast<int64_t>(sizeof(float));
    }
    RowSums(int64_t N, int64_t width, const Tensor& workspace)
        : rows(blocks(N)), width(width), partials(static_cast<float*>(workspace.data)) {
        TRIFOLD_ASSERT(workspace.bytes() >= bytes(N, width));
    }
    // body(n, sums) for every row n, where sums are those of the row's block.
    template <class Body>
    void for_rows(const Body& body) const {
        parallel_for(rows.count(), [&](int64_t b) {
            float* sums = partials + b * width;
            std::fill(sums, sums + width, 0.0f);
            for (int64_t n = rows.begin(b); n < rows.end(b); ++n) body(n, sums);
        });
    }
    // out[0, count) (+)= the sums in columns [first, first + count).
    void finish(int64_t first, int64_t count, float* out, Accumulate accumulate) const {
        parallel_for(Blocks{count, 128}.count(), [&](int64_t c) {
            const int64_t begin = c * 128;
            simd::for_groups(std::min<int64_t>(128, count - begin), [&](int64_t i, auto w) TRIFOLD_BODY {
                const float* column = partials + first + begin + i;
                simd::f32x16 total = 0.0f;
                for (int64_t b = 0; b < rows.count(); ++b) total += load(column + b * width, w);
                if (accumulate == Accumulate::add) total += load(out + begin + i, w);
                store(out + begin + i, total, w);
            });
        });
    }
};

}  // namespace trifold::cpu
