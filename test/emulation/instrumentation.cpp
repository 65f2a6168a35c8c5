// test/emulation/instrumentation.cpp   Every load and store of a kernel tells the race detector.
//
// Kernels are compiled with clang's -fsanitize=thread, which calls these functions before each access, and linked without
// its library. Copies that a compiler turns into memcpy come by way of the linker's --wrap.
#include "test/emulation/race_detector.h"

using namespace trifold::emulation;
using races::Kind;

namespace {

void accessed(const void* p, size_t bytes, Kind kind, const void* caller) {
    if (current) races::record(*current, p, bytes, kind, caller);
}

void accessed_aligned(const void* p, size_t bytes, Kind kind, const void* caller) {
    if (!current) return;
    if (reinterpret_cast<uintptr_t>(p) % bytes != 0) races::misaligned(*current, p, bytes, kind, caller);
    races::record(*current, p, bytes, kind, caller);
}

}  // namespace

extern "C" {
#define BYTES(n)                                                                                                          \
    void __tsan_read##n(void* p) { accessed_aligned(p, n, Kind::read, __builtin_return_address(0)); }                     \
    void __tsan_write##n(void* p) { accessed_aligned(p, n, Kind::write, __builtin_return_address(0)); }                   \
    void __tsan_unaligned_read##n(void* p) { accessed(p, n, Kind::read, __builtin_return_address(0)); }                   \
    void __tsan_unaligned_write##n(void* p) { accessed(p, n, Kind::write, __builtin_return_address(0)); }
BYTES(1) BYTES(2) BYTES(4) BYTES(8) BYTES(16)
#undef BYTES
void __tsan_read_range(void* p, size_t n) { accessed(p, n, Kind::read, __builtin_return_address(0)); }
void __tsan_write_range(void* p, size_t n) { accessed(p, n, Kind::write, __builtin_return_address(0)); }
void __tsan_init() {}
void __tsan_func_entry(void*) {}
void __tsan_func_exit() {}
void __tsan_vptr_update(void**, void*) {}
void __tsan_vptr_read(void**) {}

// Old versions of clang call memcpy, new ones __tsan_memcpy.
#define COPY(wrapper, real)                                                   \
    void* real(void* to, const void* from, size_t n);                         \
    void* wrapper(void* to, const void* from, size_t n) {                     \
        accessed(from, n, Kind::read, __builtin_return_address(0));           \
        accessed(to, n, Kind::write, __builtin_return_address(0));            \
        return real(to, from, n);                                             \
    }
#define FILL(wrapper, real)                                                   \
    void* real(void* to, int value, size_t n);                                \
    void* wrapper(void* to, int value, size_t n) {                            \
        accessed(to, n, Kind::write, __builtin_return_address(0));            \
        return real(to, value, n);                                            \
    }
COPY(__wrap_memcpy, __real_memcpy)
COPY(__tsan_memcpy, __real_memcpy)
COPY(__wrap_memmove, __real_memmove)
COPY(__tsan_memmove, __real_memmove)
FILL(__wrap_memset, __real_memset)
FILL(__tsan_memset, __real_memset)
#undef COPY
#undef FILL
}
