// data/tokenizer.cpp   The order of the rules is that of the package: added tokens in the raw text, normalization,
// added tokens in the normalized text, prefix space, words, merges.
#include "data/tokenizer.h"

#include <algorithm>
#include <limits>
#include <utility>

#include "base/refuse.h"
#include "data/utf8.h"

namespace trifold {
namespace {

constexpr int32_t bytes_end = 256;

AddedTokens select(const TokenizerFile& file, bool normalized) {
    std::vector<AddedToken> chosen;
    for (AddedToken token : file.added) {
        if (token.normalized != normalized) continue;
        if (normalized && file.normalizer == Normalizer::nfc) token.content = nfc(token.content);
        chosen.push_back(std::move(token));
    }
    return AddedTokens(std::move(chosen));
}

// A token that has white space in it or takes some from its neighbourhood may lie across any word break.
bool crosses_word_breaks(const AddedToken& token) {
    return token.lstrip || token.rstrip || std::ranges::any_of(token.content, [](char c) { return is_white_space(static_cast<uint8_t>(c)); });
}

}  // namespace

Tokenizer Tokenizer::load(const std::string& name, const std::string& end_of_document) {
    Tokenizer t;
    t.name_ = name;
    if (name == "bytes") {
        if (!end_of_document.empty())
            refuse(Exit::usage, "the byte tokenizer ends documents with id {}; it has no token \"{}\"", bytes_end, end_of_document);
        for (int b = 0; b < 256; ++b) t.file_.pieces.emplace_back(1, static_cast<char>(b));
        t.file_.pieces.emplace_back();
        t.end_ = bytes_end;
        return t;
    }
    TokenizerFile& file = t.file_ = read_tokenizer_json(name);
    if (!end_of_document.empty()) {
        t.end_ = t.id_of(end_of_document);
        if (t.end_ < 0) refuse(Exit::data, "tokenizer {} has no added token \"{}\" to end documents with", name, end_of_document);
    } else if (!file.document_suffix.empty()) {
        t.end_ = file.document_suffix.back();
    } else {
        for (const char* usual : {"<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>"})
            if (t.end_ < 0) t.end_ = t.id_of(usual);
    }
    t.rules_.emplace(Rules{Bpe(std::move(file.bpe)), Pretokenizer(file.pattern), select(file, false), select(file, true),
                           std::ranges::none_of(file.added, crosses_word_breaks)});
    return t;
}

int32_t Tokenizer::id_of(std::string_view token) const {
    const auto found = std::ranges::find(file_.added, token, &AddedToken::content);
    return found == file_.added.end() ? -1 : found->id;
}

int32_t Tokenizer::end_of_document() const {
    if (end_ >= 0) return end_;
    refuse(Exit::data,
           "tokenizer {} does not say which token ends a document, and it has none of <|endoftext|>, <|end_of_text|>, </s>, <eos>; "
           "name one with --eod",
           name_);
}

std::vector<int32_t> Tokenizer::encode(std::string_view text, SpecialText special) const {
    std::vector<int32_t> ids;
    Encoder(*this).encode(text, ids, special);
    return ids;
}

std::string_view Tokenizer::piece(int32_t id) const {
    if (id < 0 || id >= vocab_size()) return {};
    return file_.pieces[static_cast<size_t>(id)];
}

size_t Tokenizer::last_cut(std::string_view text) const {
    if (is_bytes()) return text.size();
    if (!rules_->cuttable) return 0;
    size_t cut = last_word_break(text, file_.pattern);
    // The second part must not look like a text that needs a prefix space.
    while (file_.prefix_space && cut > 0 && text[cut] != ' ') cut = last_word_break(text.substr(0, cut), file_.pattern);
    return cut;
}

Encoder::Encoder(const Tokenizer& tokenizer) : tokenizer_(tokenizer) {
    if (tokenizer.is_bytes()) return;
    words_.emplace(tokenizer.rules_->pretokenizer);
    bpe_.emplace(tokenizer.rules_->bpe);
}

// Text without added tokens, normalized.
void Encoder::encode_words(std::string_view text, std::vector<int32_t>& ids) {
    std::string with_space;
    if (tokenizer_.file_.prefix_space && text[0] != ' ') text = with_space = " " + std::string(text);
    words_->start(text);
    for (std::string_view word; words_->next(word);) bpe_->encode(word, ids);
}

void Encoder::encode(std::string_view text, std::vector<int32_t>& ids, SpecialText special) {
    if (tokenizer_.is_bytes()) {
        const auto added = ids.insert(ids.end(), text.size(), 0);
        std::transform(text.begin(), text.end(), added, [](char c) { return static_cast<uint8_t>(c); });
        return;
    }
    if (const size_t bad = invalid_utf8(text); bad != std::string_view::npos)
        refuse(Exit::data, "text is not UTF-8 at byte offset {} (0x{:02x}); tokenizer {} needs UTF-8", bad, static_cast<uint8_t>(text[bad]),
               tokenizer_.name());
    if (text.size() > static_cast<size_t>(std::numeric_limits<int32_t>::max()))
        refuse(Exit::data, "a text of {} bytes is too long to be encoded at once; the limit is 2147483647", text.size());
    const Tokenizer::Rules& rules = *tokenizer_.rules_;
    const auto append = [&](int32_t id) { ids.push_back(id); };
    const auto words_of = [&](std::string_view piece) { encode_words(piece, ids); };
    const auto split = [&](std::string_view normal) { rules.normalized_tokens.split(normal, special, words_of, append); };
    const auto normalize = [&](std::string_view raw) { tokenizer_.file_.normalizer == Normalizer::nfc ? split(nfc(raw)) : split(raw); };
    rules.raw_tokens.split(text, special, normalize, append);
}

std::string StreamDecoder::push(int32_t id) {
    pending_ += tokenizer_.piece(id);
    const size_t keep = incomplete_tail(pending_);
    std::string ready = pending_.substr(0, pending_.size() - keep);
    pending_.erase(0, ready.size());
    return ready;
}

std::string StreamDecoder::finish() { return std::exchange(pending_, {}); }

}  // namespace trifold
