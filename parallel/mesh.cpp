#include "parallel/mesh.h"

#include <array>
#include <cstddef>

namespace trifold {

const char* name_of(Axis axis) {
    constexpr std::array names{"tp", "cp", "dp", "pp"};
    return names.at(static_cast<size_t>(axis));
}

int Coordinates::along(Axis axis) const { return axis == Axis::tp ? tp : axis == Axis::cp ? cp : axis == Axis::dp ? dp : pp; }

int Mesh::size(Axis axis) const { return Coordinates{tp, cp, dp, pp}.along(axis); }

Coordinates Mesh::at(int rank) const { return {rank % tp, rank / tp % cp, rank / (tp * cp) % dp, rank / (tp * cp * dp)}; }

std::vector<int> Mesh::members(Axis axis, int rank) const {
    std::vector<int> ranks;
    Coordinates c = at(rank);
    int& moving = axis == Axis::tp ? c.tp : axis == Axis::cp ? c.cp : axis == Axis::dp ? c.dp : c.pp;
    for (moving = 0; moving < size(axis); ++moving) ranks.push_back(rank_of(c));
    return ranks;
}

}  // namespace trifold
