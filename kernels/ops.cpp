// kernels/ops.cpp   From the table of operations to streams: each call becomes one entry of its stream.
#include "kernels/ops.h"

namespace trifold {

#define X(op, Args) \
    Ticket op(Stream& stream, const Args& args) { return stream.launch(#op, cpu::op, cuda::op, args); }
TRIFOLD_OPS(X)
#undef X

// A copy to memory that is not page-locked may hold the host inside the call until the GPU has come so far, where nobody watches the wait.
void read_back(Stream& s, const std::vector<Copy>& copies, const char* what) {
    if (s.device() == Device::cuda) s.engine().wait(s.last());
    std::vector<BufferAccess> results;
    for (const Copy& c : copies) {
        copy(s, c);
        results.push_back({static_cast<const std::byte*>(c.y.data), c.y.bytes(), Access::read});
    }
    s.engine().wait(s.last());
    s.engine().host_access(results, what);
}

}  // namespace trifold
