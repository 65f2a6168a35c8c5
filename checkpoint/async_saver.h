// checkpoint/async_saver.h   Saving in two stages: a copy in memory, then a thread that writes it while training goes on.
#pragma once
#include <future>
#include <optional>

#include "checkpoint/store.h"
#include "kernels/tensor.h"

namespace trifold {

class AsyncSaver {
public:
    // `snapshot`: fp32, room for all slices, planned with the rest of the memory. It, the store, the model and the tables of the slices
    // outlive the saver.
    AsyncSaver(CheckpointStore& store, const ModelConfig& model, const Tensor& snapshot, int copy_threads);

    // Copies the slices, which may change again after the return, and starts writing; what lies in the snapshot already is not copied, and
    // stays untouched until the save has ended. Waits first for a save that still runs: there are never two at once. Returns the
    // outcome of the save before, unless poll() or wait() already did.
    std::optional<SaveOutcome> begin(std::vector<StateSlice> slices, const TrainingState& state);
    // The outcome of a save that has ended, once; nothing while it runs.
    std::optional<SaveOutcome> poll();
    // The same after waiting for it.
    std::optional<SaveOutcome> wait();

private:
    CheckpointStore& store_;
    const ModelConfig& model_;
    Tensor snapshot_;
    int copy_threads_;
    std::future<SaveOutcome> running_;  // or ended, and the caller has not seen its outcome yet; its destructor waits
};

}  // namespace trifold
