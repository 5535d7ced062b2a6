#include "isa.h"

#if defined(NANOINFER_AMX)
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include <stdexcept>

namespace nanoinfer {

// One table from each compilation of kernels.cpp (listed in sources.cmake).
namespace scalar { extern const Kernels kKernels; }
#if defined(__x86_64__)
namespace avx2 { extern const Kernels kKernels; }
#if !defined(NANOINFER_FEW_ISAS)
namespace avx2_vnni { extern const Kernels kKernels; }
namespace avx512 { extern const Kernels kKernels; }
namespace avx512_vnni { extern const Kernels kKernels; }
#if defined(NANOINFER_AMX)
namespace amx { extern const Kernels kKernels; }
#endif
#endif
#elif defined(__aarch64__)
namespace neon { extern const Kernels kKernels; }
#endif

namespace {

struct Entry {
  const Kernels* kernels;
  std::string missing;
};

#if defined(__x86_64__)
#define NI_NEED(feature) if (!__builtin_cpu_supports(feature)) missing += (missing.empty() ? "" : ", ") + std::string(feature)

#if defined(NANOINFER_AMX)
// Linux saves the tile registers of processes that ask for it (Documentation/arch/x86/xstate.rst).
bool may_use_tiles() {
  constexpr long kRequestPermission = 0x1023, kTileData = 18;
  static const bool granted = syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
  return granted;
}
#endif

std::string missing_for(int level) {  // the builtin also checks that the operating system saves the registers
  std::string missing;
  __builtin_cpu_init();
  NI_NEED("avx2");
  NI_NEED("fma");
  NI_NEED("f16c");
  if (level < 2) return missing;
  NI_NEED("avx512f");
  NI_NEED("avx512bw");
  NI_NEED("avx512vl");
  NI_NEED("avx512dq");
  if (level < 3) return missing;
  NI_NEED("avx512vnni");
  NI_NEED("avx512bf16");
#if defined(NANOINFER_AMX)
  if (level < 4) return missing;
  NI_NEED("amx-tile");
  NI_NEED("amx-int8");
  NI_NEED("amx-bf16");
  if (missing.empty() && !may_use_tiles()) missing = "permission of the operating system for AMX";
#endif
  return missing;
}

std::string missing_for_avx2_vnni() {
  std::string missing = missing_for(1);
  NI_NEED("avxvnni");
  return missing;
}
#endif

std::vector<Entry> entries() {
#if defined(__x86_64__)
  return {{&scalar::kKernels, ""},
          {&avx2::kKernels, missing_for(1)},
#if !defined(NANOINFER_FEW_ISAS)
          {&avx2_vnni::kKernels, missing_for_avx2_vnni()},
          {&avx512::kKernels, missing_for(2)},
          {&avx512_vnni::kKernels, missing_for(3)},
#if defined(NANOINFER_AMX)
          {&amx::kKernels, missing_for(4)},
#endif
#endif
  };
#elif defined(__aarch64__)
  return {{&scalar::kKernels, ""}, {&neon::kKernels, ""}};
#else
  return {{&scalar::kKernels, ""}};
#endif
}

}  // namespace

std::vector<IsaInfo> instruction_sets() {
  std::vector<IsaInfo> all;
  for (const Entry& e : entries()) all.push_back({e.kernels->name, e.missing});
  return all;
}

const Kernels& kernels_for(const std::string& name) {
  std::string known;
  const Kernels* fastest = nullptr;
  for (const Entry& e : entries()) {
    if (e.missing.empty()) fastest = e.kernels;
    if (name == e.kernels->name) {
      if (!e.missing.empty()) throw std::invalid_argument("instruction set '" + name + "': this CPU does not support " + e.missing);
      return *e.kernels;
    }
    known += (known.empty() ? "" : ", ") + std::string(e.kernels->name);
  }
  if (name.empty()) return *fastest;
  throw std::invalid_argument("instruction set '" + name + "' is unknown: use one of " + known);
}

}  // namespace nanoinfer
