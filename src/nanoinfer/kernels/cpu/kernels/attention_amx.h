// Attention with AMX: tiles of up to 16 rows of queries times 16 positions, and of their weights times 16 dimensions.
// Part of attention.h, which includes it in the namespace of the instruction set `amx`.
//
// Keys and values lie as a register takes them: units of 16 positions, or of 16 dimensions (units.h). bfloat16 is multiplied
// as it lies, values block by block. A block has few units of int8 values, so those of kSpan positions are copied into tiles, as
// int4 is when it becomes bytes.
//
// Sums of int8 are exact, so few rows take the vector registers, with the same result. Sums of bfloat16 have the order of
// the instruction, so they always take tiles: a row's result does not depend on the number of rows in a tile. A position
// that a row does not attend to has the weight 0 there.
#pragma once

constexpr std::int64_t kAmxUnits = 16;
constexpr std::int64_t kFewRowsInt8 = 6;  // as many or fewer are faster without tiles
constexpr std::int64_t kFewRows = 4;      // as many or fewer wait for memory, and prefetch (attention.h)
constexpr std::int64_t kBlockUnits = kBlock / CacheOf<CacheType::bf16>::kUnit;

template <CacheType type>
using AmxQueries = Queries<type, kAmxRows, true>;
constexpr CacheType in_tiles(CacheType type) { return has_integers(type) ? CacheType::i8 : type; }

// Tiles of sums as they are stored: float32, or int32 of each digit.
template <CacheType type>
struct alignas(64) AmxSums {
  static constexpr int kDigits = CacheOf<type>::kDigits;
  std::int32_t of[4 / kDigits][kDigits][kAmxRows][16];
};
NI_INLINE f32x16 sum_of(const AmxSums<CacheType::bf16>& s, int tile, int row) { return load((const float*)s.of[tile][0][row]); }
NI_INLINE f32x16 sum_of(const AmxSums<CacheType::i8>& s, int tile, int row, const std::int32_t* shift) {
  const i32x16 digits[2] = {load_ints(s.of[tile][0][row]) + broadcast(shift[0]),
                            load_ints(s.of[tile][1][row]) + broadcast(shift[1])};
  return CacheOf<CacheType::i8>::value(digits);
}

// Store the first n tiles of sums. int8: the registers 2 and 3 have the second digits of 0 and 1.
NI_INLINE void store_tiles(AmxSums<CacheType::bf16>& to, std::int64_t n) {
  _tile_stored(0, to.of[0][0], 64);
  if (n > 1) _tile_stored(1, to.of[1][0], 64);
  if (n > 2) _tile_stored(2, to.of[2][0], 64);
  if (n > 3) _tile_stored(3, to.of[3][0], 64);
}
NI_INLINE void store_tiles(AmxSums<CacheType::i8>& to, std::int64_t n) {
  _tile_stored(0, to.of[0][0], 64);
  _tile_stored(2, to.of[0][1], 64);
  if (n == 1) return;
  _tile_stored(1, to.of[1][0], 64);
  _tile_stored(3, to.of[1][1], 64);
}

// `units` rows of 64 bytes; if there are fewer than 16, a copy that ends with zeros.
template <CacheType type>
NI_INLINE const std::uint8_t* whole_tile(const std::uint8_t* from, std::int64_t units, std::uint8_t* copy) {
  if constexpr (type == CacheType::i4) {  // units after the last are not used: queries are zeros there
    for (std::int64_t u = 0; u < kAmxUnits && u < units; u += 4)
      for (int i = 0; i < 4; ++i) store_ints(copy + (u + i) * 64, CacheOf<type>::key(from + u * 48, i));
    finish_stores();
    return copy;
  }
  if (units >= kAmxUnits) return from;
  __builtin_memset(copy, 0, kAmxBytes);
  __builtin_memcpy(copy, from, units * 64);
  finish_stores();
  return copy;
}

// The scores of two blocks of keys.
template <CacheType type>
NI_INLINE void multiply_keys(const AttentionTask& t, const AmxQueries<type>& rows, const std::uint8_t* const* blocks,
                             AmxSums<in_tiles(type)>& to) {
  using C = CacheOf<type>;
  constexpr std::int64_t kBytes = kAmxBytes / C::kTogether * C::kKeyVectors;  // of a tile
  const std::int64_t units = (t.head_dim + C::kUnit - 1) / C::kUnit;
  alignas(64) std::uint8_t copies[2][kAmxBytes];
  const std::uint8_t *q = (const std::uint8_t*)rows.units, *k0 = blocks[0] + t.offset + C::kScales,
                     *k1 = blocks[1] + t.offset + C::kScales;
  zero_tiles();
  for (std::int64_t u = 0; u < units; u += kAmxUnits, q += C::kDigits * kAmxBytes, k0 += kBytes, k1 += kBytes) {
    _tile_loadd(4, q, 64);
    _tile_loadd(6, whole_tile<type>(k0, units - u, copies[0]), 64);
    if constexpr (has_integers(type)) {
      _tile_loadd(5, q + kAmxBytes, 64);
      _tile_loadd(7, whole_tile<type>(k1, units - u, copies[1]), 64);
      _tile_dpbsud(0, 4, 6);
      _tile_dpbsud(1, 4, 7);
      _tile_dpbsud(2, 5, 6);
      _tile_dpbsud(3, 5, 7);
    } else {
      _tile_dpbf16ps(0, 4, 6);
      _tile_loadd(6, whole_tile<type>(k1, units - u, copies[1]), 64);
      _tile_dpbf16ps(1, 4, 6);
    }
  }
  store_tiles(to, 2);
}

// Scores of all rows against all keys, and the largest of each row; s[0] is position `base`.
template <CacheType type>
void tile_scores(const AttentionTask& t, const AmxQueries<type>& rows, int count, float* s, std::int64_t base,
                 std::int64_t stride, f32x16* top) {
  for (int r = 0; r < count; ++r) top[r] = broadcast(-__builtin_huge_valf());
  const std::int64_t begin = base / kBlock, end = (rows.highest + kBlock - 1) / kBlock;
  AmxSums<in_tiles(type)> sums[2];  // in turn: what was just stored cannot be loaded at once
  const auto multiply = [&](std::int64_t b) __attribute__((always_inline)) {
    for (std::int64_t next = b + 2; count <= kFewRows && next < b + 4 && next < end; ++next)
      prefetch_lines(t.blocks[next] + t.offset, key_bytes<type>(t));
    const std::uint8_t* const pair[2] = {t.blocks[b], t.blocks[b + 1 < end ? b + 1 : b]};
    multiply_keys<type>(t, rows, pair, sums[b / 2 % 2]);
  };
  multiply(begin);
  for (std::int64_t b = begin; b < end; b += 2) {
    if (b + 2 < end) multiply(b + 2);
    for (int i = 0; i < 2 && b + i < end; ++i) {
      const AmxSums<in_tiles(type)>& sum = sums[b / 2 % 2];
      float* to = s + (b + i) * kBlock - base;
      for (int r = 0; r < count; ++r, to += stride) {
        f32x16 sums;
        if constexpr (has_integers(type)) sums = sum_of(sum, i, r, rows.shift[r]);
        else sums = sum_of(sum, i, r);
        const f32x16 score = score_of<type>(t, rows, r, sums, t.blocks[b + i] + t.offset);
        store(to, score);
        top[r] = larger(rows, r, (b + i) * kBlock, score, top[r]);
      }
    }
  }
}

// Copy n vectors, `dims` dimensions, of the values of a block to which not all rows attend: zeros take the place of NaN and infinity, which
// a weight of 0 would not cancel. Rows that do attend to such a position get a NaN.
NI_INLINE void copy_finite(const Unit* v, std::int64_t width, std::int64_t n, std::int64_t dims, std::int64_t position,
                           int count, AmxQueries<CacheType::bf16>& rows, Unit (*to)[64]) {
  constexpr std::int32_t kLow = 0x7f80, kHigh = 0x7f800000;  // the exponents of the two numbers of a unit
  i32x16 any = broadcast(0);
  for (std::int64_t u = 0; u < kBlockUnits; ++u)
    for (std::int64_t j = 0; j < n; ++j) {
      i32x16 x = load_ints(v + u * width + 16 * j);
      NI_EACH {
        const vi bad = (((x.v[i] & kLow) == kLow) & 0xffff) | (((x.v[i] & kHigh) == kHigh) & ~0xffff);
        any.v[i] |= bad != 0;
        x.v[i] &= ~bad;
      }
      __builtin_memcpy(to[u] + 16 * j, &x, sizeof x);
    }
  if (!sum(any)) return;
  for (std::int64_t i = 0; i < kBlock; ++i) {
    bool bad = false;
    for (std::int64_t d = 0; d < dims; ++d) bad |= (v[i / 2 * width + d] >> i % 2 * 16 & kLow) == kLow;
    for (int r = 0; bad && r < count; ++r)
      if (position + i >= rows.begin[r] && position + i < rows.end[r]) rows.share[r] = __builtin_nanf("");
  }
}

// Weighted sums of 16 n dimensions of the values, n <= 4, from vector `first` on. weights[0] is position `base`.
inline void tile_mix(const AttentionTask& t, AmxQueries<CacheType::bf16>& rows, int count, const float* weights,
                     std::int64_t base, std::int64_t stride, std::int64_t first, std::int64_t n) {
  alignas(64) Unit copy[kBlockUnits][64];
  zero_tiles();
  for (std::int64_t from = base; from < rows.highest; from += kBlock) {
    if (const std::int64_t next = from / kBlock + 2; count <= kFewRows && next * kBlock < rows.highest)
      prefetch_lines(values_at<CacheType::bf16>(t, next), value_bytes<CacheType::bf16>(t));
    const Unit* v = (const Unit*)values_at<CacheType::bf16>(t, from / kBlock) + first * 16;
    std::int64_t bytes = padded(t.head_dim) * sizeof(Unit);  // of a unit of all dimensions
    if (from < rows.begin[count - 1] || from + kBlock > rows.end[0]) {
      const std::int64_t rest = t.head_dim - first * 16;
      copy_finite(v, padded(t.head_dim), n, rest < 16 * n ? rest : 16 * n, from, count, rows, copy);
      finish_stores();
      v = copy[0], bytes = sizeof copy[0];
    }
    const std::int64_t span = (from - base) / kSpan * kSpan;  // its weights are followed by nothing up to the next one
    _tile_loadd(5, weights + span + (from - base - span) / kBlock * kBlockUnits, stride * sizeof(float));
    _tile_loadd(7, v, bytes);
    _tile_dpbf16ps(0, 5, 7);
    if (n == 1) continue;
    _tile_loadd(7, v + 16, bytes);
    _tile_dpbf16ps(1, 5, 7);
    if (n == 2) continue;
    _tile_loadd(7, v + 32, bytes);
    _tile_dpbf16ps(2, 5, 7);
    if (n == 3) continue;
    _tile_loadd(7, v + 48, bytes);
    _tile_dpbf16ps(3, 5, 7);
  }
  AmxSums<CacheType::bf16> sums;
  store_tiles(sums, n);
  for (int r = 0; r < count; ++r)
    for (int j = 0; j < n; ++j) {
      const std::int64_t d = (first + j) * 16;
      store_first(rows.out[r] + d, sum_of(sums, j, r) * broadcast(rows.share[r]), t.head_dim - d);
    }
}

// int8: n <= 2. The sums of a span are exact; they are scaled and added while the next one is multiplied.
struct alignas(64) SpanValues {
  Unit of[2][kAmxUnits][16];
};
template <CacheType type>
void copy_values(const AttentionTask& t, std::int64_t highest, std::int64_t from, std::int64_t first, std::int64_t n,
                        SpanValues& to) {
  using C = CacheOf<type>;
  constexpr std::int64_t kUnits = kBlock / C::kUnit;
  const std::int64_t width = value_width<C>(t.head_dim);
  for (std::int64_t u = 0; u < kAmxUnits && from + u / kUnits * kBlock < highest; ++u) {
    const Unit* v = (const Unit*)values_at<type>(t, from / kBlock + u / kUnits) + u % kUnits * width;
    for (std::int64_t j = first; j < first + n; ++j)
      store_ints(to.of[j - first][u], C::unpacked(load_ints(v + j / C::kShare * 16), (int)(j % C::kShare)));
  }
}

template <CacheType type>
void tile_mix(const AttentionTask& t, AmxQueries<type>& rows, int count, const float* weights,
                     std::int64_t base, std::int64_t stride, std::int64_t first, std::int64_t n) {
  SpanValues values[2] = {};
  AmxSums<CacheType::i8> sums[2];
  f32x16 total[kAmxRows][2];
  for (int r = 0; r < count; ++r) total[r][0] = total[r][1] = broadcast(type == CacheType::i4 ? rows.offset[r] : 0.0f);
  const auto add = [&](std::int64_t from) __attribute__((always_inline)) {
    constexpr std::int32_t none[2] = {};
    const float* scale = weights + from - base + 2 * kSpanUnits<CacheType::i8>;
    for (int r = 0; r < count; ++r, scale += stride)
      for (int j = 0; j < n; ++j)
        total[r][j] = fma(sum_of(sums[from / kSpan % 2], j, r, none), broadcast(*scale), total[r][j]);
  };
  copy_values<type>(t, rows.highest, base, first, n, values[base / kSpan % 2]);
  for (std::int64_t from = base; from < rows.highest; from += kSpan) {
    const std::int64_t next = from + kSpan, turn = from / kSpan % 2;
    if (next < rows.highest) copy_values<type>(t, rows.highest, next, first, n, values[1 - turn]);
    const float* digits = weights + from - base;
    finish_stores();
    zero_tiles();
    _tile_loadd(4, digits, stride * sizeof(float));
    _tile_loadd(5, digits + kSpanUnits<CacheType::i8>, stride * sizeof(float));
    _tile_loadd(6, values[turn].of[0], 64);
    _tile_dpbusd(0, 4, 6);
    _tile_dpbusd(2, 5, 6);
    if (n > 1) {
      _tile_loadd(7, values[turn].of[1], 64);
      _tile_dpbusd(1, 4, 7);
      _tile_dpbusd(3, 5, 7);
    }
    store_tiles(sums[turn], n);
    if (from > base) add(from - kSpan);
    if (next >= rows.highest) add(from);
  }
  for (int r = 0; r < count; ++r)
    for (int j = 0; j < n; ++j) {
      const std::int64_t d = (first + j) * 16;
      store_first(rows.out[r] + d, total[r][j] * broadcast(rows.share[r]), t.head_dim - d);
    }
}

template <CacheType type>
void attend_tile(const AttentionTask& t, std::int64_t row, std::int64_t piece, int count) {
  using C = CacheOf<type>;
  const std::int64_t units = (t.head_dim + C::kUnit - 1) / C::kUnit;
  const std::int64_t floats = (units + kAmxUnits - 1) / kAmxUnits * C::kDigits * kAmxRows * kAmxUnits;
  const Scratch scratch(t, row, piece);
  if (units % kAmxUnits) __builtin_memset(scratch.tile, 0, floats * sizeof(float));  // dimensions that the head does not have
  AmxQueries<type> rows(t, row, piece, scratch.partial, (Unit*)scratch.tile, count);
  if (rows.lowest >= rows.highest) return;
  float* s = scratch.tile + floats;
  const std::int64_t base = rows.lowest / kSpan * kSpan, length = (rows.highest - base + kSpan - 1) / kSpan * kSpan;
  const std::int64_t stride = length + kLanes;  // rows lie in different sets of the first-level cache
  finish_stores();  // of the queries
  f32x16 top[kAmxRows];
  tile_scores<type>(t, rows, count, s, base, stride, top);
  for (std::int64_t b = base / kBlock; count <= kFewRows && b < base / kBlock + 2 && b * kBlock < rows.highest; ++b)
    prefetch_lines(values_at<type>(t, b), value_bytes<type>(t));
  for (int r = 0; r < count; ++r) softmax<type>(t, rows, r, s + r * stride, base, length, top[r]);
  finish_stores();  // of the weights
  constexpr std::int64_t kWide = 4 / C::kDigits;
  const std::int64_t vectors = padded(t.head_dim) / 16;
  for (std::int64_t v = 0; v < vectors; v += kWide)
    tile_mix(t, rows, count, s, base, stride, v, vectors - v < kWide ? vectors - v : kWide);
  rows.join(t, row, scratch.weights, count);
}

// Compute the first of `rows` rows with tiles; return how many.
template <CacheType type>
std::int64_t attend_in_tiles(const AttentionTask& task, std::int64_t rows, std::int64_t piece) {
  std::int64_t i = 0;
  if constexpr (type != CacheType::f32) {
    while (i < rows) {
      const std::int64_t count = rows - i < kAmxRows ? rows - i : kAmxRows;
      if (has_integers(type) && count <= kFewRowsInt8) break;
      const AmxRegisters registers(64, count, has_integers(type) ? 64 : kBlockUnits * 4);
      for (; i + count <= rows; i += count) attend_tile<type>(task, i, piece, (int)count);
    }
  }
  return i;
}
