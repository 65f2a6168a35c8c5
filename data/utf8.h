// data/utf8.h   The little that tokenizers need to know about Unicode text.
#pragma once
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

namespace trifold {

// Position of the first byte that breaks well-formed UTF-8 (RFC 3629: no overlong forms, no surrogates, nothing beyond
// U+10FFFF, nothing cut off at the end), or npos.
size_t invalid_utf8(std::string_view text);

// How many bytes at the end of `text` begin a code point that is not complete yet: 0 to 3.
size_t incomplete_tail(std::string_view text);

// Unicode normalization form C of well-formed text, as the `tokenizers` package has it.
std::string nfc(std::string_view text);

// The Unicode property White_Space, which is what \s means in tokenizer.json.
bool is_white_space(char32_t c);

// The last code point of well-formed text that is not empty.
char32_t last_code_point(std::string_view text);

// Bytes of white space at the beginning and at the end of well-formed text.
size_t leading_space(std::string_view text);
size_t trailing_space(std::string_view text);

// Appends one code point as UTF-8.
void append_utf8(std::string& out, char32_t c);

}  // namespace trifold
