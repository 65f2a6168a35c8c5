// parallel/rank_text.h   Ranks in sentences.
#pragma once
#include <string>
#include <vector>

namespace trifold {

// Ascending ranks: "rank 3", "ranks 5 and 7", "ranks 3, 5-7 and 9".
std::string ranks_text(const std::vector<int>& ranks);

// values[r] is rank r's. Empty when they are all the same, else "rank 5 has WHAT 'a', the others 'b'"; what most ranks have comes last.
// Long values are shortened around the place where they differ.
std::string disagreement(const std::string& what, const std::vector<std::string>& values);

}  // namespace trifold
