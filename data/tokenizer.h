// data/tokenizer.h   Text to token ids and back.
//
//   bytes            257 ids: every byte is its own token, 256 ends a document. Needs no file, takes any input.
//   tokenizer.json   byte-level BPE of a Hugging Face tokenizer.json, with the ids that the `tokenizers` package gives. What the file asks
//                    for and we do not do exactly (tokenizer_json.h has the list) is refused.
//
// A document is: prefix (the tokens that the file's post-processor puts first, Llama-3's <|begin_of_text|>), text, end.
#pragma once
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "data/tokenizer_json.h"

namespace trifold {

class Tokenizer {
public:
    // `name` is "bytes" or the path of a tokenizer.json. `end_of_document` names the token that ends a document; when it is empty, the
    // post-processor's last token does, or the first of <|endoftext|>, <|end_of_text|>, </s>, <eos> that exists.
    static Tokenizer load(const std::string& name, const std::string& end_of_document = "");

    const std::string& name() const { return name_; }
    bool is_bytes() const { return !rules_; }
    int64_t vocab_size() const { return std::ssize(file_.pieces); }  // every id is below it
    int32_t end_of_document() const;                                 // a Problem when the file has no such token
    const std::vector<int32_t>& document_prefix() const { return file_.document_prefix; }
    int32_t id_of(std::string_view token) const;  // of an added token; -1: none

    // The ids of one text, without prefix and end. Slow start: whoever encodes many texts keeps an Encoder.
    std::vector<int32_t> encode(std::string_view text, SpecialText special = SpecialText::match) const;
    // The bytes of one token; empty for ids that have none. Bytes of one character may be spread over several tokens.
    std::string_view piece(int32_t id) const;
    // The last position where `text` can be cut so that both parts, encoded apart, give the ids of the whole; 0: none found.
    size_t last_cut(std::string_view text) const;

private:
    friend class Encoder;
    // What the byte-level BPE part needs to encode.
    struct Rules {
        Bpe bpe;
        Pretokenizer pretokenizer;
        AddedTokens raw_tokens, normalized_tokens;
        bool cuttable;
    };
    std::string name_;
    TokenizerFile file_;
    int32_t end_ = -1;
    std::optional<Rules> rules_;  // none: bytes
};

// Encodes texts, one after another, and remembers words. One per thread; the tokenizer must outlive it.
class Encoder {
public:
    explicit Encoder(const Tokenizer& tokenizer);
    // Appends the ids. Text that is not UTF-8 is a Problem with the offset of its first bad byte (any text does for bytes).
    void encode(std::string_view text, std::vector<int32_t>& ids, SpecialText special = SpecialText::match);

private:
    void encode_words(std::string_view text, std::vector<int32_t>& ids);

    const Tokenizer& tokenizer_;
    std::optional<WordScanner> words_;  // none: bytes
    std::optional<BpeEncoder> bpe_;
};

// Decodes a stream of tokens for display: gives whole characters and keeps the beginning of an unfinished one.
class StreamDecoder {
public:
    explicit StreamDecoder(const Tokenizer& tokenizer) : tokenizer_(tokenizer) {}
    std::string push(int32_t id);
    std::string finish();  // what is left

private:
    const Tokenizer& tokenizer_;
    std::string pending_;
};

}  // namespace trifold
