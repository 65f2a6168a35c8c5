// kernels/cuda/room.h   Shared memory that a block may have ("room"). Attention has tiles for three sizes of it.
//
// The tiles of a call follow from the head size, the element type and the room alone: on one GPU always the same. Results of
// different tiles may differ by rounding.
#pragma once
#include <cuda_runtime_api.h>

#include <type_traits>

#include "kernels/cuda/check.h"
#include "kernels/ops.h"

namespace trifold::cuda {

// Bytes. Compute capability 9.0 and 10.x; 8.0 and 8.7; 8.6, 8.9 and 12.x.
constexpr int large_room = 227 * 1024, medium_room = 163 * 1024, small_room = 99 * 1024;

// Of the current GPU. The runtime answers from its own memory, so that nothing needs to be kept here.
inline int room_of_gpu() {
    int device = 0, bytes = 0;
    CUDA_CHECK(cudaGetDevice(&device));
    CUDA_CHECK(cudaDeviceGetAttribute(&bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, device));
    return bytes;
}

// body(std::integral_constant<int, the largest of the three that `room` holds>)
template <class Body>
void with_room(int room, const Body& body) {
    TRIFOLD_ASSERT(room >= small_room);  // probe() refuses other GPUs
    if (room >= large_room) return body(std::integral_constant<int, large_room>());
    if (room >= medium_room) return body(std::integral_constant<int, medium_room>());
    body(std::integral_constant<int, small_room>());
}

// With the tiles for `room`, which this GPU must have. Without it (kernels/ops.h) they take all that the GPU has.
void attention_forward(cudaStream_t stream, const AttentionForward& a, int room);
void attention_backward(cudaStream_t stream, const AttentionBackward& a, int room);

}  // namespace trifold::cuda
