#include "isa.h"

#include <map>
#include <stdexcept>

#include "cpu_features.h"

namespace nanoinfer {

// One table from each compilation of kernels.cpp: sources.cmake defines NANOINFER_KERNELS, NI_KERNELS(name) for each.
#define NI_KERNELS(name) namespace name { extern const Kernels kKernels; }
NANOINFER_KERNELS
#undef NI_KERNELS

namespace {

const std::map<std::string, const Kernels*>& built() {
#define NI_KERNELS(name) {#name, &name::kKernels},
  static const std::map<std::string, const Kernels*> kernels = {NANOINFER_KERNELS};
#undef NI_KERNELS
  return kernels;
}

}  // namespace

std::vector<IsaInfo> instruction_sets() {
  std::vector<IsaInfo> all;
  for (const auto& [name, missing] : cpu_features())
    if (built().count(name)) all.push_back({name, missing});
  return all;
}

const Kernels& kernels_for(const std::string& name) {
  std::string known;
  const Kernels* fastest = nullptr;
  for (const auto& [other, missing] : cpu_features()) {
    const auto found = built().find(other);
    if (found != built().end() && missing.empty()) fastest = found->second;
    if (name == other) {
      if (!missing.empty()) throw std::invalid_argument("instruction set '" + name + "': this CPU does not support " + missing);
      if (found == built().end())
        throw std::invalid_argument("instruction set '" + name + "' is not in this build: NANOINFER_ISA=all pip install builds all");
      return *found->second;
    }
    known += (known.empty() ? "" : ", ") + other;
  }
  if (name.empty()) return *fastest;
  throw std::invalid_argument("instruction set '" + name + "' is unknown: use one of " + known);
}

}  // namespace nanoinfer
