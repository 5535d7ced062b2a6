// Matrix products with AMX in the formats of GGUF files whose blocks of 256 inputs have one scale, and groups of inputs
// integer scales of their own (whole_scales in layout.h).
// Part of kernels.cpp, which includes it in the namespace of the instruction set `amx`.
//
// A product of a code and its group's scale is an integer, too. With one scale for a row's activations in a block (rows.h),
// as in llama.cpp, a block's sum is an exact integer, and floats are multiplied once for 256 inputs:
//   scale_a (scale_w sum (scale_g (code - offset) a) - minimum_w sum (minimum_g sum a))
// Tiles multiply bytes, so a product becomes one or two digits, which all rows share. Sums of few rows are computed in vector
// registers; they are the same integers.
#pragma once

#include "amx.h"

constexpr std::int64_t kGroupLines = 8;  // of codes of 32 inputs, 4 in a line

// The products of codes and scales of a panel's block as digits, high * 2^kShift + low; and its minimums for tiles of bfloat16.
template <WeightType type>
struct alignas(64) BlockDigits {
  using R = Record<type>;
  static constexpr BlockFormat f{type};
  // With minimums, codes and scales are unsigned: bytes hold the products of codes and of 3 bits of the scales.
  static constexpr bool kUnsigned = f.minimum;
  static constexpr int kDigits = f.num_scales == 0 || f.scale_bits == 4 ? 1 : 2, kShift = kUnsigned ? 3 : 8;
  std::uint8_t digits[kDigits][8 * kGroupLines][2][64];  // the low ones last
  std::int32_t minimums[f.minimum ? 2 : 1][16][16];  // half, sum of 16 inputs, output: two bfloat16, which are the same
  f32x16 scales[2], scales_of_minimums[2];

  void unpack(const std::uint8_t* data) {
    const R record(data);
    for (int g = 0; g < R::kGroups; ++g)
      for (int s = 0; s < R::kScales; ++s)
        NI_HALVES {
          if constexpr (kUnsigned) unpack_unsigned(record, g, s, h);
          else unpack_signed(record, g, s, h);
        }
    NI_HALVES scales[h] = record.scales[h];
    if constexpr (f.minimum) NI_HALVES scales_of_minimums[h] = record.minimums[h];
  }
  const void* tile(int digit, std::int64_t k, int half) const { return digits[digit][16 * k][half]; }

 private:
  typedef std::uint16_t Words __attribute__((vector_size(64)));
  static constexpr int kLines = kGroupLines / R::kScales;  // of a scale

  void unpack_unsigned(const R& record, int g, int s, int h) {
    const i32x16 whole = R::whole_scale(record, g, s, h);
    const Words scale = pairs(whole), low = kDigits == 1 ? scale : scale & 7;
    NI_UNROLL(8) for (int i = s * kLines; i < (s + 1) * kLines; ++i) {
      const Words codes = (Words)R::code(record, g, i, h).v[0];
      store(0, g, i, h, codes * (scale >> kShift));  // without a carry from a byte to the next
      store(kDigits - 1, g, i, h, codes * low);
    }
    const i32x16 minimum = bf16_pairs(R::whole_minimum(record, g, s, h));
    for (int j = s; j < 2; j += R::kScales) store_ints(minimums[h][2 * g + j], minimum);
  }
  void unpack_signed(const R& record, int g, int s, int h) {  // scales are signed bytes
    const Words scale = pairs(R::whole_scale(record, g, s, h)), offset = scale * (std::uint16_t)f.offset;
    const __m512i neighbours = _mm512_broadcast_i32x4(_mm_set_epi8(14, 15, 12, 13, 10, 11, 8, 9, 6, 7, 4, 5, 2, 3, 0, 1));  // of bytes
    NI_UNROLL(8) for (int i = s * kLines; i < (s + 1) * kLines; ++i) {
      const __m512i codes = (__m512i)R::code(record, g, i, h).v[0];
      const __m512i even = (__m512i)((Words)_mm512_maddubs_epi16(codes, (__m512i)(scale & 255)) - offset);
      const __m512i odd = (__m512i)((Words)_mm512_maddubs_epi16(codes, (__m512i)(scale << 8)) - offset);
      store(0, g, i, h, (Words)_mm512_mask_shuffle_epi8(odd, 0x5555555555555555, even, neighbours));
      store(kDigits - 1, g, i, h, (Words)_mm512_mask_shuffle_epi8(even, 0xaaaaaaaaaaaaaaaa, odd, neighbours));
    }
  }
  __attribute__((always_inline)) void store(int digit, int g, int i, int h, Words line) {
    __builtin_memcpy(digits[digit][g * kGroupLines + i][h], &line, 64);
  }
  NI_INLINE Words pairs(i32x16 x) { return (Words)((x & 0xffff) | x << 16).v[0]; }
  NI_INLINE i32x16 bf16_pairs(i32x16 minimum) {  // of up to 8 bits, which bfloat16 has
    const i32x16 high = bits<i32x16>(to_float(minimum));
    return high | (high >> 16);
  }
};

// Add a block's products: its exact sums, and those with the minimums, whose activations are negated.
template <bool minimum>
NI_INLINE f32x16 add_block(f32x16 acc, i32x16 sum, f32x16 scale, f32x16 least, f32x16 scale_of_minimums, float of_row) {
  f32x16 product = to_float(sum) * scale;
  if constexpr (minimum) product = fma(scale_of_minimums, least, product);
  return fma(product, broadcast(of_row), acc);
}

// The sums of 16 rows, a panel and a block, as they leave the tiles.
template <WeightType type>
struct alignas(64) StoredBlock {
  std::int32_t of[BlockDigits<type>::kDigits][2][kAmxRows][16];
  float least[2][kAmxRows][16];

  // Added to the sum of row r and half h.
  __attribute__((always_inline)) void add_to(f32x16& acc, const BlockDigits<type>& w, std::int64_t r, int h, float of_row) const {
    using B = BlockDigits<type>;
    i32x16 sum = load_ints(of[B::kDigits - 1][h][r]);
    if constexpr (B::kDigits == 2) sum = sum + (load_ints(of[0][h][r]) << B::kShift);
    acc = add_block<B::f.minimum>(acc, sum, w.scales[h], load(least[h][r]), w.scales_of_minimums[h], of_row);
  }
};

// Store a block's sums of one digit, unless `to` is null, and begin the next one's.
template <WeightType type>
NI_INLINE void next_sums(int digit, StoredBlock<type>* to) {
  if (digit == BlockDigits<type>::kDigits - 1) {
    if (to != nullptr) {
      _tile_stored(0, to->of[digit][0], 64);
      _tile_stored(1, to->of[digit][1], 64);
    }
    _tile_zero(0);
    _tile_zero(1);
  } else {
    if (to != nullptr) {
      _tile_stored(2, to->of[digit][0], 64);
      _tile_stored(3, to->of[digit][1], 64);
    }
    _tile_zero(2);
    _tile_zero(3);
  }
}

// Step k of a block, 64 inputs: a tile of 16 rows times the digits of the panel. In the first step, the sums of the block of rows `before`
// are stored: stored behind their last product, they would be waited for. Those with the minimums have a tile of their own.
template <WeightType type>
NI_INLINE void multiply_block_step(const std::uint8_t* x, const std::uint8_t* sums_of_x, const BlockDigits<type>& w, int k,
                                   StoredBlock<type>* before, StoredBlock<type>& own) {
  using B = BlockDigits<type>;
  constexpr bool kHigh = B::kDigits == 2;
  NI_LOAD_TILE(true, 4, x, 64);
  _tile_loadd(6, w.tile(B::kDigits - 1, k, 0), kLine);
  _tile_loadd(7, w.tile(B::kDigits - 1, k, 1), kLine);
  if (k == 0) next_sums<type>(B::kDigits - 1, before);
  if constexpr (B::kUnsigned || kHigh) {
    _tile_dpbsud(0, 4, 6);
    _tile_dpbsud(1, 4, 7);
  } else {
    _tile_dpbssd(0, 4, 6);
    _tile_dpbssd(1, 4, 7);
  }
  if constexpr (kHigh) {
    _tile_loadd(6, w.tile(0, k, 0), kLine);
    _tile_loadd(7, w.tile(0, k, 1), kLine);
    if (k == 0) next_sums<type>(0, before);
    if constexpr (B::kUnsigned) {
      _tile_dpbsud(2, 4, 6);
      _tile_dpbsud(3, 4, 7);
    } else {
      _tile_dpbssd(2, 4, 6);
      _tile_dpbssd(3, 4, 7);
    }
  }
  if constexpr (B::f.minimum) {  // integers below 2^24, so that float32 has them exactly
    if (k % 2) {
      _tile_stored(5, own.least[k / 2], 64);
    } else {
      _tile_zero(5);
      NI_LOAD_TILE(true, 4, sums_of_x, 64);
      _tile_loadd(6, w.minimums[k / 2], 64);
      _tile_dpbf16ps(5, 4, 6);
    }
  }
}

// Rows [top, bottom), at most kRowsAtOnce, times a panel. The sums of 16 rows are scaled and added while the next 16
// are multiplied.
template <WeightType type>
inline void multiply_blocks(const MatmulTask& given, std::int64_t panel, std::int64_t top, std::int64_t bottom) {
  using B = BlockDigits<type>;
  constexpr std::int64_t kSteps = 4, kShare = kAmxRows / kSteps;
  const MatmulTask task = given;
  const Matrix m = *task.w;
  const std::int64_t records = m.depth / B::f.inputs, count = (bottom - top + kAmxRows - 1) / kAmxRows;
  const f32x16 bias[2] = {load(m.bias + panel * kPanel), load(m.bias + panel * kPanel + 16)};
  B weights;
  StoredBlock<type> sums[2];
  f32x16 acc[kRowsAtOnce][2];
  for (std::int64_t i = 0; i < count * kAmxRows; ++i) NI_HALVES acc[i][h] = broadcast(0.0f);
  for (std::int64_t k = 0; k < records; ++k) {
    const std::uint8_t* const data = m.data + panel * m.panel_bytes + k * B::f.record();
    weights.unpack(data);
    finish_stores();
    Prefetches ahead(data + kPrefetchFar, B::f.record(), count * kSteps);
    const auto add = [&](std::int64_t b, std::int64_t step) __attribute__((always_inline)) {
      const float* const of_row = group_floats(task, top + b * kAmxRows) + k * (B::f.inputs / kSmallGroup) * 2 * kAmxRows;
      NI_UNROLL(4) for (std::int64_t r = step * kShare; r < (step + 1) * kShare; ++r)
        NI_HALVES sums[b % 2].add_to(acc[b * kAmxRows + r][h], weights, r, h, of_row[r]);
    };
    for (std::int64_t b = 0; b < count; ++b) {
      const std::uint8_t* const x = task.x + (top + b * kAmxRows) * task.x_stride;
      const std::uint8_t *const from = x + tile_at(k * B::f.inputs), *const sums_of_x = x + sums_at(m.depth) + k * kAmxBytes;
      NI_UNROLL(4) for (int step = 0; step < kSteps; ++step) {
        multiply_block_step<type>(from + step * kAmxBytes, sums_of_x, weights, step, b > 0 ? &sums[(b - 1) % 2] : nullptr, sums[b % 2]);
        ahead.next();
        if (b > 0) add(b - 1, step);
      }
    }
    for (int digit = 0; digit < B::kDigits; ++digit) next_sums<type>(digit, &sums[(count - 1) % 2]);
    for (std::int64_t step = 0; step < kSteps; ++step) add(count - 1, step);
  }
  for (std::int64_t i = 0; i < count * kAmxRows; ++i) NI_HALVES acc[i][h] = acc[i][h] + bias[h];
  finish_rows(task, panel, top, bottom - top, acc);
}

template <WeightType type>
void matmul_block_digits(const MatmulTask& task, std::int64_t begin, std::int64_t end) {
  const AmxRegisters registers;
  for (std::int64_t top = 0; top < task.rows; top += kRowsAtOnce) {
    const std::int64_t bottom = top + kRowsAtOnce < task.rows ? top + kRowsAtOnce : task.rows;
    for (std::int64_t panel = begin; panel < end; ++panel) multiply_blocks<type>(task, panel, top, bottom);
  }
}

// As add_record (blocks.h), with the integers of multiply_blocks.
template <WeightType type, int M>
NI_INLINE void add_block_digits(const Record<type>& record, const RowTile& t, std::int64_t g, Acc<M>& acc) {
  using R = Record<type>;
  const BlockUnits<M> first(t, g);
  BlockUnits<M> u = first;
  i32x16 sums[M][2], least[M][2];
  NI_ROWS NI_HALVES sums[m][h] = least[m][h] = broadcast(0);
  for (int j = 0; j < R::kGroups; ++j, u.x += 8 * M, u.sum += 2 * M) {
    R::prefetch_group(record, j);
    NI_UNROLL(2) for (int s = 0; s < R::kScales; ++s) {
      i32x16 dot[M][2];
      dot_inputs<R, M, 2>(record, R::kOffsetBits, j, s, 0, u, dot);
      NI_HALVES {
        const i32x16 scale = R::whole_scale(record, j, s, h);
        NI_ROWS sums[m][h] = sums[m][h] + dot[m][h] * scale;
      }
    }
  }
  u = first;
  if constexpr (R::kMinimum)
    for (int j = 0; j < R::kGroups; ++j, u.sum += 2 * M)
      NI_UNROLL(2) for (int s = 0; s < R::kScales; ++s)
        NI_HALVES {
          const i32x16 minimum = R::whole_minimum(record, j, s, h);
          NI_ROWS least[m][h] = least[m][h] + u.sum_of(R::kScales, s, m) * minimum;
        }
  NI_ROWS NI_HALVES acc.v[m][h] = add_block<R::kMinimum>(acc.v[m][h], sums[m][h], record.scales[h], to_float(least[m][h]),
                                                         record.minimums[h], first.scale[m]);
}

template <WeightType type>
void matmul_blocks_amx(const MatmulTask& task, std::int64_t begin, std::int64_t end) {
  if constexpr (whole_scales(type)) matmul_block_digits<type>(task, begin, end);
  else matmul_groups<type>(task, begin, end);
}

void matmul_amx(const MatmulTask& task, std::int64_t begin, std::int64_t end) {
  switch (task.w->type) {
    case WeightType::i8: return matmul_tiles<WeightType::i8>(task, begin, end);
#define NI_PRODUCT(name) \
  case WeightType::name: return matmul_blocks_amx<WeightType::name>(task, begin, end);
    NI_BLOCK_FORMATS(NI_PRODUCT)
#undef NI_PRODUCT
    default: return matmul_tiles<WeightType::bf16>(task, begin, end);
  }
}
