// data/tokenizer_json.cpp
#include "data/tokenizer_json.h"

#include <algorithm>
#include <array>
#include <filesystem>
#include <unordered_map>

#include "base/file.h"
#include "base/json.h"
#include "base/refuse.h"
#include "data/utf8.h"

namespace trifold {
namespace {

using json = JsonValue;

// GPT-2's alphabet: bytes that print stand for themselves, the others for U+0100, U+0101 ... in order.
class ByteAlphabet {
public:
    ByteAlphabet() {
        char32_t next = 0x100;
        for (int b = 0; b < 256; ++b) {
            const bool prints = (b >= '!' && b <= '~') || (b >= 0xA1 && b <= 0xAC) || b >= 0xAE;
            append_utf8(letter_[b], prints ? static_cast<char32_t>(b) : next++);
            byte_[letter_[b]] = static_cast<char>(b);
        }
    }
    const std::string& letter(int byte) const { return letter_[byte]; }
    // The bytes that a token stands for. One with other letters stands for itself, as in the package.
    std::string decode(const std::string& token) const {
        std::string bytes;
        for (size_t i = 0; i < token.size();) {
            const size_t length = static_cast<uint8_t>(token[i]) < 0x80 ? 1 : 2;
            const auto found = byte_.find(token.substr(i, length));
            if (found == byte_.end()) return token;
            bytes += found->second;
            i += length;
        }
        return bytes;
    }

private:
    std::array<std::string, 256> letter_;
    std::unordered_map<std::string, char> byte_;
};

class Reader {
public:
    explicit Reader(const std::string& path) : path_(path) {
        std::error_code ignored;
        if (std::filesystem::is_directory(path, ignored)) refuse("is a folder; give the tokenizer.json in it");
        if (!std::filesystem::exists(path, ignored)) trifold::refuse(Exit::data, "there is no tokenizer {}: give \"bytes\" or the path of a tokenizer.json", path);
        root_ = parse_json<json>(read_text(path, Exit::data, "tokenizer"), "tokenizer " + path, {.code = Exit::data});
        if (!root_.is_object() || !root_.contains("model")) refuse("has no \"model\": it is not a tokenizer.json");
    }

    TokenizerFile read() {
        try {
            read_vocabulary();
            read_merges();
            read_added_tokens();
            if (!steps_of("normalizer", "normalizer", "normalizers", {"NFC"}).empty()) file_.normalizer = Normalizer::nfc;
            read_pretokenizer();
            steps_of("decoder", "decoder", "", {"ByteLevel"});
            for (const json& step : steps_of("post_processor", "post-processor", "processors", {"ByteLevel", "TemplateProcessing"}))
                if (type_of(step) == "TemplateProcessing") read_template(step);  // ByteLevel moves offsets, not ids
        } catch (const json::exception& error) {
            refuse("has an entry of an unexpected type: {}", error.what());
        }
        return std::move(file_);
    }

private:
    template <class... Args>
    [[noreturn]] void refuse(fmt::format_string<Args...> why, Args&&... args) const {
        trifold::refuse(Exit::data, "tokenizer {} {}", path_, fmt::format(why, std::forward<Args>(args)...));
    }
    template <class... Args>
    [[noreturn]] void unsupported(fmt::format_string<Args...> what, Args&&... args) const {
        refuse("uses {}, which trifold does not do; it takes byte-level BPE as in GPT-2, Llama-3 and Qwen2",
               fmt::format(what, std::forward<Args>(args)...));
    }

    static const json& field(const json& object, const char* name) {
        static const json null;
        const auto found = object.find(name);
        return found == object.end() ? null : *found;
    }
    // A field that is absent, null, false or "".
    static bool off(const json& object, const char* name) {
        const json& value = field(object, name);
        return value.is_null() || value == false || value == "";
    }
    // What one part of the pipeline does: the entries of a "Sequence", or the one that stands alone; none for null. Other types are refused.
    json steps_of(const char* part, const char* name, const char* entries, const std::vector<std::string>& known) const {
        const json& object = field(root_, part);
        if (object.is_null()) return json::array();
        const json steps = type_of(object) == "Sequence" && object.contains(entries) ? object.at(entries) : json::array({object});
        for (const json& step : steps)
            if (std::ranges::find(known, type_of(step)) == known.end()) unsupported("the {} {}", name, type_of(step));
        return steps;
    }
    static std::string type_of(const json& object) { return object.value("type", std::string("?")); }
    static bool is_on(const json& object, const char* name, bool by_default) { return object.value(name, by_default); }

    void read_vocabulary() {
        const json& model = root_["model"];
        // Files of older releases do not name the type; a list of merges is what makes it BPE.
        const std::string type = model.contains("type") ? type_of(model) : model.contains("merges") ? "BPE" : "?";
        if (type != "BPE") unsupported("a model of type {}", type);
        const json& dropout = field(model, "dropout");
        if (!dropout.is_null() && dropout != 0.0) unsupported("BPE dropout");
        for (const char* option : {"byte_fallback", "continuing_subword_prefix", "end_of_word_suffix"})
            if (!off(model, option)) unsupported("the BPE option {}", option);
        const json& vocab = model.at("vocab");
        ids_.reserve(vocab.size());
        for (const auto& [token, id] : vocab.items()) set_piece(token, id.get<int64_t>(), alphabet_.decode(token));
        for (int b = 0; b < 256; ++b) {
            const auto found = ids_.find(alphabet_.letter(b));
            if (found == ids_.end()) refuse("has no token for the byte 0x{:02x}: it cannot encode every text", b);
            file_.bpe.byte_ids[b] = found->second;
        }
        if (!off(model, "ignore_merges"))
            for (const auto& [token, id] : ids_) file_.bpe.whole_words[alphabet_.decode(token)] = id;
    }

    void set_piece(const std::string& token, int64_t id, const std::string& bytes) {
        if (id < 0 || id > (int64_t{1} << 24)) refuse("gives the token \"{}\" the id {}; ids are 0 to 16777216", token, id);
        const auto index = static_cast<size_t>(id);
        if (index >= file_.pieces.size()) file_.pieces.resize(index + 1), taken_.resize(index + 1);
        if (taken_[index]) refuse("gives two tokens the id {}; one of them is \"{}\"", id, token);
        taken_[index] = true;
        file_.pieces[index] = bytes;
        ids_.emplace(token, static_cast<int32_t>(id));
    }

    void read_merges() {
        const json& merges = root_["model"].at("merges");
        file_.bpe.merges.reserve(merges.size());
        for (size_t rank = 0; rank < merges.size(); ++rank) {
            std::vector<std::string> pair;
            if (merges[rank].is_string()) {
                const auto text = merges[rank].get<std::string>();
                const size_t space = text.find(' ');
                if (space != std::string::npos && text.find(' ', space + 1) == std::string::npos)
                    pair = {text.substr(0, space), text.substr(space + 1)};
            } else if (merges[rank].is_array()) {
                pair = merges[rank].get<std::vector<std::string>>();
            }
            if (pair.size() != 2) refuse("has a merge that is not two tokens: {} (number {})", merges[rank].dump(), rank);
            file_.bpe.merges.push_back({merge_id(pair[0], rank), merge_id(pair[1], rank), merge_id(pair[0] + pair[1], rank)});
        }
    }

    int32_t merge_id(const std::string& token, size_t rank) const {
        const auto found = ids_.find(token);
        if (found == ids_.end()) refuse("has a merge (number {}) with \"{}\", which is not in its vocabulary", rank, token);
        return found->second;
    }

    void read_added_tokens() {
        for (const json& entry : field(root_, "added_tokens")) {
            AddedToken token;
            token.content = entry.at("content").get<std::string>();
            const auto id = entry.at("id").get<int64_t>();
            if (is_on(entry, "single_word", false)) unsupported("single_word in the added token \"{}\"", token.content);
            token.special = is_on(entry, "special", false);
            token.normalized = is_on(entry, "normalized", !token.special);
            token.lstrip = is_on(entry, "lstrip", false);
            token.rstrip = is_on(entry, "rstrip", false);
            const auto known = ids_.find(token.content);
            if (known == ids_.end())
                set_piece(token.content, id, token.content);
            else if (known->second != id)
                refuse("gives the token \"{}\" two ids, {} and {}", token.content, known->second, id);
            else
                file_.pieces[static_cast<size_t>(id)] = token.content;
            token.id = static_cast<int32_t>(id);
            file_.added.push_back(std::move(token));
        }
    }

    void read_pretokenizer() {
        if (field(root_, "pre_tokenizer").is_null()) unsupported("no pre-tokenizer");
        const json steps = steps_of("pre_tokenizer", "pre-tokenizer", "pretokenizers", {"Split", "ByteLevel"});
        if (steps.size() == 2 && type_of(steps[0]) == "Split" && type_of(steps[1]) == "ByteLevel") {
            read_split(steps[0]);
            // The prefix space would go before every word, a second pattern would run inside of every word.
            if (is_on(steps[1], "add_prefix_space", true)) unsupported("a ByteLevel step with add_prefix_space after a Split");
            if (is_on(steps[1], "use_regex", true)) unsupported("a ByteLevel step with use_regex after a Split");
        } else if (steps.size() == 1 && type_of(steps[0]) == "ByteLevel") {
            if (!is_on(steps[0], "use_regex", true)) unsupported("a ByteLevel pre-tokenizer without use_regex");
            file_.prefix_space = is_on(steps[0], "add_prefix_space", true);
        } else {
            unsupported("another sequence of pre-tokenizers than Split and ByteLevel");
        }
    }

    void read_split(const json& split) {
        const json& regex = field(split.at("pattern"), "Regex");
        if (!regex.is_string()) unsupported("a Split pre-tokenizer without a regular expression");
        const auto pattern = word_pattern(regex.get<std::string>());
        if (!pattern) unsupported("an unknown word pattern, {}", regex.get<std::string>());
        if (split.value("behavior", std::string()) != "Isolated") unsupported("a Split pre-tokenizer that is not \"Isolated\"");
        if (is_on(split, "invert", false)) unsupported("an inverted Split pre-tokenizer");
        file_.pattern = *pattern;
    }

    // "single": special tokens, the text, special tokens.
    void read_template(const json& processor) {
        std::vector<int32_t>* to = &file_.document_prefix;
        for (const json& part : processor.at("single")) {
            if (part.contains("Sequence")) {
                to = &file_.document_suffix;
                continue;
            }
            const auto name = part.at("SpecialToken").at("id").get<std::string>();
            for (const json& entry : processor.at("special_tokens").at(name).at("ids")) {
                const auto id = entry.get<int32_t>();
                if (id < 0 || static_cast<size_t>(id) >= file_.pieces.size()) refuse("has a template with the unknown id {}", id);
                to->push_back(id);
            }
        }
    }

    std::string path_;
    json root_;
    ByteAlphabet alphabet_;
    TokenizerFile file_;
    std::unordered_map<std::string, int32_t> ids_;  // by the token as the file spells it
    std::vector<bool> taken_;
};

}  // namespace

TokenizerFile read_tokenizer_json(const std::string& path) { return Reader(path).read(); }

}  // namespace trifold
