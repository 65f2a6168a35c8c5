// test/emulation/ptx.h   The functions of kernels/cuda/ptx.h for the emulator. That file says what each one does.
//
// Asynchronous copies land as late as PTX allows, at the wait that covers them, and their target is NaN until then: a wait
// for the wrong group gives wrong numbers always, not now and then.
#pragma once
#include <cstdint>
#include <cstring>

#include "test/emulation/block.h"

namespace trifold::emulation {

void cp_async(const Site& site, void* shared, const void* global, bool copy);
void cp_async_wait(int groups_left);
// `registers` holds `matrices` results.
enum class Layout : uint8_t { rows, transposed };
void ldmatrix(const Site& site, uint32_t* registers, int matrices, Layout layout, const void* row);
struct MmaFragments {
    uint32_t a[4], b[2];
    float d[4];
};
void mma_m16n8k16_bf16(const Site& site, MmaFragments& fragments);
float exp2_approx(float x);
// A load that returns the same value for too long ends the program: blocks run one after another, so no other block that has
// not run yet can be waited for.
int load_acquire(const Site& site, const int* p);
void store_release(const Site& site, int* p, int value);

}  // namespace trifold::emulation

namespace trifold::cuda::ptx {

inline void cp_async_16(void* shared, const void* global, TRIFOLD_EMULATION_HERE) {
    emulation::cp_async(TRIFOLD_EMULATION_SITE("cp.async"), shared, global, true);
}
inline void cp_async_16_or_zero(void* shared, const void* global, bool copy, TRIFOLD_EMULATION_HERE) {
    emulation::cp_async(TRIFOLD_EMULATION_SITE("cp.async"), shared, global, copy);
}
inline void cp_async_commit() { ++emulation::current->open_group; }
template <int N>
void cp_async_wait() {
    emulation::cp_async_wait(N);
}

inline void ldmatrix_x4(uint32_t (&r)[4], const void* row, TRIFOLD_EMULATION_HERE) {
    emulation::ldmatrix(TRIFOLD_EMULATION_SITE("ldmatrix.x4"), r, 4, emulation::Layout::rows, row);
}
inline void ldmatrix_x4_trans(uint32_t (&r)[4], const void* row, TRIFOLD_EMULATION_HERE) {
    emulation::ldmatrix(TRIFOLD_EMULATION_SITE("ldmatrix.x4.trans"), r, 4, emulation::Layout::transposed, row);
}
inline void ldmatrix_x2(uint32_t (&r)[2], const void* row, TRIFOLD_EMULATION_HERE) {
    emulation::ldmatrix(TRIFOLD_EMULATION_SITE("ldmatrix.x2"), r, 2, emulation::Layout::rows, row);
}
inline void ldmatrix_x2_trans(uint32_t (&r)[2], const void* row, TRIFOLD_EMULATION_HERE) {
    emulation::ldmatrix(TRIFOLD_EMULATION_SITE("ldmatrix.x2.trans"), r, 2, emulation::Layout::transposed, row);
}

inline void mma_m16n8k16_bf16(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2], TRIFOLD_EMULATION_HERE) {
    emulation::MmaFragments f;
    std::memcpy(f.a, a, sizeof a);
    std::memcpy(f.b, b, sizeof b);
    std::memcpy(f.d, d, sizeof d);
    emulation::mma_m16n8k16_bf16(TRIFOLD_EMULATION_SITE("mma.m16n8k16"), f);
    std::memcpy(d, f.d, sizeof d);
}
inline float exp2_approx(float x) { return emulation::exp2_approx(x); }

inline int load_acquire(const int* p, TRIFOLD_EMULATION_HERE) { return emulation::load_acquire(TRIFOLD_EMULATION_SITE("ld.acquire"), p); }
inline void store_release(int* p, int value, TRIFOLD_EMULATION_HERE) {
    emulation::store_release(TRIFOLD_EMULATION_SITE("st.release"), p, value);
}

}  // namespace trifold::cuda::ptx
