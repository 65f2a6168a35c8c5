// model/options.h   From defaults, files and flags to one resolved Config, and back to JSON.
//
//   parse_config   defaults < model of init.from < preset < --config files in order < flags
//   resolve        fills in what was not given and refuses what cannot work
//   to_json        the whole configuration; config_from_json reads it back, bit for bit
//
// Every option is declared once, in model/options_table.cpp; the reader of JSON files, the flags, --help, the resolved
// config.json and "did you mean" all read that table. All errors are Problem(Exit::usage).
//
// Config files are JSON; comments (// and /* */) are allowed, duplicate keys and unknown keys are not. Keys nest as the
// names do: {"optim": {"lr": 3e-4}} is --optim.lr=3e-4. A top-level "origin" is skipped, so that a run's config.json
// can be given again. Flags are --name=value or --name value; booleans take on, off, true, false, and a boolean flag
// alone means on. data.train and data.val take one path or glob, or a JSON list: --data.train='["a.bin", {"path":
// "b.bin", "weight": 0.5}]'.
#pragma once
#include <cstdint>
#include <functional>
#include <string>
#include <variant>
#include <vector>

#include "model/options_table.h"

namespace trifold {

// A flag of one command, such as `--prompt TEXT`, that is not part of the configuration.
struct CommandFlag {
    std::string name;   // "prompt", typed as --prompt
    std::string value;  // what --help calls its value ("TEXT"); empty for a switch; of a choice its names, "llmc|megatron"
    std::string help;
    std::variant<bool*, int64_t*, uint64_t*, double*, std::string*, uint8_t*> into;
    Range range = {};
};
// For a flag that chooses a value of an enumeration.
template <class Choice>
uint8_t* choice_of(Choice& choice) {
    static_assert(sizeof(Choice) == 1);
    return reinterpret_cast<uint8_t*>(&choice);
}

struct ParseContext {
    // Lies below everything else; `eval` and `sample` start from the configuration of a checkpoint.
    Config base;
    // Reads the model of `init.from`, a Hugging Face folder or a checkpoint. Empty: init.from changes no model option.
    std::function<ModelConfig(const std::string& path)> read_model = {};
    std::vector<CommandFlag> flags = {};
    // Arguments that are not flags; null: such arguments are refused.
    std::vector<std::string>* positional = nullptr;
};

// `args` are the arguments after the name of the command. The result is not resolved yet.
Config parse_config(const std::vector<std::string>& args, const ParseContext& context = {});
// For a command without a configuration: reads its flags, and returns what is not a flag. Options are refused because of `no_options`.
std::vector<std::string> parse_flags(const std::vector<std::string>& args, const std::vector<CommandFlag>& flags, const std::string& no_options);
// True when the arguments ask for --help (or -h); commands then print help_text and parse nothing.
bool wants_help(const std::vector<std::string>& args);

// Fills in derived values and checks everything, for this many ranks, `local_ranks` of which share this one's CPUs; calling it twice changes nothing.
void resolve(Config& config, int ranks = 1, int local_ranks = 1);

// Options that were not given and not derived yet are left out. `with_origin` adds {"origin": {name: where from}}.
enum class Origins : uint8_t { without, with };
std::string to_json(const Config& config, Origins origins = Origins::without);
// `origin` names the source in errors and in Config::origin, such as a path.
Config config_from_json(const std::string& json, const std::string& origin);

// One entry "model.layers: 12 and 24" per option that differs. Of models: what keeps weights of one from being weights of the other, so
// names, initial values, and the longest sequence under rotary positions do not count. Both must be resolved.
std::vector<std::string> differences(const Config& a, const Config& b);
std::vector<std::string> differences(const ModelConfig& a, const ModelConfig& b);

// A line for each flag of a command; and for all options, by section, with defaults and units, after these.
std::string flags_text(const std::vector<CommandFlag>& flags);
std::string help_text(const std::vector<CommandFlag>& flags = {});
// A few lines for the start of a run.
std::string describe(const Config& config);

}  // namespace trifold
