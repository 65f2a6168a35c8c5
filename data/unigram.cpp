#include "data/unigram.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <vector>

#include "base/error.h"
#include "data/token_file.h"

namespace trifold {
namespace {

// How often each id occurs; index = id.
std::vector<int64_t> count_tokens(const std::string& path_or_glob) {
    std::vector<int64_t> counts;
    std::vector<int32_t> block;
    for (const TokenFile& file : open_token_files(path_or_glob))
        for (int64_t first = 0; first < file.tokens(); first += std::ssize(block)) {
            block.resize(static_cast<size_t>(std::min<int64_t>(1 << 16, file.tokens() - first)));
            file.read(first, block);
            for (const int32_t id : block) {
                if (id < 0) throw Problem(Exit::data, fmt::format("{} has the negative id {}", file.path(), id));
                if (id >= std::ssize(counts)) counts.resize(static_cast<size_t>(id) + 1);
                ++counts[static_cast<size_t>(id)];
            }
        }
    return counts;
}

}  // namespace

UnigramLoss unigram_loss(const std::string& train, const std::string& val) {
    std::vector<int64_t> known = count_tokens(train), seen = count_tokens(val);
    known.resize(std::max(known.size(), seen.size()));
    seen.resize(known.size());
    double total = 0;
    for (const int64_t n : known) total += static_cast<double>(n + 1);
    UnigramLoss result;
    double nats = 0;
    for (size_t id = 0; id < known.size(); ++id) {
        nats -= static_cast<double>(seen[id]) * std::log(static_cast<double>(known[id] + 1) / total);
        result.tokens += seen[id];
    }
    result.loss = result.tokens > 0 ? nats / static_cast<double>(result.tokens) : 0;
    return result;
}

}  // namespace trifold
