// checkpoint/safetensors.cpp   See safetensors.h.
#include "checkpoint/safetensors.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <bit>
#include <cstring>

#include "base/json.h"
#include "kernels/tensor.h"

namespace trifold {
namespace {

constexpr int64_t length_bytes = 8;
constexpr int64_t max_header_bytes = 100'000'000;  // the limit of the reference implementation
constexpr int64_t data_alignment = 64;

struct Half {
    uint16_t bits;
    explicit operator float() const {
        const uint32_t sign = static_cast<uint32_t>(bits & 0x8000u) << 16, exponent = (bits >> 10) & 0x1fu, mantissa = bits & 0x3ffu;
        if (exponent == 0) {  // zero, or mantissa * 2^-24 without an implicit one
            const float magnitude = static_cast<float>(mantissa) * 0x1p-24f;
            return sign ? -magnitude : magnitude;
        }
        const uint32_t wide = exponent == 31 ? 255 : exponent + 127 - 15;
        return std::bit_cast<float>(sign | wide << 23 | mantissa << 13);
    }
};

template <class T>
void convert(const std::byte* from, int64_t count, float* out) {
    for (int64_t i = 0; i < count; ++i) {
        T raw;
        std::memcpy(&raw, from + i * static_cast<int64_t>(sizeof(T)), sizeof(T));
        out[i] = static_cast<float>(raw);
    }
}

struct TypeRow {
    const char* name;
    int64_t bytes;
    void (*to_float)(const std::byte* from, int64_t count, float* out);  // null: weights cannot have this type
};
constexpr TypeRow types[] = {{"F32", 4, convert<float>}, {"BF16", 2, convert<bf16>}, {"F16", 2, convert<Half>}, {"F64", 8, convert<double>},
                             {"I32", 4, nullptr},        {"I64", 8, nullptr},        {"U8", 1, nullptr}};  // in the order of SafeType
const TypeRow& row_of(SafeType type) { return types[static_cast<int>(type)]; }

template <class... Args>
[[noreturn]] void wrong(const std::string& path, fmt::format_string<Args...> why, Args&&... args) {
    refuse(Exit::checkpoint, "{}: {}", path, fmt::format(why, std::forward<Args>(args)...));
}

int64_t header_bytes(const MappedFile& file) {
    if (file.bytes() < length_bytes) wrong(file.path(), "{} bytes are too few for a safetensors file", file.bytes());
    const auto n = file.load<uint64_t>(0);
    if (n > static_cast<uint64_t>(max_header_bytes))
        wrong(file.path(), "the header length at byte 0 is {}, more than the limit of {}", n, max_header_bytes);
    if (static_cast<int64_t>(n) > file.bytes() - length_bytes)
        wrong(file.path(), "the header ends at byte {}, but the file at byte {}", n + length_bytes, file.bytes());
    return static_cast<int64_t>(n);
}

// `data_start`: where the tensors' part of the file begins
SafeTensor parse_entry(const std::string& name, const JsonValue& entry, const MappedFile& file, int64_t data_start) {
    const auto member = [&](const char* key) -> const JsonValue& {
        if (!entry.is_object() || !entry.contains(key)) wrong(file.path(), "tensor '{}' has no {} in the header", name, key);
        return entry[key];
    };
    const auto sizes = [&](const char* key) {
        const JsonValue& list = member(key);
        const auto is_size = [](const JsonValue& v) { return v.is_number_unsigned() && v.get<uint64_t>() <= uint64_t{INT64_MAX}; };
        if (!list.is_array() || !std::all_of(list.begin(), list.end(), is_size))
            wrong(file.path(), "{} of tensor '{}' is {}, not a list of sizes", key, name, list.dump());
        return list.get<std::vector<int64_t>>();
    };
    const JsonValue& dtype = member("dtype");
    const auto* type = std::ranges::find_if(types, [&](const TypeRow& t) { return dtype == t.name; });
    if (type == std::end(types)) wrong(file.path(), "tensor '{}' has the unknown dtype {}", name, dtype.dump());
    SafeTensor t{.name = name, .type = static_cast<SafeType>(type - types), .shape = sizes("shape"), .elems = 1};
    const std::vector<int64_t> offsets = sizes("data_offsets");
    if (offsets.size() != 2 || offsets[0] > offsets[1])
        wrong(file.path(), "data_offsets of tensor '{}' are [{}], not [begin, end]", name, fmt::join(offsets, ", "));
    if (offsets[1] > file.bytes() - data_start)
        wrong(file.path(), "tensor '{}' ends at byte {}, but the file at byte {}", name,
              static_cast<uint64_t>(data_start) + static_cast<uint64_t>(offsets[1]), file.bytes());
    t.bytes = offsets[1] - offsets[0];
    t.offset = data_start + offsets[0];
    bool fits = true;
    for (const int64_t size : t.shape) fits = fits && !__builtin_mul_overflow(t.elems, size, &t.elems);
    int64_t bytes = 0;
    if (!fits || __builtin_mul_overflow(t.elems, type->bytes, &bytes) || bytes != t.bytes)
        wrong(file.path(), "tensor '{}' of {} {} takes {} bytes at byte {}, which does not fit its shape", name, type->name, shape_text(t.shape),
              t.bytes, t.offset);
    t.data = file.at(t.offset);
    return t;
}

void check_no_holes(const std::vector<SafeTensor>& tensors, const std::string& path, int64_t data_start, int64_t file_bytes) {
    int64_t at = data_start;
    for (const SafeTensor& t : tensors) {
        if (t.offset < at) wrong(path, "tensor '{}' at byte {} overlaps the one before it", t.name, t.offset);
        if (t.offset > at) wrong(path, "bytes {} to {}, before tensor '{}', belong to no tensor", at, t.offset, t.name);
        at += t.bytes;
    }
    if (at != file_bytes) wrong(path, "the last tensor ends at byte {}, but the file at byte {}", at, file_bytes);
}

}  // namespace

int64_t size_of(SafeType type) { return row_of(type).bytes; }
const char* name_of(SafeType type) { return row_of(type).name; }

int64_t elems_of(const std::vector<int64_t>& shape) {
    int64_t n = 1;
    for (const int64_t size : shape) n *= size;
    return n;
}

std::string shape_text(const std::vector<int64_t>& shape) { return fmt::format("[{}]", fmt::join(shape, ", ")); }

SafetensorsFile::SafetensorsFile(const std::string& path) : file_(path, Exit::checkpoint) {
    const int64_t n = header_bytes(file_), data_start = length_bytes + n;
    const std::string text(reinterpret_cast<const char*>(file_.at(length_bytes)), static_cast<size_t>(n));
    if (text.empty() || text.front() != '{') wrong(path, "no JSON object starts at byte 8: this is not a safetensors file");
    const JsonValue header = parse_json<JsonValue>(text, path, {.code = Exit::checkpoint, .first_byte = length_bytes});
    for (const auto& [name, entry] : header.items()) {
        if (name == "__metadata__") {
            for (const auto& [key, value] : entry.items()) {
                if (!value.is_string()) wrong(path, "metadata '{}' is not a text", key);
                metadata_[key] = value.get<std::string>();
            }
        } else {
            tensors_.push_back(parse_entry(name, entry, file_, data_start));
        }
    }
    // Empty tensors share their offset with a neighbour and come first.
    std::stable_sort(tensors_.begin(), tensors_.end(),
                     [](const SafeTensor& a, const SafeTensor& b) { return a.offset != b.offset ? a.offset < b.offset : a.bytes < b.bytes; });
    check_no_holes(tensors_, path, data_start, file_.bytes());
    for (size_t i = 0; i < tensors_.size(); ++i) index_[tensors_[i].name] = i;
}

const SafeTensor* SafetensorsFile::find(const std::string& name) const {
    const auto it = index_.find(name);
    return it == index_.end() ? nullptr : &tensors_[it->second];
}

void to_float(const SafeTensor& t, int64_t first, int64_t count, float* out) {
    TRIFOLD_ASSERT(first >= 0 && count >= 0 && first + count <= t.elems);
    const TypeRow& type = row_of(t.type);
    if (!type.to_float) refuse(Exit::checkpoint, "tensor '{}' holds {} values, and weights must be F32, BF16, F16 or F64", t.name, type.name);
    type.to_float(t.data + first * type.bytes, count, out);
}

SafetensorsWriter::SafetensorsWriter(const std::string& path, const std::vector<Entry>& entries, const std::map<std::string, std::string>& metadata)
    : file_(path, Exit::checkpoint) {
    JsonValue header = JsonValue::object();
    if (!metadata.empty()) header["__metadata__"] = metadata;
    int64_t end = 0;
    for (const Entry& e : entries) {
        TRIFOLD_ASSERT(!header.contains(e.name));
        const int64_t begin = end;
        end += elems_of(e.shape) * size_of(e.type);
        header[e.name] = {{"dtype", name_of(e.type)}, {"shape", e.shape}, {"data_offsets", {begin, end}}};
    }
    std::string text = header.dump();
    const int64_t used = length_bytes + static_cast<int64_t>(text.size());
    text.append(static_cast<size_t>((data_alignment - used % data_alignment) % data_alignment), ' ');
    if (static_cast<int64_t>(text.size()) > max_header_bytes)
        wrong(path, "{} tensors need a header of {} bytes, more than the format's limit of {}", entries.size(), text.size(), max_header_bytes);
    const uint64_t n = text.size();
    expected_bytes_ = length_bytes + static_cast<int64_t>(n) + end;
    write(&n, length_bytes);
    write(text.data(), static_cast<int64_t>(n));
}

void SafetensorsWriter::write(const void* data, int64_t bytes) {
    // Hash and write in pieces that stay in the cache between the two.
    constexpr int64_t step = int64_t{1} << 20;
    for (int64_t done = 0; done < bytes; done += step) {
        const int64_t n = std::min(step, bytes - done);
        const char* from = static_cast<const char*>(data) + done;
        hasher_.add(from, n);
        file_.write(from, n);
    }
}

FileDigest SafetensorsWriter::finish() {
    TRIFOLD_ASSERT(file_.bytes() == expected_bytes_);
    file_.finish();
    return hasher_.finish();
}

}  // namespace trifold
