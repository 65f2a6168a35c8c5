// model/options_table.h   How one option is declared, for the files that parse, print and check options.
#pragma once
#include <cstdint>
#include <limits>
#include <span>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "model/config.h"

namespace trifold {

template <class T>
using Getter = T& (*)(Config&);

// Where an option's value lives; the alternative is the option's type. Enumerations are seen as their underlying
// uint8_t.
using Field = std::variant<Getter<int64_t>, Getter<uint64_t>, Getter<double>, Getter<bool>, Getter<uint8_t>,
                           Getter<std::string>, Getter<std::vector<int64_t>>, Getter<std::vector<DataSource>>, Getter<Inject>>;

struct Range {
    double min = -std::numeric_limits<double>::infinity(), max = std::numeric_limits<double>::infinity();
    bool min_excluded = false, max_excluded = false;
    bool contains(double x) const { return (min_excluded ? x > min : x >= min) && (max_excluded ? x < max : x <= max); }
};

struct Details {
    Range range = {};
    std::string_view unit = "";
    std::string_view choices = "";  // enumerations: the names in order of their values, "adamw|lamb"
    std::string_view derived = "";  // the default in words, where it is not a constant
};

struct Option {
    std::string_view name;  // section.key
    Field field;
    std::string_view help;
    Details details;

    std::string_view section() const { return name.substr(0, name.find('.')); }
};

// In the order of --help.
std::span<const Option> option_table();
const Option* find_option(std::string_view name);
std::vector<std::string> option_names();
std::vector<std::string> choices_of(const Details& details);

// True when the option has the value that means "not given": the default, where the option's own range excludes it.
bool is_unset(const Option& option, const Config& config);
// "must be at least 0 and below 1"
std::string describe_range(const Range& range);

// The value of an option as one of the types of Field. The table reads and writes through the same getters.
template <class T>
const T& value_at(Getter<T> getter, const Config& config) {
    return getter(const_cast<Config&>(config));
}

// Empty, or one sentence for a name that is documented but belongs to a later version.
std::string not_available_yet(std::string_view name);

}  // namespace trifold
