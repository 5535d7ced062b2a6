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

// How n floats become integers of at most kMost with one scale. `given` may be the magnitude that becomes 127. If a float is NaN
// or infinite, the scale is NaN, which reaches the logits.
template <int kMost>
struct RowScale {
  float scale;
  bool usable;
  f32x16 inverse;

  NI_INLINE RowScale of(const float* x, std::int64_t n, float given = 0) {
    f32x16 top[2] = {broadcast(0.0f), broadcast(0.0f)}, check[2] = {top[0], top[0]};  // two: each waits for the one before
    const auto take = [&](std::int64_t k, int i) __attribute__((always_inline)) {
      const f32x16 v = load_first(x + k, n - k);
      top[i] = max(abs(v), top[i]);
      check[i] = fma(v, broadcast(0.0f), check[i]);
    };
    std::int64_t k = 0;
    for (; k + 16 < n; k += 32) take(k, 0), take(k + 16, 1);
    if (k < n) take(k, 0);
    const float most = given > 0 ? given : largest(max(top[0], top[1])), bad = sum(check[0] + check[1]);  // bad is 0 or NaN
    const bool usable = most > 1e-30f && bad == 0;
    const float integer = given > 0 ? 127.0f : (float)kMost;  // that `most` becomes
    return {most / integer + bad, usable, broadcast(usable ? integer / most : 0.0f)};
  }
  __attribute__((always_inline)) i32x16 integers(const float* x, std::int64_t n) const {  // of up to 16 floats
    return usable ? round(load_first(x, n) * inverse) : broadcast(0);
  }
};

// The scale of n floats as int8: largest / 127, so that the largest becomes +-127; `given` may be it.
NI_INLINE RowScale<127> int8_scale(const float* x, std::int64_t n, float given) {
  i32x16 top = broadcast(0);  // the bits of magnitudes are in their order; those of NaN and infinity are the largest
  for (std::int64_t k = 0; k < n; k += 16) {
    const f32x16 v = load_first(x + k, n - k);
    NI_EACH {
      const vi magnitude = bits<vi>(v.v[i]) & 0x7fffffff;
      top.v[i] = top.v[i] < magnitude ? magnitude : top.v[i];
    }
  }
  const std::int32_t most_bits = largest(top);
  const bool finite = most_bits < 0x7f800000;
  const float most = given > 0 ? given : bits<float>(most_bits);
  const bool usable = finite && most > 1e-30f;
  return {finite ? most / 127.0f : __builtin_nanf(""), usable, broadcast(usable ? 127.0f / most : 0.0f)};
}

// Up to G floats as int8, zeros after them, and sums of these.
template <std::int64_t G>
struct Int8Group {
  static constexpr std::int64_t kSums = G == kSmallGroup ? 16 : G;  // numbers of each sum
  std::int8_t q[G];
  std::int32_t sums[G / kSums];
};
template <std::int64_t G>
NI_INLINE Int8Group<G> quantize_group(const RowScale<127>& scale, const float* x, std::int64_t n) {
  constexpr int kOfSum = Int8Group<G>::kSums / 16;
  Int8Group<G> g;
  i32x16 total = broadcast(0);
  for (int i = 0; i < (int)G / 16; ++i) {
    const i32x16 r = n > 16 * i ? scale.integers(x + 16 * i, n - 16 * i) : broadcast(0);
    total = i % kOfSum ? total + r : r;
    if (i % kOfSum == kOfSum - 1) g.sums[i / kOfSum] = sum(total);
    store_i8(g.q + 16 * i, r);
  }
  return g;
}

// Inputs that share a scale of int8 activations.
constexpr std::int64_t inputs_of_scale(WeightType type) {
#if defined(__AMX_TILE__)
  if (whole_scales(type)) return 256;  // blocks_amx.h
#endif
  return group_of(type);
}

// Write a row as int8 units, then scales, then shifts or sums (kernels.h).
template <std::int64_t G>
NI_INLINE void prepare_int8(WeightType type, const float* x, std::int64_t n, std::int64_t depth, std::int64_t height,
                            Unit* to, float largest) {
  const std::int64_t shared = inputs_of_scale(type);
  Unit* after = to + (depth / 4 + depth / G) * height;  // the scales
  RowScale<127> scale;
  for (std::int64_t g = 0; g < depth / G; ++g) {
    const std::int64_t k = g * G;
    if (k % shared == 0) scale = int8_scale(x + k, n - k < shared ? n - k : shared, largest);
    const Int8Group<G> group = quantize_group<G>(scale, x + k, n - k);
    if (height == 1) {
      __builtin_memcpy(to + g * (G / 4), group.q, G);
    } else {
      std::uint32_t quads[G / 4];
      __builtin_memcpy(quads, group.q, sizeof quads);
      for (std::int64_t j = 0; j < G / 4; ++j) to[(g * (G / 4) + j) * height] = quads[j];
    }
    to[(depth / 4 + g) * height] = bits<std::uint32_t>(scale.scale);
    if constexpr (G == kSmallGroup) {
      for (std::int64_t j = 0; j < 2; ++j) after[(2 * g + j) * height] = (std::uint32_t)-group.sums[j];
    } else {
      after[g * height] = (std::uint32_t)(-128 * group.sums[0]);
    }
  }
}

// Quantize n floats; take(k, numbers k to k + 15). Return the scale.
template <int kMost, class Take>
NI_INLINE float quantize_row(const float* x, std::int64_t n, Take take) {
  const RowScale<kMost> row = RowScale<kMost>::of(x, n);
  for (std::int64_t k = 0; k < n; k += 16) take(k, row.integers(x + k, n - k));
  return row.scale;
}

#if defined(__AMX_TILE__)
typedef std::int16_t Words __attribute__((vector_size(64)));
NI_INLINE Words words_of(i32x16 a, i32x16 b) {  // 4 numbers of each in turn, as `bytes_of` takes them
  return (Words)_mm512_packs_epi32((__m512i)a.v[0], (__m512i)b.v[0]);
}
// 64 numbers of 8 bits in their order: the words of numbers 0 to 31, and of 32 to 63.
NI_INLINE i32x16 bytes_of(Words a, Words b) {
  const vi order = {0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15};
  return {(vi)_mm512_permutexvar_epi32((__m512i)order, _mm512_packs_epi16((__m512i)a, (__m512i)b))};
}
NI_INLINE i32x16 add_bytes(i32x16 sums, i32x16 bytes) { return dot4(sums, broadcast(0x01010101), bytes); }

// Numbers of 16 bits as digits, x = 256 high + low: 64 of each digit, in their order, and their sums.
struct Digits {
  i32x16 highs = broadcast(0), lows = broadcast(0);

  // n floats, or fewer if there are no more; the others become zeros.
  __attribute__((always_inline)) void add(const RowScale<127 << 8>& row, const float* x, std::int64_t n, void* high, void* low) {
    i32x16 q[4];
    for (int i = 0; i < 4; ++i) q[i] = n > 16 * i ? row.integers(x + 16 * i, n - 16 * i) : broadcast(0);
    const Words a = words_of(q[0], q[1]), b = words_of(q[2], q[3]), a_high = (a + 128) >> 8, b_high = (b + 128) >> 8;
    const i32x16 high_bytes = bytes_of(a_high, b_high), low_bytes = bytes_of(a - (a_high << 8), b - (b_high << 8));
    store_ints(high, high_bytes);
    store_ints(low, low_bytes);
    highs = add_bytes(highs, high_bytes);
    lows = add_bytes(lows, low_bytes);
  }
};

// Write row `row` of `rows` rows for i8 (amx.h).
NI_INLINE void prepare_digits(const float* x, std::int64_t n, std::int64_t depth, std::int64_t row, std::int64_t rows,
                              std::size_t stride, std::uint8_t* out, float largest) {
  const bool tiles = uses_amx(WeightType::i8, rows);
  const std::int64_t height = tiles ? AmxRows::of(/*digits=*/true, rows).height : rows, at = row % height;
  std::uint8_t* const group = out + (row - at) * stride;
  const RowScale<127 << 8> scale = RowScale<127 << 8>::of(x, n, largest);
  Digits digits;
  for (std::int64_t k = 0; k < depth; k += 64) {
    if (tiles) {
      std::uint8_t* to = group + (k / 64 * 2 * height + at) * 64;
      digits.add(scale, x + k, n - k, to, to + height * 64);
      continue;
    }
    alignas(64) Unit own[2][16];
    digits.add(scale, x + k, n - k, own[0], own[1]);
    Unit* const to = (Unit*)group + k / 2 * height + at;
    for (std::int64_t u = 0; u < 16; ++u)
      for (std::int64_t d = 0; d < 2; ++d) to[(2 * u + d) * height] = own[d][u];
  }
  Unit* const after = (Unit*)(group + 2 * depth * height) + at;
  after[0] = bits<Unit>(scale.scale);
  after[height] = (Unit)(-128 * sum(digits.highs));
  after[2 * height] = (Unit)(-128 * sum(digits.lows));
}

// Write a row for weights with scales of groups: its int8 between those of 15 other rows; then, for each group, the scale and the sum
// of the int8, negative.
NI_INLINE void prepare_group_tiles(const float* x, std::int64_t n, std::int64_t depth, std::int64_t row, std::size_t stride,
                                   std::uint8_t* out, float largest) {
  const std::int64_t at = row % kAmxRows;
  std::uint8_t* const block = out + (row - at) * stride;
  float* to = (float*)(block + floats_at(depth)) + at;
  for (std::int64_t k = 0; k < depth; k += kSmallGroup, to += 2 * kAmxRows) {
    const RowScale<127> scale = int8_scale(x + k, n - k < kSmallGroup ? n - k : kSmallGroup, largest);
    const Int8Group<kSmallGroup> group = quantize_group<kSmallGroup>(scale, x + k, n - k);
    __builtin_memcpy(block + tile_at(k) + at * 64, group.q, kSmallGroup);
    to[0] = scale.scale;
    to[kAmxRows] = -(float)(group.sums[0] + group.sums[1]);
  }
}

// Sums of 4 numbers each, of four vectors.
NI_INLINE i32x16 add_quads(const i32x16* q) {
  const vi even = {0, 16, 2, 18, 4, 20, 6, 22, 8, 24, 10, 26, 12, 28, 14, 30}, low = {0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29};
  const vi order = {0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15};
  const auto pick = [](vi a, vi b, vi from) { return (vi)_mm512_permutex2var_epi32((__m512i)a, (__m512i)from, (__m512i)b); };
  vi pairs[2];
  for (int i = 0; i < 2; ++i) pairs[i] = pick(q[2 * i].v[0], q[2 * i + 1].v[0], even) + pick(q[2 * i].v[0], q[2 * i + 1].v[0], even + 1);
  const vi all = pick(pairs[0], pairs[1], low) + pick(pairs[0], pairs[1], low + 2);
  return {pick(all, all, order)};
}

// The same for blocks of 256 with one scale (blocks_amx.h), and for each a row of a tile of sums of 16 int8, negative, as two bfloat16: a
// multiple of 64, and the rest.
NI_INLINE void prepare_block_tiles(const float* x, std::int64_t depth, std::int64_t row, std::size_t stride, std::uint8_t* out,
                                   float largest) {
  const std::int64_t at = row % kAmxRows;
  std::uint8_t* const block = out + (row - at) * stride;
  float* to = (float*)(block + floats_at(depth)) + at;
  for (std::int64_t k = 0; k < depth; k += 256) {
    const RowScale<127> scale = RowScale<127>::of(x + k, 256, largest);
    i32x16 quads[4];
    for (int j = 0; j < 4; ++j) {
      i32x16 q[4];
      for (int i = 0; i < 4; ++i) q[i] = scale.integers(x + k + 64 * j + 16 * i, 16);
      const i32x16 bytes = bytes_of(words_of(q[0], q[1]), words_of(q[2], q[3]));
      store_ints(block + tile_at(k + 64 * j) + at * 64, bytes);
      quads[j] = add_bytes(broadcast(0), bytes);
    }
    const i32x16 sums = broadcast(0) - add_quads(quads), rest = sums & 63;
    const i32x16 low = bits<i32x16>(to_float(rest)), high = bits<i32x16>(to_float(sums - rest));
    store_ints(block + sums_at(depth) + k / 256 * kAmxBytes + at * 64, low | ((high >> 16) & 0xffff));
    std::int32_t own[16];
    store_ints(own, sums);
    for (std::int64_t g = 0; g < 8; ++g, to += 2 * kAmxRows) to[0] = scale.scale, to[kAmxRows] = (float)(own[2 * g] + own[2 * g + 1]);
  }
}
#endif

void prepare(WeightType type, const float* x, std::int64_t n, std::int64_t depth, std::int64_t row, std::int64_t rows,
             std::size_t stride, std::uint8_t* out, float largest) {
#if defined(__AMX_TILE__)
  if (group_of(type) && type != WeightType::i8 && uses_amx(type, rows)) {
    if (whole_scales(type)) return prepare_block_tiles(x, depth, row, stride, out, largest);
    return prepare_group_tiles(x, n, depth, row, stride, out, largest);
  }
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
    case WeightType::i8: return prepare_int8<kGroup>(type, x, n, depth, height, to, largest);
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

// Multiply each `width` of n numbers by a Hadamard matrix whose columns have length 1, in place; if width is not a power of two, p, parts
// of the largest p that divides it. The matrix is its own inverse. Sums have the same order on every instruction set.
struct Signs {
  float of[16][16];
  constexpr Signs() : of() {
    for (int i = 0; i < 16; ++i)
      for (int j = 0; j < 16; ++j) of[i][j] = __builtin_parity(i & j) ? -1.0f : 1.0f;
  }
};
alignas(64) constexpr Signs kSigns;

void hadamard(float* x, std::int64_t n, std::int64_t width) {
  const std::int64_t p = width & -width;
  const float factor = 1.0f / __builtin_sqrtf((float)p);
  if (p < 16) {
    for (std::int64_t stride = 1; stride < p; stride *= 2)
      for (std::int64_t i = 0; i < n; ++i)
        if (!(i & stride)) {
          const float a = x[i], b = x[i + stride];
          x[i] = a + b, x[i + stride] = a - b;
        }
    for (std::int64_t i = 0; i < n; ++i) x[i] *= factor;
    return;
  }
  for (std::int64_t stride = 16; stride < p; stride *= 2)
    for (std::int64_t i = 0; i < n; i += 2 * stride)
      for (std::int64_t j = i; j < i + stride; j += 16) {
        const f32x16 a = load(x + j), b = load(x + j + stride);
        store(x + j, a + b);
        store(x + j + stride, a - b);
      }
  for (std::int64_t i = 0; i < n; i += 16) {
    f32x16 y[2] = {broadcast(0.0f), broadcast(0.0f)};
    NI_UNROLL(8) for (int l = 0; l < 16; l += 2)
      for (int j = 0; j < 2; ++j) y[j] = fma(broadcast(x[i + l + j]), load(kSigns.of[l + j]), y[j]);
    store(x + i, (y[0] + y[1]) * broadcast(factor));
  }
}
