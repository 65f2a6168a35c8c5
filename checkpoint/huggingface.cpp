// checkpoint/huggingface.cpp   Weights of Hugging Face folders, in and out. config.json is in hf_config.cpp, names and
// shapes in hf_tensors.cpp.
#include "checkpoint/huggingface.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cstring>
#include <filesystem>
#include <map>
#include <memory>
#include <set>

#include "base/cpus.h"
#include "base/error.h"
#include "checkpoint/files.h"
#include "checkpoint/hf_config.h"
#include "checkpoint/hf_tensors.h"
#include "checkpoint/json.h"
#include "checkpoint/load.h"
#include "checkpoint/safetensors.h"

namespace fs = std::filesystem;

namespace trifold {
namespace {

[[noreturn]] void refuse(const std::string& sentence) { throw Problem(Exit::checkpoint, sentence); }

constexpr const char* single_file = "model.safetensors";
constexpr const char* index_file = "model.safetensors.index.json";

// All tensors of a folder by name.
class Folder {
public:
    explicit Folder(const std::string& dir) : dir_(dir) {
        std::error_code ignored;
        if (fs::exists(dir + "/" + single_file, ignored))
            open(single_file);
        else if (fs::exists(dir + "/" + index_file, ignored))
            open_indexed();
        else
            refuse(fmt::format(
                "{} holds neither {} nor {}; other formats have to be converted with transformers' save_pretrained",
                dir, single_file, index_file));
    }
    const std::map<std::string, const SafeTensor*>& tensors() const { return tensors_; }

private:
    const std::string& dir_;
    std::vector<std::unique_ptr<SafetensorsFile>> files_;
    std::map<std::string, const SafeTensor*> tensors_;

    void open(const std::string& name) {
        files_.push_back(std::make_unique<SafetensorsFile>(dir_ + "/" + name));
        for (const SafeTensor& t : files_.back()->tensors())
            if (!tensors_.emplace(t.name, &t).second)
                refuse(fmt::format("tensor '{}' is in {} and in another file", t.name, files_.back()->path()));
    }
    void open_indexed() {
        const std::string path = dir_ + "/" + index_file;
        const JsonValue index = parse_file_json(read_text(path), path);
        if (!index.is_object() || !index.contains("weight_map") || !index["weight_map"].is_object())
            refuse(path + " has no weight_map");
        std::set<std::string> names;
        for (const auto& [tensor, file] : index["weight_map"].items()) {
            if (!file.is_string() || file.get<std::string>().find('/') != std::string::npos)
                refuse(fmt::format("{}: '{}' is in {}, which is not a file name", path, tensor, file.dump()));
            names.insert(file.get<std::string>());
        }
        for (const std::string& name : names) open(name);
        for (const auto& [tensor, file] : index["weight_map"].items())
            if (!tensors_.contains(tensor))
                refuse(fmt::format("{}: '{}' is not in {}", path, tensor, file.get<std::string>()));
    }
};

// Some files hold the model without its head, whose names lack the first component.
std::string without_prefix(const std::string& name) { return name.substr(name.find('.') + 1); }

// Constants that older versions saved among the weights.
bool is_constant(const std::string& name) {
    return name.ends_with(".attn.bias") || name.ends_with(".attn.masked_bias") ||
           name.ends_with(".rotary_emb.inv_freq");
}

bool same_values(const SafeTensor& a, const SafeTensor& b) {
    return a.type == b.type && a.shape == b.shape && std::memcmp(a.data, b.data, static_cast<size_t>(a.bytes)) == 0;
}

struct Match {
    HfTensor tensor;
    const SafeTensor* from;
};

// Pairs every tensor of the model with one of the folder, or names all that do not fit.
std::vector<Match> match(const std::string& dir, const Folder& folder, std::vector<HfTensor> tensors) {
    std::map<std::string, const SafeTensor*> left = folder.tensors();
    std::vector<Match> matches;
    std::vector<std::string> wrong;
    const SafeTensor* embedding = nullptr;
    for (HfTensor& t : tensors) {
        auto it = left.find(t.name);
        if (it == left.end()) it = left.find(without_prefix(t.name));
        if (it == left.end()) {
            wrong.push_back(t.name + " is missing");
            continue;
        }
        if (it->second->shape != t.shape)
            wrong.push_back(fmt::format("{} is {} there and {} in the model", it->first, shape_text(it->second->shape),
                                        shape_text(t.shape)));
        if (t.parts[0]->role == Role::token_embedding) embedding = it->second;
        matches.push_back({std::move(t), it->second});
        left.erase(it);
    }
    for (const auto& [name, tensor] : left) {
        const bool tied_head = name == "lm_head.weight" && embedding && same_values(*tensor, *embedding);
        if (!is_constant(name) && !tied_head)
            wrong.push_back(name + (name == "lm_head.weight" ? " is not the embedding, though the head is tied"
                                                             : " is not part of the model"));
    }
    if (!wrong.empty()) {
        constexpr size_t most_named = 6;
        const std::string more =
            wrong.size() > most_named ? fmt::format(" and {} more", wrong.size() - most_named) : "";
        wrong.resize(std::min(wrong.size(), most_named));
        refuse(fmt::format("the weights of {} do not fit the model: {}{}", dir, fmt::join(wrong, ", "), more));
    }
    return matches;
}

// Writes the tensors of a flat buffer one after the other, as they lie in the files.
void write_tensors(SafetensorsWriter& writer, const std::vector<HfTensor>& tensors, const float* flat, DType dtype,
                   ProgressCounter& progress) {
    std::vector<float> rows;
    std::vector<bf16> narrow;
    for (const HfTensor& t : tensors) {
        const int64_t step = rows_at_once(t), width = t.columns();
        for (int64_t first = 0; first < t.rows(); first += step) {
            const int64_t last = std::min(first + step, t.rows()), count = (last - first) * width;
            rows.resize(static_cast<size_t>(count));
            gather_rows(t, flat, first, last, rows.data());
            if (dtype == DType::bf16) {
                narrow.resize(rows.size());
                std::transform(rows.begin(), rows.end(), narrow.begin(), [](float x) { return bf16(x); });
                writer.write(narrow.data(), count * size_of(dtype));
            } else {
                writer.write(rows.data(), count * size_of(dtype));
            }
            progress.add(count * size_of(dtype));
        }
    }
}

SafetensorsWriter open_writer(const std::string& path, const std::vector<HfTensor>& tensors, DType dtype) {
    std::vector<SafetensorsWriter::Entry> entries;
    for (const HfTensor& t : tensors)
        entries.push_back({t.name, dtype == DType::bf16 ? SafeType::bf16 : SafeType::f32, t.shape});
    // transformers refuses files that do not say whose layout they have.
    return SafetensorsWriter(path, entries, {{"format", "pt"}});
}

int64_t bytes_of(const std::vector<HfTensor>& tensors, DType dtype) {
    int64_t n = 0;
    for (const HfTensor& t : tensors) n += elems_of(t.shape) * size_of(dtype);
    return n;
}

// In order, a new file where the next tensor would exceed `file_bytes`.
std::vector<std::vector<HfTensor>> split_into_files(const std::vector<HfTensor>& tensors, DType dtype,
                                                    int64_t file_bytes) {
    std::vector<std::vector<HfTensor>> files(1);
    int64_t used = 0;
    for (const HfTensor& t : tensors) {
        const int64_t bytes = elems_of(t.shape) * size_of(dtype);
        if (used > 0 && used + bytes > file_bytes) {
            files.emplace_back();
            used = 0;
        }
        used += bytes;
        files.back().push_back(t);
    }
    return files;
}

void write_weights(const std::string& dir, const std::vector<HfTensor>& tensors, const float* flat,
                   const HfExport& options) {
    const auto files = split_into_files(tensors, options.dtype, options.file_bytes);
    ProgressCounter progress("writing", bytes_of(tensors, options.dtype), options.progress);
    OrderedJson map = OrderedJson::object();
    for (size_t i = 0; i < files.size(); ++i) {
        const std::string name =
            files.size() == 1 ? single_file : fmt::format("model-{:05}-of-{:05}.safetensors", i + 1, files.size());
        SafetensorsWriter writer = open_writer(dir + "/" + name, files[i], options.dtype);
        write_tensors(writer, files[i], flat, options.dtype, progress);
        writer.finish();
        for (const HfTensor& t : files[i]) map[t.name] = name;
    }
    if (files.size() == 1) return;
    const OrderedJson index = {{"metadata", {{"total_size", bytes_of(tensors, options.dtype)}}}, {"weight_map", map}};
    replace_text(dir + "/" + index_file, index.dump(2) + "\n");
}

}  // namespace

void import_hf(const std::string& dir, const ParameterTable& table, float* flat, const ProgressCallback& callback) {
    const Folder folder(dir);
    const std::vector<Match> matches = match(dir, folder, hf_tensors(read_hf_family(dir), table));
    int64_t total = 0;
    for (const Match& m : matches) total += m.from->bytes;
    ProgressCounter progress("reading", total, callback);
    clear_padding(table, flat);
    run_jobs(static_cast<int64_t>(matches.size()), usable_cpus(), [&](int64_t i) {
        const auto& [t, from] = matches[static_cast<size_t>(i)];
        const int64_t step = rows_at_once(t), width = t.columns();
        std::vector<float> rows(static_cast<size_t>(step * width));
        for (int64_t first = 0; first < t.rows(); first += step) {
            const int64_t last = std::min(first + step, t.rows());
            to_float(*from, first * width, (last - first) * width, rows.data());
            scatter_rows(t, rows.data(), first, last, flat);
        }
        progress.add(from->bytes);
    });
}

int64_t export_hf(const std::string& dir, const ModelConfig& model, const ParameterTable& table, const float* flat,
                  const HfExport& options) {
    std::string why;
    const HfFamily family = family_of(model, &why);
    if (family == HfFamily::none)
        refuse(fmt::format(
            "no Hugging Face family that trifold writes has {}; gpt2, llama, mistral and qwen2 are written", why));
    std::error_code ignored;  // what cannot be looked at cannot be replaced either, and then the rename says why
    if (fs::exists(dir, ignored) && !(fs::is_directory(dir, ignored) && fs::is_empty(dir, ignored)))
        refuse(fmt::format("{} exists already and is not an empty folder: give another one", dir));
    const NoFileSizeSignal guard;
    const fs::path target = fs::absolute(dir).lexically_normal();
    const fs::path final_path = target.has_filename() ? target : target.parent_path();
    const std::string filling = final_path.string() + ".tmp";
    const std::vector<HfTensor> tensors = hf_tensors(family, table);
    try {
        remove_tree(filling);  // of an export that died
        make_directories(filling);
        write_weights(filling, tensors, flat, options);
        if (!options.tokenizer.empty()) replace_text(filling + "/tokenizer.json", read_text(options.tokenizer));
        replace_text(filling + "/config.json", hf_config_text(model, family, options.dtype));
        rename_path(filling, final_path.string());
        sync_directory(final_path.parent_path().string());
    } catch (...) {
        fs::remove_all(filling, ignored);
        throw;
    }
    return bytes_of(tensors, options.dtype);
}

void dump_tensors(const std::string& path, const ModelConfig& model, const ParameterTable& table, const float* flat) {
    const std::vector<HfTensor> tensors = hf_tensors(family_of(model), table);
    const std::string filling = path + ".tmp";
    const NoFileSizeSignal guard;
    try {
        ProgressCounter progress("writing", bytes_of(tensors, DType::f32), {});
        SafetensorsWriter writer = open_writer(filling, tensors, DType::f32);
        write_tensors(writer, tensors, flat, DType::f32, progress);
        writer.finish();
        rename_path(filling, path);
    } catch (...) {
        std::error_code ignored;
        fs::remove(filling, ignored);
        throw;
    }
}

}  // namespace trifold
