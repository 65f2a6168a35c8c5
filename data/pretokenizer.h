// data/pretokenizer.h   Cuts text into words before byte-pair merging: the pre-tokenizers of GPT-2, Llama-3 and Qwen2.
//
// Results must equal those of the `tokenizers` package, whose patterns run through another engine with its own Unicode tables. So \s is spelt
// out as the property White_Space (PCRE2's \s has U+180E as well), and \p{L} and \p{N} are extended by what Unicode 15 and 16 added, so that
// the system's PCRE2 (Unicode 14 in Debian 12) does not change a data set.
#pragma once
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>

struct pcre2_real_code_8;
struct pcre2_real_jit_stack_8;
struct pcre2_real_match_context_8;
struct pcre2_real_match_data_8;

namespace trifold {

enum class WordPattern : uint8_t { gpt2, llama3, qwen2 };

// The pattern that a tokenizer.json spells in this way, if we know it. Another spelling is another pattern: it is not guessed.
std::optional<WordPattern> word_pattern(std::string_view regex);

class Pretokenizer {
public:
    explicit Pretokenizer(WordPattern pattern);
    WordPattern pattern() const { return pattern_; }

private:
    friend class WordScanner;
    WordPattern pattern_;
    std::shared_ptr<pcre2_real_code_8> regex_;
    bool jit_ = false;
};

// Walks over the words of one text after another. One per thread; the pretokenizer must outlive it.
class WordScanner {
public:
    explicit WordScanner(const Pretokenizer& pretokenizer);

    // The text must be well-formed UTF-8 and must stay where it is until the last word was taken.
    void start(std::string_view text) { text_ = text, position_ = 0; }
    // The next word; the words joined are the text. False at the end.
    bool next(std::string_view& word);

private:
    const Pretokenizer& pretokenizer_;
    std::shared_ptr<pcre2_real_jit_stack_8> stack_;
    std::shared_ptr<pcre2_real_match_context_8> context_;
    std::shared_ptr<pcre2_real_match_data_8> match_;
    std::string_view text_;
    size_t position_ = 0;
};

// The last position where `text` can be cut so that the words of both parts are the words of the whole, whatever
// follows; 0 when there is none that is easily known. Works on any bytes.
size_t last_word_break(std::string_view text, WordPattern pattern);

}  // namespace trifold
