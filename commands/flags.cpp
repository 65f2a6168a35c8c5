// commands/flags.cpp   See flags.h.
#include "commands/flags.h"

#include <algorithm>

#include "base/refuse.h"
#include "base/text.h"

namespace trifold {

std::vector<std::string> read_arguments(const std::vector<std::string>& args, const std::vector<CommandFlag>& flags, const std::string& no_options) {
    std::vector<std::string> rest;
    ParseContext context;
    context.flags = flags;
    context.positional = &rest;
    const Config given = parse_config(args, context);
    for (const auto& [name, origin] : given.origin)
        if (origin != "default") refuse(Exit::usage, "{}; leave out {} ({})", no_options, name, origin);
    return rest;
}

void print_flags(const std::vector<CommandFlag>& flags) {
    size_t width = 18;
    for (const CommandFlag& f : flags) width = std::max(width, f.name.size() + 1 + f.value.size());
    for (const CommandFlag& f : flags) fmt::print("  --{:<{}} {}\n", f.name + " " + f.value, width, wrapped(f.help, width + 5));
}

}  // namespace trifold
