// data/json_document.h   One line of a JSONL file as a document: what is text, and which of it is prompt.
//
//   {"text": "..."}                               all of it is learned
//   {"prompt": "...", "completion": "..."}        the completion is learned; nothing is put between the two
//   {"messages": [{"role": "user", "content": "..."}, ...]}    what the assistant says is learned, with its end mark
//
// Messages are laid out as the tokenizer's special tokens tell; no system message is invented:
//   <|im_start|>, <|im_end|> (ChatML, Qwen2)                        <|im_start|>ROLE\nCONTENT<|im_end|>\n
//   <|start_header_id|>, <|end_header_id|>, <|eot_id|> (Llama-3)    <|start_header_id|>ROLE<|end_header_id|>\n\nCONTENT<|eot_id|>, trimmed
//   none of these                                                   ROLE: CONTENT\n
#pragma once
#include <string>
#include <string_view>
#include <vector>

#include "data/tokenizer.h"

namespace trifold {

struct Segment {
    std::string text;
    bool prompt = false;
    SpecialText special = SpecialText::match;
};

// Neighbouring segments differ in how they are treated, so each is encoded on its own: the border between prompt and answer is a border
// between tokens, as it is when a model is asked. `special` is for what the document says; the layout's own tokens always match. Problems
// do not name the place; the caller knows it.
std::vector<Segment> parse_json_document(std::string_view line, const Tokenizer& tokenizer, const std::string& text_key, SpecialText special);

}  // namespace trifold
