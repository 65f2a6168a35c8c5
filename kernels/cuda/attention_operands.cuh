// kernels/cuda/attention_operands.cuh   What every attention kernel is given, and which keys a query sees.
//
// A query sees the keys of one interval: up to itself, within the window, from the start of its document on. Both ends
// never decrease from one query to the next (doc_start does not), so the interval of a tile of queries follows from its
// first and last query, and the queries that see a tile of keys are neighbours.
#pragma once
#include <cuda_bf16.h>

#include <algorithm>
#include <climits>
#include <string>
#include <type_traits>

#include "kernels/cuda/launch.h"
#include "kernels/cuda/pack.h"
#include "kernels/cuda/room.h"
#include "kernels/ops.h"

namespace trifold::cuda::attention {

constexpr float log2_e = 1.44269504088896340736f;

// The queries and keys of one sequence.
struct Sight {
    const int32_t* doc_start_T;  // of the queries; null: joined
    int queries, keys, q_offset;
    int window;  // 0: no limit

    // The first and the last key of a query; queries past the end of a sequence are taken for the last one.
    __device__ __forceinline__ int first(int query) const {
        const int q = min(query, queries - 1);
        const int start = window > 0 ? max(0, q + q_offset - window + 1) : 0;
        return doc_start_T ? max(start, doc_start_T[q]) : start;
    }
    __device__ __forceinline__ int last(int query) const { return min(query, queries - 1) + q_offset; }
};

// Rows of one head, `stride` elements from one token to the next.
template <class T>
struct Rows {
    T* data;
    int64_t stride;
    __device__ __forceinline__ T* operator[](int row) const { return data + row * stride; }
};

// The tensors of a call as kernels see them. T is __nv_bfloat16 or float; training sets Tq = Tk and q_offset = 0.
template <class T>
struct Operands {
    const T *q, *k, *v;
    const int32_t* doc_start;
    int64_t q_stride, kv_stride, o_stride, q_batch_stride, kv_batch_stride;
    int B, H, K, D, Tq, Tk, q_offset, window;
    float scale, scale_log2;  // scale_log2 = scale * log2(e): exp(scale x) = 2^(scale_log2 x)

    __device__ __forceinline__ int kv_head(int h) const { return h / (H / K); }
    // Also where the gradients of q, k and v lie, from the given start on.
    template <class P>
    __device__ __forceinline__ Rows<P> q_rows(P* start, int b, int h, int D) const {
        return {start + b * q_batch_stride + static_cast<int64_t>(h) * D, q_stride};
    }
    template <class P>
    __device__ __forceinline__ Rows<P> kv_rows(P* start, int b, int kv, int D) const {
        return {start + b * kv_batch_stride + static_cast<int64_t>(kv) * D, kv_stride};
    }
    // o and do are dense.
    template <class P>
    __device__ __forceinline__ Rows<P> o_rows(P* start, int b, int h, int D) const {
        return {start + b * Tq * o_stride + static_cast<int64_t>(h) * D, o_stride};
    }
    __device__ __forceinline__ Sight sight(int b) const {
        return {doc_start ? doc_start + static_cast<int64_t>(b) * Tq : nullptr, Tq, Tk, q_offset, window};
    }
};

// ---------------------------------------------------------------- host

constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
constexpr int64_t round_up(int64_t a, int64_t b) { return ceil_div(a, b) * b; }

inline int narrow(int64_t n) {
    TRIFOLD_ASSERT(n >= 0 && n <= INT_MAX / 2);  // positions are ints in kernels
    return static_cast<int>(n);
}

// Kernels are compiled for these head sizes, and for the rooms of room.h: body(head size, room), both of them
// std::integral_constant.
template <class Body>
void with_tiles(int64_t D, int room, const Body& body) {
    const auto with_head_size = [&](auto head_size) { with_room(room, [&](auto size) { body(head_size, size); }); };
    switch (D) {
        case 64:
            return with_head_size(std::integral_constant<int, 64>());
        case 96:
            return with_head_size(std::integral_constant<int, 96>());
        case 128:
            return with_head_size(std::integral_constant<int, 128>());
        default:
            throw Problem(Exit::usage, "attention on CUDA has head sizes 64, 96 and 128, but this model's is " +
                                           std::to_string(D) +
                                           ": change the number of heads or run with --run.device=cpu");
    }
}

inline bool aligned_16(const Tensor& t) { return reinterpret_cast<uintptr_t>(t.data) % 16 == 0; }

// Kernels load 16 bytes at a time. Every head of a fused buffer starts at such an address when its first does.
template <class T, class Args>
Operands<T> operands(const Args& a, int64_t Tq, int64_t Tk, int64_t q_offset) {
    TRIFOLD_ASSERT(a.H % a.K == 0 && q_offset + Tq <= Tk && a.scale > 0.0f);
    TRIFOLD_ASSERT(aligned_16(a.q_NHD) && aligned_16(a.k_NKD) && aligned_16(a.v_NKD) && aligned_16(a.o_NHD));
    TRIFOLD_ASSERT((a.q_stride | a.kv_stride | a.q_batch_stride | a.kv_batch_stride) % pack_elems<T> == 0);
    return {.q = elements<const T>(a.q_NHD),
            .k = elements<const T>(a.k_NKD),
            .v = elements<const T>(a.v_NKD),
            .doc_start = a.doc_start_N ? elements<const int32_t>(a.doc_start_N) : nullptr,
            .q_stride = a.q_stride,
            .kv_stride = a.kv_stride,
            .o_stride = a.H * a.D,
            .q_batch_stride = a.q_batch_stride,
            .kv_batch_stride = a.kv_batch_stride,
            .B = narrow(a.B),
            .H = narrow(a.H),
            .K = narrow(a.K),
            .D = narrow(a.D),
            .Tq = narrow(Tq),
            .Tk = narrow(Tk),
            .q_offset = narrow(q_offset),
            .window = a.window < Tk ? narrow(a.window) : 0,
            .scale = a.scale,
            .scale_log2 = a.scale * log2_e};
}

// Cuts the workspace into arrays, each 16 bytes aligned. Without a start it only counts.
class Cutter {
public:
    explicit Cutter(void* start = nullptr) : start_(static_cast<std::byte*>(start)) {}
    template <class T>
    T* take(int64_t elems) {
        std::byte* p = start_ ? start_ + bytes_ : nullptr;
        bytes_ += round_up(elems * static_cast<int64_t>(sizeof(T)), 16);
        return reinterpret_cast<T*>(p);
    }
    int64_t bytes() const { return bytes_; }

private:
    std::byte* start_;
    int64_t bytes_ = 0;
};

}  // namespace trifold::cuda::attention
