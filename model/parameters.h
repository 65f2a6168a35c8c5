// model/parameters.h   The one table of parameters. Memory, initial values, decay, checkpoints, import/export and the planner read it.
//
// It lists every logical tensor, unfused and unpadded. In memory the tensors lie in one flat buffer in table order (the same
// offsets for weights, master weights, gradients and both moments). Tensors of one `fused` group are adjacent without
// padding, so that q, k, v (or gate, up) can be read as one matrix; every group starts at a multiple of 64 elements.
#pragma once
#include <cstdint>
#include <string>
#include <unordered_map>
#include <vector>

#include "kernels/ops.h"
#include "model/config.h"

namespace trifold {

enum class Role : uint8_t { token_embedding, position_embedding, head, norm, matrix, bias };
enum class InitKind : uint8_t { zeros, ones, normal };

struct Parameter {
    std::string name;             // layers.3.attention.q.weight
    std::vector<int64_t> shape;   // global and logical: [outputs, inputs], or [size]
    Role role = Role::matrix;
    int layer = -1;               // global number, -1 outside the blocks
    int tp_dim = -1;              // dimension that tensor parallelism splits; -1: replicated
    bool partial_over_tp = false; // its gradient is a sum over tensor-parallel ranks (sequence parallelism)
    InitKind init = InitKind::normal;
    float init_std = 0.02f;
    bool decay = true;            // one-dimensional tensors do not decay
    bool row_padded = false;      // rows are padded to padded_vocab in memory
    // Where it lies in the flat buffers, in elements; padded_elems >= elems for padded rows.
    int64_t offset = 0, elems = 0, padded_elems = 0;
};

class ParameterTable {
public:
    explicit ParameterTable(const ModelConfig& model);
    const std::vector<Parameter>& all() const { return all_; }
    const Parameter& at(const std::string& name) const;   // a missing name is a bug
    const Parameter* find(const std::string& name) const;
    int64_t flat_elems() const { return flat_elems_; }    // length of every flat buffer, padding included
    int64_t count() const;                                // logical parameters; a tied head counts once
    // One segment per tensor for the optimizer, padding left out.
    std::vector<Segment> segments(double weight_decay) const;

private:
    std::vector<Parameter> all_;
    std::unordered_map<std::string, size_t> index_;
    int64_t flat_elems_ = 0;
    void add(Parameter p, bool start_of_group = true);
};

// Flat buffers of the table in host memory, fp32, flat_elems() each: master weights and both moments. Without m and v: weights only.
struct FlatState {
    float *master = nullptr, *m = nullptr, *v = nullptr;
};

// Writes the initial values of every parameter into `flat` (fp32, flat_elems). Element i of a tensor depends on (seed, name, i)
// alone, so the values are the same in every layout and on every device; no libm is involved.
void initialize(const ParameterTable& table, uint64_t seed, float* flat);

}  // namespace trifold
