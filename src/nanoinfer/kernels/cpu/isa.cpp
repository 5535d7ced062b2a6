#include "isa.h"

#include <map>
#include <stdexcept>

#include "cpu_features.h"

namespace nanoinfer {

// One table from each compilation of kernels.cpp: sources.cmake defines NANOINFER_HAS_... for those of this build.
#define NI_KERNELS(name) namespace name { extern const Kernels kKernels; }
NI_KERNELS(scalar)
#if defined(NANOINFER_HAS_avx2)
NI_KERNELS(avx2)
#endif
#if defined(NANOINFER_HAS_avx2_vnni)
NI_KERNELS(avx2_vnni)
#endif
#if defined(NANOINFER_HAS_avx512)
NI_KERNELS(avx512)
#endif
#if defined(NANOINFER_HAS_avx512_vnni)
NI_KERNELS(avx512_vnni)
#endif
#if defined(NANOINFER_HAS_amx)
NI_KERNELS(amx)
#endif
#if defined(NANOINFER_HAS_neon)
NI_KERNELS(neon)
#endif

namespace {

const std::map<std::string, const Kernels*>& built() {
  static const std::map<std::string, const Kernels*> kernels = {
      {"scalar", &scalar::kKernels},
#if defined(NANOINFER_HAS_avx2)
      {"avx2", &avx2::kKernels},
#endif
#if defined(NANOINFER_HAS_avx2_vnni)
      {"avx2_vnni", &avx2_vnni::kKernels},
#endif
#if defined(NANOINFER_HAS_avx512)
      {"avx512", &avx512::kKernels},
#endif
#if defined(NANOINFER_HAS_avx512_vnni)
      {"avx512_vnni", &avx512_vnni::kKernels},
#endif
#if defined(NANOINFER_HAS_amx)
      {"amx", &amx::kKernels},
#endif
#if defined(NANOINFER_HAS_neon)
      {"neon", &neon::kKernels},
#endif
  };
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
