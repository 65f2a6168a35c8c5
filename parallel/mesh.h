// parallel/mesh.h   Which rank does what: every group, neighbour and coordinate comes from one expression (DESIGN 3).
//
//   rank = ((pp * DP + dp) * CP + cp) * TP + tp
//
// Tensor-parallel ranks are neighbours (inside a node), pipeline stages are farthest apart.
#pragma once
#include <cstdint>
#include <vector>

namespace trifold {

enum class Axis : uint8_t { tp, cp, dp, pp };
const char* name_of(Axis axis);

// A place in the mesh, or with sizes instead of indices the mesh itself.
struct Coordinates {
    int tp = 0, cp = 0, dp = 0, pp = 0;
    int along(Axis axis) const;
    bool operator==(const Coordinates&) const = default;
};

struct Mesh {
    int tp = 1, cp = 1, dp = 1, pp = 1;

    int ranks() const { return tp * cp * dp * pp; }
    int size(Axis axis) const;
    int rank_of(const Coordinates& at) const { return ((at.pp * dp + at.dp) * cp + at.cp) * tp + at.tp; }
    Coordinates at(int rank) const;
    // The ranks that differ from `rank` in this coordinate only, in order of the coordinate; `rank` is one of them.
    std::vector<int> members(Axis axis, int rank) const;
};

}  // namespace trifold
