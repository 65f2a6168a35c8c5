// base/text.cpp   Numbers and near misses as people read them.
#include "base/text.h"

#include <fmt/format.h>

#include <algorithm>
#include <sstream>

namespace trifold {

std::string with_commas(int64_t number) {
    std::string digits = std::to_string(number);
    const size_t first = digits[0] == '-' ? 1 : 0;
    for (size_t at = digits.size(); at > first + 3; at -= 3) digits.insert(at - 3, ",");
    return digits;
}

std::string with_prefix(double number) {
    const char* prefix = " kMGTPE";
    for (; number >= 999.5 && prefix[1]; ++prefix) number /= 1000;
    return *prefix == ' ' ? fmt::format("{:.3g}", number) : fmt::format("{:.3g} {}", number, *prefix);
}

std::string human_bytes(int64_t bytes) {
    if (bytes < 1024) return fmt::format("{} B", bytes);
    const char* prefix = "KMGTPE";
    double value = static_cast<double>(bytes) / 1024;
    for (; value >= 1023.995 && prefix[1]; ++prefix) value /= 1024;
    return fmt::format("{:.2f} {}iB", value, *prefix);
}

std::string join_words(const std::vector<std::string>& words, const std::string& last_separator) {
    std::string text;
    for (size_t i = 0; i < words.size(); ++i) {
        if (i > 0) text += i + 1 == words.size() ? last_separator : ", ";
        text += words[i];
    }
    return text;
}

std::string join_first(std::vector<std::string> words) {
    constexpr size_t most = 5;
    if (words.size() <= most) return join_words(words);
    const std::string more = fmt::format("{} more", words.size() - most);
    words.resize(most);
    return join_words(words, ", ") + " and " + more;
}

std::string wrapped(const std::string& text, size_t indent, size_t width) {
    std::istringstream words(text);
    std::string lines;
    size_t column = indent;
    for (std::string word; words >> word;) {
        const bool first = column == indent;
        if (!first && column + 1 + word.size() > width) {
            lines += "\n" + std::string(indent, ' ') + word;
            column = indent + word.size();
        } else {
            lines += (first ? "" : " ") + word;
            column += word.size() + (first ? 0 : 1);
        }
    }
    return lines;
}

int edit_distance(const std::string& a, const std::string& b) {
    // Rows i-2, i-1 and i of the table of distances between the first i letters of a and the first j of b.
    std::vector<int> before, last(b.size() + 1), row(b.size() + 1);
    for (size_t j = 0; j <= b.size(); ++j) last[j] = static_cast<int>(j);
    for (size_t i = 1; i <= a.size(); ++i) {
        row[0] = static_cast<int>(i);
        for (size_t j = 1; j <= b.size(); ++j) {
            row[j] = std::min({last[j] + 1, row[j - 1] + 1, last[j - 1] + (a[i - 1] != b[j - 1])});
            const bool swapped = i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1];
            if (swapped) row[j] = std::min(row[j], before[j - 2] + 1);
        }
        before = last;
        last = row;
    }
    return last[b.size()];
}

std::vector<std::string> near_misses(const std::string& word, const std::vector<std::string>& candidates) {
    std::vector<std::string> best;
    int best_distance = std::max(1, static_cast<int>(word.size()) / 3);
    for (const std::string& candidate : candidates) {
        const bool is_suffix = candidate.ends_with("." + word);
        const int distance = is_suffix ? 1 : edit_distance(word, candidate);
        if (distance > best_distance) continue;
        if (distance < best_distance) best.clear();
        best_distance = distance;
        best.push_back(candidate);
    }
    if (best.size() > 3) best.resize(3);
    return best;
}

std::string suggestion(const std::string& word, const std::vector<std::string>& candidates, const std::string& prefix, const std::string& otherwise) {
    std::vector<std::string> near = near_misses(word, candidates);
    for (std::string& name : near) name = prefix + name;
    return near.empty() ? otherwise : "did you mean " + join_words(near, " or ") + "?";
}

}  // namespace trifold
