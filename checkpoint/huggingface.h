// checkpoint/huggingface.h   Folders of Hugging Face transformers: config.json and safetensors, read and written.
//
// Families: GPT-2, Llama, Mistral, Qwen2. What our configuration or theirs cannot express is refused with the key and
// its value, never guessed. All failures throw Problem(Exit::checkpoint).
#pragma once
#include <cstdint>
#include <string>

#include "kernels/tensor.h"
#include "model/config.h"
#include "model/parameters.h"

namespace trifold {

// True when DIR/config.json is of transformers (it has a model_type); a run directory has a config.json too.
bool is_hf_folder(const std::string& dir);

// The resolved model of DIR/config.json, as transformers 4.x and 5.x write it.
ModelConfig read_hf_config(const std::string& dir);

// Fills the master weights of these slices of the model from model.safetensors, or the files of model.safetensors.index.json; F32, BF16
// and F16 values. Missing, unknown and mis-shaped tensors are named. Needs memory for one tensor per thread.
void import_hf(const std::string& dir, const ModelConfig& model, const std::vector<StateSlice>& slices);

struct HfExport {
    DType dtype = DType::f32;                     // or bf16, rounded to nearest even
    int64_t file_bytes = int64_t{5'000'000'000};  // more are spread over several files with an index
    std::string tokenizer = "";                   // a tokenizer.json to put beside the weights
};
// Writes a new folder `dir`, which must not exist or be empty. It appears only when it is complete. Returns the bytes of the weights.
int64_t export_hf(const std::string& dir, const ModelConfig& model, const ParameterTable& table, const float* flat, const HfExport& options = {});

// One fp32 safetensors file of a flat buffer (weights or gradients): Hugging Face names and shapes where the model
// belongs to a family, else the table's own.
void dump_tensors(const std::string& path, const ModelConfig& model, const ParameterTable& table, const float* flat);

}  // namespace trifold
