// Prints the instruction sets that this CPU has, separated by semicolons (CMakeLists.txt runs it).
#include <cstdio>

#include "cpu_features.h"

int main() {
  for (const auto& [name, missing] : nanoinfer::cpu_features())
    if (missing.empty()) std::printf("%s;", name.c_str());
}
