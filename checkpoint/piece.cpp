// checkpoint/piece.cpp   See piece.h.
#include "checkpoint/piece.h"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <string_view>

#include "base/error.h"

namespace trifold {
namespace {

int64_t volume(const Box& box, size_t from_dim = 0) {
    int64_t n = 1;
    for (size_t d = from_dim; d < box.begin.size(); ++d) n *= box.end[d] - box.begin[d];
    return n;
}

// Reads "begin:end" from the front of `text`.
bool take_range(std::string_view& text, int64_t& begin, int64_t& end) {
    const auto number = [&](int64_t& value) {
        const auto [stop, error] = std::from_chars(text.data(), text.data() + text.size(), value);
        text.remove_prefix(static_cast<size_t>(stop - text.data()));
        return error == std::errc{} && value >= 0;
    };
    if (!number(begin) || !text.starts_with(':')) return false;
    text.remove_prefix(1);
    return number(end) && begin <= end;
}

bool parse(std::string_view text, Piece& piece) {
    const size_t slash = text.find('/'), bracket = text.find('[');
    if (slash == std::string_view::npos || bracket == std::string_view::npos || bracket <= slash + 1) return false;
    const auto* kind = std::find_if(std::begin(state_kinds), std::end(state_kinds),
                                    [&](StateKind k) { return text.substr(0, slash) == name_of(k); });
    if (kind == std::end(state_kinds)) return false;
    piece.kind = *kind;
    piece.tensor = text.substr(slash + 1, bracket - slash - 1);
    text.remove_prefix(bracket);
    do {
        text.remove_prefix(1);  // '[' or ','
        if (!take_range(text, piece.box.begin.emplace_back(), piece.box.end.emplace_back())) return false;
    } while (text.starts_with(','));
    if (!text.starts_with("]@")) return false;
    text.remove_prefix(2);
    return take_range(text, piece.first, piece.last) && text.empty() && piece.last <= volume(piece.box);
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

std::string key_of(const Piece& piece) {
    std::string ranges;
    for (size_t d = 0; d < piece.box.begin.size(); ++d)
        ranges += fmt::format("{}{}:{}", d ? "," : "", piece.box.begin[d], piece.box.end[d]);
    return fmt::format("{}/{}[{}]@{}:{}", name_of(piece.kind), piece.tensor, ranges, piece.first, piece.last);
}

Piece piece_of(const std::string& key) {
    Piece piece;
    if (!parse(key, piece))
        throw Problem(Exit::checkpoint, fmt::format("'{}' is not the name of a piece of a checkpoint", key));
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
    // Dimensions after `last` are the same in both boxes, so elements are consecutive in both over all of them, and
    // along `last`.
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
        run = {run.from + before, run.to + before,
               std::min({length, stored.elems() - run.from, wanted.elems() - run.to}) - before};
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

}  // namespace trifold
