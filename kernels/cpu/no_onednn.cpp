// kernels/cpu/no_onednn.cpp   Stands in for onednn.cpp in builds without oneDNN (TRIFOLD_BUNDLE): our own products do everything.
#include "kernels/cpu/onednn.h"

namespace trifold::cpu {

bool onednn_has_amx() { return false; }

struct OnednnProducts::Cache {};
OnednnProducts::OnednnProducts() = default;
OnednnProducts::~OnednnProducts() = default;
bool OnednnProducts::run(const Gemm&) { return false; }
int64_t OnednnProducts::scratch_bytes() const { return 0; }

}  // namespace trifold::cpu
