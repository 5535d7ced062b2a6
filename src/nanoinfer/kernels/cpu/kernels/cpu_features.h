// What each instruction set of the kernels needs of a CPU: for isa.cpp, and for the build (detect_isa.cpp).
#pragma once

#include <string>
#include <utility>
#include <vector>

#if defined(NANOINFER_AMX)
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace nanoinfer {

#if defined(__x86_64__)
#define NI_NEED(feature) if (!__builtin_cpu_supports(feature)) missing += (missing.empty() ? "" : ", ") + std::string(feature)

#if defined(NANOINFER_AMX)
// Linux saves the tile registers of processes that ask for it (Documentation/arch/x86/xstate.rst).
inline bool may_use_tiles() {
  constexpr long kRequestPermission = 0x1023, kTileData = 18;
  static const bool granted = syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
  return granted;
}
#endif

inline std::string missing_for(int level) {  // the builtin also checks that the operating system saves the registers
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

inline std::string missing_for_avx2_vnni() {
  std::string missing = missing_for(1);
  NI_NEED("avxvnni");
  return missing;
}
#undef NI_NEED
#endif

// The instruction sets of this architecture, slowest first, with the features that this CPU lacks; "": it has all.
inline std::vector<std::pair<std::string, std::string>> cpu_features() {
#if defined(__x86_64__)
  return {{"scalar", ""},
          {"avx2", missing_for(1)},
          {"avx2_vnni", missing_for_avx2_vnni()},
          {"avx512", missing_for(2)},
          {"avx512_vnni", missing_for(3)},
#if defined(NANOINFER_AMX)
          {"amx", missing_for(4)},
#endif
  };
#elif defined(__aarch64__)
  return {{"scalar", ""}, {"neon", ""}};
#else
  return {{"scalar", ""}};
#endif
}

// The fastest of them that this CPU supports, whether it was built or not.
inline std::string fastest_isa() {
  std::string fastest;
  for (const auto& [name, missing] : cpu_features())
    if (missing.empty()) fastest = name;
  return fastest;
}

}  // namespace nanoinfer
