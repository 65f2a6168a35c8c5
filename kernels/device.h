// kernels/device.h   Where a model is computed.
#pragma once
#include <cstdint>

namespace trifold {

// automatic: a GPU where a working one is found. Resolved before any memory is reserved.
enum class Device : uint8_t { automatic, cpu, cuda };
constexpr const char* name_of(Device d) { return d == Device::cpu ? "cpu" : d == Device::cuda ? "cuda" : "auto"; }

}  // namespace trifold
