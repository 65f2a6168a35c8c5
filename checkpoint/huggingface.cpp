// checkpoint/huggingface.cpp   Weights of Hugging Face folders, in and out. config.json is in hf_config.cpp, names and
// shapes in hf_tensors.cpp.
#include "checkpoint/huggingface.h"

#include <algorithm>
#include <cstring>
#include <filesystem>
#include <map>
#include <memory>
#include <set>

#include "base/cpus.h"
#include "base/jobs.h"
#include "base/json.h"
#include "base/text.h"
#include "checkpoint/files.h"
#include "checkpoint/hf_tensors.h"
#include "checkpoint/piece.h"
#include "checkpoint/safetensors.h"

namespace fs = std::filesystem;

namespace trifold {
namespace {

constexpr const char* single_file = "model.safetensors";
constexpr const char* index_file = "model.safetensors.index.json";

// All tensors of a folder by name.
struct Folder {
    std::vector<std::unique_ptr<SafetensorsFile>> files;
    std::map<std::string, const SafeTensor*> tensors;

    void open(const std::string& path) {
        files.push_back(std::make_unique<SafetensorsFile>(path));
        for (const SafeTensor& t : files.back()->tensors())
            if (!tensors.emplace(t.name, &t).second) refuse(Exit::checkpoint, "tensor '{}' is in {} and in another file", t.name, path);
    }
    void open_indexed(const std::string& dir) {
        const std::string path = dir + "/" + index_file;
        const auto index = parse_json<JsonValue>(read_text(path, Exit::checkpoint), path, {.code = Exit::checkpoint});
        if (!index.is_object() || !index.contains("weight_map") || !index["weight_map"].is_object())
            refuse(Exit::checkpoint, "{} has no weight_map", path);
        std::set<std::string> names;
        for (const auto& [tensor, file] : index["weight_map"].items()) {
            if (!file.is_string() || file.get<std::string>().find('/') != std::string::npos)
                refuse(Exit::checkpoint, "{}: '{}' is in {}, which is not a file name", path, tensor, file.dump());
            names.insert(file.get<std::string>());
        }
        for (const std::string& name : names) open(dir + "/" + name);
        for (const auto& [tensor, file] : index["weight_map"].items())
            if (!tensors.contains(tensor)) refuse(Exit::checkpoint, "{}: '{}' is not in {}", path, tensor, file.get<std::string>());
    }
    explicit Folder(const std::string& dir) {
        std::error_code ignored;
        if (fs::exists(dir + "/" + single_file, ignored))
            open(dir + "/" + single_file);
        else if (fs::exists(dir + "/" + index_file, ignored))
            open_indexed(dir);
        else
            refuse(Exit::checkpoint, "{} holds neither {} nor {}; other formats have to be converted with transformers' save_pretrained", dir,
                   single_file, index_file);
    }
};

// Some files hold the model without its head, whose names lack the first component.
std::string without_prefix(const std::string& name) { return name.substr(name.find('.') + 1); }

// Constants that older versions saved among the weights.
bool is_constant(const std::string& name) {
    return name.ends_with(".attn.bias") || name.ends_with(".attn.masked_bias") || name.ends_with(".rotary_emb.inv_freq");
}

struct Match {
    HfTensor tensor;
    const SafeTensor* from;
};

// Pairs every tensor of the model with one of the folder, or names all that do not fit.
std::vector<Match> match(const std::string& dir, const Folder& folder, std::vector<HfTensor> tensors) {
    std::map<std::string, const SafeTensor*> left = folder.tensors;
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
            wrong.push_back(fmt::format("{} is {} there and {} in the model", it->first, shape_text(it->second->shape), shape_text(t.shape)));
        if (t.parts[0]->role == Role::token_embedding) embedding = it->second;
        matches.push_back({std::move(t), it->second});
        left.erase(it);
    }
    for (const auto& [name, tensor] : left) {
        const bool head = name == "lm_head.weight";
        const bool tied_head = head && embedding && tensor->type == embedding->type && tensor->shape == embedding->shape &&
                               std::memcmp(tensor->data, embedding->data, static_cast<size_t>(tensor->bytes)) == 0;
        if (!is_constant(name) && !tied_head)
            wrong.push_back(name + (head ? " is not the embedding, though the head is tied" : " is not part of the model"));
    }
    if (!wrong.empty()) refuse(Exit::checkpoint, "the weights of {} do not fit the model: {}", dir, join_first(wrong));
    return matches;
}

int64_t bytes_of(const std::vector<HfTensor>& tensors, DType dtype) {
    int64_t n = 0;
    for (const HfTensor& t : tensors) n += elems_of(t.shape) * size_of(dtype);
    return n;
}

// Writes tensors of a flat buffer one after the other, as they lie in the files.
void write_file(const std::string& path, const std::vector<HfTensor>& tensors, const float* flat, DType dtype) {
    std::vector<SafetensorsWriter::Entry> entries;
    for (const HfTensor& t : tensors) entries.push_back({t.name, dtype == DType::bf16 ? SafeType::bf16 : SafeType::f32, t.shape});
    SafetensorsWriter writer(path, entries, {{"format", "pt"}});  // transformers refuses files that do not say whose layout they have
    std::vector<float> rows;
    for (const HfTensor& t : tensors)
        for (int64_t first = 0, last = 0; first < t.rows(); first = last) {
            last = std::min(first + rows_at_once(t), t.rows());
            rows.resize(static_cast<size_t>((last - first) * t.columns()));
            gather_rows(t, flat, first, last, rows.data());
            const std::vector<bf16> narrow = dtype == DType::bf16 ? std::vector<bf16>(rows.begin(), rows.end()) : std::vector<bf16>();
            const void* data = narrow.empty() ? static_cast<const void*>(rows.data()) : narrow.data();
            writer.write(data, std::ssize(rows) * size_of(dtype));
        }
    writer.finish();
}

// In order, a new file where the next tensor would exceed `file_bytes`.
std::vector<std::vector<HfTensor>> split_into_files(const std::vector<HfTensor>& tensors, DType dtype, int64_t file_bytes) {
    std::vector<std::vector<HfTensor>> files(1);
    int64_t used = 0;
    for (const HfTensor& t : tensors) {
        const int64_t bytes = bytes_of({t}, dtype);
        if (used > 0 && used + bytes > file_bytes) {
            files.emplace_back();
            used = 0;
        }
        used += bytes;
        files.back().push_back(t);
    }
    return files;
}

void write_weights(const std::string& dir, const std::vector<HfTensor>& tensors, const float* flat, const HfExport& options) {
    const auto files = split_into_files(tensors, options.dtype, options.file_bytes);
    OrderedJson map = OrderedJson::object();
    for (size_t i = 0; i < files.size(); ++i) {
        const std::string name = files.size() == 1 ? single_file : fmt::format("model-{:05}-of-{:05}.safetensors", i + 1, files.size());
        write_file(dir + "/" + name, files[i], flat, options.dtype);
        for (const HfTensor& t : files[i]) map[t.name] = name;
    }
    if (files.size() == 1) return;
    const OrderedJson index = {{"metadata", {{"total_size", bytes_of(tensors, options.dtype)}}}, {"weight_map", map}};
    replace_text(dir + "/" + index_file, index.dump(2) + "\n");
}

}  // namespace

void import_hf(const std::string& dir, const ModelConfig& model, const std::vector<StateSlice>& slices) {
    const ParameterTable table(model);
    const Folder folder(dir);
    const std::vector<Match> matches = match(dir, folder, hf_tensors(read_hf_family(dir), table));
    std::multimap<std::string, const StateSlice*> wanted;
    for (const StateSlice& s : slices) wanted.emplace(s.parameter->name, &s);
    run_jobs(static_cast<int64_t>(matches.size()), usable_cpus(), [&](int64_t i) {
        const auto& [t, from] = matches[static_cast<size_t>(i)];
        const bool used = std::any_of(t.parts.begin(), t.parts.end(), [&](const Parameter* p) { return wanted.contains(p->name); });
        if (!used) return;
        const int64_t step = rows_at_once(t), width = t.columns(), base = t.parts.front()->offset;
        std::vector<float> rows(static_cast<size_t>(step * width));
        std::vector<float> whole(static_cast<size_t>(t.parts.back()->offset + t.parts.back()->elems - base));
        for (int64_t first = 0; first < t.rows(); first += step) {
            const int64_t last = std::min(first + step, t.rows());
            to_float(*from, first * width, (last - first) * width, rows.data());
            scatter_rows(t, rows.data(), first, last, whole.data() - base);
        }
        for (const Parameter* p : t.parts) {
            const auto [begin, end] = wanted.equal_range(p->name);
            for (auto slice = begin; slice != end; ++slice)
                copy_shared(whole_piece(*p, StateKind::master), whole.data() + (p->offset - base),
                            {piece_of(*slice->second, StateKind::master), slice->second->master});
        }
    });
}

int64_t export_hf(const std::string& dir, const ModelConfig& model, const ParameterTable& table, const float* flat, const HfExport& options) {
    std::string why;
    const HfFamily family = family_of(model, &why);
    if (family == HfFamily::none)
        refuse(Exit::checkpoint, "no Hugging Face family that trifold writes has {}; gpt2, llama, mistral and qwen2 are written", why);
    std::error_code ignored;  // what cannot be looked at cannot be replaced either, and then the rename says why
    if (fs::exists(dir, ignored) && !(fs::is_directory(dir, ignored) && fs::is_empty(dir, ignored)))
        refuse(Exit::checkpoint, "{} exists already and is not an empty folder: give another one", dir);
    const fs::path target = fs::absolute(dir).lexically_normal();
    const fs::path final_path = target.has_filename() ? target : target.parent_path();
    const std::vector<HfTensor> tensors = hf_tensors(family, table);
    Unfinished folder(final_path.string(), Exit::checkpoint, Unfinished::Kind::folder);
    remove_tree(folder.path());  // of an export that died
    make_directories(folder.path());
    write_weights(folder.path(), tensors, flat, options);
    if (!options.tokenizer.empty()) replace_text(folder.path() + "/tokenizer.json", read_text(options.tokenizer, Exit::checkpoint));
    replace_text(folder.path() + "/config.json", hf_config_text(model, family, options.dtype));
    folder.commit_as(final_path.string());
    sync_directory(final_path.parent_path().string());
    return bytes_of(tensors, options.dtype);
}

void dump_tensors(const std::string& path, const ModelConfig& model, const ParameterTable& table, const float* flat) {
    Unfinished file(path, Exit::checkpoint);
    write_file(file.path(), hf_tensors(family_of(model), table), flat, DType::f32);
    file.commit_as(path);
}

}  // namespace trifold
