// data/added_tokens.h   Tokens that are found in the text itself, before any other rule: <|endoftext|>, <|im_start|> ...
//
// As in the `tokenizers` package: matches are leftmost, then longest, and do not overlap. Tokens marked `normalized`
// are looked for after normalization, the others before; a set is one of the two.
#pragma once
#include <algorithm>
#include <array>
#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "data/utf8.h"

namespace trifold {

// What becomes of special tokens (`"special": true`) that are spelt out in a text.
enum class SpecialText : uint8_t {
    match,  // they become the token, as in the package
    plain,  // they are text like any other
};

struct AddedToken {
    std::string content;
    int32_t id = -1;
    bool special = false, normalized = false;
    bool lstrip = false, rstrip = false;  // white space before, behind belongs to the token
};

class AddedTokens {
public:
    explicit AddedTokens(std::vector<AddedToken> tokens) {
        std::ranges::stable_sort(tokens, std::ranges::greater(), [](const AddedToken& t) { return t.content.size(); });
        for (AddedToken& token : tokens)
            if (!token.content.empty()) by_first_byte_[static_cast<uint8_t>(token.content[0])].push_back(std::move(token));
    }

    // Calls piece(text) and token(id) in the order of the text.
    template <class Piece, class Token>
    void split(std::string_view text, SpecialText special, Piece piece, Token token) const {
        size_t done = 0;
        for (size_t at = 0; at < text.size();) {
            const AddedToken* found = longest(text, at);
            size_t begin = at;
            at += found ? found->content.size() : 1;
            if (!found || (found->special && special == SpecialText::plain)) continue;
            if (found->lstrip) begin = std::max(done, begin - trailing_space(text.substr(0, begin)));
            if (found->rstrip) at += leading_space(text.substr(at));
            if (begin > done) piece(text.substr(done, begin - done));
            token(found->id);
            done = at;
        }
        if (done < text.size()) piece(text.substr(done));
    }

private:
    // The longest token that stands at this byte.
    const AddedToken* longest(std::string_view text, size_t at) const {
        for (const AddedToken& token : by_first_byte_[static_cast<uint8_t>(text[at])])
            if (text.substr(at).starts_with(token.content)) return &token;
        return nullptr;
    }

    std::array<std::vector<AddedToken>, 256> by_first_byte_;  // longest first
};

}  // namespace trifold
