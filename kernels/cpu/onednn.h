// kernels/cpu/onednn.h   The same product as gemm.h through oneDNN, which knows AMX. Works with versions 2 and 3 of the
// library.
//
// oneDNN chooses blocking by the number of rows too and may split the depth between threads, so unlike gemm.h it
// promises neither that chunks of rows give the bits of the whole product, nor the same bits for another number of
// threads.
#pragma once
#include <cstdint>
#include <memory>

#include "kernels/cpu/gemm.h"

namespace trifold::cpu {

// Whether oneDNN multiplies bf16 with AMX here: several times as fast as anything else.
bool onednn_has_amx();

// Primitives, made at the first product of their sizes, types and number of threads, and kept. One thread at a time.
class OnednnProducts {
public:
    OnednnProducts();
    ~OnednnProducts();
    // a, b and bias have one type, c has it too or is fp32; no dimension is zero. False, and nothing is done, where the
    // library has no implementation for this processor.
    bool run(const Gemm&);
    int64_t scratch_bytes() const;

private:
    struct Cache;
    std::unique_ptr<Cache> cache_;
};

}  // namespace trifold::cpu
