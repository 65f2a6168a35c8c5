// test/unit/test_tokenizer.cpp   Tokenizers against the `tokenizers` package (by hashes), and files that are refused.
#include "test/catch.h"

#include <filesystem>
#include <fstream>
#include <functional>
#include <nlohmann/json.hpp>

#include "base/error.h"
#include "data/tokenizer.h"
#include "data/utf8.h"
#include "test/unit/data_files.h"

using namespace trifold;
using nlohmann::json;
namespace fs = std::filesystem;

namespace {

const fs::path golden_folder = TRIFOLD_TEST_FOLDER "/golden/tokenizers";

json read_json(const fs::path& path) {
    std::ifstream in(path);
    REQUIRE(in);
    return json::parse(in);
}

std::string tokenizer_path(const std::string& name) { return (golden_folder / (name + ".json")).string(); }

// splitmix64; the same as class Random of test/golden/make_tokenizers.py.
class Random {
public:
    explicit Random(uint64_t seed) : state_(seed) {}
    uint64_t next(uint64_t n) {
        state_ += 0x9E3779B97F4A7C15u;
        uint64_t z = state_;
        z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9u;
        z = (z ^ z >> 27) * 0x94D049BB133111EBu;
        return (z ^ z >> 31) % n;
    }

private:
    uint64_t state_;
};

std::string code_point(uint32_t c) {
    std::string out;
    if (c < 0x10000) {
        append_utf8(out, c);
    } else {
        for (const uint32_t byte : {0xF0 | c >> 18, 0x80 | (c >> 12 & 63), 0x80 | (c >> 6 & 63), 0x80 | (c & 63)})
            out += static_cast<char>(byte);
    }
    return out;
}

struct Fuzz {
    std::vector<std::string> atoms, spaces;
    std::vector<std::array<uint32_t, 2>> ranges;

    explicit Fuzz(const json& file) : atoms(file["atoms"]), spaces(file["spaces"]), ranges(file["ranges"]) {}

    std::string make(uint64_t seed) const {
        Random r(seed);
        std::string out;
        for (uint64_t left = 1 + r.next(12); left > 0; --left) {
            const uint64_t kind = r.next(8);
            if (kind < 4) {
                out += atoms[r.next(atoms.size())];
            } else if (kind < 6) {
                out += spaces[r.next(spaces.size())];
            } else if (kind == 6) {
                const auto [first, last] = ranges[r.next(ranges.size())];
                out += code_point(first + static_cast<uint32_t>(r.next(last - first + 1)));
            } else {
                out += static_cast<char>(33 + r.next(94));
            }
        }
        return out;
    }
};

// FNV-1a over the numbers, every list closed by -1.
struct IdHash {
    uint64_t value = 0xCBF29CE484222325u;
    void add(const std::vector<int32_t>& ids) {
        for (const int32_t id : ids) add(static_cast<uint64_t>(id));
        add(~uint64_t{0});
    }
    void add(uint64_t number) { value = (value ^ number) * 0x100000001B3u; }
};

// A tokenizer.json on disk for the length of a test.
class ChangedTokenizer {
public:
    ChangedTokenizer(const std::string& base, const std::function<void(json&)>& change) {
        static int count = 0;
        path_ = fs::temp_directory_path() /
                ("trifold-tokenizer-" + std::to_string(::getpid()) + "-" + std::to_string(count++) + ".json");
        json file = read_json(golden_folder / (base + ".json"));
        change(file);
        std::ofstream(path_) << file;
    }
    ~ChangedTokenizer() { fs::remove(path_); }
    std::string path() const { return path_.string(); }

private:
    fs::path path_;
};

std::string refusal(const std::string& base, const std::function<void(json&)>& change) {
    const ChangedTokenizer file(base, change);
    return problem_of([&] { Tokenizer::load(file.path()); });
}

}  // namespace

TEST_CASE("the byte tokenizer takes any bytes and gives them back") {
    const Tokenizer tokenizer = Tokenizer::load("bytes");
    std::string all;
    for (int b = 0; b < 256; ++b) all += static_cast<char>(b);
    const std::vector<int32_t> ids = tokenizer.encode(all);
    REQUIRE(ids.size() == 256);
    for (int b = 0; b < 256; ++b) REQUIRE(ids[b] == b);
    CHECK(text_of(tokenizer, ids) == all);
    CHECK(tokenizer.vocab_size() == 257);
    CHECK(tokenizer.end_of_document() == 256);
    CHECK(tokenizer.piece(256).empty());
    CHECK(tokenizer.encode("").empty());
    CHECK(tokenizer.last_cut("abc") == 3);
}

TEST_CASE("ids equal those of the tokenizers package on explicit and on random strings") {
    const json golden = read_json(golden_folder / "golden.json");
    const Fuzz fuzz(read_json(golden_folder / "fuzz.json"));
    const std::vector<std::string> strings = golden["strings"];
    const auto block = golden["block"].get<uint64_t>();
    for (const json& one : golden["cases"]) {
        const auto special = one["special"] == "match" ? SpecialText::match : SpecialText::plain;
        INFO(one["tokenizer"] << " " << one["special"]);
        const Tokenizer tokenizer = Tokenizer::load(tokenizer_path(one["tokenizer"]));
        Encoder encoder(tokenizer);
        for (size_t i = 0; i < one["ids"].size(); ++i) {
            std::vector<int32_t> ids;
            encoder.encode(strings[i], ids, special);
            INFO("string " << i << ": " << strings[i]);
            CHECK(ids == one["ids"][i].get<std::vector<int32_t>>());
        }
        for (size_t b = 0; b < one["hashes"].size(); ++b) {
            IdHash hash;
            std::vector<int32_t> ids;
            for (uint64_t i = 0; i < block; ++i) {
                ids.clear();
                encoder.encode(fuzz.make(block * b + i), ids, special);
                hash.add(ids);
            }
            char text[17];
            std::snprintf(text, sizeof(text), "%016llx", static_cast<unsigned long long>(hash.value));
            INFO("block " << b);
            CHECK(text == one["hashes"][b].get<std::string>());
        }
    }
}

TEST_CASE("decoding gives the text back") {
    const Fuzz fuzz(read_json(golden_folder / "fuzz.json"));
    for (const char* name : {"gpt2", "llama3"}) {
        const Tokenizer tokenizer = Tokenizer::load(tokenizer_path(name));
        Encoder encoder(tokenizer);
        for (uint64_t seed = 0; seed < 2000; ++seed) {
            const std::string text = fuzz.make(seed);
            std::vector<int32_t> ids;
            encoder.encode(text, ids);
            REQUIRE(text_of(tokenizer, ids) == text);
            StreamDecoder stream(tokenizer);
            std::string streamed;
            for (const int32_t id : ids) {
                const std::string ready = stream.push(id);
                REQUIRE(invalid_utf8(ready) == std::string::npos);
                streamed += ready;
            }
            REQUIRE(streamed + stream.finish() == text);
        }
    }
}

TEST_CASE("a text cut at last_cut gives the same ids") {
    const Fuzz fuzz(read_json(golden_folder / "fuzz.json"));
    for (const char* name : {"gpt2", "gpt2_prefix", "llama3", "qwen2"}) {
        const ChangedTokenizer file(name, [](json& tokenizer) {
            for (json& token : tokenizer["added_tokens"]) token["lstrip"] = token["rstrip"] = false;
        });
        const Tokenizer tokenizer = Tokenizer::load(file.path());
        Encoder encoder(tokenizer);
        int cuts = 0;
        for (uint64_t seed = 0; seed < 8000; ++seed) {
            const std::string text = fuzz.make(seed) + fuzz.make(seed + 1'000'000) + fuzz.make(seed + 2'000'000);
            std::vector<int32_t> whole, parts;
            encoder.encode(text, whole);
            const size_t cut = tokenizer.last_cut(std::string_view(text).substr(0, text.size() * 2 / 3));
            if (cut == 0) continue;
            ++cuts;
            encoder.encode(std::string_view(text).substr(0, cut), parts);
            encoder.encode(std::string_view(text).substr(cut), parts);
            INFO(name << " seed " << seed << ": " << text);
            REQUIRE(parts == whole);
        }
        CHECK(cuts > 2000);
    }
    // The carriage return belongs to the word that the line feed is in.
    CHECK(Tokenizer::load(tokenizer_path("llama3")).last_cut("a\n \rb") == 0);
    CHECK(Tokenizer::load(tokenizer_path("llama3")).last_cut("a\n  b") == 2);
    CHECK(Tokenizer::load(tokenizer_path("gpt2_prefix")).last_cut("one two three ") ==
          0);  // its tokens take white space
}

TEST_CASE("long words are merged in reasonable time") {
    const Tokenizer tokenizer = Tokenizer::load(tokenizer_path("gpt2"));
    for (const char* unit : {"a", "ab", " ", "\n", "1", "!?"}) {
        std::string text;
        while (text.size() < 200'000) text += unit;
        CHECK(text_of(tokenizer, tokenizer.encode(text)) == text);
    }
}

TEST_CASE("documents: prefix and end") {
    const Tokenizer llama = Tokenizer::load(tokenizer_path("llama3"));
    REQUIRE(llama.document_prefix().size() == 1);
    CHECK(llama.piece(llama.document_prefix()[0]) == "<|begin_of_text|>");
    CHECK(llama.piece(llama.end_of_document()) == "<|endoftext|>");
    const Tokenizer other = Tokenizer::load(tokenizer_path("llama3"), "<|eot_id|>");
    CHECK(other.piece(other.end_of_document()) == "<|eot_id|>");
    CHECK(problem_of([] { Tokenizer::load(tokenizer_path("llama3"), "<nix>"); }).find("no added token \"<nix>\"") !=
          std::string::npos);
    const ChangedTokenizer none("gpt2", [](json& file) { file["added_tokens"] = json::array(); });
    CHECK(problem_of([&] { Tokenizer::load(none.path()).end_of_document(); }).find("--eod") != std::string::npos);
}

TEST_CASE("text that is not UTF-8 is refused with its offset") {
    const Tokenizer tokenizer = Tokenizer::load(tokenizer_path("gpt2"));
    const auto refused = [&](const std::string& text) { return problem_of([&] { tokenizer.encode(text); }); };
    CHECK(refused("abc\xff").find("byte offset 3 (0xff)") != std::string::npos);
    CHECK(refused("0123456789\xc3").find("byte offset 10 (0xc3)") != std::string::npos);
    // Overlong forms, a surrogate, beyond U+10FFFF, a lone continuation, a broken sequence.
    for (const char* bad : {"\xc0\x80", "\xe0\x80\x80", "\xf0\x80\x80\x80", "\xed\xa0\x80", "\xf4\x90\x80\x80", "\x80",
                            "\xe2\x82x", "\xf8\x88\x80\x80\x80"}) {
        CHECK(refused(std::string("ok") + bad).find("byte offset 2") != std::string::npos);
    }
    for (const char* good : {"\xc2\x80", "\xe0\xa0\x80", "\xed\x9f\xbf", "\xf0\x90\x80\x80", "\xf4\x8f\xbf\xbf"})
        CHECK(refused(good) == "no problem");
}

TEST_CASE("unknown kinds of tokenizer.json are refused by name") {
    const auto says = [](const std::string& message, const std::string& part) {
        INFO(message);
        CHECK(message.find(part) != std::string::npos);
    };
    says(refusal("gpt2", [](json& f) { f["model"]["type"] = "Unigram"; }), "model of type Unigram");
    says(refusal("gpt2", [](json& f) { f["model"]["type"] = "WordPiece"; }), "model of type WordPiece");
    says(refusal("gpt2", [](json& f) { f["model"]["byte_fallback"] = true; }), "byte_fallback");
    says(refusal("gpt2", [](json& f) { f["model"]["dropout"] = 0.1; }), "dropout");
    says(refusal("gpt2", [](json& f) { f["model"]["end_of_word_suffix"] = "</w>"; }), "end_of_word_suffix");
    says(refusal("gpt2", [](json& f) { f["model"]["vocab"].erase("\u0120"); }), "byte 0x20");
    says(refusal("gpt2", [](json& f) { f["model"]["vocab"]["x"] = 5; }), "two tokens the id");
    says(refusal("gpt2", [](json& f) { f["model"]["vocab"]["x"] = -5; }), "the id -5");
    says(refusal("gpt2", [](json& f) { f["model"]["vocab"]["x"] = "y"; }), "unexpected type");
    says(refusal("gpt2", [](json& f) { f["model"]["merges"].push_back("a b c"); }), "not two tokens");
    says(refusal("gpt2", [](json& f) { f["model"]["merges"].push_back("a zzzz"); }), "not in its vocabulary");
    says(refusal("gpt2", [](json& f) { f["model"].erase("merges"); }), "unexpected type");
    says(refusal("gpt2", [](json& f) { f["normalizer"] = {{"type", "Lowercase"}}; }), "normalizer Lowercase");
    says(refusal("qwen2", [](json& f) { f["normalizer"]["type"] = "NFKC"; }), "normalizer NFKC");
    says(refusal("gpt2", [](json& f) { f["pre_tokenizer"] = nullptr; }), "no pre-tokenizer");
    says(refusal("gpt2", [](json& f) { f["pre_tokenizer"]["type"] = "Metaspace"; }), "pre-tokenizer Metaspace");
    says(refusal("gpt2", [](json& f) { f["pre_tokenizer"]["use_regex"] = false; }), "without use_regex");
    const auto split = [](json& f) -> json& { return f["pre_tokenizer"]["pretokenizers"][0]; };
    says(refusal("llama3", [&](json& f) { split(f)["pattern"]["Regex"] = "\\s+"; }), "unknown word pattern, \\s+");
    says(refusal("llama3", [&](json& f) { split(f)["pattern"] = {{"String", " "}}; }), "without a regular expression");
    says(refusal("llama3", [&](json& f) { split(f)["behavior"] = "Removed"; }), "not \"Isolated\"");
    says(refusal("llama3", [&](json& f) { split(f)["invert"] = true; }), "inverted");
    says(refusal("llama3",
                 [&](json& f) {
                     f["pre_tokenizer"]["pretokenizers"].push_back({{"type", "Digits"}});
                 }),
         "pre-tokenizer Digits");
    says(refusal("llama3", [&](json& f) { f["pre_tokenizer"]["pretokenizers"].erase(1); }), "another sequence");
    says(refusal("gpt2", [](json& f) { f["decoder"]["type"] = "Metaspace"; }), "decoder Metaspace");
    says(refusal("gpt2", [](json& f) { f["post_processor"]["type"] = "BertProcessing"; }),
         "post-processor BertProcessing");
    says(refusal("gpt2", [](json& f) { f["added_tokens"][0]["single_word"] = true; }), "single_word");
    says(refusal("gpt2", [](json& f) { f["added_tokens"][0]["id"] = 3; }), "the id 3");
    says(refusal("gpt2", [](json& f) { f = json::object(); }), "not a tokenizer.json");
    says(problem_of([] { Tokenizer::load("/nonexistent/tokenizer.json"); }),
         "there is no tokenizer /nonexistent/tokenizer.json");
    says(problem_of([] { Tokenizer::load("/"); }), "is a folder");
    says(problem_of([] { Tokenizer::load(TRIFOLD_TEST_FOLDER "/unit/main.cpp"); }), "main.cpp, line 1, column 1: syntax error");
}
