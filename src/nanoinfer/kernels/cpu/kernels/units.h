// Keys, queries, values and weights of attention as units of 4 bytes, and the storage of new keys and values.
// Part of kernels.cpp, which includes it in the namespace of each instruction set.
#pragma once

#include "rows.h"

// A unit has one float, two bfloat16 or four int8, which one instruction multiplies and adds. A head's part of a block:
//   keys (ceil(D / kUnit), kBlock): a unit has kUnit dimensions of a position; missing dimensions are zeros
//   values (kBlock / kUnit, D rounded up to 16): a unit has kUnit positions of a dimension
// For int8, float scales precede them: one for each key (kBlock), then one for each value (kBlock). Bytes of keys are
// stored with 128 added, because dot4 takes one unsigned operand: the queries are signed, and so are values, whose weights
// are not negative. Queries and weights have 16 bits then, and two words for each unit: two digits, x = 256 x[0] + x[1], or,
// where bytes are multiplied in 16 bits, two pairs of numbers. Both give the same sums.
// int4 has values of 4 bits and keys of 6, whose errors a softmax enlarges. They become bytes, 16 and 4 times as large, in registers, and
// then all is as for int8, but that a scale has 16 bits and is followed by an offset of 16, the number that the byte 0 stands for:
//   keys (ceil(D / 16), 3, kBlock): a unit has the upper 4 bits of each byte of two units, another the two bits that follow, of four
//   values (kBlock / 4, ceil(D / 32), 16): a unit has those of dimension d and, in the upper bits, d + 16

NI_INLINE std::int64_t padded(std::int64_t head_dim) { return (head_dim + 15) & ~std::int64_t{15}; }

NI_INLINE f32x16 as_floats(i32x16 x) {
  f32x16 r;
  NI_EACH r.v[i] = bits<vf>(x.v[i]);
  return r;
}

// For each type: how 16 numbers become units, and what a unit of queries or weights adds to a sum.
template <CacheType type>
struct CacheOf;
template <class C, class Number, int numbers>
struct FloatUnits {
  using T = Number;
  using Sum = f32x16;
  static constexpr std::int64_t kUnit = numbers;
  static constexpr int kWords = 1, kDigits = 1, kTogether = 1, kKeyVectors = 1, kShare = 1;
  static constexpr std::size_t kScales = 0;
  NI_INLINE i32x16 key(const std::uint8_t* from, int) { return load_ints(from); }
  NI_INLINE i32x16 unpacked(i32x16 values, int) { return values; }
  NI_INLINE std::int64_t place(std::int64_t u, int) { return u; }
  template <int N>
  NI_INLINE void mix(Sum (&sum)[N][1], const i32x16 (&values)[N], const Unit* weight) {
    NI_UNROLL(4) for (int j = 0; j < N; ++j) C::score(sum[j], values[j], weight, 0);
  }
  NI_INLINE f32x16 value(const Sum* sum) { return sum[0]; }
};
template <>
struct CacheOf<CacheType::f32> : FloatUnits<CacheOf<CacheType::f32>, float, 1> {
  NI_INLINE void narrow(f32x16 x, Unit* to) { store((float*)to, x); }
  NI_INLINE f32x16 widen(const Unit* from) { return load((const float*)from); }
  NI_INLINE void score(Sum* sum, i32x16 keys, const Unit* query, int) {
    *sum = fma(as_floats(keys), broadcast(bits<float>(*query)), *sum);
  }
};
template <>
struct CacheOf<CacheType::bf16> : FloatUnits<CacheOf<CacheType::bf16>, std::uint16_t, 2> {
  NI_INLINE void narrow(f32x16 x, Unit* to) { store_bf16((std::uint16_t*)to, x); }
  NI_INLINE f32x16 widen(const Unit* from) { return load_bf16((const std::uint16_t*)from); }
  NI_INLINE void score(Sum* sum, i32x16 keys, const Unit* query, int) { *sum = dot2_bf16(*sum, keys, (std::int32_t)*query); }
};
template <>
struct CacheOf<CacheType::i8> {
  using T = std::int8_t;
  using Sum = i32x16;
  static constexpr std::int64_t kUnit = 4;
  static constexpr int kWords = 2, kDigits = kMultiplies16 ? 1 : 2;
  static constexpr int kTogether = 1, kKeyVectors = 1;  // units of keys that are unpacked together, and vectors that have them
  static constexpr int kShare = 1;                      // vectors of values in one
  static constexpr std::size_t kScales = 2 * kBlock * sizeof(float);
  // Where word `g` of unit `u` of a row's weights for kSpan positions lies.
  NI_INLINE std::int64_t place(std::int64_t u, int g) { return kMultiplies16 ? 2 * u + g : g * (kSpan / kUnit) + u; }
  NI_INLINE i32x16 key(const std::uint8_t* from, int) { return load_ints(from); }
  NI_INLINE i32x16 unpacked(i32x16 values, int) { return values; }
  NI_INLINE void narrow(i32x16 x, Unit* to) { store_i8((std::int8_t*)to, x); }
  NI_INLINE void score(Sum* sum, i32x16 keys, const Unit* query, int stride) {
    const std::int32_t first = (std::int32_t)query[0], second = (std::int32_t)query[stride];
    if constexpr (kMultiplies16) {
      sum[0] = add_products(sum[0], widen_unsigned(keys), {broadcast(first), broadcast(second)});
    } else {
      sum[0] = dot4(sum[0], keys, first);
      sum[1] = dot4(sum[1], keys, second);
    }
  }
  template <int N>
  NI_INLINE void mix(Sum (&sum)[N][kDigits], const i32x16 (&values)[N], const Unit* weight) {
    const std::int32_t words[2] = {(std::int32_t)weight[place(0, 0)], (std::int32_t)weight[place(0, 1)]};
    NI_UNROLL(2) for (int g = 0; g < kDigits; ++g)
      NI_UNROLL(4) for (int j = 0; j < N; ++j) {
        if constexpr (kMultiplies16)
          sum[j][g] = add_products(sum[j][g], widen_signed(values[j]), {broadcast(words[0]), broadcast(words[1])});
        else
          sum[j][g] = dot4(sum[j][g], broadcast(words[g]), values[j]);
      }
  }
  NI_INLINE f32x16 value(const Sum* sum) {
    return kDigits == 1 ? to_float(sum[0]) : fma(to_float(sum[0]), broadcast(256.0f), to_float(sum[kDigits - 1]));
  }
};

template <>
struct CacheOf<CacheType::i4> : CacheOf<CacheType::i8> {
  static constexpr int kTogether = 4, kKeyVectors = 3, kShare = 2;
  NI_INLINE i32x16 key(const std::uint8_t* from, int i) {  // unit i of the four
    const i32x16 upper = load_ints(from + i / 2 * 64), lower = load_ints(from + 128);
    return unpacked(upper, i % 2) | ((i == 0 ? lower << 2 : lower >> (2 * i - 2)) & 0x0c0c0c0cu);
  }
  NI_INLINE i32x16 unpacked(i32x16 values, int i) { return (i ? values : values << 4) & 0xf0f0f0f0u; }
};

template <class C>
NI_INLINE std::int64_t key_units(std::int64_t head_dim) {  // of a position, as they are stored
  const std::int64_t units = (head_dim + C::kUnit - 1) / C::kUnit;
  return (units + C::kTogether - 1) / C::kTogether * C::kKeyVectors;
}
template <class C>
NI_INLINE std::int64_t value_width(std::int64_t head_dim) {  // units of as many positions as a unit has
  return (head_dim + 16 * C::kShare - 1) / (16 * C::kShare) * 16;
}

// Store 16 numbers of a key, dimensions d to d + 15, and of a value.
template <class C>
struct Slot {
  Unit* keys;            // unit u of the key: keys[u * kBlock]
  typename C::T* value;  // of dimension d: value[d * C::kUnit]
  std::int64_t head_dim, slot;

  Slot(std::uint8_t* part, std::int64_t head_dim, std::int64_t slot) : head_dim(head_dim), slot(slot) {
    Unit* const from = (Unit*)(part + C::kScales);
    keys = from + slot;
    value = (typename C::T*)(from + key_units<C>(head_dim) * kBlock + slot / C::kUnit * value_width<C>(head_dim)) + slot % C::kUnit;
  }
  template <class Numbers>
  void key(std::int64_t d, Numbers x, Unit flip) const {
    alignas(64) Unit units[16 / C::kUnit];
    C::narrow(x, units);
    for (std::int64_t u = 0; u < 16 / C::kUnit && d + u * C::kUnit < head_dim; ++u)
      keys[(d / C::kUnit + u) * kBlock] = units[u] ^ flip;
  }
  template <class Numbers>
  void values(std::int64_t d, Numbers x) const {
    alignas(64) Unit units[16 / C::kUnit];
    C::narrow(x, units);
#if defined(__AMX_TILE__)
    // One store of a part of each unit: other threads may write the rest of them.
    std::uint8_t* const to = (std::uint8_t*)(value - slot % C::kUnit + d * C::kUnit);
    if constexpr (C::kUnit == 4) {
      const __m512i wide = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)units));
      return _mm512_mask_storeu_epi8(to, 0x1111111111111111u << slot % 4, _mm512_slli_epi32(wide, (int)(slot % 4 * 8)));
    } else if constexpr (C::kUnit == 2) {
      const __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)units));
      return _mm512_mask_storeu_epi16(to, 0x55555555u << slot % 2, _mm512_slli_epi32(wide, (int)(slot % 2 * 16)));
    }
#endif
    typename C::T numbers[16];
    __builtin_memcpy(numbers, units, sizeof numbers);
    for (std::int64_t j = 0; j < 16 && d + j < head_dim; ++j) value[(d + j) * C::kUnit] = numbers[j];
  }
};

// Numbers as signed integers of few bits from the lowest to the highest. Scale and offset are rounded first, so that the integers make up
// for it: the range is enlarged by what the offset may be off.
template <int width>
struct FewBits {
  static constexpr float kHalf = 1 << (width - 1);
  const float* x;
  std::int64_t n;
  Unit scale_and_offset;
  f32x16 inverse, offset;

  FewBits(const float* x, std::int64_t n) : x(x), n(n) {
    f32x16 high = broadcast(x[0]), low = high, check = broadcast(0.0f);
    for (std::int64_t d = 0; d < n; d += 16) {
      const f32x16 v = first(n - d, load_first(x + d, n - d), x[0]);
      high = max(high, v), low = min(low, v), check = fma(v, broadcast(0.0f), check);
    }
    const float most = largest(high), least = -largest(broadcast(0.0f) - low), bad = sum(check);  // bad is 0 or NaN
    const float range = most - least + (most > -least ? most : -least) / 256;
    float pair[16] = {range / (2 * kHalf - 1) + bad};
    std::uint16_t rounded[16];
    store_bf16(rounded, load(pair));
    const float step = bits<float>((std::uint32_t)rounded[0] << 16);
    pair[0] = step / (1 << (8 - width)), pair[1] = (most + least + step) / 2;
    store_bf16(rounded, load(pair));
    __builtin_memcpy(&scale_and_offset, rounded, sizeof scale_and_offset);
    offset = broadcast(bits<float>((std::uint32_t)rounded[1] << 16));
    inverse = broadcast(step > 1e-30f ? 1 / step : 0.0f);
  }
  __attribute__((always_inline)) i32x16 at(std::int64_t d) const {
    const f32x16 v = (load_first(x + d, n - d) - offset) * inverse;
    return round(min(max(v, broadcast(-kHalf)), broadcast(kHalf - 1)));
  }
};
NI_INLINE void store_int4(const float* k, const float* v, std::int64_t head_dim, std::uint8_t* part, std::int64_t slot) {
  using C = CacheOf<CacheType::i8>;
  const Slot<CacheOf<CacheType::i4>> to(part, head_dim, slot);
  const FewBits<6> key(k, head_dim);
  const FewBits<4> value(v, head_dim);
  ((Unit*)part)[slot] = key.scale_and_offset;
  ((Unit*)part)[kBlock + slot] = value.scale_and_offset;
  for (std::int64_t d = 0; d < head_dim; d += 16) {
    const i32x16 x = key.at(d) + broadcast(32);
    Unit upper[4], lower[4], *const at = to.keys + d / 16 * 3 * kBlock;
    C::narrow(x >> 2, upper);
    C::narrow(x & 3, lower);
    at[0] = upper[0] | upper[1] << 4;
    at[kBlock] = upper[2] | upper[3] << 4;
    at[2 * kBlock] = lower[0] | lower[1] << 2 | lower[2] << 4 | lower[3] << 6;
  }
  for (std::int64_t d = 0; d < head_dim; d += 32) {
    std::int8_t both[16];
    store_i8(both, (value.at(d) & 15) | value.at(d + 16) << 4);
    for (std::int64_t j = 0; j < 16; ++j) to.value[(d / 2 + j) * C::kUnit] = both[j];
  }
}

template <CacheType type>
void store_as(const float* k, const float* v, std::int64_t head_dim, std::uint8_t* part, std::int64_t slot) {
  const Slot<CacheOf<type>> to(part, head_dim, slot);
  if constexpr (type == CacheType::i8) {
    float* scales = (float*)part;
    const auto put_key = [&](std::int64_t d, i32x16 x) __attribute__((always_inline)) { to.key(d, x, 0x80808080u); };
    const auto put_value = [&](std::int64_t d, i32x16 x) __attribute__((always_inline)) { to.values(d, x); };
    scales[slot] = quantize_row<127>(k, head_dim, put_key);
    scales[kBlock + slot] = quantize_row<127>(v, head_dim, put_value);
  } else {
    for (std::int64_t d = 0; d < head_dim; d += 16) {
      to.key(d, load_first(k + d, head_dim - d), 0);
      to.values(d, load_first(v + d, head_dim - d));
    }
  }
}

void store_kv(CacheType type, const float* k, const float* v, std::int64_t head_dim, std::uint8_t* part,
              std::int64_t slot) {
  switch (type) {
    case CacheType::f32: return store_as<CacheType::f32>(k, v, head_dim, part, slot);
    case CacheType::bf16: return store_as<CacheType::bf16>(k, v, head_dim, part, slot);
    case CacheType::i8: return store_as<CacheType::i8>(k, v, head_dim, part, slot);
    case CacheType::i4: return store_int4(k, v, head_dim, part, slot);
  }
}
