// checkpoint/hf_config.h   config.json of transformers: the writing half (read_hf_config is in huggingface.h).
#pragma once
#include <string>

#include "checkpoint/hf_tensors.h"
#include "kernels/tensor.h"
#include "model/config.h"

namespace trifold {

// The text of a config.json that transformers 4.x and 5.x both read.
std::string hf_config_text(const ModelConfig& model, HfFamily family, DType dtype);

}  // namespace trifold
