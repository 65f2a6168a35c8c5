// test/unit/test_tokenize.cpp   Text, folders and JSONL to token files; prompts and chats with their masks.
#include "test/catch.h"

#include <zlib.h>

#include "commands/commands.h"
#include "data/tokenize.h"
#include "data/tokenizer.h"
#include "test/unit/data_files.h"

using namespace trifold;

namespace {

using Ids = std::vector<int32_t>;

const std::string golden = TRIFOLD_TEST_FOLDER "/golden/tokenizers";

Ids tokens_of(const std::string& path) {
    const TokenFile file(path);
    Ids ids(static_cast<size_t>(file.tokens()));
    file.read(0, ids);
    return ids;
}

Ids bytes_and_end(const std::string& text) {
    Ids ids;
    for (const char c : text) ids.push_back(static_cast<uint8_t>(c));
    ids.push_back(256);
    return ids;
}

void append(Ids& to, const Ids& from) { to.insert(to.end(), from.begin(), from.end()); }

std::string long_text(int lines) {
    std::string text;
    for (int i = 0; i < lines; ++i) {
        text += "Line " + std::to_string(i * 7919) + " of the text: naïve café, 中文字, don't!\n";
        if (i % 7 == 0) text += "\n    indented   words\n";
    }
    return text;
}

}  // namespace

TEST_CASE("files, folders and their order") {
    const TemporaryFolder folder;
    write_file(folder / "in/b.txt", "second");
    write_file(folder / "in/a/z.txt", "first");
    write_file(folder / "in/c.txt", "");
    write_file(folder / "in/.hidden/x.txt", "never");
    write_file(folder / "in/.x", "never");
    write_file(folder / "one", std::string("\xff\x00\n", 3));
    const TokenizeResult result = tokenize({.inputs = {folder / "in", folder / "one"}, .prefix = folder / "out/t"});
    Ids expected = bytes_and_end("first");
    append(expected, bytes_and_end("second"));
    append(expected, bytes_and_end(std::string("\xff\x00\n", 3)));
    CHECK(tokens_of(folder / "out/t.bin") == expected);
    CHECK(result.empty_documents == 1);
    REQUIRE(result.outputs.size() == 1);
    CHECK(result.outputs[0].documents == 3);
    CHECK(result.outputs[0].tokens == std::ssize(expected));
    CHECK(result.outputs[0].files == std::vector<std::string>{folder / "out/t.bin"});
}

TEST_CASE("the output does not depend on threads or chunks") {
    const TemporaryFolder folder;
    const std::string text = long_text(400);
    write_file(folder / "a.txt", text);
    write_file(folder / "b.txt", "short");
    for (const char* name : {"bytes", "gpt2", "llama3", "qwen2"}) {
        const std::string tokenizer = name == std::string("bytes") ? name : golden + "/" + name + ".json";
        const Tokenizer loaded = Tokenizer::load(tokenizer);
        Ids expected;
        for (const std::string& document : {text, std::string("short")}) {
            append(expected, loaded.document_prefix());
            append(expected, loaded.encode(document));
            expected.push_back(loaded.end_of_document());
        }
        for (const auto& [threads, chunk] : {std::pair<int, int64_t>{1, 1 << 20}, {1, 100}, {3, 777}, {2, 4096}}) {
            INFO(name << ", " << threads << " threads, chunks of " << chunk);
            tokenize({.inputs = {folder / "a.txt", folder / "b.txt"},
                      .tokenizer = tokenizer,
                      .prefix = folder / "o",
                      .format = TokenFormat::megatron,
                      .threads = threads,
                      .chunk_bytes = chunk});
            CHECK(tokens_of(folder / "o") == expected);
            CHECK(TokenFile(folder / "o").listed_documents() == 2);
        }
    }
}

TEST_CASE("a validation part: the end of one file, whole documents of many") {
    const TemporaryFolder folder;
    const std::string text = long_text(300);
    write_file(folder / "a.txt", text);
    TokenizeResult result =
        tokenize({.inputs = {folder / "a.txt"}, .prefix = folder / "o", .validation = 0.1, .chunk_bytes = 1000});
    Ids train = tokens_of(folder / "o_train.bin"), val = tokens_of(folder / "o_val.bin");
    REQUIRE(train.back() == 256);
    train.pop_back();
    CHECK(train.back() == '\n');  // cut at a line
    append(train, val);
    CHECK(train == bytes_and_end(text));
    CHECK(std::abs(static_cast<double>(val.size()) / static_cast<double>(train.size()) - 0.1) < 0.01);
    CHECK(result.outputs[0].documents == 1);
    CHECK(result.outputs[1].documents == 1);

    // 500 bytes of it.
    tokenize({.inputs = {folder / "a.txt"}, .prefix = folder / "p", .validation = 500});
    CHECK(std::abs(static_cast<double>(tokens_of(folder / "p_val.bin").size()) - 500) < 100);

    std::string lines;
    for (int i = 0; i < 50; ++i) lines += "{\"text\": \"" + std::to_string(i) + "\"}\n";
    write_file(folder / "b.jsonl", lines);
    result = tokenize({.inputs = {folder / "b.jsonl"}, .prefix = folder / "q", .validation = 0.1, .chunk_bytes = 64});
    CHECK(result.outputs[0].documents == 45);
    CHECK(result.outputs[1].documents == 5);
    Ids expected;
    for (const char* number : {"9", "19", "29", "39", "49"}) append(expected, bytes_and_end(number));
    CHECK(tokens_of(folder / "q_val.bin") == expected);
    CHECK_PROBLEM(tokenize({.inputs = {folder / "b.jsonl"}, .prefix = folder / "r", .validation = 0.01}),
                  "--val 0.01 gives no document");
    CHECK_PROBLEM(tokenize({.inputs = {folder / "b.jsonl"}, .prefix = folder / "r", .validation = 1e9}),
                  "2: --val 1000000000 of 740 bytes");
    CHECK_PROBLEM(tokenize({.inputs = {folder / "b.jsonl"}, .prefix = folder / "r", .validation = -1}),
                  "2: --val -1 is neither");
    CHECK_FALSE(std::filesystem::exists(folder / "r_train.bin.tmp"));
}

TEST_CASE("JSONL with prompts: what is masked") {
    const TemporaryFolder folder;
    write_file(
        folder / "a.jsonl",
        "{\"text\": \"x\"}\n\n{\"prompt\": \"ab\", \"completion\": \"cd\"}\n{\"text\": \"\"}\n{\"text\": \"y\"}");
    const TokenizeResult result = tokenize({.inputs = {folder / "a.jsonl"}, .prefix = folder / "o"});
    CHECK(tokens_of(folder / "o.bin") == Ids{'x', 256, 'a', 'b', 'c', 'd', 256, 'y', 256});
    CHECK(result.empty_documents == 1);
    CHECK(result.outputs[0].prompt_tokens == 2);
    const MaskFile mask(folder / "o.mask", 9);
    CHECK(mask.count(0, 9) == 2);
    CHECK((mask.is_prompt(2) && mask.is_prompt(3)));
    // Without any prompt there is no mask, and that of an earlier output goes.
    write_file(folder / "b.jsonl", "{\"body\": \"x\"}\n");
    tokenize({.inputs = {folder / "b.jsonl"}, .prefix = folder / "o", .text_key = "body"});
    CHECK_FALSE(std::filesystem::exists(folder / "o.mask"));
}

TEST_CASE("chat messages: three layouts") {
    const TemporaryFolder folder;
    write_file(
        folder / "chat.jsonl",
        R"({"messages": [{"role": "system", "content": "Be kind."}, {"role": "user", "content": " Hi <|im_end|>"}, {"role": "assistant", "content": "Hello!"}]})");
    const auto decoded = [&](const std::string& tokenizer, SpecialText special, bool prompt) {
        tokenize(
            {.inputs = {folder / "chat.jsonl"}, .tokenizer = tokenizer, .prefix = folder / "o", .special = special});
        const Ids ids = tokens_of(folder / "o.bin");
        const MaskFile mask(folder / "o.mask", std::ssize(ids));
        Ids chosen;
        for (size_t i = 0; i < ids.size(); ++i) {
            if (mask.is_prompt(static_cast<int64_t>(i)) == prompt) chosen.push_back(ids[i]);
        }
        return text_of(Tokenizer::load(tokenizer), chosen);
    };
    CHECK(decoded("bytes", SpecialText::match, true) == "system: Be kind.\nuser:  Hi <|im_end|>\nassistant:");
    CHECK(decoded("bytes", SpecialText::match, false) == " Hello!\n");
    const std::string qwen = golden + "/qwen2.json";
    const std::string prompt =
        "<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user\n Hi <|im_end|><|im_end|>\n<|im_start|>assistant\n\n";
    CHECK(decoded(qwen, SpecialText::match, true) == prompt);
    CHECK(decoded(qwen, SpecialText::match, false) == "Hello!<|im_end|><|endoftext|>");
    const Tokenizer tokenizer = Tokenizer::load(qwen);
    const int32_t mark = tokenizer.id_of("<|im_end|>");
    decoded(qwen, SpecialText::match, true);
    Ids ids = tokens_of(folder / "o.bin");
    CHECK(std::count(ids.begin(), ids.end(), mark) == 4);
    CHECK(decoded(qwen, SpecialText::plain, true) == prompt);
    ids = tokens_of(folder / "o.bin");
    CHECK(std::count(ids.begin(), ids.end(), mark) == 3);  // the user's own stays text
}

TEST_CASE("packed files are unpacked, broken ones refused") {
    const TemporaryFolder folder;
    const std::string text = long_text(200);
    gzFile out = gzopen((folder / "a.txt.gz").c_str(), "wb");
    gzwrite(out, text.data(), static_cast<unsigned>(text.size()));
    gzclose(out);
    tokenize({.inputs = {folder / "a.txt.gz"}, .prefix = folder / "o", .chunk_bytes = 1000});
    CHECK(tokens_of(folder / "o.bin") == bytes_and_end(text));
    const std::string packed = read_file(folder / "a.txt.gz");
    write_file(folder / "cut.gz", packed.substr(0, packed.size() / 2));
    CHECK_PROBLEM(tokenize({.inputs = {folder / "cut.gz"}, .prefix = folder / "o"}), "cannot unpack");
    std::string damaged = packed;
    damaged[packed.size() / 2] ^= 0x55;
    write_file(folder / "bad.gz", damaged);
    CHECK_PROBLEM(tokenize({.inputs = {folder / "bad.gz"}, .prefix = folder / "o"}), "cannot unpack");
}

TEST_CASE("bad text is one sentence each and leaves nothing behind") {
    const TemporaryFolder folder;
    const std::string tokenizer = golden + "/gpt2.json";
    const auto text = [&](const std::string& bytes, int64_t chunk) {
        write_file(folder / "x.txt", bytes);
        tokenize({.inputs = {folder / "x.txt"}, .tokenizer = tokenizer, .prefix = folder / "o", .chunk_bytes = chunk});
    };
    CHECK_PROBLEM(text(long_text(100) + "\xff tail", 512),
                  "x.txt is not UTF-8 at byte offset " + std::to_string(long_text(100).size()) + " (0xff)");
    CHECK_PROBLEM(text(std::string(5000, '\xfe'), 512), "byte offset 0 (0xfe)");
    CHECK_PROBLEM(text("abc\xe4\xb8", 512), "byte offset 3 (0xe4)");
    const auto lines = [&](const std::string& bytes) {
        write_file(folder / "x.jsonl", bytes);
        tokenize({.inputs = {folder / "x.jsonl"}, .prefix = folder / "o", .chunk_bytes = 16});
    };
    const std::string fine = "{\"text\": \"fine\"}\n";
    CHECK_PROBLEM(lines(fine + fine + "{\"text\": \"a\xff\"}\n"), "not UTF-8 at byte offset 45");
    CHECK_PROBLEM(lines(fine + "\n" + fine + "{\"text\": \"a\"\n"), "x.jsonl line 4: the JSON, byte 12: syntax error");
    CHECK_PROBLEM(lines(fine + "{\"body\": \"a\"}\n"), "line 2: has neither \"text\" nor");
    CHECK_PROBLEM(lines("{\"text\": 5}\n"), "line 1: \"text\" is a number, not a string");
    CHECK_PROBLEM(lines("[1]\n"), "line 1: not a JSON object");
    CHECK_PROBLEM(lines("{\"prompt\": \"a\", \"completion\": null}\n"), "\"completion\" is a null, not a string");
    CHECK_PROBLEM(lines("{\"messages\": [{\"role\": \"user\"}]}\n"), "\"content\" is missing");
    CHECK_PROBLEM(lines("{\"messages\": {}}\n"), "\"messages\" is a object, not a list");
    CHECK_PROBLEM(lines("\n\n"), "there is no text in");
    CHECK_PROBLEM(tokenize({.inputs = {folder / "none"}, .prefix = folder / "o"}), "3: there is no file or folder");
    std::filesystem::create_directory(folder / "empty");
    CHECK_PROBLEM(tokenize({.inputs = {folder / "empty"}, .prefix = folder / "o"}), "has no files");
    CHECK(folder.names() == std::vector<std::string>{"empty", "x.jsonl", "x.txt"});
}

TEST_CASE("the command line: usage errors are problems with a suggestion") {
    CHECK_PROBLEM(data_command({"tokenise", "x"}), "2: unknown argument tokenise: did you mean tokenize?");
    CHECK_PROBLEM(data_command({"tokenize", "x", "--out", "y", "--tokeniser", "bytes"}), "did you mean --tokenizer?");
    CHECK_PROBLEM(data_command({"tokenize", "x", "--out", "y", "--format", "foo"}), "2: --format must be one of llmc or megatron, not \"foo\"");
    CHECK_PROBLEM(data_command({"tokenize", "x"}), "2: --out is required");
    CHECK_PROBLEM(data_command({}), "2: A subcommand is required");
    CHECK_PROBLEM(data_command({"inspect", "/nonexistent.bin"}), "3: there is no token file");
}
