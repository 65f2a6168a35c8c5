// test/cuda/on_device.h   Runs the CUDA version of an operation on operands that lie in host memory.
//
// The same tests run on a GPU and in the emulator: they use the CUDA runtime alone. Every view of the arguments is copied to
// device memory of exactly its size (views that overlap stay one piece), the operation runs there, and what it may have
// written is copied back.
#pragma once
#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstring>
#include <tuple>
#include <utility>
#include <vector>

#include "kernels/cuda/check.h"
#include "kernels/cuda/range.h"
#include "kernels/ops.h"

namespace trifold::test {

class DeviceCopies {
public:
    DeviceCopies() = default;
    DeviceCopies(const DeviceCopies&) = delete;
    ~DeviceCopies() {
        for (Piece& p : pieces_) cudaFree(p.device);
    }
    // Host bytes [begin, begin + bytes) will be needed on the device; merged with what they overlap.
    void add(const void* begin, int64_t bytes) {
        if (bytes == 0) return;
        Piece piece{static_cast<std::byte*>(const_cast<void*>(begin)), static_cast<std::byte*>(const_cast<void*>(begin)) + bytes, nullptr};
        for (size_t i = 0; i < pieces_.size();) {
            if (pieces_[i].begin < piece.end && piece.begin < pieces_[i].end) {
                piece.begin = std::min(piece.begin, pieces_[i].begin);
                piece.end = std::max(piece.end, pieces_[i].end);
                pieces_.erase(pieces_.begin() + static_cast<std::ptrdiff_t>(i));
                i = 0;
            } else {
                ++i;
            }
        }
        pieces_.push_back(piece);
    }
    void upload() {
        for (Piece& p : pieces_) {
            CUDA_CHECK(cudaMalloc(&p.device, static_cast<size_t>(p.end - p.begin)));
            CUDA_CHECK(cudaMemcpy(p.device, p.begin, static_cast<size_t>(p.end - p.begin), cudaMemcpyHostToDevice));
        }
    }
    void download(const void* begin, int64_t bytes) {
        if (bytes > 0) CUDA_CHECK(cudaMemcpy(const_cast<void*>(begin), on_device(begin), static_cast<size_t>(bytes), cudaMemcpyDeviceToHost));
    }
    void* on_device(const void* host) const {
        for (const Piece& p : pieces_)
            if (p.begin <= host && host < p.end) return static_cast<std::byte*>(p.device) + (static_cast<const std::byte*>(host) - p.begin);
        return nullptr;
    }

private:
    struct Piece {
        std::byte *begin, *end;
        void* device;
    };
    std::vector<Piece> pieces_;
};

// Scratch memory: allocated, but neither copied there nor back.
struct Scratch {
    void* memory = nullptr;
    explicit Scratch(int64_t bytes) {
        if (bytes > 0) CUDA_CHECK(cudaMalloc(&memory, static_cast<size_t>(bytes)));
    }
    ~Scratch() { cudaFree(memory); }
    Scratch(const Scratch&) = delete;
};

// on_device(cuda::rotary, args): as cpu::rotary(args), but on the device. `segments` tables are copied as well; the workspace
// holds rubbish at first.
template <class Operation, class Args>
void on_device(const Operation& operation, Args args) {
    DeviceCopies copies;
    Tensor workspace;
    if constexpr (requires { args.workspace; }) workspace = std::exchange(args.workspace, {});
    const Scratch scratch(workspace.bytes());
    const auto views = [&](auto&& visit) { std::apply([&](const auto&... v) { (visit(v), ...); }, args.views()); };
    views([&](const Tensor& t) { copies.add(t.data, t.bytes()); });
    if constexpr (requires { args.segments; }) copies.add(args.segments, args.segment_count * static_cast<int64_t>(sizeof(Segment)));
    copies.upload();
    std::vector<BufferAccess> written;
    views([&](const auto& v) {
        if (v.access != Access::read) written.push_back(declare(v));
        const_cast<Tensor&>(static_cast<const Tensor&>(v)).data = copies.on_device(v.data);
    });
    if constexpr (requires { args.segments; }) args.segments = static_cast<const Segment*>(copies.on_device(args.segments));
    if constexpr (requires { args.workspace; }) args.workspace = Tensor{scratch.memory, workspace.dtype, workspace.elems};
    cuda::operation_begin("test", accesses_of(args));
    operation(nullptr, args);
    cuda::operation_end();
    CUDA_CHECK(cudaDeviceSynchronize());
    for (const BufferAccess& w : written) copies.download(w.begin, w.bytes);
}

}  // namespace trifold::test
