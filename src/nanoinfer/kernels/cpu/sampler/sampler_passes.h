// The passes of the native sampler over a row: maxima, counts, weights. sampler.h describes their use.
#pragma once

#include <bit>
#include <cstdint>
#include <limits>

#if defined(__GNUC__)
#define NANOINFER_INLINE inline __attribute__((always_inline))
#else
#define NANOINFER_INLINE inline
#endif

namespace nanoinfer::sampling {

inline constexpr std::int32_t kBlock = 64;      // logits that share one maximum: 4 vectors of 16
inline constexpr std::int32_t kSumBlock = 256;  // weights that share one sum
inline constexpr std::int32_t kInfKey = 0x7f800000;
inline constexpr double kExcluded = -std::numeric_limits<double>::infinity();
inline constexpr double kWeightless = -750.0;  // its exp is 0
inline constexpr float kLowest = std::numeric_limits<float>::lowest();

constexpr std::int32_t num_blocks(std::int32_t V, std::int32_t block) { return (V - 1) / block + 1; }

// Map a float to an integer with the same order (-0 is less than +0; NaNs are outside the infinities): maxima of
// integers need no special cases and vectorise. The mapping is its own inverse.
NANOINFER_INLINE std::int32_t to_key(float x) {
  const auto bits = std::bit_cast<std::int32_t>(x);
  return bits ^ ((bits >> 31) & 0x7fffffff);
}

NANOINFER_INLINE float to_float(std::int32_t key) {
  return std::bit_cast<float>(key ^ ((key >> 31) & 0x7fffffff));
}

// exp(x) for x <= 0, within about 1 ulp, without branches or calls, so that loops vectorise.
// x = n ln 2 + r with |r| <= ln 2 / 2; exp(r) is the Taylor series up to r^13 / 13! (the remainder is below 4e-18).
// ln 2 is split in two parts (the high part ends in 32 zero bits, so that n * high is exact) with the constants of
// FreeBSD's msun, e_exp.c.
NANOINFER_INLINE double exp_nonpositive(double x) {
  constexpr double kLog2e = 1.44269504088896338700e+00;
  constexpr double kLn2High = 6.93147180369123816490e-01, kLn2Low = 1.90821492927058770002e-10;
  constexpr double kRound = 0x1.8p52;  // adding it leaves a rounded integer in the low bits of the sum
  x = x < kWeightless ? kWeightless : x;
  const double shifted = x * kLog2e + kRound;
  const double n = shifted - kRound;
  const double r = (x - n * kLn2High) - n * kLn2Low;
  double y = 1.0 / 6227020800.0;
  y = y * r + 1.0 / 479001600.0;
  y = y * r + 1.0 / 39916800.0;
  y = y * r + 1.0 / 3628800.0;
  y = y * r + 1.0 / 362880.0;
  y = y * r + 1.0 / 40320.0;
  y = y * r + 1.0 / 5040.0;
  y = y * r + 1.0 / 720.0;
  y = y * r + 1.0 / 120.0;
  y = y * r + 1.0 / 24.0;
  y = y * r + 1.0 / 6.0;
  y = y * r + 0.5;
  y = y * r + 1.0;
  y = y * r + 1.0;
  // y * 2^n in two factors: below 2^-1022 doubles are subnormal, and 2^n itself would be out of range.
  const std::uint64_t biased = std::bit_cast<std::uint64_t>(shifted) + (1023 + 128);
  return y * std::bit_cast<double>(biased << 52) * 0x1p-128;
}

// Read a logit exactly once, so that the value that is kept is the one that was compared.
NANOINFER_INLINE float read_once(const float* x) { return *static_cast<const volatile float*>(x); }

// Write the largest key of each block of V logits; return whether no logit is NaN.
bool block_maxima(const float* x, std::int32_t V, std::int32_t* maxima);

// The number of V logits that are >= border.
std::int32_t count_at_least(const float* x, std::int32_t V, float border);

// Replace n logits by z = (logit - largest) / temperature, or by 0 if z is not below 0.
void scale_all(double* z, std::int32_t n, double largest, double temperature);

// weights[i] = exp(z[i]), z <= 0, for n tokens.
void exp_all(const double* z, std::int32_t n, double* weights);

// weights[i] = exp((x[i] - largest) / temperature) for n logits.
void weigh_block(const float* x, std::int32_t n, double largest, double temperature, double* weights);

// Write the sum of these weights for each block of kSumBlock logits, of V logits.
void weigh_blocks(const float* x, std::int32_t V, double largest, double temperature, double* sums);

}  // namespace nanoinfer::sampling
