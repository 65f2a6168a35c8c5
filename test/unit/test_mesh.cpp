// test/unit/test_mesh.cpp   Coordinates and groups of the mesh; examples by hand.
#include "test/catch.h"

#include <set>

#include "parallel/mesh.h"

using namespace trifold;

TEST_CASE("tensor-parallel ranks are neighbours, stages farthest apart", "[mesh]") {
    const Mesh mesh{.tp = 2, .dp = 2, .pp = 2};
    REQUIRE(mesh.ranks() == 8);
    CHECK(mesh.at(0) == Coordinates{});
    CHECK(mesh.at(1) == Coordinates{.tp = 1});
    CHECK(mesh.at(2) == Coordinates{.dp = 1});
    CHECK(mesh.at(4) == Coordinates{.pp = 1});
    CHECK(mesh.at(7) == Coordinates{.tp = 1, .dp = 1, .pp = 1});
    CHECK(mesh.members(Axis::tp, 5) == std::vector<int>{4, 5});
    CHECK(mesh.members(Axis::dp, 5) == std::vector<int>{5, 7});
    CHECK(mesh.members(Axis::pp, 5) == std::vector<int>{1, 5});
    CHECK(mesh.members(Axis::cp, 5) == std::vector<int>{5});
}

TEST_CASE("an uneven mesh, by hand", "[mesh]") {
    // rank = ((pp * 2 + dp) * 2 + cp) * 3 + tp
    const Mesh mesh{.tp = 3, .cp = 2, .dp = 2, .pp = 4};
    CHECK(mesh.ranks() == 48);
    CHECK(mesh.rank_of({.tp = 2, .cp = 1, .dp = 0, .pp = 3}) == 41);
    CHECK(mesh.at(41) == Coordinates{.tp = 2, .cp = 1, .dp = 0, .pp = 3});
    CHECK(mesh.members(Axis::tp, 41) == std::vector<int>{39, 40, 41});
    CHECK(mesh.members(Axis::cp, 41) == std::vector<int>{38, 41});
    CHECK(mesh.members(Axis::dp, 41) == std::vector<int>{41, 47});
    CHECK(mesh.members(Axis::pp, 41) == std::vector<int>{5, 17, 29, 41});
}

TEST_CASE("every rank is in exactly one group of each axis, at the place of its coordinate", "[mesh]") {
    for (const Mesh& mesh : {Mesh{}, Mesh{.tp = 4}, Mesh{.dp = 3, .pp = 2}, Mesh{.tp = 2, .cp = 3, .dp = 2, .pp = 2}, Mesh{.tp = 5, .cp = 1, .dp = 2, .pp = 3}}) {
        for (const Axis axis : {Axis::tp, Axis::cp, Axis::dp, Axis::pp}) {
            CAPTURE(name_of(axis), mesh.tp, mesh.cp, mesh.dp, mesh.pp);
            std::set<std::vector<int>> groups;
            int members_in_all = 0;
            for (int r = 0; r < mesh.ranks(); ++r) {
                REQUIRE(mesh.rank_of(mesh.at(r)) == r);
                const std::vector<int> members = mesh.members(axis, r);
                REQUIRE(static_cast<int>(members.size()) == mesh.size(axis));
                REQUIRE(members[static_cast<size_t>(mesh.at(r).along(axis))] == r);
                if (groups.insert(members).second) members_in_all += static_cast<int>(members.size());
            }
            CHECK(static_cast<int>(groups.size()) == mesh.ranks() / mesh.size(axis));
            CHECK(members_in_all == mesh.ranks());
        }
    }
}
