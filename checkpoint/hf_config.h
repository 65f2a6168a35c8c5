// checkpoint/hf_config.h   config.json of transformers, what huggingface.h does not need to show.
#pragma once
#include <string>

#include "checkpoint/hf_tensors.h"
#include "kernels/tensor.h"
#include "model/config.h"

namespace trifold {

// The family that DIR/config.json names. Others are refused.
HfFamily read_hf_family(const std::string& dir);

// The text of a config.json that transformers 4.x and 5.x both read.
std::string hf_config_text(const ModelConfig& model, HfFamily family, DType dtype);

}  // namespace trifold
