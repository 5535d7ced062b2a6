// The instruction sets of this build, which of them this CPU supports, and the selection of one.
#pragma once

#include <string>
#include <vector>

#include "cpu_features.h"
#include "kernels.h"

namespace nanoinfer {

struct IsaInfo {
  std::string name;
  std::string missing;  // CPU features that it needs and this CPU lacks; empty: supported
};

// All instruction sets of this build, slowest first.
std::vector<IsaInfo> instruction_sets();

// The kernels of one instruction set; "" selects the fastest supported one.
// Throws std::invalid_argument if the name is unknown or this CPU does not support it.
const Kernels& kernels_for(const std::string& name);

}  // namespace nanoinfer
