// checkpoint/manifest.cpp   See manifest.h.
#include "checkpoint/manifest.h"

#include "base/json.h"
#include "checkpoint/files.h"

namespace trifold {
namespace {

constexpr const char* format_name = "trifold checkpoint";
constexpr int64_t format_version = 1;

// The last bytes of the file, always of the same length.
std::string seal(const std::string& text) { return fmt::format(",\n  \"xxh3\": \"{}\"\n}}\n", to_hex(xxh3(text))); }

uint64_t from_hex(const std::string& digits) {
    if (digits.size() != 16 || digits.find_first_not_of("0123456789abcdef") != std::string::npos)
        refuse(Exit::checkpoint, "'{}' is not a hash of 16 hexadecimal digits", digits);
    return std::stoull(digits, nullptr, 16);
}

OrderedJson to_json(const std::vector<ShardFile>& shards) {
    OrderedJson list = OrderedJson::array();
    for (const auto& [file, digest, pieces] : shards) {
        std::vector<std::string> blocks;
        for (const uint64_t hash : digest.blocks) blocks.push_back(to_hex(hash));
        list.push_back({{"file", file}, {"bytes", digest.bytes}, {"xxh3", to_hex(digest.xxh3)}, {"block_xxh3", blocks}, {"pieces", pieces}});
    }
    return list;
}

std::vector<ShardFile> shards_of(const JsonValue& list) {
    std::vector<ShardFile> shards;
    for (const JsonValue& json : list) {
        const auto file = json.at("file").get<std::string>();
        if (file.empty() || file.find('/') != std::string::npos) refuse(Exit::checkpoint, "the shard name '{}' is not a plain file name", file);
        FileDigest digest{json.at("bytes").get<int64_t>(), from_hex(json.at("xxh3").get<std::string>()), {}};
        for (const JsonValue& hash : json.at("block_xxh3")) digest.blocks.push_back(from_hex(hash.get<std::string>()));
        shards.push_back({file, digest, json.at("pieces").get<std::vector<std::string>>()});
    }
    return shards;
}

Manifest manifest_of(const JsonValue& json) {
    if (json.at("format") != format_name) refuse(Exit::checkpoint, "it is not the manifest of a checkpoint");
    if (const int64_t version = json.at("version").get<int64_t>(); version != format_version)
        refuse(Exit::checkpoint, "its format version is {} and this program reads {}; use the program that wrote it ({})", version, format_version,
               json.value("tool", "unknown"));
    Manifest m;
    m.save_number = json.at("save_number").get<int64_t>();
    m.tool = json.at("tool").get<std::string>();
    m.ranks = json.at("ranks").get<int64_t>();
    const JsonValue& data = json.at("data");
    m.state = {.step = json.at("step").get<int64_t>(),
               .updates = json.at("updates").get<int64_t>(),
               .skipped = json.at("skipped").get<int64_t>(),
               .samples = data.at("samples").get<int64_t>(),
               .tokens = data.at("tokens").get<int64_t>(),
               .seed = json.at("seed").get<uint64_t>(),
               .config_json = json.at("config").dump(2),
               .data_hash = data.at("hash").get<std::string>()};
    m.tensors = json.at("tensors").get<decltype(m.tensors)>();
    m.shards = shards_of(json.at("shards"));
    return m;
}

}  // namespace

std::string to_line(const std::vector<ShardFile>& shards) { return to_json(shards).dump(); }
std::vector<ShardFile> from_line(const std::string& line) { return shards_of(JsonValue::parse(line)); }

std::string to_text(const Manifest& m) {
    const TrainingState& s = m.state;
    const OrderedJson json = {{"format", format_name}, {"version", format_version}, {"tool", m.tool}, {"save_number", m.save_number},
                              {"ranks", m.ranks}, {"step", s.step}, {"updates", s.updates}, {"skipped", s.skipped}, {"seed", s.seed},
                              {"data", {{"samples", s.samples}, {"tokens", s.tokens}, {"hash", s.data_hash}}},
                              {"config", OrderedJson::parse(s.config_json.empty() ? "{}" : s.config_json)},
                              {"tensors", m.tensors}, {"shards", to_json(m.shards)}};
    std::string text = json.dump(2);
    text.erase(text.rfind("\n}"));
    return text + seal(text);
}

Manifest read_manifest(const std::string& step_dir) {
    const std::string path = step_dir + "/" + manifest_name;
    const std::string text = read_text(path, Exit::checkpoint);
    const size_t tail = seal("").size();
    const std::string body = text.substr(0, text.size() - std::min(tail, text.size()));
    if (text != body + seal(body))
        refuse(Exit::checkpoint, "{} is damaged: its {} bytes do not match the xxh3 at byte {}", path, text.size(), body.size());
    const JsonValue json = parse_json<JsonValue>(text, path, {.code = Exit::checkpoint});
    try {
        return manifest_of(json);
    } catch (const std::exception& e) {
        refuse(Exit::checkpoint, "{}: {}", path, e.what());
    }
}

}  // namespace trifold
