// The instruction of AVX-VNNI that the kernels use as a function, as avx512_emulated.h has those of AVX-512.
#pragma once

#include <immintrin.h>

#include <cstdint>
#include <cstring>

namespace emulated {

inline __m256i dpbusd_avx_epi32(__m256i sums, __m256i a, __m256i b) {
  std::int32_t to[8];
  std::uint8_t x[32];
  std::int8_t y[32];
  std::memcpy(to, &sums, sizeof to);
  std::memcpy(x, &a, sizeof x);
  std::memcpy(y, &b, sizeof y);
  for (int i = 0; i < 32; ++i) to[i / 4] += x[i] * y[i];
  std::memcpy(&sums, to, sizeof to);
  return sums;
}

}  // namespace emulated

#define __AVXVNNI__ 1
#define _mm256_dpbusd_avx_epi32 emulated::dpbusd_avx_epi32
