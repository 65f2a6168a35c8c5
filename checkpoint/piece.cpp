// checkpoint/piece.cpp   See piece.h.
#include "checkpoint/piece.h"

#include <algorithm>
#include <cctype>
#include <sstream>

#include "base/refuse.h"

namespace trifold {
namespace {

int64_t volume(const Box& box, size_t from_dim = 0) {
    int64_t n = 1;
    for (size_t d = from_dim; d < box.begin.size(); ++d) n *= box.end[d] - box.begin[d];
    return n;
}

}  // namespace

const char* name_of(StateKind kind) {
    constexpr const char* names[] = {"master", "m", "v"};
    return names[static_cast<int>(kind)];
}

std::vector<int64_t> Box::shape() const {
    std::vector<int64_t> sizes(begin.size());
    for (size_t d = 0; d < sizes.size(); ++d) sizes[d] = end[d] - begin[d];
    return sizes;
}

bool Piece::whole_box() const { return first == 0 && last == volume(box); }

Piece piece_of(const StateSlice& slice, StateKind kind) {
    const Parameter& p = *slice.parameter;
    Box box{p.box_begin(), p.box_shape()};
    for (size_t d = 0; d < box.end.size(); ++d) box.end[d] += box.begin[d];
    return {p.name, kind, box, slice.first, slice.last};
}

std::vector<PieceInMemory> pieces_of(const std::vector<StateSlice>& slices) {
    std::vector<PieceInMemory> pieces;
    for (const StateKind kind : state_kinds)
        for (const StateSlice& s : slices)
            if (float* data = kind == StateKind::master ? s.master : kind == StateKind::m ? s.m : s.v) pieces.push_back({piece_of(s, kind), data});
    return pieces;
}

std::string key_of(const Piece& piece) {
    std::string ranges;
    for (size_t d = 0; d < piece.box.begin.size(); ++d) ranges += fmt::format("{}{}:{}", d ? "," : "", piece.box.begin[d], piece.box.end[d]);
    return fmt::format("{}/{}[{}]@{}:{}", name_of(piece.kind), piece.tensor, ranges, piece.first, piece.last);
}

// Takes what looks like the parts of a name, and then asks whether these parts have this name.
Piece piece_of(const std::string& key) {
    Piece piece;
    const size_t slash = std::min(key.find('/'), key.size()), bracket = std::min(key.find('[', slash), key.size());
    for (const StateKind kind : state_kinds)
        if (key.substr(0, slash) == name_of(kind)) piece.kind = kind;
    piece.tensor = key.substr(std::min(slash + 1, bracket), bracket - std::min(slash + 1, bracket));
    std::string digits = key.substr(bracket);
    std::replace_if(
        digits.begin(), digits.end(), [](unsigned char c) { return !std::isdigit(c); }, ' ');
    std::istringstream text(digits);
    for (int64_t begin = 0, end = 0; text >> begin >> end;) {
        piece.box.begin.push_back(begin);
        piece.box.end.push_back(end);
    }
    bool good = !piece.tensor.empty() && piece.box.end.size() >= 2;
    for (size_t d = 0; d < piece.box.end.size(); ++d) good = good && piece.box.begin[d] <= piece.box.end[d];
    if (good) {  // the last two numbers are the interval
        piece.first = piece.box.begin.back(), piece.box.begin.pop_back();
        piece.last = piece.box.end.back(), piece.box.end.pop_back();
    }
    if (!good || key_of(piece) != key || piece.last > volume(piece.box))
        refuse(Exit::checkpoint, "'{}' is not the name of a piece of a checkpoint", key);
    return piece;
}

std::vector<SharedRun> shared_runs(const Piece& stored, const Piece& wanted) {
    const Box &s = stored.box, &w = wanted.box;
    const size_t dims = s.begin.size();
    TRIFOLD_ASSERT(dims == w.begin.size() && dims > 0);
    Box both = s;
    for (size_t d = 0; d < dims; ++d) {
        both.begin[d] = std::max(s.begin[d], w.begin[d]);
        both.end[d] = std::min(s.end[d], w.end[d]);
        if (both.begin[d] >= both.end[d]) return {};
    }
    // Dimensions after `last` are the same in both boxes, so elements are consecutive in both over all of them, and along `last`.
    size_t last = dims - 1;
    while (last > 0 && s.begin[last] == w.begin[last] && s.end[last] == w.end[last]) --last;
    const int64_t length = (both.end[last] - both.begin[last]) * volume(s, last + 1);

    std::vector<SharedRun> runs;
    std::vector<int64_t> index = both.begin;
    const auto position = [&](const Box& box) {
        int64_t p = 0;
        for (size_t d = 0; d < dims; ++d) p = p * (box.end[d] - box.begin[d]) + index[d] - box.begin[d];
        return p;
    };
    for (bool more = true; more;) {
        SharedRun run{position(s) - stored.first, position(w) - wanted.first, length};
        const int64_t before = std::max<int64_t>({0, -run.from, -run.to});  // lies before one of the intervals
        run = {run.from + before, run.to + before, std::min({length, stored.elems() - run.from, wanted.elems() - run.to}) - before};
        if (run.count > 0) {
            SharedRun* previous = runs.empty() ? nullptr : &runs.back();
            if (previous && previous->from + previous->count == run.from && previous->to + previous->count == run.to)
                previous->count += run.count;
            else
                runs.push_back(run);
        }
        more = false;
        for (size_t d = last; d-- > 0 && !more;) {
            more = ++index[d] < both.end[d];
            if (!more) index[d] = both.begin[d];
        }
    }
    return runs;
}

void copy_shared(const Piece& stored, const float* from, const PieceInMemory& wanted) {
    for (const SharedRun& run : shared_runs(stored, wanted.piece)) std::copy_n(from + run.from, run.count, wanted.data + run.to);
}

}  // namespace trifold
