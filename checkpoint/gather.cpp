#include "checkpoint/gather.h"

#include <cstring>

#include "checkpoint/piece.h"

namespace trifold {
namespace {

// "KEY\n" and the values, one slice after the other.
std::string to_bytes(const std::vector<StateSlice>& slices) {
    std::string bytes;
    for (const StateSlice& s : slices) {
        bytes += key_of(piece_of(s, StateKind::master)) + "\n";
        bytes.append(reinterpret_cast<const char*>(s.master), static_cast<size_t>(s.last - s.first) * sizeof(float));
    }
    return bytes;
}

void place(const std::string& bytes, const ParameterTable& table, std::vector<float>& flat) {
    for (size_t at = 0; at < bytes.size();) {
        const size_t end = bytes.find('\n', at);
        const Piece piece = piece_of(bytes.substr(at, end - at));
        std::vector<float> values(static_cast<size_t>(piece.elems()));
        std::memcpy(values.data(), bytes.data() + end + 1, values.size() * sizeof(float));
        const Parameter& p = table.at(piece.tensor);
        copy_shared(piece, values.data(), {whole_piece(p, StateKind::master), flat.data() + p.offset});
        at = end + 1 + values.size() * sizeof(float);
    }
}

}  // namespace

std::vector<float> gather_tensors(World& world, const ModelConfig& model, const std::vector<StateSlice>& slices) {
    constexpr double deadline_s = 600;
    const auto key = [](int rank) { return "gather " + std::to_string(rank); };
    if (world.rank() > 0) {
        world.put(key(world.rank()), to_bytes(slices));
        return {};
    }
    const ParameterTable table(model);
    std::vector<float> flat(static_cast<size_t>(table.flat_elems()));
    place(to_bytes(slices), table, flat);
    for (int r = 1; r < world.size(); ++r) place(world.take(key(r), deadline_s), table, flat);
    return flat;
}

}  // namespace trifold
