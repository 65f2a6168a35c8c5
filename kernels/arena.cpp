// kernels/arena.cpp   One allocation for everything: on a CPU an anonymous mapping, huge pages where the kernel gives them.
#include "kernels/arena.h"

#include <fmt/format.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <fstream>
#include <limits>

#include "kernels/cuda/runtime.h"

namespace trifold {
namespace {

constexpr int64_t alignment = 256;  // what the matrix library of a GPU likes best
int64_t round_up(int64_t n, int64_t to) { return (n + to - 1) / to * to; }
double gib(int64_t bytes) { return static_cast<double>(bytes) / (1 << 30); }

// A number in the first line of a file; `none` when the file or the number is not there ("max").
int64_t number_in(const char* path, int64_t none) {
    std::ifstream in(path);
    int64_t n;
    return in >> n ? n : none;
}

int64_t meminfo_available() {
    std::ifstream in("/proc/meminfo");
    for (std::string line; std::getline(in, line);)
        if (line.rfind("MemAvailable:", 0) == 0) return std::stoll(line.substr(13)) * 1024;
    return sysconf(_SC_AVPHYS_PAGES) * sysconf(_SC_PAGESIZE);
}

// Null when the system refuses.
void* map(int64_t bytes) {
    void* p = mmap(nullptr, static_cast<size_t>(bytes), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (p == MAP_FAILED) return nullptr;
    madvise(p, static_cast<size_t>(bytes), MADV_HUGEPAGE);
    return p;
}
void unmap(void* p, int64_t bytes) { munmap(p, static_cast<size_t>(bytes)); }

}  // namespace

const char* name_of(MemoryClass c) {
    constexpr const char* names[] = {"params", "grads", "optimizer", "activations", "workspace"};
    return names[static_cast<int>(c)];
}

int64_t available_memory() {
    constexpr int64_t unlimited = std::numeric_limits<int64_t>::max();
    int64_t bytes = meminfo_available();
    const int64_t v2 = number_in("/sys/fs/cgroup/memory.max", unlimited);
    if (v2 != unlimited) bytes = std::min(bytes, v2 - number_in("/sys/fs/cgroup/memory.current", 0));
    const int64_t v1 = number_in("/sys/fs/cgroup/memory/memory.limit_in_bytes", unlimited);
    if (v1 < (int64_t{1} << 60)) bytes = std::min(bytes, v1 - number_in("/sys/fs/cgroup/memory/memory.usage_in_bytes", 0));
    return std::max<int64_t>(bytes, 0);
}

Arena::Arena(const Arena& plan, const std::string& what)
    : device_(plan.device_), capacity_(round_up(std::max<int64_t>(plan.used_, 1), alignment)) {
    const bool gpu = device_ == Device::cuda;
    const int64_t available = gpu ? cuda::available_memory() : available_memory();
    if (capacity_ > available) {
        std::string classes;
        for (int c = 0; c < memory_classes; ++c)
            if (plan.by_class_[c] > 0)
                classes += fmt::format("{}{} {:.2f}", classes.empty() ? "" : ", ", name_of(static_cast<MemoryClass>(c)), gib(plan.by_class_[c]));
        throw Problem(Exit::usage, fmt::format("{} needs {:.2f} GiB{} ({}), but only {:.2f} GiB are available: use a smaller model, "
                                               "--train.micro_batch, --train.seq{}", what, gib(capacity_), gpu ? " on the GPU" : "", classes, gib(available),
                                               gpu ? " or --train.recompute=full" : ", --train.recompute=full or --checkpoint.async=off"));
    }
    void* p = gpu ? cuda::allocate(capacity_) : map(capacity_);
    if (!p) throw Problem(Exit::usage, fmt::format("{}: the system refuses {:.2f} GiB of {}memory{}", what, gib(capacity_), gpu ? "GPU " : "", gpu ? "" : " (see ulimit -v)"));
    base_ = static_cast<std::byte*>(p);
}

Arena::~Arena() {
    if (!base_) return;
    if (pinned_) cuda::unpin(base_);
    device_ == Device::cuda ? cuda::release(base_) : unmap(base_, capacity_);
}

void Arena::pin() {
    TRIFOLD_ASSERT(device_ == Device::cpu && !pinned_);
    if (planning()) return;
    pinned_ = cuda::pin(base_, capacity_);
}

Tensor Arena::reserve(MemoryClass c, DType type, int64_t elems) {
    const int64_t bytes = round_up(elems * size_of(type), alignment);
    TRIFOLD_ASSERT(planning() || used_ + bytes <= capacity_);
    Tensor t{planning() ? nullptr : base_ + used_, type, elems};
    used_ += bytes;
    by_class_[static_cast<int>(c)] += bytes;
    return t;
}

}  // namespace trifold
