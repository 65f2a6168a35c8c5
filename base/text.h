// base/text.h   Numbers and near misses as people read them.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

namespace trifold {

// 124439808 -> "124,439,808"
std::string with_commas(int64_t number);

// Three significant digits with a decimal prefix: 124439808 -> "124 M", 6.5e12 -> "6.5 T".
std::string with_prefix(double number);

// Bytes with a binary prefix: 1536 -> "1.50 KiB".
std::string human_bytes(int64_t bytes);

// "a, b and c"
std::string join_words(const std::vector<std::string>& words, const std::string& last_separator = " and ");

// "a, b, c and 7 more"
std::string join_first(std::vector<std::string> words);

// Breaks text at spaces into lines of at most `width` columns. It starts in column `indent`, where further lines start
// too.
std::string wrapped(const std::string& text, size_t indent, size_t width = 120);

// Insertions, deletions, replacements and swaps of neighbours that turn one word into the other.
int edit_distance(const std::string& a, const std::string& b);

// The candidates that `word` most probably stands for, best ones only and at most three: the smallest edit distance, if
// it is small for the word's length, or a dotted name that ends in the word ("lr" -> "optim.lr"). Empty when nothing is
// near.
std::vector<std::string> near_misses(const std::string& word, const std::vector<std::string>& candidates);
// "did you mean A or B?", each with `prefix` before it, or `otherwise`.
std::string suggestion(const std::string& word, const std::vector<std::string>& candidates, const std::string& prefix, const std::string& otherwise);

}  // namespace trifold
