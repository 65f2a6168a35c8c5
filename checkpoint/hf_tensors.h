// checkpoint/hf_tensors.h   Which Hugging Face tensor holds which of ours: the one table for import, export and dumps.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

#include "kernels/tensor.h"
#include "model/config.h"
#include "model/parameters.h"

namespace trifold {

enum class HfFamily : uint8_t { none, gpt2, llama, mistral, qwen2 };
const char* model_type(HfFamily family);    // "gpt2"
const char* architecture(HfFamily family);  // "GPT2LMHeadModel"
HfFamily family_of_type(const std::string& model_type);
// The family that can express this model, `none` when there is none; `why` then says what stands in the way.
HfFamily family_of(const ModelConfig& model, std::string* why = nullptr);

// The family that DIR/config.json names; others are refused. And the text of a config.json that transformers 4.x and 5.x both read.
HfFamily read_hf_family(const std::string& dir);
std::string hf_config_text(const ModelConfig& model, HfFamily family, DType dtype);

// One tensor of theirs: some of ours, one below the other ([outputs, inputs]), possibly stored transposed.
struct HfTensor {
    std::string name;
    std::vector<int64_t> shape;
    std::vector<const Parameter*> parts;
    bool transposed = false;
    int64_t rows() const { return shape[0]; }
    int64_t columns() const { return shape.size() > 1 ? shape[1] : 1; }
};
// Every tensor of the model under their names, or with HfFamily::none under ours. A tied head has no tensor.
std::vector<HfTensor> hf_tensors(HfFamily family, const ParameterTable& table);

// Rows [first, last) of the tensor as they lie in the file, between a flat buffer and `rows`.
void gather_rows(const HfTensor& tensor, const float* flat, int64_t first, int64_t last, float* rows);
void scatter_rows(const HfTensor& tensor, const float* rows, int64_t first, int64_t last, float* flat);
// How many rows are worth handling at once: about a megabyte, and a multiple of 16 where possible.
int64_t rows_at_once(const HfTensor& tensor);

}  // namespace trifold
