// Which instruction sets were compiled in, which this machine runs, and the one to use.
#pragma once

#include <string>
#include <vector>

#include "kernels.h"

namespace nanoinfer {

struct IsaInfo {
  std::string name;
  std::string missing;  // what the machine lacks for it; empty: it runs here
};

// All that were compiled in, slowest first.
std::vector<IsaInfo> instruction_sets();

// The kernels of one instruction set; "" is the fastest that runs here.
// Throws std::invalid_argument for a name that does not exist, or that this machine lacks.
const Kernels& kernels_for(const std::string& name);

}  // namespace nanoinfer
