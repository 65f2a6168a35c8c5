// checkpoint/safetensors.h   The safetensors file format: named tensors behind a JSON header.
//
//   8 bytes   length n of the header, little endian, at most 100 MB
//   n bytes   {"__metadata__": {text: text}, "name": {"dtype": "F32", "shape": [2, 3], "data_offsets": [begin, end]}, ...}
//   the rest  the tensors, row-major, little endian, without holes
//
// The reader accepts only files in which every byte belongs to exactly one tensor. All failures throw Problem(Exit::checkpoint).
#pragma once
#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "base/file.h"
#include "checkpoint/digest.h"

namespace trifold {

enum class SafeType : uint8_t { f32, bf16, f16, f64, i32, i64, u8 };
int64_t size_of(SafeType type);
const char* name_of(SafeType type);  // as in the header: "F32"

struct SafeTensor {
    std::string name;
    SafeType type = SafeType::f32;
    std::vector<int64_t> shape;
    const std::byte* data = nullptr;  // not aligned: read it with memcpy or to_float
    int64_t elems = 0, bytes = 0;
    int64_t offset = 0;  // of data in the file
};

class SafetensorsFile {
public:
    explicit SafetensorsFile(const std::string& path);
    const std::vector<SafeTensor>& tensors() const { return tensors_; }  // in file order
    const SafeTensor* find(const std::string& name) const;
    const std::map<std::string, std::string>& metadata() const { return metadata_; }
    const std::string& path() const { return file_.path(); }

private:
    MappedFile file_;
    std::vector<SafeTensor> tensors_;
    std::map<std::string, size_t> index_;
    std::map<std::string, std::string> metadata_;
};

// Elements [first, first + count) of an F32, BF16, F16 or F64 tensor as fp32.
void to_float(const SafeTensor& tensor, int64_t first, int64_t count, float* out);

// Writes one file: all names and shapes first, then the tensors' bytes in that order. The data start at a multiple of 64 bytes.
class SafetensorsWriter {
public:
    struct Entry {
        std::string name;
        SafeType type = SafeType::f32;
        std::vector<int64_t> shape;
    };
    SafetensorsWriter(const std::string& path, const std::vector<Entry>& entries, const std::map<std::string, std::string>& metadata = {});
    void write(const void* data, int64_t bytes);
    FileDigest finish();  // syncs the file; every announced byte must have been written

private:
    OutputFile file_;
    Hasher hasher_;
    int64_t expected_bytes_ = 0;
};

int64_t elems_of(const std::vector<int64_t>& shape);
std::string shape_text(const std::vector<int64_t>& shape);  // [2, 3]

}  // namespace trifold
