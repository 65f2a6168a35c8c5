#include "parallel/rank_text.h"

#include <fmt/format.h>

#include <algorithm>
#include <map>

#include "base/text.h"

namespace trifold {
namespace {

constexpr size_t most_parts = 12;    // of a list of ranks
constexpr size_t most_groups = 3;    // of ranks with values of their own
constexpr size_t most_columns = 60;  // of a value
constexpr size_t columns_before = 12;

// A part of the value that holds column `place`.
std::string shortened(const std::string& value, size_t place) {
    if (value.size() <= most_columns) return value;
    const size_t from = place > most_columns - columns_before ? place - columns_before : 0;
    const std::string part = value.substr(std::min(from, value.size()), most_columns);
    return (from > 0 ? "..." : "") + part + (from + most_columns < value.size() ? "..." : "");
}

}  // namespace

std::string ranks_text(const std::vector<int>& ranks) {
    std::vector<std::string> parts;
    for (size_t i = 0, run = 1; i < ranks.size(); i += run, run = 1) {
        while (i + run < ranks.size() && ranks[i + run] == ranks[i] + static_cast<int>(run)) ++run;
        if (parts.size() == most_parts) {
            parts.push_back(fmt::format("{} more", ranks.size() - i));
            break;
        }
        if (run == 2) run = 1;  // "5 and 6" reads better than "5-6"
        parts.push_back(run == 1 ? std::to_string(ranks[i]) : fmt::format("{}-{}", ranks[i], ranks[i + run - 1]));
    }
    return (ranks.size() == 1 ? "rank " : "ranks ") + join_words(parts);
}

std::string disagreement(const std::string& what, const std::vector<std::string>& values) {
    std::map<std::string, std::vector<int>> ranks_with;
    for (size_t r = 0; r < values.size(); ++r) ranks_with[values[r]].push_back(static_cast<int>(r));
    if (ranks_with.size() <= 1) return "";
    // Rarest first; among equals those of rank 0 last, so that it counts as the norm.
    std::vector<std::pair<std::string, std::vector<int>>> groups(ranks_with.begin(), ranks_with.end());
    std::ranges::sort(groups, [](const auto& a, const auto& b) {
        return a.second.size() != b.second.size() ? a.second.size() < b.second.size() : a.second.front() > b.second.front();
    });
    const auto& [norm, most] = groups.back();
    std::string sentence;
    size_t place = 0;
    for (size_t g = 0; g + 1 < groups.size(); ++g) {
        const auto& [value, ranks] = groups[g];
        if (g == most_groups) {
            sentence += fmt::format(", others {} more values", groups.size() - 1 - g);
            break;
        }
        place = static_cast<size_t>(std::ranges::mismatch(value, norm).in1 - value.begin());
        const std::string verb = g > 0 ? "" : fmt::format(" {} {}", ranks.size() == 1 ? "has" : "have", what);
        sentence += fmt::format("{}{}{} '{}'", g > 0 ? ", " : "", ranks_text(ranks), verb, shortened(value, place));
    }
    return fmt::format("{}, {} '{}'", sentence, most.size() == 1 ? ranks_text(most) : groups.size() == 2 ? "the others" : "most", shortened(norm, place));
}

}  // namespace trifold
