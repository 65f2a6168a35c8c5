// data/tokenizer_json.h   Reads a Hugging Face tokenizer.json of the byte-level BPE family, or says why not.
//
// Taken: model BPE without dropout, affixes, byte_fallback or fused unknowns, its merges as strings or pairs,
// ignore_merges; normalizer none or NFC; pre-tokenizer ByteLevel, or Split by the Llama-3 or Qwen2 pattern, then
// ByteLevel; added tokens with lstrip and rstrip; post-processor none, ByteLevel or a template. `truncation` and
// `padding` describe batches of an application, not the text, and are left alone.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

#include "data/added_tokens.h"
#include "data/bpe.h"
#include "data/pretokenizer.h"

namespace trifold {

enum class Normalizer : uint8_t { none, nfc };

struct TokenizerFile {
    BpeTable bpe;
    std::vector<std::string> pieces;  // bytes of each id; empty for ids that are not used
    std::vector<AddedToken> added;
    Normalizer normalizer = Normalizer::none;
    WordPattern pattern = WordPattern::gpt2;
    bool prefix_space = false;  // a space is put before text that does not begin with one
    std::vector<int32_t> document_prefix, document_suffix;
};

// Everything that is wrong or not supported is a Problem(Exit::data) that names the file and the part.
TokenizerFile read_tokenizer_json(const std::string& path);

}  // namespace trifold
