// kernels/arena.h   All memory is planned, then allocated once, before step 0.
//
// Objects that need memory take an Arena in their constructor and reserve tensors from it. Construction runs twice: on a
// *planning* arena, which only counts (tensors then have no data), and on a real one of exactly that size. The planner
// (`trifold plan`) stops after the first pass, so its numbers are those of the run.
#pragma once
#include <array>
#include <cstdint>
#include <string>

#include "kernels/device.h"
#include "kernels/tensor.h"

namespace trifold {

enum class MemoryClass : uint8_t { params, grads, optimizer, activations, workspace };
inline constexpr int memory_classes = 5;
const char* name_of(MemoryClass c);

class Arena {
public:
    explicit Arena(Device device = Device::cpu) : device_(device) {}  // planning
    // Real: as large as the plan, on the same device; throws Problem when there is less.
    Arena(const Arena& plan, const std::string& what);
    ~Arena();
    Arena(const Arena&) = delete;
    Arena& operator=(const Arena&) = delete;

    // `elems` elements, aligned to 256 bytes, zero at first.
    Tensor reserve(MemoryClass c, DType type, int64_t elems);
    // Page-locks a CPU arena where the system allows it, so that a GPU copies from and to it behind the host's back.
    void pin();
    Device device() const { return device_; }
    bool planning() const { return base_ == nullptr; }
    int64_t bytes() const { return used_; }
    int64_t bytes(MemoryClass c) const { return by_class_[static_cast<int>(c)]; }

private:
    Device device_;
    bool pinned_ = false;
    std::byte* base_ = nullptr;
    int64_t capacity_ = 0, used_ = 0;
    std::array<int64_t, memory_classes> by_class_{};
};

// Bytes that this process could still get: the machine's available memory, or less under a cgroup limit.
int64_t available_memory();

}  // namespace trifold
