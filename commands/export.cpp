// commands/export.cpp   trifold export CHECKPOINT --to DIR --format hf [--dtype fp32|bf16]
#include <cstdio>
#include <filesystem>
#include <vector>

#include "base/cpus.h"
#include "base/refuse.h"
#include "base/text.h"
#include "checkpoint/huggingface.h"
#include "checkpoint/load.h"
#include "commands/commands.h"
#include "model/options.h"

namespace trifold {
namespace {

constexpr const char* usage =
    "trifold export CHECKPOINT --to DIR [options]\n\n"
    "Writes the weights of a checkpoint as a Hugging Face folder (config.json and safetensors; GPT-2, Llama, Mistral, "
    "Qwen2).\n"
    "CHECKPOINT is a step, a folder of checkpoints, or a run directory: of these the newest verified one.\n\n";

// The tokenizer.json of the run, or an empty path when it has none or it is gone.
std::string tokenizer_file(const Config& config) {
    const std::string& path = config.data.tokenizer;
    if (path.empty() || path == "bytes") return "";
    if (std::filesystem::is_regular_file(path)) return path;
    std::fprintf(stderr, "%s, the tokenizer of this run, is not there any more: the folder gets none\n", path.c_str());
    return "";
}

}  // namespace

int export_command(const Words& args) {
    std::string to, format = "hf";
    HfExport options;
    const std::vector<CommandFlag> flags = {
        {"to", "DIR", "the folder to write; it must not exist or be empty", &to},
        {"format", "NAME", "hf [hf]", &format},
        {"dtype", "fp32|bf16", "of the weights; bf16 is rounded to nearest even [fp32]", choice_of(options.dtype)},
        {"file-bytes", "N", "more weights than this are spread over several files [5000000000]", &options.file_bytes, {.min = 1}}};
    if (wants_help(args)) {
        fmt::print("{}{}", usage, flags_text(flags));
        return 0;
    }
    const std::vector<std::string> checkpoints = parse_flags(args, flags, "export takes everything from the checkpoint");
    if (checkpoints.size() != 1)
        refuse(Exit::usage, "export takes one checkpoint, not {}: trifold export CHECKPOINT --to DIR", checkpoints.size());
    if (to.empty()) refuse(Exit::usage, "where to? give the folder to write with --to DIR");
    if (format != "hf") refuse(Exit::usage, "--format must be hf, not {}", format);

    const LoadOptions load{.threads = usable_cpus()};
    const FoundCheckpoint found = open_checkpoint(checkpoints[0], load);
    for (const std::string& sentence : found.damaged) std::fprintf(stderr, "%s\n", sentence.c_str());
    const Config config = config_from_json(found.state.config_json, found.path);
    const ParameterTable table(config.model);
    std::vector<float> weights(static_cast<size_t>(table.flat_elems()));
    load_state(found, config.model, whole_state(table, weights.data()), load);
    options.tokenizer = tokenizer_file(config);
    const int64_t bytes = export_hf(to, config.model, table, weights.data(), options);
    fmt::print("{}: {} parameters of {}, {} {}\n", to, with_commas(table.count()), found.path, human_bytes(bytes), name_of(options.dtype));
    return 0;
}

}  // namespace trifold
