// model/presets.h   Named architectures. Each lists only what differs from the defaults of ModelConfig.
#pragma once
#include <string>
#include <vector>

#include "model/config.h"

namespace trifold {

struct Preset {
    std::string name;
    std::string source;  // where its sizes come from
    ModelConfig model;   // derived values are not filled in
};

const std::vector<Preset>& presets();
// Throws Problem(Exit::usage) with a suggestion when there is no preset of this name.
const Preset& preset(const std::string& name);

}  // namespace trifold
