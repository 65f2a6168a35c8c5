// kernels/ops.cpp   From the table of operations to streams: each call becomes one entry of its stream.
#include "kernels/ops.h"

namespace trifold {

#define X(op, Args) \
    Ticket op(Stream& stream, const Args& args) { return stream.launch(#op, cpu::op, cuda::op, args); }
TRIFOLD_OPS(X)
#undef X

}  // namespace trifold
