// data/json_document.cpp
#include "data/json_document.h"

#include "base/json.h"
#include "base/refuse.h"
#include "data/utf8.h"

namespace trifold {
namespace {

using json = JsonValue;

const std::string& string_at(const json& object, const std::string& key) {
    const auto found = object.find(key);
    if (found == object.end()) refuse(Exit::data, "\"{}\" is missing", key);
    if (!found->is_string()) refuse(Exit::data, "\"{}\" is a {}, not a string", key, found->type_name());
    return found->get_ref<const std::string&>();
}

void add(std::vector<Segment>& to, std::string_view text, bool prompt, SpecialText special) {
    if (text.empty()) return;
    if (to.empty() || to.back().prompt != prompt || to.back().special != special) to.push_back({"", prompt, special});
    to.back().text += text;
}

std::string_view trimmed(std::string_view text) {
    text.remove_prefix(leading_space(text));
    text.remove_suffix(trailing_space(text));
    return text;
}

void add_message(const std::string& role, std::string_view content, const Tokenizer& tokenizer, SpecialText special, std::vector<Segment>& to) {
    const bool prompt = role != "assistant";
    const auto say = [&](std::string_view text) { add(to, text, prompt, special); };
    const auto mark = [&](std::string_view text, bool is_prompt) { add(to, text, is_prompt, SpecialText::match); };
    const auto has = [&](std::string_view token) { return tokenizer.id_of(token) >= 0; };
    if (has("<|im_start|>") && has("<|im_end|>")) {
        mark(fmt::format("<|im_start|>{}\n", role), true);
        say(content);
        mark("<|im_end|>", prompt);
        mark("\n", true);
    } else if (has("<|start_header_id|>") && has("<|end_header_id|>") && has("<|eot_id|>")) {
        mark(fmt::format("<|start_header_id|>{}<|end_header_id|>\n\n", role), true);
        say(trimmed(content));
        mark("<|eot_id|>", prompt);
    } else {
        mark(fmt::format("{}:", role), true);
        say(fmt::format(" {}\n", content));
    }
}

}  // namespace

std::vector<Segment> parse_json_document(std::string_view line, const Tokenizer& tokenizer, const std::string& text_key, SpecialText special) {
    const auto document = parse_json<json>(line, "the JSON", {.code = Exit::data, .first_byte = 0});
    if (!document.is_object()) refuse(Exit::data, "not a JSON object");
    std::vector<Segment> segments;
    if (document.contains("messages")) {
        const json& messages = document["messages"];
        if (!messages.is_array()) refuse(Exit::data, "\"messages\" is a {}, not a list", messages.type_name());
        for (const json& message : messages) {
            if (!message.is_object()) refuse(Exit::data, "a message is not an object with \"role\" and \"content\"");
            add_message(string_at(message, "role"), string_at(message, "content"), tokenizer, special, segments);
        }
    } else if (document.contains("prompt") && document.contains("completion")) {
        add(segments, string_at(document, "prompt"), true, special);
        add(segments, string_at(document, "completion"), false, special);
    } else if (document.contains(text_key)) {
        add(segments, string_at(document, text_key), false, special);
    } else {
        refuse(Exit::data, "has neither \"{}\" nor \"prompt\" and \"completion\" nor \"messages\"; --text-key names the key of the text", text_key);
    }
    return segments;
}

}  // namespace trifold
