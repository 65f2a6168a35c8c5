// data/json_document.h   One line of a JSONL file as a document: what is text, and which of it is prompt.
//
//   {"text": "..."}                               all of it is learned
//   {"prompt": "...", "completion": "..."}        the completion is learned; nothing is put between the two
//   {"messages": [{"role": "user", "content": "..."}, ...]}    what the assistant says is learned, with its end mark
//
// Messages are laid out as the tokenizer's special tokens tell:
//   <|im_start|>, <|im_end|>                          <|im_start|>ROLE\nCONTENT<|im_end|>\n                    (ChatML,
//   Qwen2)
//   <|start_header_id|>, <|end_header_id|>, <|eot_id|> <|start_header_id|>ROLE<|end_header_id|>\n\nCONTENT<|eot_id|>,
//   content
//                                                     trimmed                                              (Llama-3)
//   none of these                                     ROLE: CONTENT\n
// No system message is invented.
#pragma once
#include <cstdint>
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

struct DocumentOptions {
    std::string text_key = "text";
    SpecialText special = SpecialText::match;  // for what the document says; the layout's own tokens always match
};

// Neighbouring segments differ in how they are treated, so each is encoded on its own: the border between prompt and
// answer is a border between tokens, as it is when a model is asked. Problems do not name the place; the caller knows
// it.
std::vector<Segment> parse_json_document(std::string_view line, const Tokenizer& tokenizer,
                                         const DocumentOptions& options);

}  // namespace trifold
