// test/fake_nccl/fake_nccl.h   A stand-in for NCCL between the threads or processes of a test, over plain host memory, that checks
// how it is used.
//
// It gives right results (sums in rank order in fp32) and takes its time: every operation is "in progress" for a few polls of
// ncclCommGetAsyncError, which also move the data. Streams are not looked at: an operation is done when its state is success.
// A unique id names a socket in the abstract namespace, on which a thread of the process that made the id (the hub) listens; the
// ranks connect to it from wherever they are.
//
// What it finds, each as a sentence with communicator, rank and operation:
//   order       ranks whose operations differ in kind, count, type, root or reduction; sends and receives that do not pair
//   deadlock    all ranks wait, and nothing fits; a rank that left while another waits for it
//   groups      ncclGroupEnd without a start, polling or leaving inside an open group
//   life cycle  calls on a communicator that is not ready, or was destroyed or aborted; destroy without finalize
//   arguments   null buffers, ranks that do not exist, buffers that overlap without being in place
// Two threads in calls on one communicator at once are for a thread sanitizer: the fake has no locks of its own there.
// The call that is wrong returns an error, as NCCL's own checks do; what only the hub can see becomes the asynchronous error of
// the communicators concerned.
#pragma once
#include <string>
#include <vector>

#include "parallel/nccl_api.h"

namespace trifold::fake_nccl {

const NcclApi& api();

// What this process was told so far; the list is emptied.
std::vector<std::string> take_findings();
// What became of the communicators of this process.
struct Communicators {
    int open = 0, destroyed = 0, aborted = 0;
};
Communicators communicators();

}  // namespace trifold::fake_nccl
