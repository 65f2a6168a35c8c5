// model/options_json.h   Option values as JSON: reading, type checks, writing. Only .cpp files include this.
#pragma once
#include <string>
#include <vector>

#include "base/json.h"
#include "model/options.h"
#include "model/options_table.h"

namespace trifold {

using Json = OrderedJson;  // keeps the order of the table

// One value that a file or a flag gives to an option.
struct Assignment {
    const Option* option = nullptr;
    Json value;
    std::string subject;  // how errors name it: "--optim.lr", or "optim.lr in a.json"
    std::string origin;   // for Config::origin: "flag", or the path
};

// The assignments of a nested object of options; unknown keys are refused with a suggestion.
std::vector<Assignment> read_options(const std::string& text, const std::string& where);

// The JSON value that a flag's text stands for, given the option's type. Text that does not fit stays a string.
Json from_flag_text(const Option& option, const std::string& text, const std::string& subject);
// A number, or the text itself as a string.
Json number_or_text(const std::string& text);

// Checks type, range and choices, stores the value and its origin.
void assign(Config& config, const Assignment& assignment);
void assign(const CommandFlag& flag, const std::string& text);
Json value_of(const Option& option, const Config& config);

// value_of as people type it: on, adamw, 0.0006
std::string text_of(const Option& option, const Config& config);

}  // namespace trifold
