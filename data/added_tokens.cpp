// data/added_tokens.cpp
#include "data/added_tokens.h"

#include <algorithm>

#include "data/utf8.h"

namespace trifold {

AddedTokens::AddedTokens(std::vector<AddedToken> tokens) {
    for (AddedToken& token : tokens)
        if (!token.content.empty()) by_first_byte_[static_cast<uint8_t>(token.content[0])].push_back(std::move(token));
    for (auto& list : by_first_byte_)
        std::stable_sort(list.begin(), list.end(), [](const AddedToken& a, const AddedToken& b) { return a.content.size() > b.content.size(); });
}

bool AddedTokens::find(std::string_view text, SpecialText special, size_t done, size_t& from, Match& match) const {
    for (; from < text.size(); ++from) {
        for (const AddedToken& token : by_first_byte_[static_cast<uint8_t>(text[from])]) {
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
