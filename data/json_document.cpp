// data/json_document.cpp
#include "data/json_document.h"

#include <fmt/format.h>

#include <nlohmann/json.hpp>

#include "base/error.h"
#include "data/utf8.h"

namespace trifold {

namespace {

using nlohmann::json;

[[noreturn]] void refuse(const std::string& why) { throw Problem(Exit::data, why); }

const std::string& string_at(const json& object, const char* key) {
    const auto found = object.find(key);
    if (found == object.end()) refuse(fmt::format("\"{}\" is missing", key));
    if (!found->is_string()) refuse(fmt::format("\"{}\" is a {}, not a string", key, found->type_name()));
    return found->get_ref<const std::string&>();
}

class Layout {
public:
    explicit Layout(SpecialText special) : special_(special) {}
    void prompt(std::string_view text) { add(text, true, special_); }
    void answer(std::string_view text) { add(text, false, special_); }
    void mark(std::string_view text, bool is_prompt) { add(text, is_prompt, SpecialText::match); }
    std::vector<Segment> take() { return std::move(segments_); }

private:
    void add(std::string_view text, bool is_prompt, SpecialText special) {
        if (text.empty()) return;
        const bool joins =
            !segments_.empty() && segments_.back().prompt == is_prompt && segments_.back().special == special;
        if (!joins) segments_.push_back({"", is_prompt, special});
        segments_.back().text += text;
    }
    SpecialText special_;
    std::vector<Segment> segments_;
};

std::string_view trimmed(std::string_view text) {
    text.remove_prefix(leading_space(text));
    text.remove_suffix(trailing_space(text));
    return text;
}

void add_message(const std::string& role, std::string_view content, const Tokenizer& tokenizer, Layout& layout) {
    const bool prompt = role != "assistant";
    const auto say = [&](std::string_view text) { prompt ? layout.prompt(text) : layout.answer(text); };
    if (tokenizer.id_of("<|im_start|>") >= 0 && tokenizer.id_of("<|im_end|>") >= 0) {
        layout.mark(fmt::format("<|im_start|>{}\n", role), true);
        say(content);
        layout.mark("<|im_end|>", prompt);
        layout.mark("\n", true);
    } else if (tokenizer.id_of("<|start_header_id|>") >= 0 && tokenizer.id_of("<|end_header_id|>") >= 0 &&
               tokenizer.id_of("<|eot_id|>") >= 0) {
        layout.mark(fmt::format("<|start_header_id|>{}<|end_header_id|>\n\n", role), true);
        say(trimmed(content));
        layout.mark("<|eot_id|>", prompt);
    } else {
        layout.mark(fmt::format("{}:", role), true);
        say(fmt::format(" {}\n", content));
    }
}

void add_messages(const json& messages, const Tokenizer& tokenizer, Layout& layout) {
    if (!messages.is_array()) refuse(fmt::format("\"messages\" is a {}, not a list", messages.type_name()));
    for (const json& message : messages) {
        if (!message.is_object()) refuse("a message is not an object with \"role\" and \"content\"");
        add_message(string_at(message, "role"), string_at(message, "content"), tokenizer, layout);
    }
}

}  // namespace

std::vector<Segment> parse_json_document(std::string_view line, const Tokenizer& tokenizer,
                                         const DocumentOptions& options) {
    json document;
    try {
        document = json::parse(line);
    } catch (const json::exception& error) {
        refuse(fmt::format("not JSON: {}", error.what()));
    }
    if (!document.is_object()) refuse("not a JSON object");
    Layout layout(options.special);
    if (document.contains("messages")) {
        add_messages(document["messages"], tokenizer, layout);
    } else if (document.contains("prompt") && document.contains("completion")) {
        layout.prompt(string_at(document, "prompt"));
        layout.answer(string_at(document, "completion"));
    } else if (document.contains(options.text_key)) {
        layout.answer(string_at(document, options.text_key.c_str()));
    } else {
        refuse(
            fmt::format("has neither \"{}\" nor \"prompt\" and \"completion\" nor \"messages\"; --text-key names the "
                        "key of the text",
                        options.text_key));
    }
    return layout.take();
}

}  // namespace trifold
