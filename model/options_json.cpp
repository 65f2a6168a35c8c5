// model/options_json.cpp   Option values as JSON: reading with line and column, type and range checks, writing.
#include "model/options_json.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <sstream>

#include "base/json.h"
#include "base/text.h"
#include "model/options.h"

namespace trifold {
namespace {

Json parse_options(const std::string& text, const std::string& where) { return parse_json<Json>(text, where, {.comments = true}); }

// The keys directly inside `prefix`: of "" the sections, of "model." layers, hidden, ...
std::vector<std::string> keys_inside(const std::string& prefix) {
    std::vector<std::string> keys;
    for (const std::string& name : option_names()) {
        if (!name.starts_with(prefix)) continue;
        const std::string key = name.substr(prefix.size(), name.find('.', prefix.size()) - prefix.size());
        if (std::find(keys.begin(), keys.end(), key) == keys.end()) keys.push_back(key);
    }
    return keys;
}

[[noreturn]] void refuse_key(const std::string& name, const std::string& prefix, const std::string& where) {
    const std::string later = not_available_yet(name);
    if (!later.empty()) refuse(Exit::usage, "{}: {}", where, later);
    if (name.find('.', prefix.size()) != std::string::npos)
        refuse(Exit::usage, "{}: unknown key {}: sections nest, as in {{\"optim\": {{\"lr\": 3e-4}}}}", where, name);
    std::vector<std::string> candidates = option_names();
    for (const std::string& key : keys_inside(prefix))
        if (!find_option(prefix + key)) candidates.push_back(prefix + key);  // sections
    const std::string section = prefix.empty() ? "the sections" : "the keys of " + prefix.substr(0, prefix.size() - 1);
    const std::string all = fmt::format("{} are {}", section, join_words(keys_inside(prefix)));
    refuse(Exit::usage, "{}: unknown key {}: {}", where, name, suggestion(name, candidates, "", all));
}

// A resolved config.json says where its values came from. What nobody gave is not given by reading the file again either, else
// a second run would, for instance, write into the first one's checkpoint folder.
bool was_given(const Json& origins, const std::string& name) {
    const auto origin = origins.find(name);
    return origin == origins.end() || (*origin != "derived" && *origin != "default");
}

void collect(const Json& object, const std::string& prefix, const std::string& where, const Json& origins, std::vector<Assignment>& out) {
    for (const auto& [key, value] : object.items()) {
        const std::string name = prefix + key;
        if (name == "origin") continue;
        if (!was_given(origins, name)) continue;
        const bool dotted = key.find('.') != std::string::npos;
        if (const Option* option = dotted ? nullptr : find_option(name)) {
            out.push_back({option, value, fmt::format("{} in {}", name, where), where});
        } else if (dotted || keys_inside(name + ".").empty()) {
            refuse_key(name, prefix, where);
        } else if (!value.is_object()) {
            refuse(Exit::usage, "{} in {} must be an object with keys such as {}, not {}", name, where,
                   keys_inside(name + ".")[0], value.dump());
        } else {
            collect(value, name + ".", where, origins, out);
        }
    }
}

// One converter per type of option: a checked JSON value in, the stored value out.
struct Reader {
    const Details& details;
    const std::string& subject;
    const Json& value;

    [[noreturn]] void wrong(const std::string& needed) const {
        refuse(Exit::usage, "{} {}, not {}", subject, needed, value.dump(-1, ' ', false, Json::error_handler_t::replace));
    }
    void check_range(double x) const {
        if (!details.range.contains(x)) wrong(describe_range(details.range));
    }

    void into(int64_t& to) const {
        constexpr double most_exact = 9007199254740992.0;  // 2^53: every whole number up to here is a double
        const double number = value.is_number() ? value.get<double>() : 0;
        const bool whole = value.is_number_float() && std::floor(number) == number && std::abs(number) <= most_exact;  // 1e6
        if (!whole && !value.is_number_integer()) wrong("must be an integer");
        check_range(number);
        if (value.is_number_unsigned() && value.get<uint64_t>() > uint64_t{INT64_MAX}) wrong("must be an integer of 64 bits");
        to = value.get<int64_t>();
    }
    void into(uint64_t& to) const {
        if (value.is_number_unsigned()) {
            to = value.get<uint64_t>();
        } else {
            int64_t small = -1;
            if (value.is_number()) into(small);
            if (small < 0) wrong("must be an integer of at least 0");
            to = static_cast<uint64_t>(small);
        }
    }
    void into(double& to) const {
        if (!value.is_number() || !std::isfinite(value.get<double>())) wrong("must be a number");
        check_range(value.get<double>());
        to = value.get<double>();
    }
    void into(bool& to) const {
        const bool on = value == true || value == "on" || value == "true";
        if (!on && value != false && value != "off" && value != "false") wrong("must be on or off (true or false)");
        to = on;
    }
    void into(uint8_t& to) const {
        const std::vector<std::string> names = choices_of(details);
        const auto found =
            value.is_string() ? std::find(names.begin(), names.end(), value.get<std::string>()) : names.end();
        if (found == names.end()) wrong("must be one of " + join_words(names, " or "));
        to = static_cast<uint8_t>(found - names.begin());
    }
    void into(std::string& to) const {
        if (!value.is_string()) wrong("must be text");
        if (!is_utf8(value)) wrong("must be valid UTF-8");
        to = value.get<std::string>();
    }
    void into(std::vector<DataSource>& to) const {
        std::vector<DataSource> sources;
        const Json list = value.is_array() ? value : Json::array({value});
        for (const Json& entry : list) sources.push_back(source(entry));
        to = std::move(sources);
    }
    // [12, 13, 12], 12,13,12, one number, or the word for an empty list
    void into(std::vector<int64_t>& to) const {
        std::vector<int64_t> numbers;
        Json list = value.is_number() ? Json::array({value}) : value;
        if (value == details.derived) {
            list = Json::array();
        } else if (value.is_string()) {
            list = Json::array();
            std::istringstream parts(value.get<std::string>() + ",");  // so that the last part may be empty, and is then refused
            for (std::string part; std::getline(parts, part, ',');) list.push_back(number_or_text(part));
        }
        if (!list.is_array()) wrong("must be a list of integers, such as 12,13,12");
        for (const Json& entry : list) Reader{details, "an entry of " + subject, entry}.into(numbers.emplace_back());
        to = std::move(numbers);
    }

    // kind=nan,step=3, in any order; empty: none
    void into(Inject& to) const {
        const std::string text = value.is_string() ? value.get<std::string>() : "?";
        to = {};
        if (text.empty()) return;
        const std::string first = "kind=nan,step=", last = ",kind=nan";
        std::string step;
        if (text.starts_with(first)) step = text.substr(first.size());
        if (text.starts_with("step=") && text.ends_with(last)) step = text.substr(5, text.size() - 5 - last.size());
        const Json number = number_or_text(step);
        if (!number.is_number_unsigned() || number < 1 || number > INT64_MAX) wrong("must be kind=nan,step=N, with a step from 1");
        to = {.kind = InjectKind::nan, .step = number.get<int64_t>()};
    }

private:
    static bool is_utf8(const Json& text) {
        try {
            text.dump();
            return true;
        } catch (const Json::type_error&) {
            return false;
        }
    }
    DataSource source(const Json& entry) const {
        DataSource s;
        if (!entry.is_string() && !entry.is_object()) wrong("must be a path, or a list of paths and {\"path\": ..., \"weight\": ...}");
        const Json fields = entry.is_object() ? entry : Json{{"path", entry}};
        for (const auto& [key, field] : fields.items()) {
            const std::string part = entry.is_object() ? key + " of " + subject : subject;
            if (key == "path")
                Reader{details, part, field}.into(s.path);
            else if (key == "weight")
                Reader{details, part, field}.into(s.weight);
            else
                refuse(Exit::usage, "{}: unknown key {}: a source has path and weight", subject, key);
        }
        if (s.path.empty()) wrong("must not have an empty path");
        if (s.weight <= 0) wrong("must have weights above 0");
        return s;
    }
};

}  // namespace

std::vector<Assignment> read_options(const std::string& text, const std::string& where) {
    const Json object = parse_options(text, where);
    if (!object.is_object())
        refuse(Exit::usage, "{} must hold one JSON object, as in {{\"optim\": {{\"lr\": 3e-4}}}}", where);
    std::vector<Assignment> assignments;
    collect(object, "", where, object.value("origin", Json::object()), assignments);
    return assignments;
}

Json number_or_text(const std::string& text) {
    const char* end = text.data() + text.size();
    const auto read = [&](auto number) -> Json {
        const auto result = std::from_chars(text.data(), end, number);
        return result.ec == std::errc() && result.ptr == end ? Json(number) : Json();
    };
    for (const Json& number : {read(uint64_t{}), read(int64_t{}), read(double{})})
        if (!number.is_null() && std::isfinite(number.get<double>())) return number;
    return text;
}

Json from_flag_text(const Option& option, const std::string& text, const std::string& subject) {
    const bool number = std::holds_alternative<Getter<int64_t>>(option.field) ||
                        std::holds_alternative<Getter<uint64_t>>(option.field) ||
                        std::holds_alternative<Getter<double>>(option.field);
    if (number) return number_or_text(text);
    const bool list = text.starts_with("[") && (std::holds_alternative<Getter<std::vector<DataSource>>>(option.field) ||
                                                std::holds_alternative<Getter<std::vector<int64_t>>>(option.field));
    return list ? parse_options(text, subject) : Json(text);
}

void assign(Config& config, const Assignment& a) {
    const Reader reader{a.option->details, a.subject, a.value};
    std::visit([&](auto getter) { reader.into(getter(config)); }, a.option->field);
    config.origin[std::string(a.option->name)] = a.origin;
}

void assign(const CommandFlag& flag, const std::string& text) {
    const Details details{.range = flag.range, .choices = flag.value};
    const std::string subject = "--" + flag.name;
    const bool number = std::holds_alternative<int64_t*>(flag.into) || std::holds_alternative<uint64_t*>(flag.into) || std::holds_alternative<double*>(flag.into);
    const Json value = number ? number_or_text(text) : Json(text);
    if (std::string* const* to = std::get_if<std::string*>(&flag.into)) return void(**to = text);  // any bytes: it may be a path
    std::visit([&](auto* to) { Reader{details, subject, value}.into(*to); }, flag.into);
}

Json value_of(const Option& option, const Config& config) {
    return std::visit(
        [&](auto getter) -> Json {
            const auto& value = value_at(getter, config);
            using T = std::decay_t<decltype(value)>;
            if constexpr (std::is_same_v<T, uint8_t>) {
                return choices_of(option.details)[value];
            } else if constexpr (std::is_same_v<T, std::vector<DataSource>>) {
                Json list = Json::array();
                for (const DataSource& s : value) list.push_back({{"path", s.path}, {"weight", s.weight}});
                return list;
            } else if constexpr (std::is_same_v<T, Inject>) {
                return value.kind == InjectKind::none ? "" : fmt::format("kind=nan,step={}", value.step);
            } else {
                return value;
            }
        },
        option.field);
}

std::string text_of(const Option& option, const Config& config) {
    const Json value = value_of(option, config);
    if (value.is_boolean()) return value.get<bool>() ? "on" : "off";
    if (value.is_string()) return value.get<std::string>();
    return value.is_array() && value.empty() ? "" : value.dump();
}

std::string to_json(const Config& config, Origins origins) {
    Json object = Json::object();
    for (const Option& o : option_table()) {
        if (is_unset(o, config)) continue;
        std::string pointer = "/" + std::string(o.name);
        std::replace(pointer.begin(), pointer.end(), '.', '/');
        object[Json::json_pointer(pointer)] = value_of(o, config);
    }
    if (origins == Origins::with)
        for (const Option& o : option_table()) {
            const auto found = config.origin.find(std::string(o.name));
            object["origin"][std::string(o.name)] = found == config.origin.end() ? "default" : found->second;
        }
    return object.dump(2);
}

Config config_from_json(const std::string& json, const std::string& origin) {
    Config config;
    for (const Assignment& a : read_options(json, origin)) assign(config, a);
    return config;
}

std::vector<std::string> differences(const Config& a, const Config& b) {
    std::vector<std::string> found;
    for (const Option& o : option_table())
        if (value_of(o, a) != value_of(o, b)) found.push_back(fmt::format("{}: {} and {}", o.name, text_of(o, a), text_of(o, b)));
    return found;
}

std::vector<std::string> differences(const ModelConfig& a, const ModelConfig& b) {
    Config left, right;
    left.model = a;
    right.model = b;
    right.model.preset = a.preset;
    right.model.init_std = a.init_std;
    if (a.position == Position::rope && b.position == Position::rope) right.model.max_seq = a.max_seq;
    return differences(left, right);
}

}  // namespace trifold
