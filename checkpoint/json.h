// checkpoint/json.h   JSON of files that others wrote: strict, with the file and the byte in every message.
#pragma once
#include <nlohmann/json.hpp>
#include <set>
#include <string>
#include <vector>

#include "base/refuse.h"

namespace trifold {

using JsonValue = nlohmann::json;
using OrderedJson = nlohmann::ordered_json;  // for writing: keeps the order of the keys, but each look-up is a search

// Parses all of `text`. A key given twice in one object is refused: readers disagree on which of the two counts.
// `origin` is the file and `base` the byte in it at which the text starts.
inline JsonValue parse_file_json(const std::string& text, const std::string& origin, int64_t base = 0) {
    constexpr int max_depth = 64;
    std::vector<std::set<std::string>> open_objects;
    const auto check = [&](int depth, JsonValue::parse_event_t event, JsonValue& value) {
        using Event = JsonValue::parse_event_t;
        if (depth > max_depth) refuse(Exit::checkpoint, "{}: JSON nested deeper than {}", origin, max_depth);
        if (event == Event::object_start) open_objects.emplace_back();
        if (event == Event::object_end) open_objects.pop_back();
        if (event == Event::key && !open_objects.back().insert(value.get<std::string>()).second)
            refuse(Exit::checkpoint, "{}: the key '{}' is given twice", origin, value.get<std::string>());
        return true;
    };
    try {
        return JsonValue::parse(text, check);
    } catch (const JsonValue::parse_error& e) {
        refuse(Exit::checkpoint, "{}: not valid JSON at byte {}", origin, base + static_cast<int64_t>(e.byte));
    } catch (const JsonValue::exception& e) {  // a number out of range
        refuse(Exit::checkpoint, "{}: not valid JSON ({})", origin, e.what());
    }
}

}  // namespace trifold
