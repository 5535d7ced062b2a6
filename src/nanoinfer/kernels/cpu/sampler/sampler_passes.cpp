// The passes of the native sampler: plain loops that compilers vectorise (only at -O3).
// With GCC and glibc they are also compiled for wider vectors, and the loader selects a version for the machine;
// otherwise they are compiled once.
#include "sampler_passes.h"

#include <cstring>

#if defined(__x86_64__) && defined(__GLIBC__) && defined(__GNUC__) && !defined(__clang__)
#define NANOINFER_CLONES __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define NANOINFER_CLONES
#endif

namespace nanoinfer::sampling {
namespace {

constexpr std::int32_t kLanes = 16;  // independent partial sums, to hide the latency of additions
static_assert(kSumBlock % kLanes == 0);

// The largest key of n logits; `magnitude` is raised to the largest absolute value's bits, which reveal a NaN.
NANOINFER_INLINE std::int32_t largest_key(const float* x, std::int32_t n, std::int32_t& magnitude) {
  std::int32_t best = std::numeric_limits<std::int32_t>::min(), most = magnitude;
  for (std::int32_t i = 0; i < n; ++i) {
    const auto bits = std::bit_cast<std::int32_t>(x[i]);
    const std::int32_t key = bits ^ ((bits >> 31) & 0x7fffffff);
    const std::int32_t size = bits & 0x7fffffff;
    most = size > most ? size : most;
    best = key > best ? key : best;
  }
  magnitude = most;
  return best;
}

NANOINFER_INLINE void weigh(const float* x, std::int32_t n, double largest, double temperature,
                            double* weights) {
  for (std::int32_t i = 0; i < n; ++i) {
    weights[i] = exp_nonpositive((static_cast<double>(x[i]) - largest) / temperature);
  }
}

}  // namespace

NANOINFER_CLONES bool block_maxima(const float* x, std::int32_t V, std::int32_t* maxima) {
  std::int32_t magnitude = 0, b = 0;
  const std::int32_t whole = V / kBlock;
  for (; b < whole; ++b) maxima[b] = largest_key(x + b * kBlock, kBlock, magnitude);
  if (whole * kBlock < V) maxima[b] = largest_key(x + b * kBlock, V - whole * kBlock, magnitude);
  return magnitude <= kInfKey;
}

NANOINFER_CLONES std::int32_t count_at_least(const float* x, std::int32_t V, float border) {
  std::int32_t count = 0;
  for (std::int32_t i = 0; i < V; ++i) count += x[i] >= border ? 1 : 0;
  return count;
}

NANOINFER_CLONES void exp_all(const double* z, std::int32_t n, double* weights) {
  for (std::int32_t i = 0; i < n; ++i) weights[i] = exp_nonpositive(z[i]);
}

NANOINFER_CLONES void scale_all(double* z, std::int32_t n, double largest, double temperature) {
  for (std::int32_t i = 0; i < n; ++i) {
    const double scaled = (z[i] - largest) / temperature;
    z[i] = scaled < 0 ? scaled : 0.0;
  }
}

NANOINFER_CLONES void weigh_block(const float* x, std::int32_t n, double largest, double temperature,
                                  double* weights) {
  weigh(x, n, largest, temperature, weights);
}

NANOINFER_CLONES void weigh_blocks(const float* x, std::int32_t V, double largest, double temperature,
                                   double* sums) {
  double weights[kSumBlock];
  for (std::int32_t begin = 0; begin < V; begin += kSumBlock) {
    if (V - begin >= kSumBlock) {
      weigh(x + begin, kSumBlock, largest, temperature, weights);
    } else {
      std::memset(weights, 0, sizeof weights);
      weigh(x + begin, V - begin, largest, temperature, weights);
    }
    double lanes[kLanes] = {};
    for (std::int32_t i = 0; i < kSumBlock; i += kLanes) {
      for (std::int32_t lane = 0; lane < kLanes; ++lane) lanes[lane] += weights[i + lane];
    }
    double sum = 0.0;
    for (const double lane : lanes) sum += lane;
    sums[begin / kSumBlock] = sum;
  }
}

}  // namespace nanoinfer::sampling
