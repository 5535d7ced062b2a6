// How weights, keys and values are prefetched. BlockFormat::ahead (layout.h) has the distances of the formats of GGUF files.
// Part of kernels.cpp, which includes it in the namespace of each instruction set.
#pragma once

#include "vec.h"

NI_INLINE void prefetch(const void* p) { __builtin_prefetch(p, 0, 3); }
NI_INLINE void prefetch_l2(const void* p) { __builtin_prefetch(p, 0, 2); }

// Bytes to prefetch ahead. With wide registers, prefetches go into the second-level cache: into the first level they are
// slower at every distance. One or two rows: numbers of 8 to 32 bits are read nearly as fast without them, because the CPU
// has many loads in flight and its own prefetchers; a long distance is slower there, but faster where a line of weights takes
// more instructions. Three or four rows are multiplied fastest without prefetches, more with a long distance. Measured on Zen 4
// (docs/log/2026-11.md, 25 and 26).
constexpr std::int64_t kPrefetchRow = 3 << 10, kPrefetchDigits = 12 << 10, kPrefetchFar = 16 << 10;
constexpr int kRowsNear = 4;

// Prefetch for a line of 128 bytes of weights and M rows.
template <int M>
NI_INLINE void prefetch_line(const void* w, const std::uint8_t*& ahead, std::int64_t stride) {
  if constexpr (M <= 2 && kWidth == 16) {
    for (int at = 0; at < 128; at += 64) prefetch_l2((const char*)w + kPrefetchRow + at);
  } else {
    for (int at = 0; at < 128; at += 64) prefetch_l2(ahead + at);
    ahead += stride;
  }
}

// Memory that is prefetched while tiles are multiplied, in about as many parts as given: lines that are asked for in a row hold up
// the loads of tiles.
struct Prefetches {
  const std::uint8_t *at, *end;
  std::int64_t part;  // bytes

  Prefetches(const std::uint8_t* begin, std::int64_t bytes, std::int64_t parts)
      : at(begin), end(begin + bytes), part((bytes / parts + 63) / 64 * 64) {}
  __attribute__((always_inline)) void next() {
    for (std::int64_t i = 0; i < part && at < end; i += 64, at += 64) prefetch_l2(at);
  }
};

// Blocks are far apart in memory, so the hardware prefetcher does not predict the next one.
NI_INLINE void prefetch_lines(const std::uint8_t* p, std::int64_t bytes) {
  for (std::int64_t at = 0; at < bytes; at += 64) prefetch(p + at);
}
