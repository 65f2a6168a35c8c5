// data/tokenizer.cpp   The order of the rules is that of the package: added tokens in the raw text, normalization,
// added tokens in the normalized text, prefix space, words, merges.
#include "data/tokenizer.h"

#include <algorithm>
#include <array>
#include <limits>
#include <optional>
#include <utility>

#include "base/refuse.h"
#include "data/bpe.h"
#include "data/pretokenizer.h"
#include "data/tokenizer_json.h"
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
    return token.lstrip || token.rstrip ||
           std::any_of(
               token.content.begin(), token.content.end(), [](char c) { return is_white_space(static_cast<uint8_t>(c)); });
}

// What the byte-level BPE part of a tokenizer needs to encode.
struct BpeRules {
    Bpe bpe;
    Pretokenizer pretokenizer;
    Normalizer normalizer;
    bool prefix_space;
    AddedTokens raw_tokens, normalized_tokens;
    bool cuttable;

    explicit BpeRules(TokenizerFile& file)
        : bpe(std::move(file.bpe)),
          pretokenizer(file.pattern),
          normalizer(file.normalizer),
          prefix_space(file.prefix_space),
          raw_tokens(select(file, false)),
          normalized_tokens(select(file, true)),
          cuttable(std::none_of(file.added.begin(), file.added.end(), crosses_word_breaks)) {}
};

}  // namespace

struct Tokenizer::Tables {
    std::string name;
    TokenizerFile file;
    int32_t end = -1;
    std::optional<BpeRules> rules;  // none: bytes

    int32_t id_of(std::string_view token) const {
        for (const AddedToken& added : file.added)
            if (added.content == token) return added.id;
        return -1;
    }
    int32_t choose_end(const std::string& wanted) const {
        if (!wanted.empty()) {
            const int32_t id = id_of(wanted);
            if (id < 0) refuse(Exit::data, "tokenizer {} has no added token \"{}\" to end documents with", name, wanted);
            return id;
        }
        if (!file.document_suffix.empty()) return file.document_suffix.back();
        for (const char* usual : {"<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>"})
            if (const int32_t id = id_of(usual); id >= 0) return id;
        return -1;
    }
};

Tokenizer Tokenizer::load(const std::string& name, const std::string& end_of_document) {
    auto tables = std::make_shared<Tables>();
    tables->name = name;
    if (name == "bytes") {
        if (!end_of_document.empty())
            refuse(Exit::usage, "the byte tokenizer ends documents with id {}; it has no token \"{}\"", bytes_end, end_of_document);
        for (int b = 0; b < 256; ++b) tables->file.pieces.emplace_back(1, static_cast<char>(b));
        tables->file.pieces.emplace_back();
        tables->end = bytes_end;
    } else {
        tables->file = read_tokenizer_json(name);
        tables->end = tables->choose_end(end_of_document);
        tables->rules.emplace(tables->file);
    }
    return Tokenizer(std::move(tables));
}

Tokenizer::Tokenizer(std::shared_ptr<const Tables> tables) : tables_(std::move(tables)) {}

const std::string& Tokenizer::name() const { return tables_->name; }
bool Tokenizer::is_bytes() const { return !tables_->rules; }
int64_t Tokenizer::vocab_size() const { return std::ssize(tables_->file.pieces); }
const std::vector<int32_t>& Tokenizer::document_prefix() const { return tables_->file.document_prefix; }
int32_t Tokenizer::id_of(std::string_view token) const { return tables_->id_of(token); }

int32_t Tokenizer::end_of_document() const {
    if (tables_->end >= 0) return tables_->end;
    refuse(Exit::data,
           "tokenizer {} does not say which token ends a document, and it has none of <|endoftext|>, <|end_of_text|>, </s>, <eos>; "
           "name one with --eod",
           tables_->name);
}

std::vector<int32_t> Tokenizer::encode(std::string_view text, SpecialText special) const {
    std::vector<int32_t> ids;
    Encoder(*this).encode(text, ids, special);
    return ids;
}

std::string_view Tokenizer::piece(int32_t id) const {
    if (id < 0 || id >= vocab_size()) return {};
    return tables_->file.pieces[static_cast<size_t>(id)];
}

std::string Tokenizer::decode(std::span<const int32_t> ids) const {
    std::string text;
    for (const int32_t id : ids) text += piece(id);
    return text;
}

size_t Tokenizer::last_cut(std::string_view text) const {
    if (is_bytes()) return text.size();
    const BpeRules& rules = *tables_->rules;
    if (!rules.cuttable) return 0;
    size_t cut = last_word_break(text, rules.pretokenizer.pattern());
    // The second part must not look like a text that needs a prefix space.
    while (rules.prefix_space && cut > 0 && text[cut] != ' ') cut = last_word_break(text.substr(0, cut), rules.pretokenizer.pattern());
    return cut;
}

struct Encoder::State {
    const Tokenizer::Tables& tables;
    std::optional<WordScanner> words;
    std::optional<BpeEncoder> bpe;

    // Text without added tokens, normalized.
    void encode_words(std::string_view text, std::vector<int32_t>& ids) {
        std::string with_space;
        if (tables.rules->prefix_space && text[0] != ' ') text = with_space = " " + std::string(text);
        words->start(text);
        for (std::string_view word; words->next(word);) bpe->encode(word, ids);
    }
    void encode(std::string_view raw, std::vector<int32_t>& ids, SpecialText special) {
        const BpeRules& rules = *tables.rules;
        const auto append = [&](int32_t id) { ids.push_back(id); };
        const auto words_of = [&](std::string_view piece) { encode_words(piece, ids); };
        const auto split = [&](std::string_view text) { rules.normalized_tokens.split(text, special, words_of, append); };
        const auto normalize = [&](std::string_view text) { rules.normalizer == Normalizer::nfc ? split(nfc(text)) : split(text); };
        rules.raw_tokens.split(raw, special, normalize, append);
    }
};

Encoder::Encoder(const Tokenizer& tokenizer) : state_(new State{*tokenizer.tables_, {}, {}}) {
    if (tokenizer.is_bytes()) return;
    state_->words.emplace(state_->tables.rules->pretokenizer);
    state_->bpe.emplace(state_->tables.rules->bpe);
}

Encoder::~Encoder() = default;

void Encoder::encode(std::string_view text, std::vector<int32_t>& ids, SpecialText special) {
    if (!state_->tables.rules) {
        const auto added = ids.insert(ids.end(), text.size(), 0);
        std::transform(text.begin(), text.end(), added, [](char c) { return static_cast<uint8_t>(c); });
        return;
    }
    if (const size_t bad = invalid_utf8(text); bad != std::string_view::npos)
        refuse(Exit::data, "text is not UTF-8 at byte offset {} (0x{:02x}); tokenizer {} needs UTF-8", bad, static_cast<uint8_t>(text[bad]),
               state_->tables.name);
    if (text.size() > static_cast<size_t>(std::numeric_limits<int32_t>::max()))
        refuse(Exit::data, "a text of {} bytes is too long to be encoded at once; the limit is 2147483647", text.size());
    state_->encode(text, ids, special);
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
