#include "model/placement.h"

#include <fmt/format.h>

#include <algorithm>
#include <numeric>

#include "base/error.h"

namespace trifold {
namespace {

// One layer after the other goes to the part that is done first; of equals, to the earliest.
std::vector<int> balanced(const ModelConfig& m, int parts) {
    std::vector<int> layers(static_cast<size_t>(parts), 1);
    const double head = static_cast<double>(m.vocab) / (12.0 * static_cast<double>(m.hidden));
    const auto time = [&](size_t k) { return layers[k] + (k + 1 == layers.size() ? head : 0.0); };
    for (int64_t left = m.layers - parts; left > 0; --left) {
        size_t least = 0;
        for (size_t k = 1; k < layers.size(); ++k)
            if (time(k) < time(least)) least = k;
        ++layers[least];
    }
    return layers;
}

}  // namespace

Placement Placement::whole(const ModelConfig& m) {
    Placement p;
    p.chunks = {{0, static_cast<int>(m.layers), true, true}};
    return p;
}

std::vector<int> layers_of_parts(const ModelConfig& m, int stages, int virtual_stages, const std::vector<int64_t>& given) {
    const int parts = stages * virtual_stages;
    const auto refuse = [](const std::string& sentence) { throw Problem(Exit::usage, sentence); };
    if (m.layers < parts)
        refuse(fmt::format("model.layers = {} is less than mesh.pp * mesh.virtual_stages = {} * {}: every part of the pipeline needs a layer; use fewer stages",
                           m.layers, stages, virtual_stages));
    if (given.empty()) return balanced(m, parts);
    const int64_t sum = std::accumulate(given.begin(), given.end(), int64_t{0});
    if (sum != m.layers) refuse(fmt::format("mesh.layers_per_stage adds up to {} layers, but model.layers = {}", sum, m.layers));
    if (std::any_of(given.begin(), given.end(), [](int64_t n) { return n < 1; })) refuse("mesh.layers_per_stage: every stage needs at least one layer");
    std::vector<int> layers(static_cast<size_t>(parts));
    if (static_cast<int>(given.size()) == parts) {
        std::copy(given.begin(), given.end(), layers.begin());
        return layers;
    }
    if (static_cast<int>(given.size()) != stages)
        refuse(fmt::format("mesh.layers_per_stage has {} numbers; it takes one per stage ({}){}", given.size(), stages,
                           virtual_stages > 1 ? fmt::format(" or one per part ({})", parts) : ""));
    for (int k = 0; k < parts; ++k) {
        const int64_t n = given[static_cast<size_t>(k % stages)], chunk = k / stages;
        if (n < virtual_stages)
            refuse(fmt::format("mesh.layers_per_stage gives stage {} {} layers for {} virtual stages: each needs one", k % stages, n, virtual_stages));
        layers[static_cast<size_t>(k)] = static_cast<int>(n / virtual_stages + (chunk < n % virtual_stages ? 1 : 0));
    }
    return layers;
}

Mesh mesh_of(const Config& c) {
    return {.tp = static_cast<int>(c.mesh.tp), .cp = static_cast<int>(c.mesh.cp), .dp = static_cast<int>(c.mesh.dp), .pp = static_cast<int>(c.mesh.pp)};
}

Placement placement_of(const Config& c, int rank) {
    const Coordinates at = mesh_of(c).at(rank);
    const int stages = static_cast<int>(c.mesh.pp), virtual_stages = static_cast<int>(c.mesh.virtual_stages);
    const std::vector<int> layers = layers_of_parts(c.model, stages, virtual_stages, c.mesh.layers_per_stage);
    Placement p{.tp = static_cast<int>(c.mesh.tp), .tp_rank = at.tp, .dp = static_cast<int>(c.mesh.dp), .dp_rank = at.dp, .stages = stages, .stage = at.pp};
    int first = 0;
    for (int k = 0; k < static_cast<int>(layers.size()); ++k) {
        const int last = first + layers[static_cast<size_t>(k)];
        if (k % stages == at.pp) p.chunks.push_back({first, last, k == 0, k + 1 == static_cast<int>(layers.size())});
        first = last;
    }
    return p;
}

}  // namespace trifold
