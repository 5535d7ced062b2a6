// Philox4x32-10: a counter-based random number generator (a keyed bijection without state).
//
// The random number of token t is a pure function of (seed, sample index, t), so a request samples the same tokens
// alone, in any batch, resumed after a stop, or verified out of order.
// Source of the algorithm and its constants: Salmon, Moraes, Dror, Shaw, "Parallel Random Numbers: As Easy as 1, 2, 3",
// SC 2011. The Python reference is nanoinfer/sampling/rng.py; tests compare the two and check the paper's known-answer
// vectors.
#pragma once

#include <array>
#include <cstdint>

namespace nanoinfer {

using PhiloxCounter = std::array<std::uint32_t, 4>;
using PhiloxKey = std::array<std::uint32_t, 2>;

inline PhiloxCounter philox4x32_10(PhiloxCounter ctr, PhiloxKey key) {
  constexpr std::uint64_t kMul0 = 0xD2511F53u, kMul1 = 0xCD9E8D57u;       // round multipliers
  constexpr std::uint32_t kWeyl0 = 0x9E3779B9u, kWeyl1 = 0xBB67AE85u;     // key schedule increments
  for (int round = 0; round < 10; ++round) {
    const std::uint64_t p0 = kMul0 * ctr[0];
    const std::uint64_t p1 = kMul1 * ctr[2];
    ctr = {static_cast<std::uint32_t>(p1 >> 32) ^ ctr[1] ^ key[0], static_cast<std::uint32_t>(p1),
           static_cast<std::uint32_t>(p0 >> 32) ^ ctr[3] ^ key[1], static_cast<std::uint32_t>(p0)};
    key[0] += kWeyl0;
    key[1] += kWeyl1;
  }
  return ctr;
}

// The uniform number in [0, 1) of one token: 53 random bits, so that every value is an exact double.
// Counter words: position (64 bits, low first), sample index (64 bits, low first); key: the seed.
inline double philox_uniform(std::uint64_t seed, std::uint64_t sample, std::uint64_t position) {
  const auto lo = [](std::uint64_t x) { return static_cast<std::uint32_t>(x); };
  const auto hi = [](std::uint64_t x) { return static_cast<std::uint32_t>(x >> 32); };
  const PhiloxCounter r =
      philox4x32_10({lo(position), hi(position), lo(sample), hi(sample)}, {lo(seed), hi(seed)});
  const std::uint64_t bits53 = (static_cast<std::uint64_t>(r[0] >> 5) << 26) | (r[1] >> 6);  // 27 + 26
  return static_cast<double>(bits53) * 0x1.0p-53;
}

}  // namespace nanoinfer
