#include "test/emulation/fiber.h"

#include <sys/mman.h>
#include <unistd.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>

#if defined(__has_feature)
#if __has_feature(address_sanitizer)
#define __SANITIZE_ADDRESS__ 1
#endif
#endif
#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/common_interface_defs.h>
#endif

#if !defined(EMULATION_UCONTEXT)
// Saves the callee-saved registers on this stack, its top in *save, and takes the other's.
extern "C" void trifold_emulation_switch(void** save, void* load);
asm(R"(.text
.globl trifold_emulation_switch
.type trifold_emulation_switch,@function
trifold_emulation_switch:
  push %rbp; push %rbx; push %r12; push %r13; push %r14; push %r15
  mov %rsp,(%rdi)
  mov %rsi,%rsp
  pop %r15; pop %r14; pop %r13; pop %r12; pop %rbx; pop %rbp
  ret
.size trifold_emulation_switch,.-trifold_emulation_switch
)");
#endif

namespace trifold::emulation {
namespace {
[[maybe_unused]] Fiber* left = nullptr;  // the fiber the last switch came from
}

void Fiber::start(void (*entry)(), int colour) {
    if (!stack_) {
        const size_t guard = static_cast<size_t>(sysconf(_SC_PAGESIZE));
        void* memory = mmap(nullptr, guard + stack_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (memory == MAP_FAILED || mprotect(memory, guard, PROT_NONE) != 0) {
            std::perror("emulation: no memory for a thread's stack");
            std::abort();
        }
        stack_ = static_cast<char*>(memory) + guard;
    }
    bottom_ = stack_;
    bytes_ = stack_bytes;
    fake_stack_ = nullptr;
    const size_t offset = static_cast<size_t>(colour) % 61 * 128;  // equal offsets in the page would share a few cache sets
#if defined(EMULATION_UCONTEXT)
    getcontext(&context_);
    context_.uc_stack.ss_sp = stack_;
    context_.uc_stack.ss_size = stack_bytes - offset;
    context_.uc_link = nullptr;
    makecontext(&context_, entry, 0);
#else
    constexpr int saved_registers = 6;
    void** top = reinterpret_cast<void**>(stack_ + stack_bytes - 64 - offset);
    *--top = nullptr;  // entry's return address: keeps its frame aligned and ends backtraces
    *--top = reinterpret_cast<void*>(entry);
    stack_pointer_ = top - saved_registers;
    for (int i = 1; i <= saved_registers; ++i) top[-i] = nullptr;
#endif
}

void Fiber::change(Fiber& from, Fiber& to, [[maybe_unused]] Leaving leaving) {
    left = &from;
#if defined(__SANITIZE_ADDRESS__)
    __sanitizer_start_switch_fiber(leaving == Leaving::for_ever ? nullptr : &from.fake_stack_, to.bottom_, to.bytes_);
#endif
#if defined(EMULATION_UCONTEXT)
    swapcontext(&from.context_, &to.context_);
#else
    trifold_emulation_switch(&from.stack_pointer_, to.stack_pointer_);
#endif
    arrived(from);
}

void Fiber::arrived([[maybe_unused]] Fiber& here) {
#if defined(__SANITIZE_ADDRESS__)
    __sanitizer_finish_switch_fiber(here.fake_stack_, &left->bottom_, &left->bytes_);
#endif
}

}  // namespace trifold::emulation
