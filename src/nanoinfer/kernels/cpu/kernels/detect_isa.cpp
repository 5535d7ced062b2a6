// Prints the instruction set that a build for this machine contains beside `scalar` (sources.cmake runs it).
#include <cstdio>

#include "cpu_features.h"

int main() { std::printf("%s", nanoinfer::fastest_isa().c_str()); }
