// data/added_tokens.cpp
#include "data/added_tokens.h"

#include <algorithm>

#include "data/utf8.h"

namespace trifold {

namespace {

uint8_t first_byte(const AddedToken& token) { return static_cast<uint8_t>(token.content[0]); }

}  // namespace

AddedTokens::AddedTokens(std::vector<AddedToken> tokens) : tokens_(std::move(tokens)) {
    std::erase_if(tokens_, [](const AddedToken& token) { return token.content.empty(); });
    std::stable_sort(tokens_.begin(), tokens_.end(), [](const AddedToken& a, const AddedToken& b) {
        if (first_byte(a) != first_byte(b)) return first_byte(a) < first_byte(b);
        return a.content.size() > b.content.size();
    });
    for (const AddedToken& token : tokens_) ++first_[first_byte(token) + 1];
    for (size_t b = 1; b < first_.size(); ++b) first_[b] += first_[b - 1];
}

bool AddedTokens::find(std::string_view text, SpecialText special, size_t done, size_t& from, Match& match) const {
    for (; from < text.size(); ++from) {
        const auto byte = static_cast<uint8_t>(text[from]);
        for (int32_t t = first_[byte]; t < first_[byte + 1]; ++t) {
            const AddedToken& token = tokens_[t];
            if (!text.substr(from).starts_with(token.content)) continue;
            match = {from, from + token.content.size(), token.id};
            from = match.end - 1;  // where the loop goes on when this match does not count
            if (token.special && special == SpecialText::plain) break;
            if (token.lstrip) match.begin = std::max(done, match.begin - trailing_space(text.substr(0, match.begin)));
            if (token.rstrip) match.end += leading_space(text.substr(match.end));
            from = match.end;
            return true;
        }
    }
    return false;
}

}  // namespace trifold
