#include "commands/peak.h"

#include <fmt/format.h>
#include <omp.h>

#include "base/cpus.h"
#include "kernels/cpu/linear_rate.h"
#include "kernels/cuda/runtime.h"
#include "kernels/gpu_rate.h"

namespace trifold {
namespace {

Peak peak_of_gpus(const Config& c, const World& world, Stream& compute) {
    const DType type = c.train.dtype;
    const cuda::Gpu gpu = cuda::probe();
    if (const double sheet = type == DType::bf16 ? gpu.bf16_flops : gpu.fp32_flops; sheet > 0)
        return {sheet * world.size(), fmt::format("{} by the data sheet of the GPU, without sparsity", name_of(type))};
    return {measure_gpu_rate(compute, type) * world.size(), fmt::format("{} matrix products on the GPU, measured just now", name_of(type))};
}

Peak peak_of_cpus(const Config& c, const World& world) {
    const int own = static_cast<int>(c.run.threads), threads = world.size() > 1 ? usable_cpus() : own, sets = world.size() / world.ranks_sharing_cpus();
    omp_set_num_threads(threads);
    const double rate = measure_matmul_rate(c.train.dtype);
    omp_set_num_threads(own);
    return {rate * sets, fmt::format("{} matrix products on {} thread{}{}, measured just now", name_of(c.train.dtype), threads, threads == 1 ? "" : "s",
                                     sets > 1 ? fmt::format(", times {}", sets) : "")};
}

}  // namespace

Peak find_peak(const Config& c, const World& world, Stream& compute) {
    if (c.run.device == Device::cuda) return peak_of_gpus(c, world, compute);
    return world.rank() == 0 ? peak_of_cpus(c, world) : Peak();
}

}  // namespace trifold
