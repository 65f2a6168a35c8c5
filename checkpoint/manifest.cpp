// checkpoint/manifest.cpp   See manifest.h.
#include "checkpoint/manifest.h"

#include <fmt/format.h>

#include "checkpoint/files.h"
#include "checkpoint/json.h"

namespace trifold {
namespace {

[[noreturn]] void refuse(const std::string& sentence) { throw Problem(Exit::checkpoint, sentence); }

constexpr const char* format_name = "trifold checkpoint";
constexpr int64_t format_version = 1;

// The last bytes of the file, always of the same length.
std::string seal(const std::string& text) { return fmt::format(",\n  \"xxh3\": \"{}\"\n}}\n", to_hex(xxh3(text))); }

OrderedJson to_json(const ShardFile& shard) {
    std::vector<std::string> blocks;
    for (const uint64_t hash : shard.digest.blocks) blocks.push_back(to_hex(hash));
    return {{"file", shard.file},
            {"bytes", shard.digest.bytes},
            {"xxh3", to_hex(shard.digest.xxh3)},
            {"block_xxh3", blocks},
            {"pieces", shard.pieces}};
}

ShardFile shard_of(const JsonValue& json) {
    ShardFile shard;
    shard.file = json.at("file").get<std::string>();
    if (shard.file.empty() || shard.file.find('/') != std::string::npos)
        refuse(fmt::format("the shard name '{}' is not a plain file name", shard.file));
    shard.digest.bytes = json.at("bytes").get<int64_t>();
    shard.digest.xxh3 = from_hex(json.at("xxh3").get<std::string>());
    for (const JsonValue& hash : json.at("block_xxh3"))
        shard.digest.blocks.push_back(from_hex(hash.get<std::string>()));
    shard.pieces = json.at("pieces").get<std::vector<std::string>>();
    return shard;
}

Manifest manifest_of(const JsonValue& json) {
    if (json.at("format") != format_name) refuse("it is not the manifest of a checkpoint");
    if (const int64_t version = json.at("version").get<int64_t>(); version != format_version)
        refuse(fmt::format("its format version is {} and this program reads {}; use the program that wrote it ({})",
                           version, format_version, json.value("tool", "unknown")));
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
    for (const JsonValue& shard : json.at("shards")) m.shards.push_back(shard_of(shard));
    return m;
}

}  // namespace

std::string to_text(const Manifest& m) {
    const TrainingState& s = m.state;
    OrderedJson json = {{"format", format_name},
                        {"version", format_version},
                        {"tool", m.tool},
                        {"save_number", m.save_number},
                        {"ranks", m.ranks},
                        {"step", s.step},
                        {"updates", s.updates},
                        {"skipped", s.skipped},
                        {"seed", s.seed},
                        {"data", {{"samples", s.samples}, {"tokens", s.tokens}, {"hash", s.data_hash}}},
                        {"config", OrderedJson::parse(s.config_json.empty() ? "{}" : s.config_json)},
                        {"tensors", m.tensors}};
    for (const ShardFile& shard : m.shards) json["shards"].push_back(to_json(shard));
    std::string text = json.dump(2);
    text.erase(text.rfind("\n}"));
    return text + seal(text);
}

Manifest read_manifest(const std::string& step_dir) {
    const std::string path = step_dir + "/" + manifest_name;
    const std::string text = read_text(path);
    const size_t tail = seal("").size();
    const std::string body = text.substr(0, text.size() - std::min(tail, text.size()));
    if (text != body + seal(body))
        refuse(fmt::format("{} is damaged: its {} bytes do not match the xxh3 at byte {}", path, text.size(),
                           body.size()));
    const JsonValue json = parse_file_json(text, path);
    try {
        return manifest_of(json);
    } catch (const JsonValue::exception& e) {
        refuse(fmt::format("{}: {}", path, e.what()));
    } catch (const Problem& e) {
        refuse(fmt::format("{}: {}", path, e.what()));
    }
}

}  // namespace trifold
