// data/added_tokens.h   Tokens that are found in the text itself, before any other rule: <|endoftext|>, <|im_start|> ...
//
// As in the `tokenizers` package: matches are leftmost, then longest, and do not overlap. Tokens marked `normalized`
// are looked for after normalization, the others before; a set is one of the two.
#pragma once
#include <array>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

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
    explicit AddedTokens(std::vector<AddedToken> tokens);

    struct Match {
        size_t begin, end;  // bytes of the text
        int32_t id;
    };
    // Calls piece(text) and token(id) in the order of the text.
    template <class Piece, class Token>
    void split(std::string_view text, SpecialText special, Piece piece, Token token) const {
        size_t done = 0, from = 0;
        for (Match match; find(text, special, done, from, match);) {
            if (match.begin > done) piece(text.substr(done, match.begin - done));
            token(match.id);
            done = match.end;
        }
        if (done < text.size()) piece(text.substr(done));
    }

private:
    // The next match from byte `from` on, which is moved; spaces before it count only from `done` on.
    bool find(std::string_view text, SpecialText special, size_t done, size_t& from, Match& match) const;

    std::array<std::vector<AddedToken>, 256> by_first_byte_;  // longest first
};

}  // namespace trifold
