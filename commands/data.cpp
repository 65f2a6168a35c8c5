// commands/data.cpp
#include "commands/data.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <functional>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "base/error.h"
#include "base/text.h"
#include "commands/progress_line.h"
#include "data/dataset.h"
#include "data/tokenize.h"
#include "data/unigram.h"

namespace trifold {

namespace {

// File names may be any bytes.
std::string as_line(const nlohmann::json& object) {
    return object.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
}

DatasetProgress tokens_progress(ProgressLine& line) {
    return [&line](int64_t done, int64_t total) {
        line.show(static_cast<double>(done) / static_cast<double>(std::max<int64_t>(total, 1)),
                  with_commas(done) + " tokens",
                  [&](double s) { return with_prefix(static_cast<double>(done) / s) + " tokens/s"; });
    };
}

// An option that takes one of a few words.
template <class T>
CLI::Option* add_choice(CLI::App& app, const std::string& flag, T& into,
                        const std::vector<std::pair<std::string, T>>& words, const std::string& help) {
    std::vector<std::string> names;
    for (const auto& [name, value] : words) names.push_back(name);
    const auto choose = [&into, words](const std::string& chosen) {
        for (const auto& [name, value] : words) {
            if (name == chosen) into = value;
        }
    };
    return app.add_option_function<std::string>(flag, choose, help)
        ->check(CLI::IsMember(names).description(""))
        ->type_name(fmt::format("{}", fmt::join(names, "|")));
}

CLI::Option* add_format(CLI::App& app, TokenFormat& format, const std::string& help) {
    return add_choice<TokenFormat>(app, "--format", format,
                                   {{"llmc", TokenFormat::llmc}, {"megatron", TokenFormat::megatron}}, help);
}

void add_shard_tokens(CLI::App& app, int64_t& tokens) {
    app.add_option("--shard-tokens", tokens,
                   "llmc: tokens per file; more make PREFIX_000000.bin, PREFIX_000001.bin ...")
        ->type_name("N")
        ->check(CLI::Range(int64_t{1}, LlmcHeader::max_tokens).description(""))
        ->capture_default_str();
}

// --eod ID or --tokenizer T of `inspect` and `convert`.
struct EndOption {
    std::string tokenizer;
    int64_t id = -1;
    int64_t vocab = 0;

    void add_to(CLI::App& app) {
        auto* by_id = app.add_option("--eod", id, "Id that ends a document")
                          ->type_name("ID")
                          ->check(CLI::Range(int64_t{0}, (int64_t{1} << 31) - 1).description(""));
        app.add_option("--tokenizer", tokenizer, "Tokenizer whose id ends a document: bytes, or a tokenizer.json")
            ->type_name("T")
            ->excludes(by_id);
    }
    std::optional<int32_t> resolve() {
        if (!tokenizer.empty()) {
            const Tokenizer loaded = Tokenizer::load(tokenizer);
            vocab = loaded.vocab_size();
            return loaded.end_of_document();
        }
        if (id < 0) return std::nullopt;
        return static_cast<int32_t>(id);
    }
};

struct TokenizeCommand {
    TokenizeOptions options;
    bool json = false;

    void add_to(CLI::App& app) {
        app.add_option("input", options.inputs,
                       "Text files, JSONL files (.jsonl, .ndjson), folders; .gz and .dz are unpacked")
            ->type_name("IN")
            ->required();
        app.add_option("--tokenizer", options.tokenizer, "bytes, or the path of a Hugging Face tokenizer.json")
            ->type_name("T")
            ->capture_default_str();
        app.add_option("--out", options.prefix,
                       "Output PREFIX.bin (and .idx, .mask); with --val PREFIX_train.bin and PREFIX_val.bin")
            ->type_name("PREFIX")
            ->required();
        add_format(app, options.format, "Format of the output: one .bin as in llm.c, or Megatron's .bin and .idx")
            ->default_str("llmc");
        app.add_option(
               "--val", options.validation,
               "Validation part: a share below 1, or bytes of text. The end of a text file that is alone or has 1 MiB, "
               "else whole documents, evenly spread")
            ->type_name("SHARE");
        add_choice<TextKind>(app, "--input-format", options.kind,
                             {{"auto", TextKind::by_name}, {"text", TextKind::text}, {"jsonl", TextKind::jsonl}},
                             "What the inputs are; auto goes by their names")
            ->default_str("auto");
        app.add_option("--text-key", options.text_key,
                       "JSONL: the key of the text (\"prompt\" with \"completion\", and \"messages\", need none)")
            ->type_name("KEY")
            ->capture_default_str();
        app.add_option("--eod", options.end_of_document,
                       "Token that ends a document, such as '<|endoftext|>' [the tokenizer's own]")
            ->type_name("TOKEN");
        add_choice<SpecialText>(
            app, "--special-text", options.special, {{"match", SpecialText::match}, {"plain", SpecialText::plain}},
            "Special tokens spelt out in the text become tokens, as in the tokenizers package, or stay text")
            ->default_str("match");
        add_shard_tokens(app, options.shard_tokens);
        app.add_option("--threads", options.threads, "Threads that encode [all cores this process may use]")
            ->type_name("N")
            ->check(CLI::Range(1, 4096).description(""));
        app.add_flag("--json", json, "Print the result as one JSON object");
    }

    void run() {
        ProgressLine line("tokenizing");
        const TokenizeResult result = tokenize(options, [&](const TokenizeProgress& p) {
            line.show(static_cast<double>(p.bytes_read) / static_cast<double>(std::max<int64_t>(p.bytes_total, 1)),
                      with_commas(p.tokens) + " tokens", [&](double s) {
                          return human_bytes(static_cast<int64_t>(static_cast<double>(p.bytes_read) / s)) + "/s";
                      });
        });
        json ? print_json(result) : print_text(result, line.elapsed());
    }

    static void print_json(const TokenizeResult& result) {
        nlohmann::json out = {{"input_files", result.input_files},
                              {"input_bytes", result.input_bytes},
                              {"empty_documents", result.empty_documents},
                              {"vocab", result.vocab},
                              {"dtype", result.dtype},
                              {"outputs", nlohmann::json::array()}};
        for (const TokenizeOutput& output : result.outputs) {
            out["outputs"].push_back({{"part", output.part.empty() ? "all" : output.part},
                                      {"files", output.files},
                                      {"tokens", output.tokens},
                                      {"documents", output.documents},
                                      {"prompt_tokens", output.prompt_tokens}});
        }
        fmt::print("{}\n", as_line(out));
    }
    static void print_text(const TokenizeResult& result, double seconds) {
        for (const TokenizeOutput& output : result.outputs) {
            fmt::print("{}: {} tokens ({}), {} document{}", join_words(output.files), with_commas(output.tokens),
                       result.dtype, with_commas(output.documents), output.documents == 1 ? "" : "s");
            if (output.prompt_tokens > 0) fmt::print(", {} tokens are prompt", with_commas(output.prompt_tokens));
            fmt::print("\n");
        }
        fmt::print("from {} file{}, {}, in {:.1f} s; the vocabulary has {} ids\n", result.input_files,
                   result.input_files == 1 ? "" : "s", human_bytes(result.input_bytes), seconds,
                   with_commas(result.vocab));
        if (result.empty_documents > 0)
            fmt::print("{} empty documents were left out\n", with_commas(result.empty_documents));
    }
};

struct InspectCommand {
    std::string path;
    EndOption end;
    bool json = false;

    void add_to(CLI::App& app) {
        app.add_option("data", path, "Token file, Megatron prefix, or glob in quotes")->type_name("DATA")->required();
        end.add_to(app);
        app.add_flag("--json", json, "Print the result as one JSON object");
    }
    void run() {
        ProgressLine line("reading");
        const auto wanted = end.resolve();
        const DatasetSummary summary = inspect(path, wanted, tokens_progress(line));
        json ? print_json(summary) : print_text(summary, wanted.has_value());
    }
    static void print_json(const DatasetSummary& summary) {
        nlohmann::json out = {{"format", name_of(summary.format)},
                              {"tokens", summary.tokens},
                              {"documents", summary.documents},
                              {"vocab_max", summary.vocab_max},
                              {"dtype", name_of(summary.type)},
                              {"files", summary.files},
                              {"bytes", summary.bytes},
                              {"eod", nullptr},
                              {"prompt_tokens", nullptr}};
        if (summary.end_of_document) out["eod"] = *summary.end_of_document;
        if (summary.prompt_tokens) out["prompt_tokens"] = *summary.prompt_tokens;
        fmt::print("{}\n", as_line(out));
    }
    static void print_text(const DatasetSummary& summary, bool end_given) {
        const auto row = [](const char* name, const std::string& value) { fmt::print("{:<11}{}\n", name, value); };
        row("format", fmt::format("{}, {} file{}, {}", name_of(summary.format), summary.files,
                                  summary.files == 1 ? "" : "s", human_bytes(summary.bytes)));
        row("tokens", with_commas(summary.tokens));
        std::string documents = with_commas(summary.documents);
        if (summary.end_of_document) {
            const bool guessed = summary.format == TokenFormat::llmc && !end_given;
            documents += fmt::format(", ended by id {}{}", *summary.end_of_document,
                                     guessed ? " (a guess; --eod or --tokenizer tell)" : "");
        }
        row("documents", documents);
        row("largest id", fmt::format("{}", summary.vocab_max));
        row("dtype", name_of(summary.type));
        if (summary.prompt_tokens) row("prompt", fmt::format("{} tokens", with_commas(*summary.prompt_tokens)));
    }
};

struct ConvertCommand {
    ConvertOptions options;
    EndOption end;
    bool json = false;

    void add_to(CLI::App& app) {
        app.add_option("data", options.input, "Token file, Megatron prefix, or glob in quotes")
            ->type_name("DATA")
            ->required();
        app.add_option("--out", options.prefix, "Output PREFIX.bin (and .idx, .mask)")->type_name("PREFIX")->required();
        add_format(app, options.format, "Format of the output")->required();
        end.add_to(app);
        add_shard_tokens(app, options.shard_tokens);
        app.add_flag("--json", json, "Print the result as one JSON object");
    }
    void run() {
        ProgressLine line("converting");
        options.end_of_document = end.resolve();
        options.vocab = end.vocab;
        const ConvertResult result = convert(options, tokens_progress(line));
        if (json) {
            fmt::print("{}\n", as_line({{"files", result.files},
                                        {"tokens", result.tokens},
                                        {"documents", result.documents},
                                        {"appended_eod", result.appended_ends}}));
            return;
        }
        fmt::print("{}: {} tokens, {} documents\n", join_words(result.files), with_commas(result.tokens),
                   with_commas(result.documents));
        if (result.appended_ends > 0)
            fmt::print("id {} was put behind {} documents\n", *result.input.end_of_document,
                       with_commas(result.appended_ends));
        if (result.input.format == TokenFormat::llmc && !options.end_of_document) {
            fmt::print(stderr, "documents were taken to end with id {}; --eod or --tokenizer tell\n",
                       *result.input.end_of_document);
        }
    }
};

struct UnigramCommand {
    std::string train, val;
    bool json = false;

    void add_to(CLI::App& app) {
        app.add_option("train", train, "Token file or glob to count on")->required()->type_name("TRAIN");
        app.add_option("val", val, "Token file or glob to compute the loss of")->required()->type_name("VAL");
        app.add_flag("--json", json, "Print one JSON object");
    }
    void run() const {
        const UnigramLoss result = unigram_loss(train, val);
        if (json) {
            fmt::print("{}\n", nlohmann::json{{"loss", result.loss}, {"tokens", result.tokens}}.dump());
        } else {
            fmt::print("unigram loss {:.5f} nats per token over {} tokens\n", result.loss, with_commas(result.tokens));
        }
    }
};

// "did you mean": the nearest flag or sub-command to each argument that the parser does not know.
std::string suggestion(const CLI::App& app, const std::string& message) {
    const CLI::App* command = app.get_subcommands().empty() ? &app : app.get_subcommands().front();
    std::vector<std::string> names;
    for (const CLI::Option* option : command->get_options()) {
        for (const std::string& name : option->get_lnames()) names.push_back("--" + name);
    }
    for (const CLI::App* sub : app.get_subcommands({})) names.push_back(sub->get_name());
    for (const std::string& word : command->remaining()) {
        const std::string bare = word.substr(0, word.find('='));
        const auto near = near_misses(bare, names);
        if (!near.empty()) return fmt::format("unknown argument {}: did you mean {}?", bare, join_words(near, " or "));
    }
    return message;
}

}  // namespace

int data_command(int argc, char** argv) {
    CLI::App app("Makes token files from text, looks at them, and converts them.", "trifold data");
    app.require_subcommand(1);
    TokenizeCommand tokenize_command;
    InspectCommand inspect_command;
    ConvertCommand convert_command;
    UnigramCommand unigram_command;
    CLI::App* tokenize_app = app.add_subcommand(
        "tokenize",
        "Text to tokens:  trifold data tokenize book.txt notes/ --tokenizer bytes --out data/books --val 0.05");
    CLI::App* inspect_app = app.add_subcommand(
        "inspect", "Size, documents and ids of token files:  trifold data inspect 'data/books_*.bin'");
    CLI::App* convert_app = app.add_subcommand(
        "convert",
        "Between llm.c and Megatron:  trifold data convert data/books.bin --out data/books-m --format megatron");
    CLI::App* unigram_app = app.add_subcommand(
        "unigram",
        "The loss that token frequencies alone reach:  trifold data unigram data/books_train.bin data/books_val.bin");
    tokenize_command.add_to(*tokenize_app);
    inspect_command.add_to(*inspect_app);
    convert_command.add_to(*convert_app);
    unigram_command.add_to(*unigram_app);
    try {
        app.parse(argc, argv);
    } catch (const CLI::CallForHelp&) {
        const auto chosen = app.get_subcommands();
        fmt::print("{}", chosen.empty() ? app.help() : chosen.front()->help("trifold data"));
        return 0;
    } catch (const CLI::ParseError& error) {
        throw Problem(Exit::usage, fmt::format("{} (trifold data --help tells more)", suggestion(app, error.what())));
    }
    if (tokenize_app->parsed()) tokenize_command.run();
    if (inspect_app->parsed()) inspect_command.run();
    if (convert_app->parsed()) convert_command.run();
    if (unigram_app->parsed()) unigram_command.run();
    return 0;
}

}  // namespace trifold
