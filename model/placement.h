// model/placement.h   Which part of the model a rank holds: its slice of every matrix, its layers, embedding and head.
//
// The model is cut into pp * virtual_stages parts of consecutive layers; chunk c of stage s is part c * pp + s. The embedding belongs to
// the first part, final norm and head to the last.
#pragma once
#include <vector>

#include "model/config.h"
#include "parallel/mesh.h"

namespace trifold {

struct Part {
    int first_layer = 0, last_layer = 0;  // global numbers, last excluded
    bool embedding = false, head = false;
    int layers() const { return last_layer - first_layer; }
};

struct Placement {
    int tp = 1, tp_rank = 0;
    int dp = 1, dp_rank = 0;
    int stages = 1, stage = 0;
    std::vector<Part> chunks;  // of this stage

    bool first_stage() const { return stage == 0; }
    bool last_stage() const { return stage == stages - 1; }
    // This stage holds another one's parameters again: a tied head behind the last part.
    bool ties_stages(const ModelConfig& m) const { return m.tied && stages > 1 && (first_stage() || last_stage()); }
    static Placement whole(const ModelConfig& m);
};

// Layers of every part of the model, in order. Balanced: no part takes longer than it must, where the head counts as
// vocab / (12 * hidden) layers (its share of the FLOPs) and the embedding as nothing. `layers_per_stage`: one number per stage, spread
// evenly over its chunks, or one per part; empty: balanced. Throws Problem(Exit::usage).
std::vector<int> layers_of_parts(const ModelConfig& m, int stages, int virtual_stages, const std::vector<int64_t>& layers_per_stage);

Mesh mesh_of(const Config& c);
Placement placement_of(const Config& c, int rank);

}  // namespace trifold
