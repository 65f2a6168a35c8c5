// commands/export.cpp   trifold export CHECKPOINT --to DIR --format hf [--dtype fp32|bf16]
#include "commands/export.h"

#include <fmt/format.h>

#include <cstdio>
#include <filesystem>
#include <vector>

#include "base/cpus.h"
#include "base/text.h"
#include "checkpoint/huggingface.h"
#include "checkpoint/load.h"
#include "model/options.h"

namespace trifold {
namespace {

constexpr const char* usage =
    "trifold export CHECKPOINT --to DIR [options]\n\n"
    "Writes the weights of a checkpoint as a Hugging Face folder (config.json and safetensors; GPT-2, Llama, Mistral, "
    "Qwen2).\n"
    "CHECKPOINT is a step, a folder of checkpoints, or a run directory: of these the newest verified one.\n\n";

struct ExportFlags {
    std::string to, format = "hf", dtype = "fp32";
    int64_t file_bytes = HfExport{}.file_bytes;

    std::vector<CommandFlag> list() {
        return {{"to", "DIR", "the folder to write; it must not exist or be empty", &to},
                {"format", "NAME", "hf [hf]", &format},
                {"dtype", "TYPE", "fp32 or bf16, rounded to nearest even [fp32]", &dtype},
                {"file-bytes", "N", "more weights than this are spread over several files [5000000000]", &file_bytes}};
    }
    void check() const {
        const auto refuse = [](const std::string& sentence) { throw Problem(Exit::usage, sentence); };
        if (to.empty()) refuse("where to? give the folder to write with --to DIR");
        if (format != "hf") refuse(fmt::format("--format={} is not known: hf is", format));
        if (dtype != "fp32" && dtype != "bf16") refuse(fmt::format("--dtype={} must be fp32 or bf16", dtype));
        if (file_bytes < 1) refuse(fmt::format("--file-bytes={} must be at least 1", file_bytes));
    }
};

// The tokenizer.json of the run, or an empty path when it has none or it is gone.
std::string tokenizer_file(const Config& config) {
    const std::string& path = config.data.tokenizer;
    if (path.empty() || path == "bytes") return "";
    if (std::filesystem::is_regular_file(path)) return path;
    std::fprintf(stderr, "%s, the tokenizer of this run, is not there any more: the folder gets none\n", path.c_str());
    return "";
}

}  // namespace

int export_command(int argc, char** argv) {
    const std::vector<std::string> args(argv + 1, argv + argc);
    ExportFlags flags;
    if (wants_help(args)) {
        std::fputs(usage, stdout);
        for (const CommandFlag& f : flags.list())
            std::fprintf(stdout, "  --%-18s %s\n", (f.name + " " + f.value).c_str(), f.help.c_str());
        return 0;
    }
    std::vector<std::string> checkpoints;
    ParseContext context;
    context.flags = flags.list();
    context.positional = &checkpoints;
    const Config given = parse_config(args, context);
    for (const auto& [name, origin] : given.origin)
        if (origin != "default")
            throw Problem(Exit::usage,
                          fmt::format("export takes everything from the checkpoint; leave out {} ({})", name, origin));
    if (checkpoints.size() != 1)
        throw Problem(
            Exit::usage,
            fmt::format("export takes one checkpoint, not {}: trifold export CHECKPOINT --to DIR", checkpoints.size()));
    flags.check();

    const LoadOptions load{.threads = usable_cpus(), .progress = {}};
    const FoundCheckpoint found = open_checkpoint(checkpoints[0], load);
    for (const std::string& sentence : found.damaged) std::fprintf(stderr, "%s\n", sentence.c_str());
    const Config config = config_from_json(found.state.config_json, found.path);
    const ParameterTable table(config.model);
    std::vector<float> weights(static_cast<size_t>(table.flat_elems()));
    load_state(found, table, {weights.data(), nullptr, nullptr}, load);
    const HfExport options{.dtype = flags.dtype == "bf16" ? DType::bf16 : DType::f32,
                           .file_bytes = flags.file_bytes,
                           .tokenizer = tokenizer_file(config),
                           .progress = {}};
    const int64_t bytes = export_hf(flags.to, config.model, table, weights.data(), options);
    fmt::print("{}: {} parameters of {}, {} {}\n", flags.to, with_commas(table.count()), found.path, human_bytes(bytes),
               flags.dtype);
    return 0;
}

}  // namespace trifold
