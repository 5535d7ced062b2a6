// Operations on each row between the products: its prepared form, norms, rotation.
// Part of kernels.cpp, which includes it in the namespace of each instruction set.
#pragma once

#include "matmul.h"

// The 4-byte units of prepared rows are written as integers, and read as integers and floats.
using Unit = std::uint32_t __attribute__((may_alias));

// Round 16 floats to integers, ties to even; |x| < 2^22.
NI_INLINE i32x16 round(f32x16 x) {
  const f32x16 magic = broadcast(12582912.0f);
  const f32x16 t = x + magic;
  i32x16 r;
  NI_EACH r.v[i] = bits<vi>(t.v[i]) - 0x4b400000;
  return r;
}

// Up to G floats quantized to int8 with scale = largest / 127, so that the largest becomes +-127; `given` may be it. A group with a
// NaN or an infinity gets a NaN scale, which reaches the logits.
template <std::int64_t G>
struct Int8Group {
  static constexpr std::int64_t kSums = G == kSmallGroup ? 16 : G;  // numbers of each sum
  std::int8_t q[G];
  float scale;
  std::int32_t sums[G / kSums];
};
template <std::int64_t G>
NI_INLINE Int8Group<G> quantize_group(const float* x, std::int64_t n, float given) {
  constexpr int kVectors = G / 16, kOfSum = Int8Group<G>::kSums / 16;
  f32x16 v[kVectors];
  i32x16 top = broadcast(0);  // the bits of magnitudes are in their order; those of NaN and infinity are the largest
  for (int k = 0; k < kVectors; ++k) {
    v[k] = n > 16 * k ? load_first(x + 16 * k, n - 16 * k) : broadcast(0.0f);
    NI_EACH {
      const vi magnitude = bits<vi>(v[k].v[i]) & 0x7fffffff;
      top.v[i] = top.v[i] < magnitude ? magnitude : top.v[i];
    }
  }
  const std::int32_t most_bits = largest(top);
  const bool finite = most_bits < 0x7f800000;
  const float most = given > 0 ? given : bits<float>(most_bits);
  const bool usable = finite && most > 1e-30f;
  const f32x16 inverse = broadcast(usable ? 127.0f / most : 0.0f);
  Int8Group<G> g;
  g.scale = finite ? most / 127.0f : __builtin_nanf("");
  i32x16 total = broadcast(0);
  for (int i = 0; i < kVectors; ++i) {
    const i32x16 r = usable ? round(v[i] * inverse) : broadcast(0);
    total = i % kOfSum ? total + r : r;
    if (i % kOfSum == kOfSum - 1) g.sums[i / kOfSum] = sum(total);
    store_i8(g.q + 16 * i, r);
  }
  return g;
}

// Write a row as int8 units, then scales, then shifts or sums (kernels.h).
template <std::int64_t G>
NI_INLINE void prepare_int8(WeightType type, const float* x, std::int64_t n, std::int64_t depth, std::int64_t height,
                            Unit* to, float largest) {
  Unit* after = to + (depth / 4 + depth / G) * height;  // the scales
  for (std::int64_t g = 0; g < depth / G; ++g) {
    const Int8Group<G> group = quantize_group<G>(x + g * G, n - g * G, largest);
    if (height == 1) {
      __builtin_memcpy(to + g * (G / 4), group.q, G);
    } else {
      std::uint32_t quads[G / 4];
      __builtin_memcpy(quads, group.q, sizeof quads);
      for (std::int64_t j = 0; j < G / 4; ++j) to[(g * (G / 4) + j) * height] = quads[j];
    }
    to[(depth / 4 + g) * height] = bits<std::uint32_t>(group.scale);
    if constexpr (G == kSmallGroup) {
      for (std::int64_t j = 0; j < 2; ++j) after[(2 * g + j) * height] = (std::uint32_t)-group.sums[j];
    } else {
      const std::int32_t sum = group.sums[0];
      after[g * height] = type == WeightType::i4 ? bits<std::uint32_t>(-(float)sum) : (std::uint32_t)(-128 * sum);
    }
  }
}

// Quantize n floats to integers of at most kMost with one scale, which is returned. take(k, numbers k to k + 15). `given` may be
// the magnitude that becomes 127. If a float is NaN or infinite, the scale is NaN, which reaches the logits.
template <int kMost, class Take>
NI_INLINE float quantize_row(const float* x, std::int64_t n, Take take, float given = 0) {
  f32x16 top = broadcast(0.0f), check = broadcast(0.0f);
  for (std::int64_t k = 0; k < n; k += 16) {
    const f32x16 v = load_first(x + k, n - k);
    top = max(abs(v), top);
    check = fma(v, broadcast(0.0f), check);
  }
  const float most = given > 0 ? given : largest(top), bad = sum(check);  // bad is 0 or NaN
  const bool usable = most > 1e-30f && bad == 0;
  const float integer = given > 0 ? 127.0f : (float)kMost;  // that `most` becomes
  const f32x16 inverse = broadcast(usable ? integer / most : 0.0f);
  for (std::int64_t k = 0; k < n; k += 16)
    take(k, usable ? round(load_first(x + k, n - k) * inverse) : broadcast(0));
  return most / integer + bad;
}

#if defined(__AMX_TILE__)
// Write row `row` of `rows` rows for i8: numbers of 16 bits, x = 256 high + low, as digits (amx.h).
NI_INLINE void prepare_digits(const float* x, std::int64_t n, std::int64_t depth, std::int64_t row, std::int64_t rows,
                              std::size_t stride, std::uint8_t* out, float largest) {
  const bool tiles = uses_amx(WeightType::i8, rows);
  const std::int64_t height = tiles ? TileRows::of(/*digits=*/true, rows).height : rows, at = row % height;
  std::uint8_t* const group = out + (row - at) * stride;
  i32x16 highs = broadcast(0), lows = broadcast(0);
  const auto take = [&](std::int64_t k, i32x16 q) __attribute__((always_inline)) {
    const i32x16 high = (q + broadcast(128)) >> 8;
    highs = highs + high;
    lows = lows + (q - (high << 8));
    if (tiles) {
      std::int8_t* to = (std::int8_t*)group + (k / 64 * 2 * height + at) * 64 + k % 64;
      store_i8(to, high);
      store_i8(to + height * 64, q);  // its last byte
    } else {
      alignas(64) Unit digits[2][4];
      store_i8((std::int8_t*)digits[0], high);
      store_i8((std::int8_t*)digits[1], q);
      Unit* const to = (Unit*)group + k / 2 * height + at;
      for (std::int64_t u = 0; u < 4; ++u)
        for (std::int64_t d = 0; d < 2; ++d) to[(2 * u + d) * height] = digits[d][u];
    }
  };
  const float scale = quantize_row<127 << 8>(x, n, take, largest);
  for (std::int64_t k = (n + 15) / 16 * 16; k < depth; k += 16) take(k, broadcast(0));
  Unit* const after = (Unit*)(group + 2 * depth * height) + at;
  after[0] = bits<Unit>(scale);
  after[height] = (Unit)(-128 * sum(highs));
  after[2 * height] = (Unit)(-128 * sum(lows));
}
#endif

void prepare(WeightType type, const float* x, std::int64_t n, std::int64_t depth, std::int64_t row, std::int64_t rows,
             std::size_t stride, std::uint8_t* out, float largest) {
#if defined(__AMX_TILE__)
  if (type == WeightType::bf16) return prepare_bf16_tiles(x, n, depth, row, rows, stride, out);
  if (type == WeightType::i8) return prepare_digits(x, n, depth, row, rows, stride, out, largest);
#endif
  const Tiling tiling(rows, uses_amx(type, rows) ? 1 : group_of(type) ? kRowsInt : kRowsFloat);
  const std::int64_t tile = tiling.tile_of(row), from = tiling.begin(tile), height = tiling.begin(tile + 1) - from;
  Unit* to = (Unit*)(out + from * stride) + (row - from);  // unit u of this row: to[u * height]
  switch (type) {
    case WeightType::f32:
    case WeightType::f16:
      for (std::int64_t k = 0; k < n; ++k) to[k * height] = bits<std::uint32_t>(x[k]);
      return;
    case WeightType::bf16:
      for (std::int64_t k = 0; k < depth; k += 16) {
        std::uint16_t values[16];
        store_bf16(values, load_first(x + k, n - k));
        std::uint32_t pairs[8];
        __builtin_memcpy(pairs, values, sizeof pairs);
        for (std::int64_t j = 0; j < 8 && k + 2 * j < depth; ++j) to[(k / 2 + j) * height] = pairs[j];
      }
      return;
    case WeightType::i8:
    case WeightType::i4: return prepare_int8<kGroup>(type, x, n, depth, height, to, largest);
    default: return prepare_int8<kSmallGroup>(type, x, n, depth, height, to, largest);
  }
}

void norm(Norm norm, const float* x, const float* weight, const float* bias, std::int64_t n, float eps, float* y) {
  f32x16 mean = broadcast(0.0f);
  if (norm == Norm::layer) {
    f32x16 total = broadcast(0.0f);
    for (std::int64_t k = 0; k < n; k += 16) total = total + load_first(x + k, n - k);
    mean = broadcast(sum(total) / (float)n);
  }
  f32x16 squares = broadcast(0.0f);
  for (std::int64_t k = 0; k < n; k += 16) {
    const f32x16 d = first(n - k, load_first(x + k, n - k) - mean, 0.0f);
    squares = fma(d, d, squares);
  }
  const f32x16 inverse = broadcast(1.0f / __builtin_sqrtf(sum(squares) / (float)n + eps));
  for (std::int64_t k = 0; k < n; k += 16) {
    const f32x16 scaled = (load_first(x + k, n - k) - mean) * inverse;
    store_first(y + k, fma(scaled, load_first(weight + k, n - k), load_first(bias + k, n - k)), n - k);
  }
}

void rotate(float* x, const float* cos, const float* sin, std::int64_t half) {
  for (std::int64_t k = 0; k < half; k += 16) {
    const std::int64_t n = half - k;
    const f32x16 a = load_first(x + k, n), b = load_first(x + half + k, n);
    const f32x16 c = load_first(cos + k, n), s = load_first(sin + k, n);
    store_first(x + k, a * c - b * s, n);
    store_first(x + half + k, b * c + a * s, n);
  }
}
