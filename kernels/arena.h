// kernels/arena.h   All memory is planned, then allocated once, before step 0.
//
// Objects that need memory take an Arena in their constructor and reserve tensors from it. Construction runs twice: on a
// *planning* arena, which only counts (tensors then have no data), and on a real one of exactly that size. The planner
// (`trifold plan`) stops after the first pass, so its numbers are those of the run.
#pragma once
#include <array>
#include <cstdint>
#include <string>

#include "kernels/tensor.h"

namespace trifold {

enum class MemoryClass : uint8_t { params, grads, optimizer, activations, workspace };
inline constexpr int memory_classes = 5;
const char* name_of(MemoryClass c);

class Arena {
public:
    Arena() = default;                       // planning
    explicit Arena(const Arena& plan, const std::string& what);  // real: as large as the plan; throws Problem when the machine has less
    ~Arena();
    Arena(const Arena&) = delete;
    Arena& operator=(const Arena&) = delete;

    // `elems` elements, aligned to 64 bytes, zero at first. `name` appears in error messages.
    Tensor reserve(MemoryClass c, DType type, int64_t elems);
    bool planning() const { return base_ == nullptr; }
    int64_t bytes() const { return used_; }
    int64_t bytes(MemoryClass c) const { return by_class_[static_cast<int>(c)]; }

private:
    std::byte* base_ = nullptr;
    int64_t capacity_ = 0, used_ = 0;
    std::array<int64_t, memory_classes> by_class_{};
};

// Bytes that this process could still get: the machine's available memory, or less under a cgroup limit.
int64_t available_memory();

}  // namespace trifold
