// commands/data.cpp   trifold data: token files from text, looked at, converted, and the baseline of counted tokens.
#include <algorithm>
#include <climits>
#include <cstring>
#include <nlohmann/json.hpp>
#include <optional>
#include <sstream>

#include "base/refuse.h"
#include "base/text.h"
#include "commands/commands.h"
#include "commands/progress_line.h"
#include "data/dataset.h"
#include "data/tokenize.h"
#include "model/options.h"

namespace trifold {
namespace {

struct Command {
    const char* name;
    const char* arguments;  // "TRAIN VAL"; the last one may be several: "IN..."
    const char* help;
    void (*run)(const Command&, const Words&);
};

template <class... Args>
[[noreturn]] void misused(fmt::format_string<Args...> why, Args&&... args) {
    refuse(Exit::usage, "{} (trifold data --help tells more)", fmt::format(why, std::forward<Args>(args)...));
}

// Fills the flags and returns the arguments, as many as the command has; nothing: --help was asked for, and is answered.
std::optional<Words> read(const Command& command, const Words& args, const std::vector<CommandFlag>& flags) {
    if (wants_help(args)) {
        fmt::print("trifold data {} {} [options]\n\n{}\n\n{}", command.name, command.arguments, command.help, flags_text(flags));
        return std::nullopt;
    }
    Words given = parse_flags(args, flags, "data takes no options of a run"), names;
    std::istringstream text(command.arguments);
    for (std::string name; text >> name;) names.push_back(name);
    const bool several = names.back().ends_with("...");
    if (given.size() < names.size()) misused("{} is required", names[given.size()]);
    if (given.size() > names.size() && !several) misused("unknown argument {}", given[names.size()]);
    return given;
}

constexpr Range shard_range = {.min = 1, .max = LlmcHeader::max_tokens};
constexpr const char* shard_help = "llmc: tokens per file; more make PREFIX_000000.bin, PREFIX_000001.bin ... [2147483647]";
constexpr const char* json_help = "Print the result as one JSON object";

// File names may be any bytes.
void print_line(const nlohmann::json& object) { fmt::print("{}\n", object.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace)); }

const char* plural(int64_t count) { return count == 1 ? "" : "s"; }

DatasetProgress tokens_progress(ProgressLine& line) {
    return [&line](int64_t done, int64_t total) {
        line.show(static_cast<double>(done) / static_cast<double>(std::max<int64_t>(total, 1)), with_commas(done) + " tokens",
                  [&](double s) { return with_prefix(static_cast<double>(done) / s) + " tokens/s"; });
    };
}

// --eod ID or --tokenizer T of `inspect` and `convert`.
struct EndOption {
    std::string tokenizer;
    int64_t id = -1;  // not given
    int64_t vocab = 0;

    void add_to(std::vector<CommandFlag>& flags) {
        flags.push_back({"eod", "ID", "Id that ends a document", &id, {.min = 0, .max = INT32_MAX}});
        flags.push_back({"tokenizer", "T", "Tokenizer whose id ends a document: bytes, or a tokenizer.json", &tokenizer});
    }
    std::optional<int32_t> resolve() {
        if (!tokenizer.empty()) {
            if (id >= 0) misused("--eod excludes --tokenizer");
            const Tokenizer loaded = Tokenizer::load(tokenizer);
            vocab = loaded.vocab_size();
            return loaded.end_of_document();
        }
        if (id < 0) return std::nullopt;
        return static_cast<int32_t>(id);
    }
};

void print_text(const TokenizeResult& result, double seconds) {
    for (const TokenizeOutput& output : result.outputs) {
        fmt::print("{}: {} tokens ({}), {} document{}", join_words(output.files), with_commas(output.tokens), result.dtype,
                   with_commas(output.documents), plural(output.documents));
        if (output.prompt_tokens > 0) fmt::print(", {} tokens are prompt", with_commas(output.prompt_tokens));
        fmt::print("\n");
    }
    fmt::print("from {} file{}, {}, in {:.1f} s; the vocabulary has {} ids\n", result.input_files, plural(result.input_files),
               human_bytes(result.input_bytes), seconds, with_commas(result.vocab));
    if (result.empty_documents > 0) fmt::print("{} empty documents were left out\n", with_commas(result.empty_documents));
}

void run_tokenize(const Command& command, const Words& args) {
    TokenizeOptions options;
    int64_t threads = 0;  // all
    bool json = false;
    const auto inputs = read(command, args, {
        {"tokenizer", "T", "bytes, or the path of a Hugging Face tokenizer.json [bytes]", &options.tokenizer},
        {"out", "PREFIX", "Output PREFIX.bin (and .idx, .mask); with --val PREFIX_train.bin and PREFIX_val.bin. Required", &options.prefix},
        {"format", "llmc|megatron", "Format of the output: one .bin as in llm.c, or Megatron's .bin and .idx [llmc]", choice_of(options.format)},
        {"val", "SHARE", "Validation part: a share below 1, or bytes of text. The end of a text file that is alone or has 1 MiB, else whole "
                         "documents, evenly spread", &options.validation},
        {"input-format", "auto|text|jsonl", "What the inputs are; auto goes by their names [auto]", choice_of(options.kind)},
        {"text-key", "KEY", "JSONL: the key of the text (\"prompt\" with \"completion\", and \"messages\", need none) [text]", &options.text_key},
        {"eod", "TOKEN", "Token that ends a document, such as '<|endoftext|>' [the tokenizer's own]", &options.end_of_document},
        {"special-text", "match|plain", "Special tokens spelt out in the text become tokens, as in the tokenizers package, or stay text [match]", choice_of(options.special)},
        {"shard-tokens", "N", shard_help, &options.shard_tokens, shard_range},
        {"threads", "N", "Threads that encode [all cores this process may use]", &threads, {.min = 1, .max = 4096}},
        {"json", "", json_help, &json}});
    if (!inputs) return;
    options.inputs = *inputs;
    if (options.prefix.empty()) misused("--out is required");
    options.threads = static_cast<int>(threads);
    ProgressLine line("tokenizing");
    const TokenizeResult result = tokenize(options, [&](const TokenizeProgress& p) {
        line.show(static_cast<double>(p.bytes_read) / static_cast<double>(std::max<int64_t>(p.bytes_total, 1)), with_commas(p.tokens) + " tokens",
                  [&](double s) { return human_bytes(static_cast<int64_t>(static_cast<double>(p.bytes_read) / s)) + "/s"; });
    });
    if (!json) return print_text(result, line.elapsed());
    nlohmann::json out = {{"input_files", result.input_files}, {"input_bytes", result.input_bytes}, {"empty_documents", result.empty_documents},
                          {"vocab", result.vocab}, {"dtype", result.dtype}, {"outputs", nlohmann::json::array()}};
    for (const TokenizeOutput& output : result.outputs)
        out["outputs"].push_back({{"part", output.part}, {"files", output.files}, {"tokens", output.tokens},
                                  {"documents", output.documents}, {"prompt_tokens", output.prompt_tokens}});
    print_line(out);
}

void print_text(const DatasetSummary& summary, bool end_given) {
    const auto row = [](const char* name, const std::string& value) { fmt::print("{:<11}{}\n", name, value); };
    row("format", fmt::format("{}, {} file{}, {}", name_of(summary.format), summary.files, plural(summary.files), human_bytes(summary.bytes)));
    row("tokens", with_commas(summary.tokens));
    std::string documents = with_commas(summary.documents);
    if (summary.end_of_document) {
        const bool guessed = summary.format == TokenFormat::llmc && !end_given;
        documents += fmt::format(", ended by id {}{}", *summary.end_of_document, guessed ? " (a guess; --eod or --tokenizer tell)" : "");
    }
    row("documents", documents);
    row("largest id", fmt::format("{}", summary.vocab_max));
    row("dtype", name_of(summary.type));
    if (summary.prompt_tokens) row("prompt", fmt::format("{} tokens", with_commas(*summary.prompt_tokens)));
}

void run_inspect(const Command& command, const Words& args) {
    EndOption end;
    bool json = false;
    std::vector<CommandFlag> flags = {{"json", "", json_help, &json}};
    end.add_to(flags);
    const auto data = read(command, args, flags);
    if (!data) return;
    ProgressLine line("reading");
    const auto wanted = end.resolve();
    const DatasetSummary summary = inspect(data->front(), wanted, tokens_progress(line));
    if (!json) return print_text(summary, wanted.has_value());
    nlohmann::json out = {{"format", name_of(summary.format)}, {"tokens", summary.tokens}, {"documents", summary.documents},
                          {"vocab_max", summary.vocab_max}, {"dtype", name_of(summary.type)}, {"files", summary.files},
                          {"bytes", summary.bytes}, {"eod", nullptr}, {"prompt_tokens", nullptr}};
    if (summary.end_of_document) out["eod"] = *summary.end_of_document;
    if (summary.prompt_tokens) out["prompt_tokens"] = *summary.prompt_tokens;
    print_line(out);
}

void run_convert(const Command& command, const Words& args) {
    ConvertOptions options;
    EndOption end;
    bool json = false;
    constexpr auto none = TokenFormat(255);
    options.format = none;
    std::vector<CommandFlag> flags = {{"out", "PREFIX", "Output PREFIX.bin (and .idx, .mask). Required", &options.prefix},
                                      {"format", "llmc|megatron", "Format of the output. Required", choice_of(options.format)},
                                      {"shard-tokens", "N", shard_help, &options.shard_tokens, shard_range},
                                      {"json", "", json_help, &json}};
    end.add_to(flags);
    const auto data = read(command, args, flags);
    if (!data) return;
    if (options.prefix.empty()) misused("--out is required");
    if (options.format == none) misused("--format is required");
    options.input = data->front();
    ProgressLine line("converting");
    options.end_of_document = end.resolve();
    options.vocab = end.vocab;
    const ConvertResult result = convert(options, tokens_progress(line));
    if (json)
        return print_line({{"files", result.files}, {"tokens", result.tokens}, {"documents", result.documents},
                           {"appended_eod", result.appended_ends}});
    fmt::print("{}: {} tokens, {} documents\n", join_words(result.files), with_commas(result.tokens), with_commas(result.documents));
    if (result.appended_ends > 0)
        fmt::print("id {} was put behind {} documents\n", *result.input.end_of_document, with_commas(result.appended_ends));
    if (result.input.format == TokenFormat::llmc && !options.end_of_document)
        fmt::print(stderr, "documents were taken to end with id {}; --eod or --tokenizer tell\n", *result.input.end_of_document);
}

void run_unigram(const Command& command, const Words& args) {
    bool json = false;
    const auto data = read(command, args, {{"json", "", json_help, &json}});
    if (!data) return;
    const UnigramLoss result = unigram_loss(data->front(), data->back());
    if (json) return print_line({{"loss", result.loss}, {"tokens", result.tokens}});
    fmt::print("unigram loss {:.5f} nats per token over {} tokens\n", result.loss, with_commas(result.tokens));
}

constexpr Command commands[] = {
    {"tokenize", "IN...", "Text to tokens:  trifold data tokenize book.txt notes/ --tokenizer bytes --out data/books --val 0.05\n"
                          "Inputs are text files, JSONL files (.jsonl, .ndjson) and folders; .gz and .dz are unpacked.", run_tokenize},
    {"inspect", "DATA", "Size, documents and ids of token files:  trifold data inspect 'data/books_*.bin'\n"
                        "DATA is a token file, a Megatron prefix, or a glob in quotes.", run_inspect},
    {"convert", "DATA", "Between llm.c and Megatron:  trifold data convert data/books.bin --out data/books-m --format megatron\n"
                        "DATA is a token file, a Megatron prefix, or a glob in quotes.", run_convert},
    {"unigram", "TRAIN VAL", "The loss that token frequencies alone reach:  trifold data unigram data/books_train.bin data/books_val.bin\n"
                             "TRAIN is counted on, and the loss is that of VAL; both are token files or globs.", run_unigram},
};

}  // namespace

int data_command(const Words& args) {
    Words names;
    for (const Command& command : commands) {
        if (!args.empty() && args[0] == command.name) return command.run(command, {args.begin() + 1, args.end()}), 0;
        names.push_back(command.name);
    }
    if (wants_help(args)) {
        fmt::print("trifold data makes token files from text, looks at them, and converts them.\n\n");
        for (const Command& command : commands) fmt::print("  {:<10}{}\n", command.name, std::string(command.help, std::strchr(command.help, '\n')));
        return 0;
    }
    if (args.empty()) misused("A subcommand is required");
    misused("unknown argument {}: {}", args[0], suggestion(args[0], names, "", "the sub-commands are " + join_words(names)));
}

}  // namespace trifold
