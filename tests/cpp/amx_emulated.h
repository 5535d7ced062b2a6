// The tile instructions of AMX as functions, as avx512_emulated.h has those of AVX-512. Operations as in Intel's Software Developer's Manual, volume 2; sums of
// bfloat16 products are rounded after each addition.
#pragma once

#define EMULATE_VNNI
#include "avx512_emulated.h"

#define __AMX_TILE__ 1

#undef _tile_loadconfig
#undef _tile_release
#undef _tile_zero
#undef _tile_loadd
#undef _tile_stored
#undef _tile_stream_loadd
#undef _tile_dpbssd
#undef _tile_dpbsud
#undef _tile_dpbusd
#undef _tile_dpbf16ps
#define _tile_loadconfig emulated_loadconfig
#define _tile_release emulated_release
#define _tile_zero emulated_zero
#define _tile_loadd emulated_loadd
#define _tile_stored emulated_stored
#define _tile_stream_loadd emulated_loadd
#define _tile_dpbssd emulated_dpbssd
#define _tile_dpbsud emulated_dpbsud
#define _tile_dpbusd emulated_dpbusd
#define _tile_dpbf16ps emulated_dpbf16ps

namespace {

struct Tiles {
  int rows[8], bytes[8];
  std::uint8_t data[8][16][64];
};
thread_local Tiles tiles;

inline void emulated_loadconfig(const void* config) {
  const auto* c = static_cast<const std::uint8_t*>(config);
  for (int t = 0; t < 8; ++t) {
    tiles.bytes[t] = c[16 + 2 * t] | c[17 + 2 * t] << 8;
    tiles.rows[t] = c[48 + t];
  }
}
inline void emulated_release() { std::memset(&tiles, 0, sizeof tiles); }
inline void emulated_zero(int t) { std::memset(tiles.data[t], 0, sizeof tiles.data[t]); }
inline void emulated_loadd(int t, const void* from, std::int64_t stride) {
  emulated_zero(t);
  for (int r = 0; r < tiles.rows[t]; ++r)
    std::memcpy(tiles.data[t][r], static_cast<const std::uint8_t*>(from) + r * stride, tiles.bytes[t]);
}
inline void emulated_stored(int t, void* to, std::int64_t stride) {
  for (int r = 0; r < tiles.rows[t]; ++r)
    std::memcpy(static_cast<std::uint8_t*>(to) + r * stride, tiles.data[t][r], tiles.bytes[t]);
}

// c[m][n] += products of the 4 bytes a[m][k] and b[k][n], for all k, in order.
template <class Sum, class Product>
void emulated_multiply(int c, int a, int b, Product product) {
  for (int m = 0; m < tiles.rows[c]; ++m)
    for (int n = 0; n < tiles.bytes[c] / 4; ++n) {
      Sum sum;
      std::memcpy(&sum, tiles.data[c][m] + 4 * n, 4);
      for (int k = 0; k < tiles.bytes[a] / 4; ++k) product(sum, tiles.data[a][m] + 4 * k, tiles.data[b][k] + 4 * n);
      std::memcpy(tiles.data[c][m] + 4 * n, &sum, 4);
    }
}
inline void emulated_dpbssd(int c, int a, int b) {
  emulated_multiply<std::int32_t>(c, a, b, [](std::int32_t& sum, const std::uint8_t* x, const std::uint8_t* w) {
    for (int i = 0; i < 4; ++i) sum += static_cast<std::int8_t>(x[i]) * static_cast<std::int8_t>(w[i]);
  });
}
inline void emulated_dpbsud(int c, int a, int b) {
  emulated_multiply<std::int32_t>(c, a, b, [](std::int32_t& sum, const std::uint8_t* x, const std::uint8_t* w) {
    for (int i = 0; i < 4; ++i) sum += static_cast<std::int8_t>(x[i]) * w[i];
  });
}
inline void emulated_dpbusd(int c, int a, int b) {
  emulated_multiply<std::int32_t>(c, a, b, [](std::int32_t& sum, const std::uint8_t* x, const std::uint8_t* w) {
    for (int i = 0; i < 4; ++i) sum += x[i] * static_cast<std::int8_t>(w[i]);
  });
}
inline void emulated_dpbf16ps(int c, int a, int b) {
  emulated_multiply<float>(c, a, b, [](float& sum, const std::uint8_t* x, const std::uint8_t* w) {
    for (int i = 0; i < 4; i += 2) {
      const auto of = [](const std::uint8_t* p) { return emulated::of_bf16(p[0] | p[1] << 8); };
      sum += of(x + i) * of(w + i);
    }
  });
}

}  // namespace
