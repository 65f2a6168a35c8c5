// base/json.h   JSON that others wrote, read strictly. For .cpp files: it brings the library along.
#pragma once
#include <algorithm>
#include <nlohmann/json.hpp>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "base/refuse.h"

namespace trifold {

using JsonValue = nlohmann::json;
using OrderedJson = nlohmann::ordered_json;  // keeps the order of the keys, but each look-up is a search

struct JsonRules {
    Exit code = Exit::usage;
    bool comments = false;    // as in C and C++
    int64_t first_byte = -1;  // of the text in a binary file, whose errors have bytes in place of lines and columns
};

inline std::string place_in(std::string_view text, size_t byte, const JsonRules& rules) {
    const size_t at = std::min(byte > 0 ? byte - 1 : 0, text.size());
    if (rules.first_byte >= 0) return fmt::format("byte {}", rules.first_byte + static_cast<int64_t>(at));
    const size_t newline = at == 0 ? std::string_view::npos : text.rfind('\n', at - 1);
    const auto line = 1 + std::count(text.begin(), text.begin() + static_cast<std::ptrdiff_t>(at), '\n');
    return fmt::format("line {}, column {}", line, newline == std::string_view::npos ? at + 1 : at - newline);
}

// The library's message without its own name, error number and position, and without the end of a long quotation.
inline std::string reason_of(const std::string& message) {
    constexpr size_t most = 200;
    const size_t syntax = message.find("syntax error"), bracket = message.find("] ");
    const std::string reason = message.substr(syntax != std::string::npos ? syntax : bracket != std::string::npos ? bracket + 2 : 0);
    return reason.size() <= most ? reason : reason.substr(0, most) + " ...";
}

// Parses all of `text`; `where` names it in errors. A key given twice in one object is refused: readers disagree on which of the two counts.
template <class Json>
Json parse_json(std::string_view text, const std::string& where, const JsonRules& rules) {
    using Event = typename Json::parse_event_t;
    constexpr int max_depth = 64;
    struct Object {
        std::set<std::string> keys;
        const std::string* last = nullptr;  // whose value is being read
    };
    std::vector<Object> open;
    const auto check = [&](int depth, Event event, Json& parsed) {
        if (depth > max_depth) refuse(rules.code, "{}: JSON nested deeper than {}", where, max_depth);
        if (event == Event::object_start) open.emplace_back();
        if (event == Event::object_end) open.pop_back();
        if (event != Event::key) return true;
        const auto [key, is_new] = open.back().keys.insert(parsed.template get<std::string>());
        open.back().last = &*key;
        if (is_new) return true;
        std::string path;
        for (const Object& o : open) path += (path.empty() ? "" : ".") + *o.last;
        refuse(rules.code, "{}: the key {} appears twice; keep one", where, path);
    };
    try {
        return Json::parse(text, check, /*allow_exceptions=*/true, rules.comments);
    } catch (const typename Json::parse_error& e) {
        refuse(rules.code, "{}, {}: {}", where, place_in(text, e.byte, rules), reason_of(e.what()));
    } catch (const typename Json::exception& e) {  // a number out of range
        refuse(rules.code, "{}: {}", where, reason_of(e.what()));
    }
}

}  // namespace trifold
