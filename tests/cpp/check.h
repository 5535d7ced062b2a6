// What the tests in C++ share: checks that say what is wrong, numbers that are the same on every machine, and the
// instruction sets to test.
#pragma once

#include <cmath>
#include <cstdarg>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "format.h"
#include "isa.h"

namespace nanoinfer::test {

using Floats = std::vector<float>;

constexpr WeightType kTypes[] = {WeightType::f32, WeightType::f16, WeightType::bf16,
                                 WeightType::i8,  WeightType::q8_0};
constexpr CacheType kCaches[] = {CacheType::f32, CacheType::bf16, CacheType::i8, CacheType::i4};
#define NI_NAME(name) #name,
inline const char* name_of(WeightType t) {
  constexpr const char* kNames[] = {"float32", "float16", "bfloat16", "int8", NI_BLOCK_FORMATS(NI_NAME)};
  return kNames[static_cast<int>(t)];
}
#undef NI_NAME
#define NI_TYPE(name) WeightType::name,
constexpr WeightType kBlockTypes[] = {NI_BLOCK_FORMATS(NI_TYPE)};
#undef NI_TYPE
inline const char* name_of(CacheType t) {
  constexpr const char* kNames[] = {"float32", "bfloat16", "int8", "int4"};
  return kNames[static_cast<int>(t)];
}

// One run of a test program: counts what failed, and writes the bits that must be the same on every machine.
class Test {
 public:
  Test(const char* name, int argc, char** argv) : name_(name), bits_(argc > 1 ? std::fopen(argv[1], "w") : nullptr) {}

  // Print the message, as printf does, unless ok.
  [[gnu::format(printf, 3, 4)]] void check(bool ok, const char* message, ...) {
    ++checks_;
    if (ok || ++failures_ > 20) return;  // twenty tell enough
    std::va_list more;
    va_start(more, message);
    std::fprintf(stderr, "%s: ", name_);
    std::vfprintf(stderr, message, more);
    std::fputc('\n', stderr);
    va_end(more);
  }

  // A line for the file of bits (make neon compares the files of two machines): FNV-1a of some bytes.
  void bits(const std::string& what, const void* data, std::size_t n) {
    std::uint64_t hash = 0xcbf29ce484222325u;
    for (std::size_t i = 0; i < n; ++i) hash = (hash ^ static_cast<const unsigned char*>(data)[i]) * 0x100000001b3u;
    if (bits_) std::fprintf(bits_, "%s %016llx\n", what.c_str(), static_cast<unsigned long long>(hash));
  }

  int result() {  // of main
    if (bits_) std::fclose(bits_);
    std::printf("%s: %ld checks, %ld failed\n", name_, checks_, failures_);
    return failures_ > 0;
  }

 private:
  const char* name_;
  std::FILE* bits_;
  long checks_ = 0, failures_ = 0;
};

// n numbers, roughly normal: a sum of four uniform ones. In integers and one product, so all machines agree.
inline Floats random(std::int64_t n, std::uint32_t seed, float scale = 1.0f) {
  std::mt19937 bits(seed);
  Floats x(n);
  for (float& v : x) {
    std::int32_t sum = -(1 << 21);
    for (int i = 0; i < 4; ++i) sum += static_cast<std::int32_t>(bits() >> 12);
    v = static_cast<float>(sum) * (0x1.bb67aep-20f * scale);  // sqrt(3) / 2^20: the standard deviation is `scale`
  }
  return x;
}

// x as a bfloat16, to nearest and ties to even; x is 0 or not subnormal.
inline double as_bf16(float x) {
  int exponent;
  std::frexp(x, &exponent);
  const double step = std::ldexp(1.0, exponent - 8);
  return std::nearbyint(x / step) * step;
}

inline float largest(const float* x, std::int64_t n) {
  float most = 0;
  for (std::int64_t i = 0; i < n; ++i) most = std::fmax(most, std::fabs(x[i]));
  return most;
}

inline bool same_bits(const float* a, const float* b, std::int64_t n) { return !std::memcmp(a, b, n * sizeof *a); }

inline bool is_near(double got, double expected, double atol, double rtol) {  // false for a NaN
  return std::fabs(got - expected) <= atol + rtol * std::fabs(expected);
}

}  // namespace nanoinfer::test
#define NI_EMULATED(name) namespace nanoinfer::name { extern const Kernels kKernels; }
NANOINFER_EMULATED
#undef NI_EMULATED
namespace nanoinfer::test {

// What this CPU has; the others are named.
inline std::vector<const Kernels*> kernels_here() {
  std::vector<const Kernels*> all;
  for (const IsaInfo& isa : instruction_sets())
    if (isa.missing.empty()) all.push_back(&kernels_for(isa.name));
    else std::printf("not run: %s, this CPU has no %s\n", isa.name.c_str(), isa.missing.c_str());
  return all;
}

// And the others, emulated.
inline std::vector<const Kernels*> kernels_to_test() {
  std::vector<const Kernels*> all = kernels_here();
#define NI_EMULATED(name) all.push_back(&name::kKernels);
  NANOINFER_EMULATED
#undef NI_EMULATED
  return all;
}

}  // namespace nanoinfer::test
