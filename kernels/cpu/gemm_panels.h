// kernels/cpu/gemm_panels.h   Packing, the register tile, and its epilogue, written once for every vector width.
//
// Included by gemm_avx512.cpp, gemm_avx2.cpp and gemm_portable.cpp, each of which first selects its instruction set and
// defines
//   lanes                          floats of a vector
//   Vec widen_bf16(const bf16*)    `lanes` bf16 values as fp32
//   Vec broadcast(const float*)    one number in all lanes
//   Vec multiply_add(x, y, z)      x * y + z, rounded once
// Everything here has internal linkage, so that no function compiled for AVX-512 is ever called by another file.
//
// Tile       lanes / 2 rows by 3 * lanes columns (8 x 48 with AVX-512, 4 x 24 with AVX2): 3 * lanes / 2 accumulators,
//            and per depth 3 vector loads and lanes / 2 broadcasts for 3 * lanes / 2 multiply-adds, so arithmetic is
//            the bottleneck. A panel of a is one tile high, so that the tile uses every byte of the cache lines it reads.
// Prefetch   While one tile is computed the next panel of b, which no tile has touched yet, is fetched into the
//            second-level cache: every tile of a column fetches its share.

namespace trifold::cpu {
namespace {

constexpr int64_t tile_rows = lanes / 2, tile_cols = 3 * lanes;
constexpr int64_t line = 64;  // bytes of a cache line

#define TRIFOLD_INLINE [[gnu::always_inline]] inline

constexpr int64_t round_up(int64_t n, int64_t to) { return (n + to - 1) / to * to; }

TRIFOLD_INLINE Vec load(const float* p) {
    Vec v;
    __builtin_memcpy(&v, p, sizeof v);
    return v;
}
TRIFOLD_INLINE Vec load(const bf16* p) { return widen_bf16(p); }

// The first `count` lanes (at most all, at least none); the others are zero.
template <class T>
Vec load_part(const T* p, int64_t count) {
    float group[lanes] = {};
    for (int64_t i = 0; i < count && i < lanes; ++i) group[i] = static_cast<float>(p[i]);
    return load(group);
}

// ---------------------------------------------------------------- transposition

template <int... i>
struct Indices {};
template <int n, int... i>
struct MakeIndices : MakeIndices<n - 1, n - 1, i...> {};
template <int... i>
struct MakeIndices<0, i...> {
    using type = Indices<i...>;
};
using AllLanes = typename MakeIndices<lanes>::type;

// Exchanges the lanes of y whose number has no bit `block` with those of x that have it.
template <int block, int... lane>
TRIFOLD_INLINE void exchange(Vec& x, Vec& y, Indices<lane...>) {
    const Vec upper = __builtin_shufflevector(x, y, ((lane & block) ? lane - block + lanes : lane)...);
    y = __builtin_shufflevector(x, y, ((lane & block) ? lane + lanes : lane + block)...);
    x = upper;
}

// In place, by Eklundh's method: exchange blocks of 1, 2, 4, ... lanes.
template <int block = 1>
TRIFOLD_INLINE void transpose(Vec* rows) {
#pragma GCC unroll 16
    for (int i = 0; i < lanes; ++i)
        if (!(i & block)) exchange<block>(rows[i], rows[i + block], AllLanes{});
    if constexpr (2 * block < lanes) transpose<2 * block>(rows);
}

// ---------------------------------------------------------------- packing

TRIFOLD_INLINE void store(float* p, const Vec& v) { __builtin_memcpy(p, &v, sizeof v); }

// Stores a strip of `lanes` outer indices from i on, at depth k of panels of `width`: into one of them, or where panels are narrower
// into neighbours.
template <int64_t width>
TRIFOLD_INLINE void store_strip(float* panels, int64_t i, int64_t k, int64_t depth, const Vec& v) {
    constexpr int64_t run = width < lanes ? width : lanes;
    float* to = panels + i / width * width * depth + k * width + i % width;
#pragma GCC unroll 2
    for (int64_t at = 0; at < lanes; at += run, to += width * depth)
        __builtin_memcpy(to, reinterpret_cast<const float*>(&v) + at, static_cast<size_t>(run) * sizeof(float));
}

// Up to lanes x lanes elements from memory along the depth, transposed: columns[k] holds the outer indices at depth k.
// Calls for neighbouring depths follow each other, so the same depths of the next strip are fetched meanwhile: streams
// of memory that are only a strip's depth long are over before the processor has noticed them.
template <class T>
TRIFOLD_INLINE void load_transposed(const T* from, int64_t stride, int64_t outer, int64_t depth, Vec* columns) {
    if (outer >= lanes && depth >= lanes) {
#pragma GCC unroll 16
        for (int64_t i = 0; i < lanes; ++i) {
            columns[i] = load(from + i * stride);
            __builtin_prefetch(from + (i + lanes) * stride, 0, 2);
        }
    } else {
        for (int64_t i = 0; i < lanes; ++i) {
            const T* row = from + i * stride;
            columns[i] = i >= outer ? Vec{} : depth >= lanes ? load(row) : load_part(row, depth);
        }
    }
    transpose(columns);
}

template <class T, int64_t width>
void pack_along_depth(const T* from, int64_t stride, int64_t outer, int64_t depth, float* panels) {
    for (int64_t i = 0; i < round_up(outer, width); i += lanes) {
        for (int64_t k = 0; k < depth; k += lanes) {
            Vec columns[lanes];
            load_transposed(from + i * stride + k, stride, outer - i, depth - k, columns);
            if (depth - k >= lanes) {
#pragma GCC unroll 16
                for (int64_t j = 0; j < lanes; ++j) store_strip<width>(panels, i, k + j, depth, columns[j]);
            } else {
                for (int64_t j = 0; j < depth - k; ++j) store_strip<width>(panels, i, k + j, depth, columns[j]);
            }
        }
    }
}

// A few depths of all strips at a time, so that memory is read in long runs, and the next few are fetched meanwhile.
template <class T, int64_t width>
void pack_along_outer(const T* from, int64_t stride, int64_t outer, int64_t depth, float* panels) {
    constexpr int64_t some = 8;
    for (int64_t k0 = 0; k0 < depth; k0 += some) {
        const int64_t end = k0 + some < depth ? k0 + some : depth;
        for (int64_t i = 0; i < round_up(outer, width); i += lanes) {
            const T* row = from + i;
            if (outer - i >= lanes)
                for (int64_t k = k0; k < end; ++k) {
                    store_strip<width>(panels, i, k, depth, load(row + k * stride));
                    __builtin_prefetch(row + (k + some) * stride, 0, 3);
                }
            else
                for (int64_t k = k0; k < end; ++k) store_strip<width>(panels, i, k, depth, load_part(row + k * stride, outer - i));
        }
    }
}

template <class T, int64_t width>
void pack_as(const GemmOperand& m, Span outer, Span depth, float* panels) {
    const T* data = static_cast<const T*>(m.data.data);
    if (m.along == Along::depth)
        pack_along_depth<T, width>(data + outer.first * m.stride + depth.first, m.stride, outer.count, depth.count,
                                   panels);
    else
        pack_along_outer<T, width>(data + depth.first * m.stride + outer.first, m.stride, outer.count, depth.count,
                                   panels);
}

template <int64_t width>
void pack(const GemmOperand& m, Span outer, Span depth, float* panels) {
    if (m.data.dtype == DType::f32)
        pack_as<float, width>(m, outer, depth, panels);
    else
        pack_as<bf16, width>(m, outer, depth, panels);
}

// ---------------------------------------------------------------- the tile

// tile[i][j] = sum over k of a[k][i] * b[k][j], k in order. Fetches `fetch` floats of `next` per depth on the way.
void multiply_tile(const float* a, const float* b, int64_t depth, const float* next, int64_t fetch, float* tile) {
    Vec sum[tile_rows][3];
#pragma GCC unroll 8
    for (int64_t i = 0; i < tile_rows; ++i) sum[i][0] = sum[i][1] = sum[i][2] = Vec{};
    for (int64_t k = 0; k < depth; ++k) {
        const Vec b0 = load(b), b1 = load(b + lanes), b2 = load(b + 2 * lanes);
        __builtin_prefetch(next, 0, 2);
#pragma GCC unroll 8
        for (int64_t i = 0; i < tile_rows; ++i) {
            const Vec x = broadcast(a + i);
            sum[i][0] = multiply_add(x, b0, sum[i][0]);
            sum[i][1] = multiply_add(x, b1, sum[i][1]);
            sum[i][2] = multiply_add(x, b2, sum[i][2]);
        }
        a += tile_rows;
        b += tile_cols;
        next += fetch;
    }
#pragma GCC unroll 8
    for (int64_t i = 0; i < tile_rows; ++i)
#pragma GCC unroll 3
        for (int64_t j = 0; j < 3; ++j) store(tile + i * tile_cols + j * lanes, sum[i][j]);
}

// row (+)= start + bias, then to the type of the result. Start and result may be the same memory.
template <class T>
TRIFOLD_INLINE void add_row(float* row, const T* more, int64_t cols) {
    for (int64_t j = 0; j < cols; ++j) row[j] = static_cast<float>(more[j]) + row[j];
}
TRIFOLD_INLINE void add_row(float* row, const void* more, DType type, int64_t offset, int64_t cols) {
    if (!more) return;
    if (type == DType::f32)
        add_row(row, static_cast<const float*>(more) + offset, cols);
    else
        add_row(row, static_cast<const bf16*>(more) + offset, cols);
}
TRIFOLD_INLINE void store_row(const float* row, void* out, DType type, int64_t offset, int64_t cols) {
    if (type == DType::f32) {
        __builtin_memcpy(static_cast<float*>(out) + offset, row, static_cast<size_t>(cols) * sizeof(float));
        return;
    }
    bf16* to = static_cast<bf16*>(out) + offset;
    for (int64_t j = 0; j < cols; ++j) to[j] = bf16(row[j]);
}
TRIFOLD_INLINE void finish_tile(float* tile, const GemmSums& s, Span rows, Span cols) {
    for (int64_t i = 0; i < rows.count; ++i) {
        float* row = tile + i * tile_cols;
        add_row(row, s.start, s.start_type, (rows.first + i) * s.start_stride + cols.first, cols.count);
        add_row(row, s.bias, s.bias_type, cols.first, cols.count);
        store_row(row, s.out, s.out_type, (rows.first + i) * s.out_stride + cols.first, cols.count);
    }
}

// Asks for the memory of the results of a tile while it is computed.
TRIFOLD_INLINE void fetch_results(const GemmSums& s, Span rows, Span cols) {
    const int64_t size = size_of(s.out_type);
    for (int64_t i = rows.first; i < rows.first + rows.count; ++i) {
        const char* row = static_cast<const char*>(s.out) + (i * s.out_stride + cols.first) * size;
        for (int64_t at = 0; at < cols.count * size; at += line) __builtin_prefetch(row + at, 1, 3);
    }
}

// Row by row of tiles: the panels of b stay in the second-level cache, those of a pass by once.
void multiply(const GemmTask& t) {
    alignas(64) float tile[tile_rows * tile_cols];
    const int64_t panels = (t.cols + tile_cols - 1) / tile_cols, fetch = (tile_rows + panels - 1) / panels;
    for (int64_t i = 0; i < t.rows; i += tile_rows) {
        const float* panel = t.a + i * t.depth;
        const Span rows{i, t.rows - i < tile_rows ? t.rows - i : tile_rows};
        for (int64_t j = 0; j < t.cols; j += tile_cols) {
            const Span cols{j, t.cols - j < tile_cols ? t.cols - j : tile_cols};
            const float* next = panel + (tile_rows + j / tile_cols * fetch) * t.depth;
            fetch_results(t.sums, rows, cols);
            multiply_tile(panel, t.b + j * t.depth, t.depth, next, fetch, tile);
            if (cols.count == tile_cols)
                finish_tile(tile, t.sums, rows, {j, tile_cols});
            else
                finish_tile(tile, t.sums, rows, cols);
        }
    }
}

// ---------------------------------------------------------------- few rows

// tile[r][0, lanes) for one strip of b, which is used as it is transposed: with so few rows packing it would be most of
// the work.
template <int64_t rows, class T>
void multiply_strip(const float* a, const T* b, int64_t stride, int64_t cols, int64_t depth, float* tile) {
    Vec sum[rows] = {};
    for (int64_t k = 0; k < depth; k += lanes) {
        Vec columns[lanes];
        load_transposed(b + k, stride, cols, depth - k, columns);
        const int64_t end = depth - k < lanes ? depth - k : lanes;
#pragma GCC unroll 16
        for (int64_t j = 0; j < lanes; ++j) {
            if (j == end) break;
            for (int64_t r = 0; r < rows; ++r) sum[r] = multiply_add(broadcast(a + r), columns[j], sum[r]);
            a += tile_rows;
        }
    }
    for (int64_t r = 0; r < rows; ++r) store(tile + r * tile_cols, sum[r]);
}

template <class T>
void multiply_few_as(const GemmTask& t, const T* b, int64_t stride) {
    alignas(64) float tile[tile_rows * tile_cols];
    const auto strip = t.rows == 1   ? multiply_strip<1, T>
                       : t.rows == 2 ? multiply_strip<2, T>
                       : t.rows <= 4 ? multiply_strip<4, T>
                                     : multiply_strip<tile_rows, T>;
    for (int64_t j = 0; j < t.cols; j += lanes) {
        strip(t.a, b + j * stride, stride, t.cols - j, t.depth, tile);
        finish_tile(tile, t.sums, {0, t.rows}, {j, t.cols - j < lanes ? t.cols - j : lanes});
    }
}

void multiply_few(const GemmTask& t, const GemmOperand& b, int64_t first_col, int64_t first_depth) {
    const int64_t at = first_col * b.stride + first_depth;
    if (b.data.dtype == DType::f32)
        multiply_few_as(t, static_cast<const float*>(b.data.data) + at, b.stride);
    else
        multiply_few_as(t, static_cast<const bf16*>(b.data.data) + at, b.stride);
}

#undef TRIFOLD_INLINE

}  // namespace
}  // namespace trifold::cpu
