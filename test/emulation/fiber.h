// test/emulation/fiber.h   A stack of its own and the switch to it.
//
// x86-64 has its own switch of six registers, about 20 times as fast as ucontext, which serves other processors and asks
// the kernel for the signal mask each time. Below each stack lies a page that cannot be touched.
#pragma once
#include <cstddef>

#if !defined(__x86_64__) && !defined(EMULATION_UCONTEXT)
#define EMULATION_UCONTEXT
#endif
#if defined(EMULATION_UCONTEXT)
#include <ucontext.h>
#endif

namespace trifold::emulation {

class Fiber {
public:
    // The next switch to this fiber calls `entry`, which must not return; its stack is made on first use. Stacks of
    // different `colour` do not fall on the same cache sets.
    void start(void (*entry)(), int colour);
    enum class Leaving { to_return, for_ever };
    // Goes on with `to`; returns when something switches back to `from`, the running one.
    static void change(Fiber& from, Fiber& to, Leaving leaving = Leaving::to_return);
    // To be called first by `entry`.
    static void arrived(Fiber& here);

private:
    static constexpr size_t stack_bytes = 256 << 10;
    void* stack_pointer_ = nullptr;
    char* stack_ = nullptr;          // lowest usable byte
    const void* bottom_ = nullptr;   // as the address sanitizer wants it; the program's own stack is learned when left
    size_t bytes_ = 0;
    void* fake_stack_ = nullptr;
#if defined(EMULATION_UCONTEXT)
    ucontext_t context_;
#endif
};

}  // namespace trifold::emulation
