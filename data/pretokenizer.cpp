// data/pretokenizer.cpp   Patterns through PCRE2 with its JIT compiler.
#define PCRE2_CODE_UNIT_WIDTH 8
#include "data/pretokenizer.h"

#include <pcre2.h>

#include <array>

#include "base/refuse.h"
#include "data/utf8.h"

namespace trifold {
namespace {

// As tokenizer.json files spell them. GPT-2's is built into the ByteLevel pre-tokenizer.
constexpr std::array<std::string_view, 3> spellings = {
    R"('s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+)",
    R"((?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+)",
    R"((?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+)"};

// Letters and numbers that Unicode 15.0, 15.1 and 16.0 added to version 14.
constexpr std::string_view new_letters =
    R"(\x{1c89}-\x{1c8a}\x{a7cb}-\x{a7cd}\x{a7da}-\x{a7dc}\x{105c0}-\x{105f3}\x{10d4a}-\x{10d65}\x{10d6f}-\x{10d85})"
    R"(\x{10ec2}-\x{10ec4}\x{1123f}-\x{11240}\x{11380}-\x{11389}\x{1138b}\x{1138e}\x{11390}-\x{113b5}\x{113b7}\x{113d1})"
    R"(\x{113d3}\x{11bc0}-\x{11be0}\x{11f02}\x{11f04}-\x{11f10}\x{11f12}-\x{11f33}\x{1342f}\x{13441}-\x{13446})"
    R"(\x{13460}-\x{143fa}\x{16100}-\x{1611d}\x{16d40}-\x{16d6c}\x{18cff}\x{1b132}\x{1b155}\x{1df25}-\x{1df2a})"
    R"(\x{1e030}-\x{1e06d}\x{1e4d0}-\x{1e4eb}\x{1e5d0}-\x{1e5ed}\x{1e5f0}\x{2b739}\x{2ebf0}-\x{2ee5d}\x{31350}-\x{323af})";
constexpr std::string_view new_numbers =
    R"(\x{10d40}-\x{10d49}\x{116d0}-\x{116e3}\x{11bf0}-\x{11bf9}\x{11f50}-\x{11f59}\x{16130}-\x{16139}\x{16d70}-\x{16d79})"
    R"(\x{1ccf0}-\x{1ccf9}\x{1d2c0}-\x{1d2d3}\x{1e4f0}-\x{1e4f9}\x{1e5f1}-\x{1e5fa})";

// The spelling with \s, \S, \p{L} and \p{N} replaced by what the package's engine means by them.
std::string for_pcre2(std::string_view spelling) {
    std::string out;
    bool in_class = false;
    const auto extended = [&](std::string_view name, std::string_view more) {
        return fmt::format("{}{}{}{}", in_class ? "" : "[", name, more, in_class ? "" : "]");
    };
    for (size_t i = 0; i < spelling.size();) {
        const std::string_view rest = spelling.substr(i);
        if (rest.starts_with(R"(\p{L})") || rest.starts_with(R"(\p{N})")) {
            out += extended(rest.substr(0, 5), rest[3] == 'L' ? new_letters : new_numbers);
            i += 5;
        } else if (rest.starts_with(R"(\s)") || rest.starts_with(R"(\S)")) {
            out += rest[1] == 's' ? R"(\p{White_Space})" : R"(\P{White_Space})";
            i += 2;
        } else {
            in_class = rest[0] == '[' || (in_class && rest[0] != ']');
            out += spelling[i++];
        }
    }
    return out;
}

std::string message_of(int error) {
    std::array<PCRE2_UCHAR, 256> text{};
    pcre2_get_error_message(error, text.data(), text.size());
    return reinterpret_cast<const char*>(text.data());
}

}  // namespace

std::optional<WordPattern> word_pattern(std::string_view regex) {
    for (size_t i = 0; i < spellings.size(); ++i)
        if (regex == spellings[i]) return static_cast<WordPattern>(i);
    return std::nullopt;
}

Pretokenizer::Pretokenizer(WordPattern pattern) : pattern_(pattern) {
    const std::string text = for_pcre2(spellings[static_cast<size_t>(pattern)]);
    int error = 0;
    PCRE2_SIZE offset = 0;
    regex_ = {pcre2_compile(reinterpret_cast<PCRE2_SPTR>(text.data()), text.size(), PCRE2_UTF | PCRE2_UCP, &error, &offset, nullptr), pcre2_code_free};
    if (!regex_)
        refuse(Exit::data, "this machine's PCRE2 refuses the tokenizer's pattern at position {}: {}; PCRE2 10.40 or newer is needed", offset,
               message_of(error));
    jit_ = pcre2_jit_compile(regex_.get(), PCRE2_JIT_COMPLETE) == 0;
}

WordScanner::WordScanner(const Pretokenizer& pretokenizer)
    : pretokenizer_(pretokenizer),
      stack_(pcre2_jit_stack_create(64 << 10, 64 << 20, nullptr), pcre2_jit_stack_free),  // beyond the 32 KiB that JIT code finds on the machine's stack
      context_(pcre2_match_context_create(nullptr), pcre2_match_context_free),
      match_(pcre2_match_data_create(1, nullptr), pcre2_match_data_free) {
    pcre2_jit_stack_assign(context_.get(), nullptr, stack_.get());
}

bool WordScanner::next(std::string_view& word) {
    if (position_ == text_.size()) return false;
    const auto* subject = reinterpret_cast<PCRE2_SPTR>(text_.data());
    const auto match = pretokenizer_.jit_ ? pcre2_jit_match : pcre2_match;
    const int found = match(pretokenizer_.regex_.get(), subject, text_.size(), position_, PCRE2_NO_UTF_CHECK, match_.get(), context_.get());
    if (found < 0)
        refuse(Exit::data, "the tokenizer's pattern failed at byte {} of {} bytes of text: {}", position_, text_.size(), message_of(found));
    // Every code point belongs to some alternative of each pattern, so words leave no gaps.
    const PCRE2_SIZE* bounds = pcre2_get_ovector_pointer(match_.get());
    TRIFOLD_ASSERT(bounds[0] == position_ && bounds[1] > position_);
    word = text_.substr(position_, bounds[1] - position_);
    position_ = bounds[1];
    return true;
}

// GPT-2: no word has white space after anything else, so every word ends there.
// Llama-3, Qwen2: a run of white space up to its last line feed, or punctuation and the line feeds behind it, ends a
// word, whatever follows. (Not in GPT-2, where a run of white space leaves its last character to the next word.)
size_t last_word_break(std::string_view text, WordPattern pattern) {
    for (size_t i = text.size(); i-- > 1;) {
        const std::string_view rest = text.substr(i);
        if (pattern == WordPattern::gpt2) {
            if ((rest[0] == ' ' || rest[0] == '\n') && !is_white_space(last_code_point(text.substr(0, i)))) return i;
        } else if (text[i - 1] == '\n') {
            const size_t space = leading_space(rest);
            const bool last_feed_of_run = rest.substr(0, space).find_first_of("\r\n") == std::string_view::npos;
            if (last_feed_of_run && space < rest.size() && incomplete_tail(text) < rest.size() - space) return i;
        }
    }
    return 0;
}

}  // namespace trifold
