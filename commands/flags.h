// commands/flags.h   Flags and arguments of the commands that take no configuration of their own: `data` and `export`.
#pragma once
#include <string>
#include <vector>

#include "model/options.h"

namespace trifold {

// Reads the flags into their places and returns what is not a flag. `no_options` says why options of the configuration do not belong here.
std::vector<std::string> read_arguments(const std::vector<std::string>& args, const std::vector<CommandFlag>& flags, const std::string& no_options);

// One line per flag, for --help.
void print_flags(const std::vector<CommandFlag>& flags);

}  // namespace trifold
