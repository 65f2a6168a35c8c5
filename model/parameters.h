// model/parameters.h   The one table of parameters. Memory, initial values, decay, checkpoints, import/export, gradient sums and the planner
// read it.
//
// It lists every logical tensor that a rank holds, unfused and unpadded, with its global shape and the box of it that lies here. In memory
// the boxes lie in one flat buffer (the same offsets for weights, master weights, gradients and both moments), bucket by bucket:
//
//   bucket   what data parallelism gathers and reduces at once: the token embedding; the positions; some layers; final norm and head. Its
//            length is a multiple of 64 * dp, so that every data-parallel rank owns an equal interval.
//   order    in a bucket, tensors whose gradient is partial over TP come first: what is left of them in a shard is one interval
//   groups   tensors of one fused group are adjacent without padding, so that q, k, v (or gate, up) can be read as one matrix; every
//            group starts at a multiple of 64 elements
#pragma once
#include <cstdint>
#include <string>
#include <unordered_map>
#include <vector>

#include "kernels/ops.h"
#include "model/config.h"
#include "model/placement.h"

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
    bool owned = true;            // this rank counts it in norms and writes it; false: another TP rank, or the stage it is tied to, does
    // The box of it that lies here: everything, but for indices [begin, begin + count) of tp_dim.
    int64_t begin = 0, count = 0;
    // Where it lies in the flat buffers, in elements; padded_elems >= elems for padded rows.
    int64_t offset = 0, elems = 0, padded_elems = 0;
    int bucket = 0;

    std::vector<int64_t> box_begin() const, box_shape() const;
};

struct Bucket {
    int64_t begin = 0, elems = 0, partial_elems = 0;  // in the flat buffers; partial ones lie first
    int chunk = 0;                                    // of this stage
    int first_layer = -1, last_layer = -1;            // its layers (last excluded); -1: none
    bool token = false, position = false, head = false;
    int64_t end() const { return begin + elems; }
};

class ParameterTable {
public:
    // Buckets of layers hold at least `bucket_elems` elements where there are enough layers.
    static constexpr int64_t default_bucket_elems = int64_t{4} << 20;
    ParameterTable(const ModelConfig& model, const Placement& placement, int64_t bucket_elems = default_bucket_elems);
    explicit ParameterTable(const ModelConfig& model) : ParameterTable(model, Placement::whole(model)) {}

    const std::vector<Parameter>& all() const { return all_; }     // in order of the offset
    const std::vector<Bucket>& buckets() const { return buckets_; }
    const Placement& placement() const { return placement_; }
    const Parameter& at(const std::string& name) const;   // a missing name is a bug
    const Parameter* find(const std::string& name) const;
    int64_t flat_elems() const { return flat_elems_; }    // length of every flat buffer, padding included
    int64_t count() const;                                // logical parameters that lie here; a tied head counts once
    // Rows of the token embedding and head in memory here, padding included, and the first id.
    int64_t padded_rows() const { return padded_rows_; }
    int64_t first_row() const { return first_row_; }
    int64_t rows() const { return rows_; }                // without padding

    enum class Which : uint8_t { all, owned };
    // One segment per tensor of the bucket for the optimizer, padding left out: what of it lies in [first, first + elems) of the flat
    // buffer, with offsets from `first`. Tensors with nothing there give empty segments. `owned`: empty as well where this rank does not count.
    std::vector<Segment> segments(const Bucket& bucket, int64_t first, int64_t elems, double weight_decay, Which which) const;

private:
    Placement placement_;
    std::vector<Parameter> all_;
    std::vector<Bucket> buckets_;
    std::unordered_map<std::string, size_t> index_;
    int64_t flat_elems_ = 0, padded_rows_ = 0, first_row_ = 0, rows_ = 0;

    void close_bucket(Bucket bucket, std::vector<std::vector<Parameter>> groups);
};

// Elements [first, last) of a tensor's box, and where this rank keeps them: fp32 weights and both moments, in host memory. Without m and v:
// weights only.
struct StateSlice {
    const Parameter* parameter = nullptr;
    int64_t first = 0, last = 0;
    float *master = nullptr, *m = nullptr, *v = nullptr;
};
// Master weights and moments of elements [first, first + elems) of the flat buffers.
struct StateShard {
    int64_t first = 0, elems = 0;
    float *master = nullptr, *m = nullptr, *v = nullptr;
};
std::vector<StateSlice> slices_of(const ParameterTable& table, const std::vector<StateShard>& shards);
// The same for whole flat buffers.
std::vector<StateSlice> whole_state(const ParameterTable& table, float* master, float* m = nullptr, float* v = nullptr);

// Writes the initial values into the master weights. Element i of a tensor depends on (seed, name, i) alone, so the values are the same in
// every layout and on every device; no libm is involved.
void initialize(const std::vector<StateSlice>& slices, uint64_t seed);

}  // namespace trifold
