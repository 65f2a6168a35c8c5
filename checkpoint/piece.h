// checkpoint/piece.h   The unit of a checkpoint: a flat interval of a box of one logical tensor.
//
// A tensor-parallel rank holds a box of a tensor (some rows, or some columns); the optimizer's sharding gives each
// data-parallel rank an interval of that box, read row by row. Both the stored and the wanted parts of a tensor are
// described this way, so a checkpoint loads into any layout: only the list of wanted pieces differs.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

#include "model/parameters.h"

namespace trifold {

enum class StateKind : uint8_t { master, m, v };  // fp32 weights and Adam's two moments
inline constexpr StateKind state_kinds[] = {StateKind::master, StateKind::m, StateKind::v};
const char* name_of(StateKind kind);

// Indices [begin[d], end[d]) in every dimension d of the global tensor.
struct Box {
    std::vector<int64_t> begin, end;
    static Box whole(const std::vector<int64_t>& shape) { return {std::vector<int64_t>(shape.size(), 0), shape}; }
    std::vector<int64_t> shape() const;
    bool operator==(const Box&) const = default;
};

struct Piece {
    std::string tensor;
    StateKind kind = StateKind::master;
    Box box;
    int64_t first = 0, last = 0;  // elements [first, last) of the box, row-major
    int64_t elems() const { return last - first; }
    bool whole_box() const;
    bool operator==(const Piece&) const = default;
};

// The piece that a rank's slice of the state is.
Piece piece_of(const StateSlice& slice, StateKind kind);
// A whole tensor as a piece.
inline Piece whole_piece(const Parameter& p, StateKind kind) { return {p.name, kind, Box::whole(p.shape), 0, p.elems}; }

// A piece and where its elements are, or are wanted.
struct PieceInMemory {
    Piece piece;
    float* data = nullptr;
};
// All that the slices have. All weights come first, so that reading weights alone touches a third of the files.
std::vector<PieceInMemory> pieces_of(const std::vector<StateSlice>& slices);

// The name of a piece in the shard files and in the manifest, for example
//   m/layers.0.attention.q.weight[0:64,0:128]@0:8192
std::string key_of(const Piece& piece);
Piece piece_of(const std::string& key);  // anything else throws Problem(Exit::checkpoint)

// `count` consecutive elements that two pieces share, counted from the first element of each.
struct SharedRun {
    int64_t from = 0, to = 0, count = 0;
    bool operator==(const SharedRun&) const = default;
};
// What `stored` has of `wanted`, which must be pieces of the same tensor.
std::vector<SharedRun> shared_runs(const Piece& stored, const Piece& wanted);
void copy_shared(const Piece& stored, const float* from, const PieceInMemory& wanted);

}  // namespace trifold
