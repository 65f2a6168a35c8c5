// model/options.cpp   Flags, the order of precedence, and --help.
#include "model/options.h"

#include <algorithm>
#include <cctype>
#include <optional>

#include "base/file.h"
#include "base/text.h"
#include "model/options_json.h"
#include "model/presets.h"

namespace trifold {
namespace {

// Splits the arguments into values of options and what belongs to the command alone.
class FlagReader {
public:
    FlagReader(const std::vector<std::string>& args, const ParseContext& context) : args_(args), context_(context) {}

    void read_all() {
        for (at_ = 0; at_ < args_.size(); ++at_) {
            const std::string& arg = args_[at_];
            if (arg.starts_with("--") && arg.size() > 2) {
                read_flag(arg.substr(2));
            } else if (arg.starts_with("-") && arg.size() > 1) {
                refuse(Exit::usage, "unknown option {}: options are --name=value (--help lists them)", arg);
            } else if (context_.positional) {
                context_.positional->push_back(arg);
            } else {
                refuse(Exit::usage, "unexpected argument \"{}\": options are --name=value (--help lists them)", arg);
            }
        }
    }

    std::vector<Assignment> of_files, of_flags;  // each in order

private:
    void read_flag(const std::string& text) {
        const size_t equals = text.find('=');
        name_ = text.substr(0, equals);
        inline_value_.reset();
        if (equals != std::string::npos) inline_value_ = text.substr(equals + 1);
        if (name_ == "config") {
            const std::string file = value();
            for (Assignment& a : read_options(read_text(file, Exit::usage, "configuration file"), file)) of_files.push_back(std::move(a));
        } else if (const auto flag = std::ranges::find(context_.flags, name_, &CommandFlag::name); flag != context_.flags.end()) {
            assign(*flag, std::holds_alternative<bool*>(flag->into) ? switch_value() : value());
        } else if (const Option* option = find_option(name_ == "inject" ? "debug.inject" : name_)) {
            const bool boolean = std::holds_alternative<Getter<bool>>(option->field);
            const std::string subject = "--" + name_;
            of_flags.push_back(
                {option, from_flag_text(*option, boolean ? switch_value() : value(), subject), subject, "flag"});
        } else {
            refuse_unknown();
        }
    }

    std::string value() {
        if (inline_value_) return *inline_value_;
        if (at_ + 1 == args_.size() || args_[at_ + 1].starts_with("--"))
            refuse(Exit::usage, "--{0} needs a value: --{0}=...", name_);
        return args_[++at_];
    }
    // A switch alone means on; it takes the next argument only when that is plainly its value.
    std::string switch_value() {
        if (inline_value_) return *inline_value_;
        const std::string next = at_ + 1 < args_.size() ? args_[at_ + 1] : "";
        const bool is_value = next == "on" || next == "off" || next == "true" || next == "false";
        return is_value ? args_[++at_] : "on";
    }

    [[noreturn]] void refuse_unknown() const {
        const std::string later = not_available_yet(name_);
        if (!later.empty()) refuse(Exit::usage, "--{}", later);
        std::vector<std::string> candidates = option_names(), inside;
        for (const std::string& name : candidates)
            if (name.starts_with(name_ + ".")) inside.push_back("--" + name);
        if (!inside.empty()) refuse(Exit::usage, "--{} is a group of options: {}", name_, join_words(inside));
        candidates.push_back("config");
        candidates.push_back("help");
        for (const CommandFlag& flag : context_.flags) candidates.push_back(flag.name);
        refuse(Exit::usage, "unknown option --{}: {}", name_, suggestion(name_, candidates, "--", "--help lists all options"));
    }

    const std::vector<std::string>& args_;
    const ParseContext& context_;
    size_t at_ = 0;
    std::string name_;
    std::optional<std::string> inline_value_;
};

// A preset and the model of init.from are whole models: no option of another one shows through.
void replace_model(Config& config, const ModelConfig& model, const std::string& origin) {
    config.model = model;
    for (const Option& o : option_table())
        if (o.section() == "model") config.origin[std::string(o.name)] = origin;
}

// The last text given to an option, wherever it stands.
std::string last_text(const std::vector<Assignment>& assignments, std::string_view name) {
    std::string text;
    for (const Assignment& a : assignments)
        if (a.option->name == name && a.value.is_string()) text = a.value.get<std::string>();
    return text;
}

}  // namespace

Config parse_config(const std::vector<std::string>& args, const ParseContext& context) {
    FlagReader flags(args, context);
    flags.read_all();
    std::vector<Assignment> assignments = std::move(flags.of_files);
    for (Assignment& a : flags.of_flags) assignments.push_back(std::move(a));

    Config config = context.base;
    for (const Option& o : option_table()) config.origin.try_emplace(std::string(o.name), "default");
    const std::string from = last_text(assignments, "init.from"), preset_name = last_text(assignments, "model.preset");
    if (!from.empty() && context.read_model) replace_model(config, context.read_model(from), "init.from " + from);
    if (!preset_name.empty()) replace_model(config, preset(preset_name).model, "preset " + preset_name);
    for (const Assignment& a : assignments) assign(config, a);
    return config;
}

std::vector<std::string> parse_flags(const std::vector<std::string>& args, const std::vector<CommandFlag>& flags, const std::string& no_options) {
    std::vector<std::string> rest;
    ParseContext context;
    context.flags = flags;
    context.positional = &rest;
    const Config given = parse_config(args, context);
    for (const auto& [name, origin] : given.origin)
        if (origin != "default") refuse(Exit::usage, "{}; leave out {} ({})", no_options, name, origin);
    return rest;
}

bool wants_help(const std::vector<std::string>& args) {
    return std::ranges::any_of(args, [](const std::string& arg) { return arg == "--help" || arg == "-h"; });
}

namespace {

constexpr size_t help_column = 40;

// "  left   right", the right part wrapped inside its column.
std::string help_line(const std::string& left, const std::string& right) {
    std::string line = "  " + left;
    if (line.size() + 2 > help_column) line += "\n" + std::string(help_column, ' ');
    line.resize(std::max(line.size(), help_column), ' ');
    return line + wrapped(right, help_column) + "\n";
}

// What --help calls the value: its unit where it has one.
std::string kind_of(const Option& option) {
    std::string unit(option.details.unit);
    std::transform(unit.begin(), unit.end(), unit.begin(), [](unsigned char c) { return std::toupper(c); });
    if (!unit.empty()) return unit;
    if (std::holds_alternative<Getter<bool>>(option.field)) return "on|off";
    if (std::holds_alternative<Getter<double>>(option.field)) return "X";
    if (std::holds_alternative<Getter<int64_t>>(option.field) || std::holds_alternative<Getter<uint64_t>>(option.field))
        return "N";
    return option.details.choices.empty() ? "TEXT" : "NAME";
}

std::string help_of(const Option& option) {
    static const Config defaults;
    const Details& d = option.details;
    const std::string initial = d.derived.empty() ? text_of(option, defaults) : std::string(d.derived);
    std::string text(d.choices);
    text += (d.choices.empty() ? "" : ": ") + std::string(option.help);
    if (!initial.empty()) text += fmt::format(" [{}]", initial);
    return text;
}

}  // namespace

std::string flags_text(const std::vector<CommandFlag>& flags) {
    std::string text;
    for (const CommandFlag& f : flags) text += help_line("--" + f.name + (f.value.empty() ? "" : " " + f.value), f.help);
    return text;
}

std::string help_text(const std::vector<CommandFlag>& flags) {
    std::string text = flags_text(flags);
    if (!flags.empty()) text += "\n";
    text +=
        help_line("--config FILE", "JSON file of options; may be given again, later ones win, flags win over files");
    text += help_line("--SECTION.KEY=VALUE",
                      "one of the options below, with [default]; in a file {\"SECTION\": {\"KEY\": VALUE}}");
    std::string_view section;
    for (const Option& o : option_table()) {
        if (o.section() != section) text += fmt::format("\n{}\n", o.section());
        section = o.section();
        text += help_line(fmt::format("--{} {}", o.name, kind_of(o)), help_of(o));
    }
    text += "\npresets\n";
    for (const Preset& p : presets()) text += help_line(p.name, p.source);
    return text;
}

}  // namespace trifold
