// Matrix products in the formats of GGUF files (BlockFormat in layout.h).
// Part of kernels.cpp, which includes it in the namespace of each instruction set.
//
// A group of 32 inputs adds  scale_a (scale_w sum (code - offset) a - minimum sum a)  to each sum, with the exact sums of
// integers of each 16 or 32 inputs that share a scale. A tile of rows reads the weights from their records, or records are
// unpacked, 256 inputs at a time, and all rows of a block are multiplied with them. Both read the same numbers and compute
// with the same functions, so the result of a row does not depend on the number of rows.
// blocks_amx.h has other sums of the formats with integer scales.
#pragma once

#include "chunks.h"

// How many lines of codes can be multiplied and added in 16 bits, where that takes fewer instructions than dot4, else 0.
// Codes of 8 bits are made signed for that.
__attribute__((always_inline)) constexpr int lines_in_16_bits(const BlockFormat& f) {
  int most = (1 << (f.bits + f.more)) - 1;
  if (f.table != nullptr)
    for (int i = most = 0; i < 16; ++i) most = f.table[i] > most ? f.table[i] : most;
  const int lines = 32767 / (2 * 127 * most);
  return !kPairs ? 0 : lines < 2 ? 1 : lines < 4 ? 2 : lines < 8 ? 4 : 8;
}

// The inputs of one panel that a record contains.
template <WeightType type>
struct Record {
  static constexpr BlockFormat f{type};
  static constexpr int kGroups = f.inputs / 32, kScales = f.groups();  // of 32 inputs, and scales of each
  static constexpr int kLines = lines_in_16_bits(f);
  static constexpr bool kMinimum = f.minimum;
  static constexpr int kOffsetBits = f.offset ? __builtin_ctz(f.offset) : 0;
  const std::uint8_t* data;
  std::int64_t ahead;  // bytes to prefetch ahead; 0: nothing is prefetched
  f32x16 scales[2], minimums[2];
  alignas(64) std::uint8_t values[f.num_values() ? f.num_values() * kPanel : 64];  // group scales, then group minimums

  __attribute__((always_inline)) explicit Record(const std::uint8_t* data, std::int64_t ahead = 0)
      : data(data), ahead(ahead) {
    for (std::int64_t at = 0; ahead && at < f.codes(); at += 64) prefetch_l2(data + ahead + at);
    NI_HALVES {
      if constexpr (f.exponent) scales[h] = load_exponents(data + 16 * h);
      else scales[h] = load_f16((const std::uint16_t*)data + 16 * h);
      if constexpr (kMinimum) minimums[h] = load_f16((const std::uint16_t*)(data + f.minimums()) + 16 * h);
      if constexpr (kMinimum && !f.num_scales) minimums[h] = broadcast(0.0f) - minimums[h];  // these are added in a file
    }
    constexpr int n = f.num_values() * kPanel;  // bytes of all values
    if constexpr (n > 0 && f.scale_bits < 8) {
      for (int at = 0; at < n; at += 64) {
        i32x16 v = bit_field(load_ints(data + f.values() + at % (n / 2)), at < n / 2 ? 0 : 4, 4, 0);
        if constexpr (f.scale_bits == 6) {
          const i32x16 high = load_ints(data + f.values() + n / 2 + at % (n / 4));
          v = v | bit_field(high, at / (n / 4) * 2, 2, 4);
        }
        store_ints(values + at, v);
      }
    }
  }
  // Bytes of inputs 4 i to 4 i + 3 of a group, unsigned, of outputs 16 h to 16 h + 15.
  NI_INLINE i32x16 code(const Record& r, int group, int i, int h) {
    const std::uint8_t* line = r.data + f.codes() + group * f.lines() * kLine + 64 * h;
    i32x16 q = load_ints(line + i % f.bits * kLine);
    if constexpr (f.bits < 8) q = bit_field(q, i / f.bits * f.bits, f.bits, 0);
    if constexpr (f.more > 0)
      q = q | bit_field(load_ints(line + (f.bits + i % f.more) * kLine), i / f.more * f.more, f.more, f.bits);
    if constexpr (f.table != nullptr) q = lookup(q, f.table);
    return q;
  }
  NI_INLINE void prefetch_group(const Record& r, int group) {
    const std::uint8_t* next = r.data + f.codes() + group * f.lines() * kLine + r.ahead;
    for (int at = 0; at < f.lines() * kLine; at += 64) prefetch_l2(next + at);
  }
  NI_INLINE f32x16 scale(const Record& r, int group, int s, int h) {
    if constexpr (f.num_scales == 0) return r.scales[h];
    const int at = (group * kScales + s) * kPanel + 16 * h;
    if constexpr (f.scale_bits == 8) return r.scales[h] * load_i8((const std::int8_t*)r.data + f.values() + at);
    return r.scales[h] * (load_u8(r.values + at) - broadcast((float)f.scale_zero));
  }
  NI_INLINE f32x16 minimum(const Record& r, int group, int s, int h) {
    if constexpr (f.num_scales == 0) return r.minimums[h];
    return r.minimums[h] * load_u8(r.values + (f.num_scales + group * kScales + s) * kPanel + 16 * h);
  }
  // The integers that they are products of.
  NI_INLINE i32x16 whole_scale(const Record& r, int group, int s, int h) {
    if constexpr (f.num_scales == 0) return broadcast(1);
    const int at = (group * kScales + s) * kPanel + 16 * h;
    if constexpr (f.scale_bits == 8) return (load_bytes(r.data + f.values() + at) << 24) >> 24;
    return load_bytes(r.values + at) - broadcast(f.scale_zero);
  }
  NI_INLINE i32x16 whole_minimum(const Record& r, int group, int s, int h) {
    return load_bytes(r.values + (f.num_scales + group * kScales + s) * kPanel + 16 * h);
  }
};

// Groups of 32 inputs of a panel, unpacked from records of any format with as many scales and minimums.
constexpr int kChunkGroups = 8;
template <int num_scales, bool with_minimum, int lines>
struct alignas(64) Chunk {
  static constexpr int kUnit = 32, kMost = kChunkGroups, kRows = kRowsInt;  // chunks.h
  static constexpr int kScales = num_scales, kLines = lines;
  static constexpr bool kMinimum = with_minimum;
  std::int32_t codes[kChunkGroups][8][2][16];
  float scales[kChunkGroups][num_scales][2][16];
  float minimums[with_minimum ? kChunkGroups : 1][num_scales][2][16];
  int offset_bits;

  NI_INLINE i32x16 code(const Chunk& c, int group, int i, int h) { return load_ints(c.codes[group][i][h]); }
  NI_INLINE f32x16 scale(const Chunk& c, int group, int s, int h) { return load(c.scales[group][s][h]); }
  NI_INLINE f32x16 minimum(const Chunk& c, int group, int s, int h) { return load(c.minimums[group][s][h]); }
  NI_INLINE void prefetch_group(const Chunk&, int) {}
};
template <WeightType type>
using ChunkOf = Chunk<BlockFormat(type).groups(), BlockFormat(type).minimum, Record<type>::kLines>;

// Unpack the groups [from, from + count) of a panel; `from` begins a record.
template <WeightType type>
void unpack_chunk(const std::uint8_t* panel, std::int64_t from, int count, ChunkOf<type>& to) {
  using R = Record<type>;
  for (int g = 0; g < count; g += R::kGroups) {
    const R record(panel + (from + g) / R::kGroups * R::f.record(), kPrefetchFar);
    for (int j = 0; j < R::kGroups; ++j) {
      R::prefetch_group(record, j);
      NI_UNROLL(8) for (int i = 0; i < 8; ++i)
        NI_HALVES store_ints(to.codes[g + j][i][h], R::code(record, j, i, h));
      for (int s = 0; s < R::kScales; ++s)
        NI_HALVES {
          store(to.scales[g + j][s][h], R::scale(record, j, s, h));
          if constexpr (R::kMinimum) store(to.minimums[g + j][s][h], R::minimum(record, j, s, h));
        }
    }
  }
  to.offset_bits = R::kOffsetBits;
}

// The prepared rows of a tile (kernels.h) from a group of inputs on.
template <int M>
struct BlockUnits {
  const std::int32_t* x;
  const float* scale;
  const std::int32_t* sum;

  BlockUnits(const RowTile& t, std::int64_t group)
      : x(t.units<std::int32_t>(group * 8, M)),
        scale(t.units<float>(t.depth / 4 + group, M)),
        sum(t.units<std::int32_t>(t.depth / 4 + t.depth / 32 + 2 * group, M)) {}

  // Of the activations of row m that share scale s of `scales`, negated.
  __attribute__((always_inline)) i32x16 sum_of(int scales, int s, int m) const {
    return broadcast(scales == 1 ? sum[m] + sum[M + m] : sum[s * M + m]);
  }
};

// The exact sums of the inputs of scale s of a group of W, a Record or a Chunk, for N halves of the panel from h on.
template <class W, int M, int N>
NI_INLINE void dot_inputs(const W& w, int offset_bits, int g, int s, int h, const BlockUnits<M>& u, i32x16 (&dot)[M][N]) {
  constexpr int kQuads = 8 / W::kScales, kStep = W::kLines == 0 ? 1 : W::kLines < kQuads ? W::kLines : kQuads;
  constexpr bool kSigned = W::kLines == 1;  // these formats have the offset 128
  NI_UNROLL(8) for (int first = 0; first < kQuads; first += kStep) {
    i32x16 pairs[M][N];
    NI_UNROLL(8) for (int i = first; i < first + kStep; ++i) {
      i32x16 q[N];
      NI_UNROLL(2) for (int n = 0; n < N; ++n) {
        q[n] = W::code(w, g, s * kQuads + i, h + n);
        if constexpr (kSigned) q[n] = to_signed(q[n]);
      }
      NI_ROWS NI_UNROLL(2) for (int n = 0; n < N; ++n) {
        const std::int32_t x = u.x[(s * kQuads + i) * M + m];
        if constexpr (W::kLines == 0) {
          if (i == 0) dot[m][n] = W::kMinimum ? broadcast(0) : u.sum_of(W::kScales, s, m) << offset_bits;
          dot[m][n] = dot4(dot[m][n], q[n], x);
        } else {
          const i32x16 products = kSigned ? dot_signed_pairs(q[n], x) : dot_pairs(q[n], x);
          pairs[m][n] = i == first ? products : add_pairs(pairs[m][n], products);
          if constexpr (kStep > 1) in_order(pairs[m][n]);
        }
      }
    }
    if constexpr (W::kLines > 0)
      NI_ROWS NI_UNROLL(2) for (int n = 0; n < N; ++n) {
        dot[m][n] = add_sums(first ? dot[m][n] : broadcast(0), pairs[m][n]);
        if constexpr (kStep < kQuads) in_order(dot[m][n]);
      }
  }
  if constexpr (W::kLines > 1 && !W::kMinimum)
    NI_ROWS NI_UNROLL(2) for (int n = 0; n < N; ++n) dot[m][n] = dot[m][n] + (u.sum_of(W::kScales, s, m) << offset_bits);
}

// Add their products with the scales.
template <class W, int M, int N>
NI_INLINE void add_inputs(const W& w, int offset_bits, int g, int s, int h, const BlockUnits<M>& u, Acc<M>& acc) {
  i32x16 dot[M][N];
  dot_inputs<W, M, N>(w, offset_bits, g, s, h, u, dot);
  NI_UNROLL(2) for (int n = 0; n < N; ++n) {
    const f32x16 scale = W::scale(w, g, s, h + n);
    f32x16 minimum;
    if constexpr (W::kMinimum) minimum = W::minimum(w, g, s, h + n);
    NI_ROWS {
      f32x16 product = to_float(dot[m][n]) * scale;
      if constexpr (W::kMinimum) product = fma(minimum, to_float(u.sum_of(W::kScales, s, m)), product);
      acc.v[m][h + n] = fma(product, broadcast(u.scale[m]), acc.v[m][h + n]);
    }
  }
}

// Add the products of `count` groups.
template <class W, int M>
NI_INLINE void add_groups(const W& w, int offset_bits, int count, BlockUnits<M> u, Acc<M>& acc) {
  for (int g = 0; g < count; ++g, u.x += 8 * M, u.scale += M, u.sum += 2 * M) {
    W::prefetch_group(w, g);
    NI_UNROLL(2) for (int s = 0; s < W::kScales; ++s)
      NI_UNROLL(2) for (int h = 0; h < 2; h += kHalves) {
        add_inputs<W, M, kHalves>(w, offset_bits, g, s, h, u, acc);
        if constexpr (kHalves == 1 && M > 2) asm volatile("" ::: "memory");  // GCC would store the activations for the other half
      }
  }
}

// Add the products of the record that begins with group g.
template <WeightType type, int M>
NI_INLINE void add_record(const Record<type>& record, const RowTile& t, std::int64_t g, Acc<M>& acc) {
  using R = Record<type>;
  add_groups<R, M>(record, R::kOffsetBits, R::kGroups, BlockUnits<M>(t, g), acc);
}

// As `tile` (products.h), which multiplies with numbers.
template <WeightType type, int M, void (*add)(const Record<type>&, const RowTile&, std::int64_t, Acc<M>&)>
__attribute__((noinline)) void tile_blocks(const MatmulTask& task, std::int64_t panel, std::int64_t row, std::int64_t, std::int64_t) {
  using R = Record<type>;
  const Matrix& w = *task.w;
  const RowTile t{w.data + panel * w.panel_bytes, task.x + row * task.x_stride, w.depth, nullptr, 0};
  Acc<M> acc;
  NI_ROWS NI_HALVES acc.v[m][h] = broadcast(0.0f);
  for (std::int64_t g = 0; g < w.depth / 32; g += R::kGroups) {
    const R record(t.w + g / R::kGroups * R::f.record(), kWidth == 16 && M <= 2 ? R::f.ahead() : kPrefetchFar);
    add(record, t, g, acc);
  }
  finish_panel<false, M>(task, panel, row, acc);
}

template <int scales, bool minimum, int lines, int M>
NI_INLINE void add_chunk(const Chunk<scales, minimum, lines>& chunk, const RowTile& t, std::int64_t from, int count, Acc<M>& acc) {
  add_groups<Chunk<scales, minimum, lines>, M>(chunk, chunk.offset_bits, count, BlockUnits<M>(t, from), acc);
}
