// Attention over blocks of keys and values. Part of kernels.cpp, which includes it in the namespace of each instruction set.
//
// Queries and weights are rounded so that one instruction multiplies and adds all numbers of a unit (units.h): to bfloat16
// for bfloat16, and to 16 bits, two digits of 8, for int8. There a query has one scale, and so have the weights of kSpan
// positions, multiplied by the scales of the values before: sums within a span are exact integers. What a row computes
// depends on its own query and positions only: spans start at multiples of kSpan, and other positions have no effect.
#pragma once

#include "units.h"

constexpr std::int64_t kSpanBlocks = kSpan / kBlock;
#define NI_DIGITS NI_UNROLL(2) for (int g = 0; g < kDigits; ++g)

// The weights of a row so far: where they have their origin (exp_from), and their sum.
struct Weights {
  float origin, sum;
};
NI_INLINE float first_lane(f32x16 x) {
  float lanes[16];
  store(lanes, x);
  return lanes[0];
}

// Add the sums of values of one more piece to those of a row, which the sum of the weights divides after the last.
void add_piece(Weights& row, float* out, const Weights& piece, const float* values, std::int64_t head_dim, bool last) {
  const f32x16 a = broadcast(row.origin), b = broadcast(piece.origin), origin = higher(a, b);
  const f32x16 keep = exp_between(a, origin), take = exp_between(b, origin);
  row = {first_lane(origin), first_lane(fma(keep, broadcast(row.sum), take * broadcast(piece.sum)))};
  const f32x16 share = broadcast(last ? 1.0f / row.sum : 1.0f);
  for (std::int64_t d = 0; d < head_dim; d += 16)
    store_first(out + d, fma(load_first(out + d, head_dim - d), keep, load(values + d) * take) * share, head_dim - d);
}

// M rows of queries that share a pass over the keys of a piece: row r of a task is head r % group of token r / group. With tiles
// (attention_amx.h), the first `count` of them.
template <CacheType type, int M, bool tiles = false>
struct Queries {
  static constexpr int kWords = CacheOf<type>::kWords;
  Unit* units;                    // (ceil(D / kUnit), kWords, M); tiles: (ceil(D / kUnit / 16), kWords, M, 16)
  float scale[M];                 // of the scores
  std::int32_t shift[M][2];       // int8, of each sum: what the 128 that is added to the keys contributes, negated
  float total[M];                 // int4: sum of the integers, which the offset of a key multiplies
  float offset[M];                // int4: what the offsets of values contribute
  float* out[M];                  // the row's result, or its part of it: partial_floats(head_dim) - kLanes
  float share[M];                 // what sums of values are multiplied by: 1 / sum of the weights, 1 if there are more pieces
  float sink[M];                  // a further score in that sum
  Weights weights[M];             // of the piece
  bool first[M], last[M];         // whether the row has no piece before this one, and none after it
  std::int64_t begin[M], end[M];  // positions of the piece that the row attends to
  std::int64_t lowest, highest;   // of all begins, and of all ends; lowest >= highest: there are none

  // `partial`: for rows that have several pieces, M of them.
  Queries(const AttentionTask& t, std::int64_t row, std::int64_t piece, float* partial, Unit* units, int count = M) : units(units) {
    const std::int64_t from = piece * kPiece, to = from + kPiece;
    for (int m = 0; m < count; ++m) {
      end[m] = t.start + (row + m) / t.group + 1;
      begin[m] = end[m] > t.window ? end[m] - t.window : 0;
      first[m] = begin[m] >= from, last[m] = end[m] <= to;
      if (!first[m]) begin[m] = from;
      if (!last[m]) end[m] = to;
    }
    lowest = begin[0];  // tokens are in the order of their positions
    highest = end[count - 1];
    for (int m = 0; m < count && lowest < highest; ++m) {
      const std::int64_t token = (row + m) / t.group, column = (row + m) % t.group * t.head_dim;
      prepare(t, t.q + token * t.q_stride + column, m);
      const bool apart = t.piece >= 0 || !first[m] || begin[m] >= end[m];
      out[m] = apart ? partial + m * partial_floats(t.head_dim) + kLanes : t.out + token * t.out_stride + column;
      sink[m] = first[m] && t.sinks ? t.sinks[(row + m) % t.group] : -__builtin_huge_valf();
    }
  }
  bool is_whole(const AttentionTask& t, int m) const { return first[m] && last[m] && t.piece < 0; }

  // After the weighted sums: join what rows have of this piece with what they had; `had` is of row 0 of the task.
  void join(const AttentionTask& t, std::int64_t row, Weights* had, int count = M) const {
    for (int m = 0; m < count; ++m) {
      if (begin[m] >= end[m]) continue;
      if (t.piece >= 0) __builtin_memcpy(out[m] - kLanes, &weights[m], sizeof(Weights));
      else if (first[m]) had[row + m] = weights[m];
      else add_piece(had[row + m], t.out + (row + m) / t.group * t.out_stride + (row + m) % t.group * t.head_dim, weights[m], out[m], t.head_dim, last[m]);
    }
  }

 private:
  NI_INLINE std::int64_t place(std::int64_t unit, int word, int m) {
    return tiles ? ((unit / 16 * kWords + word) * M + m) * 16 + unit % 16 : (unit * kWords + word) * M + m;
  }
  void prepare(const AttentionTask& t, const float* q, int m) {
    using C = CacheOf<type>;
    const auto put = [&](std::int64_t d, int word, auto x) __attribute__((always_inline)) {
      alignas(64) Unit narrow[16 / C::kUnit];
      C::narrow(x, narrow);
      if constexpr (tiles) {  // which end with zeros
        __builtin_memcpy(units + place(d / C::kUnit, word, m), narrow, sizeof narrow);
        return;
      }
      for (std::int64_t u = 0; u < 16 / C::kUnit && d + u * C::kUnit < t.head_dim; ++u)
        units[place(d / C::kUnit + u, word, m)] = narrow[u];
    };
    scale[m] = t.scale;
#if defined(__AMX_TILE__)
    if constexpr (has_integers(type) && tiles) {
      const RowScale<127 << 8> row = RowScale<127 << 8>::of(q, t.head_dim);
      Digits digits;
      for (std::int64_t d = 0; d < t.head_dim; d += 64)
        digits.add(row, q + d, t.head_dim - d, units + place(d / 4, 0, m), units + place(d / 4, 1, m));
      scale[m] *= row.scale;
      shift[m][0] = -128 * sum(digits.highs);
      shift[m][1] = -128 * sum(digits.lows);
      total[m] = (256.0f * (float)shift[m][0] + (float)shift[m][1]) / -128;
      return;
    }
#endif
    if constexpr (has_integers(type)) {
      i32x16 numbers = broadcast(0), highs = broadcast(0);
      const auto take = [&](std::int64_t d, i32x16 x) __attribute__((always_inline)) {
        numbers = numbers + x;
        if constexpr (kMultiplies16) {
          alignas(64) Unit words[8];
          store_pairs(words, x);
          for (std::int64_t u = 0; u < 4 && d + 4 * u < t.head_dim; ++u)
            for (int g = 0; g < 2; ++g) units[place(d / 4 + u, g, m)] = words[2 * u + g];
        } else {
          const i32x16 high = (x + broadcast(128)) >> 8;  // x = 256 high + low, and low is x's last byte, signed
          put(d, 0, high);
          put(d, 1, x);
          highs = highs + high;
        }
      };
      scale[m] *= quantize_row<127 << 8>(q, t.head_dim, take);
      shift[m][0] = -128 * sum(kMultiplies16 ? numbers : highs);
      if constexpr (!kMultiplies16) shift[m][1] = -128 * sum(numbers) - 256 * shift[m][0];
      total[m] = (float)sum(numbers);
    } else {
      for (std::int64_t d = 0; d < t.head_dim; d += 16) put(d, 0, load_first(q + d, t.head_dim - d));
    }
  }
};

// Scores of row m, whose sums are of products with keys of a block. `scales` are theirs.
template <CacheType type, class Rows>
NI_INLINE f32x16 score_of(const AttentionTask& t, const Rows& rows, int m, f32x16 sums, const std::uint8_t* scales) {
  f32x16 score = sums, scale = broadcast(rows.scale[m]);
  if constexpr (type == CacheType::i8) scale = scale * load((const float*)scales);
  if constexpr (type == CacheType::i4) {
    const i32x16 pair = load_ints(scales);
    score = fma(sums, first_of(pair), second_of(pair) * broadcast(rows.total[m]));
  }
  score = score * scale;
  return t.softcap > 0 ? soft_cap(score, t.softcap) : score;
}

// Scores of M rows against the keys of B blocks; lanes are positions. Each score is summed in the order of the
// dimensions in all cases. The first `ahead` of the blocks that follow are prefetched.
template <CacheType type, int M, int B>
NI_INLINE void scores(const AttentionTask& t, const std::uint8_t* const* blocks, std::int64_t ahead, const Queries<type, M>& rows,
                      float* out, std::int64_t stride) {
  using C = CacheOf<type>;
  constexpr int kDigits = C::kDigits;
  const std::uint8_t* k[B];
  typename C::Sum acc[M][B][kDigits];
  for (int b = 0; b < B; ++b) k[b] = blocks[b] + t.offset + C::kScales;
  NI_ROWS for (int b = 0; b < B; ++b) NI_DIGITS {
    if constexpr (has_integers(type)) acc[m][b][g] = broadcast(rows.shift[m][g]);
    else acc[m][b][g] = broadcast(0.0f);
  }
  const Unit* q = rows.units;
  constexpr std::int64_t kBytes = C::kKeyVectors * kBlock * sizeof(Unit);
  for (std::int64_t d = 0, at = 0; d < t.head_dim; at += kBytes) {
    for (std::int64_t b = 0; b < ahead; ++b)
      for (std::int64_t i = 0; i < kBytes; i += 64) prefetch(blocks[B + b] + t.offset + at + i);
    NI_UNROLL(4) for (int i = 0; i < C::kTogether; ++i, d += C::kUnit, q += C::kWords * M) {
      if (C::kTogether > 1 && d >= t.head_dim) break;
      i32x16 keys[B];
      NI_UNROLL(4) for (int b = 0; b < B; ++b) keys[b] = C::key(k[b] + at, i);
      NI_ROWS NI_UNROLL(4) for (int b = 0; b < B; ++b) C::score(acc[m][b], keys[b], q + m, M);
    }
  }
  for (int b = 0; b < B; ++b)
    NI_ROWS store(out + m * stride + b * kBlock, score_of<type>(t, rows, m, C::value(acc[m][b]), blocks[b] + t.offset));
}

template <CacheType type>
NI_INLINE std::int64_t key_bytes(const AttentionTask& t) {
  return key_units<CacheOf<type>>(t.head_dim) * kBlock * sizeof(Unit);
}
template <CacheType type>
NI_INLINE std::int64_t value_bytes(const AttentionTask& t) {
  return kBlock / CacheOf<type>::kUnit * value_width<CacheOf<type>>(t.head_dim) * sizeof(Unit);
}
template <CacheType type>
NI_INLINE const std::uint8_t* values_at(const AttentionTask& t, std::int64_t block) {
  return t.blocks[block] + t.offset + CacheOf<type>::kScales + key_bytes<type>(t);
}

NI_INLINE const float* value_scales(const AttentionTask& t, std::int64_t block) {  // int8
  return (const float*)(t.blocks[block] + t.offset) + kBlock;
}

// x where from <= lane < to, else `other`.
NI_INLINE f32x16 between(std::int64_t from, std::int64_t to, f32x16 x, float other) {
  if (from > 0) {
    float lanes[16];
    store(lanes, x);
    for (std::int64_t l = 0; l < 16 && l < from; ++l) lanes[l] = other;
    x = load(lanes);
  }
  return to < 16 ? first(to < 0 ? 0 : to, x, other) : x;
}

template <CacheType type>
constexpr std::int64_t kSpanUnits = kSpan / CacheOf<type>::kUnit;
constexpr float kMostWeight = 32767.0f;  // of int8 values

// Write the weights of kSpan positions as units in the place of their scores, and add them to `total` as they are rounded.
template <CacheType type>
NI_INLINE void store_weights(const f32x16* e, float* to, f32x16& total) {
  using C = CacheOf<type>;
  constexpr std::int64_t kUnits = kBlock / C::kUnit;
  for (int b = 0; b < kSpanBlocks; ++b) {
    C::narrow(e[b], (Unit*)to + b * kUnits);
    total = total + C::widen((const Unit*)to + b * kUnits);
  }
}
// int8: the weights, which are multiplied by the scales of the values already, lie where their units go. These are followed
// by the scale of all; `most` is the largest weight.
NI_INLINE void store_weights(float* to, float most) {
  using C = CacheOf<CacheType::i8>;
  constexpr std::int64_t kUnits = kBlock / C::kUnit;
  const f32x16 inverse = broadcast(most > 1e-30f ? kMostWeight / most : 0.0f);
  i32x16 x[kSpanBlocks];
  for (int b = 0; b < kSpanBlocks; ++b) x[b] = round(load(to + b * kBlock) * inverse);
  for (int b = 0; b < kSpanBlocks; ++b) {
    Unit* const units = (Unit*)to + C::place(b * kUnits, 0);
    if constexpr (kMultiplies16) {
      store_pairs(units, x[b]);
    } else {
      C::narrow(x[b] >> 8, units);
      C::narrow(x[b], units + kSpanUnits<CacheType::i8>);
    }
  }
  to[2 * kSpanUnits<CacheType::i8>] = most / kMostWeight;
}
constexpr int kSpansAtOnce = 4;  // int8: largest weights that are computed before the first is needed

// The larger ones of `top` and the scores of a block, whose first position is `at`, where row m attends to it.
template <class Rows>
NI_INLINE f32x16 larger(const Rows& rows, int m, std::int64_t at, f32x16 scores, f32x16 top) {
  return max(between(rows.begin[m] - at, rows.end[m] - at, scores, -__builtin_huge_valf()), top);
}

// Turn the scores of row m, of which `top` are the largest, into weights, in place; those of other positions than its own become 0. They
// are not divided by their sum. s[0] is position `base`, a multiple of kSpan, and `length` as well.
template <CacheType type, class Rows>
void softmax(const AttentionTask& t, Rows& rows, int m, float* s, std::int64_t base, std::int64_t length, f32x16 top) {
  const std::int64_t begin = rows.begin[m] - base, end = rows.end[m] - base;
  f32x16 total = broadcast(0.0f), check = total, offset = total;
  const f32x16 sink = broadcast(rows.sink[m]), origin = exp_from(max(sink, broadcast(largest(top))));
  float largest_of[kSpansAtOnce];
  for (std::int64_t i = 0; i < length; i += kSpan) {
    f32x16 e[kSpanBlocks], scales[kSpanBlocks];
    const auto weigh = [&](int b, bool whole) __attribute__((always_inline)) {
      const std::int64_t at = i + b * kBlock, from = begin - at, to = end - at;
      const bool own = whole || (from < kBlock && to > 0);
      const auto of = [&](f32x16 x) __attribute__((always_inline)) { return whole ? x : between(from, to, x, 0.0f); };
      e[b] = own ? of(exp_below(load(s + at), origin)) : broadcast(0.0f);
      if constexpr (has_integers(type)) scales[b] = own ? of(load(value_scales(t, (base + at) / kBlock))) : e[b];
      if constexpr (type == CacheType::i4) {
        const i32x16 pair = bits<i32x16>(scales[b]);
        scales[b] = first_of(pair);
        offset = fma(e[b], second_of(pair), offset);
      }
    };
    if (begin <= i && i + kSpan <= end) {
      NI_UNROLL(4) for (int b = 0; b < kSpanBlocks; ++b) weigh(b, /*whole=*/true);
    } else {
      for (int b = 0; b < kSpanBlocks; ++b) weigh(b, /*whole=*/false);
    }
    if constexpr (has_integers(type)) {
      f32x16 top = broadcast(0.0f);
      for (int b = 0; b < kSpanBlocks; ++b) {
        total = total + e[b];
        e[b] = e[b] * scales[b];
        check = fma(e[b], broadcast(0.0f), check);  // becomes NaN if a scale is
        top = max(e[b], top);
        store(s + i + b * kBlock, e[b]);
      }
      const int turn = (int)(i / kSpan % kSpansAtOnce);
      largest_of[turn] = largest(top);
      if (turn == kSpansAtOnce - 1 || i + kSpan == length)
        for (int j = 0; j <= turn; ++j) store_weights(s + i + (j - turn) * kSpan, largest_of[j]);
    } else {
      store_weights<type>(e, s + i, total);
    }
  }
  float whole = sum(total);
  if constexpr (type == CacheType::i4) rows.offset[m] = sum(offset);
  if (t.sinks && rows.first[m]) whole += first_lane(exp_below(sink, origin));
  rows.weights[m] = {first_lane(origin), whole + sum(check)};
  rows.share[m] = rows.is_whole(t, m) ? 1.0f / rows.weights[m].sum : 1.0f;
}

// Weighted sums of values for M rows, 16 N dimensions from d on; lanes are dimensions. weights[0] is position `base`.
// A row multiplies only its own positions, because a weight of 0 does not cancel a NaN; for int8 it does.
template <CacheType type, int M, int N>
NI_INLINE void mix(const AttentionTask& t, const float* weights, std::int64_t stride, const Queries<type, M>& rows,
                   std::int64_t base, std::int64_t d, bool prefetches) {
  using C = CacheOf<type>;
  constexpr int kDigits = C::kDigits;
  constexpr std::int64_t kUnit = C::kUnit, kUnits = kBlock / kUnit;
  const std::int64_t width = value_width<C>(t.head_dim), at = d / 16 / C::kShare * 16;
  const std::int64_t common_begin = rows.begin[M - 1], common_end = rows.end[0];  // attended by all rows
  f32x16 acc[M][N];
  NI_ROWS for (int j = 0; j < N; ++j) acc[m][j] = broadcast(type == CacheType::i4 ? rows.offset[m] : 0.0f);
  for (; base < rows.highest; base += kSpan, weights += kSpan) {
    typename C::Sum sum[M][N][kDigits];
    NI_ROWS for (int j = 0; j < N; ++j) NI_DIGITS {
      if constexpr (has_integers(type)) sum[m][j][g] = broadcast(0);
      else sum[m][j][g] = acc[m][j];
    }
    for (std::int64_t b = 0; b < kSpanBlocks && base + b * kBlock < rows.highest; ++b) {
      const std::int64_t block = base / kBlock + b, from = block * kBlock;
      const bool more = prefetches && (block + 2) * kBlock < rows.highest;
      const Unit* const ahead = more ? (const Unit*)values_at<type>(t, block + 2) + at : nullptr;
      const Unit* v = (const Unit*)values_at<type>(t, block) + at;
      const Unit* w = (const Unit*)weights + C::place(b * kUnits, 0);
      const auto add = [&](std::int64_t u, bool everyone) __attribute__((always_inline)) {
        i32x16 values[N];
        NI_UNROLL(4) for (int j = 0; j < N; ++j)
          values[j] = C::unpacked(load_ints(v + u * width + j / C::kShare * 16), (N > 1 ? j : (int)(d / 16)) % C::kShare);
        if (more) NI_UNROLL(4) for (int j = 0; j < N; j += C::kShare) prefetch(ahead + u * width + j / C::kShare * 16);
        const std::int64_t position = from + u * kUnit;
        NI_ROWS {
          std::uint32_t keep = ~0u;  // of a unit
          if (!everyone) {
            if (position + kUnit <= rows.begin[m] || position >= rows.end[m]) continue;
            if (position < rows.begin[m]) keep = 0xffff0000u;
            if (position + kUnit > rows.end[m]) keep = 0xffffu;
          }
          const Unit* weight = w + m * stride + C::place(u, 0);
          if (everyone) {
            C::mix(sum[m], values, weight);
          } else {
            i32x16 own[N];
            NI_UNROLL(4) for (int j = 0; j < N; ++j) own[j] = values[j] & keep;
            C::mix(sum[m], own, weight);
          }
        }
        if constexpr (kWidth == 8 && M > 2) asm volatile("" ::: "memory");  // GCC would unroll, and store what is left over
      };
      if (has_integers(type) || (from >= common_begin && from + kBlock <= common_end))
        for (std::int64_t u = 0; u < kUnits; ++u) add(u, /*everyone=*/true);
      else
        for (std::int64_t u = 0; u < kUnits; ++u) add(u, /*everyone=*/false);
    }
    NI_ROWS for (int j = 0; j < N; ++j) {
      if constexpr (has_integers(type))
        acc[m][j] = fma(C::value(sum[m][j]), broadcast(weights[m * stride + 2 * kSpanUnits<type>]), acc[m][j]);
      else
        acc[m][j] = C::value(sum[m][j]);
    }
  }
  NI_ROWS for (int j = 0; j < N; ++j)
    store_first(rows.out[m] + d + 16 * j, acc[m][j] * broadcast(rows.share[m]), t.head_dim - d - 16 * j);
}

// The parts of a task's scratch for rows of queries.
struct Scratch {
  Weights* weights;  // of all rows
  float *partial, *tile;

  Scratch(const AttentionTask& t, std::int64_t row, std::int64_t piece) {
    const std::int64_t rows = t.num_tokens * t.group;
    weights = (Weights*)t.scratch;
    tile = t.scratch + (2 * rows + kLanes - 1) / kLanes * kLanes;
    partial = tile;
    if (t.piece >= 0) partial = t.partial + (piece * rows + row) * partial_floats(t.head_dim);
    else tile += kQueryTile * partial_floats(t.head_dim);
  }
};

// Attention of M consecutive rows to a piece: scores, softmax over each row's own positions, weighted sums of values.
template <CacheType type, int M>
void attend(const AttentionTask& t, std::int64_t row, std::int64_t piece) {
  constexpr int kSums = M * CacheOf<type>::kDigits;
  constexpr int kAtOnce = M == 1 ? 4 : kSums <= (kWidth == 8 ? 2 : 8) ? 2 : 1;  // blocks
  constexpr int kWide = kWidth == 16 ? 16 / kSums : 4 / kSums;  // vectors of values whose sums fit in the registers
  const Scratch scratch(t, row, piece);
  Queries<type, M> rows(t, row, piece, scratch.partial, (Unit*)scratch.tile);
  if (rows.lowest >= rows.highest) return;
  float* s = scratch.tile + padded(t.head_dim) * M;  // (M, stride), from a multiple of kSpan on
  const std::int64_t base = rows.lowest / kSpan * kSpan;
  const std::int64_t stride = (rows.highest - base + kSpan - 1) / kSpan * kSpan;
  const std::int64_t blocks = (rows.highest + kBlock - 1) / kBlock;
  std::int64_t b = base / kBlock;
  const auto at = [&](std::int64_t block) { return s + block * kBlock - base; };
  const bool prefetches = M <= 4 && row == 0;  // later rows find the blocks in a cache
  for (; b + kAtOnce <= blocks; b += kAtOnce) {
    const std::int64_t left = blocks - b - kAtOnce, ahead = left < kAtOnce ? left : kAtOnce;
    scores<type, M, kAtOnce>(t, t.blocks + b, prefetches ? ahead : 0, rows, at(b), stride);
  }
  if constexpr (M == 1) {
    if (blocks - b == 3) scores<type, 1, 3>(t, t.blocks + b, 0, rows, at(b), stride), b += 3;
    if (blocks - b == 2) scores<type, 1, 2>(t, t.blocks + b, 0, rows, at(b), stride), b += 2;
  }
  for (; b < blocks; ++b) scores<type, M, 1>(t, t.blocks + b, 0, rows, at(b), stride);
  if (prefetches)
    for (b = base / kBlock; b < base / kBlock + 2 && b < blocks; ++b)
      prefetch_lines(values_at<type>(t, b), value_bytes<type>(t));
  for (int m = 0; m < M; ++m) {
    float* const own = s + m * stride;
    f32x16 top = broadcast(-__builtin_huge_valf());
    for (std::int64_t i = rows.begin[m] / kBlock * kBlock; i < rows.end[m]; i += kBlock)
      top = larger(rows, m, i, load(own + i - base), top);
    softmax<type>(t, rows, m, own, base, stride, top);
  }
  std::int64_t d = 0;
  if constexpr (kWide >= 4)
    for (; d + 48 < t.head_dim; d += 64) mix<type, M, 4>(t, s, stride, rows, base, d, prefetches);
  if constexpr (kWide >= 2)
    for (; d + 16 < t.head_dim; d += 32) mix<type, M, 2>(t, s, stride, rows, base, d, prefetches);
  for (; d < t.head_dim; d += 16) mix<type, M, 1>(t, s, stride, rows, base, d, prefetches);
  rows.join(t, row, scratch.weights);
}

#if defined(__AMX_TILE__)
#include "attention_amx.h"
#else
template <CacheType type>
std::int64_t attend_in_tiles(const AttentionTask&, std::int64_t, std::int64_t) {
  return 0;
}
#endif

// Rows are processed in tiles of 8, 4, 3, 2 and 1, as many as fit in the registers of the instruction set.
template <CacheType type>
void attend_rows(const AttentionTask& task, std::int64_t piece) {
  const std::int64_t rows = task.num_tokens * task.group;
  std::int64_t i = attend_in_tiles<type>(task, rows, piece);
  if constexpr (kWidth == 16) {
    for (; i + 8 <= rows; i += 8) attend<type, 8>(task, i, piece);
  }
  if constexpr (kWidth >= 8) {
    for (; i + 4 <= rows; i += 4) attend<type, 4>(task, i, piece);
    if (i + 3 <= rows) attend<type, 3>(task, i, piece), i += 3;
  }
  for (; i + 2 <= rows; i += 2) attend<type, 2>(task, i, piece);
  if (i < rows) attend<type, 1>(task, i, piece);
}

// The pieces to which rows of a task attend. A row's are those of the token alone.
struct Pieces {
  std::int64_t begin, end;
  Pieces(const AttentionTask& t, std::int64_t first, std::int64_t last)  // tokens
      : begin((t.start + first + 1 > t.window ? t.start + first + 1 - t.window : 0) / kPiece), end((t.start + last) / kPiece + 1) {}
};

// All rows attend to a piece while its keys and values are in a cache.
template <CacheType type>
void attention_as(const AttentionTask& task) {
  const Pieces all(task, 0, task.num_tokens - 1);
  if (task.piece >= all.begin && task.piece < all.end) return attend_rows<type>(task, task.piece);
  for (std::int64_t p = all.begin; task.piece < 0 && p < all.end; ++p) attend_rows<type>(task, p);
}

void attention(const AttentionTask& task) {
  switch (task.type) {
    case CacheType::f32: return attention_as<CacheType::f32>(task);
    case CacheType::bf16: return attention_as<CacheType::bf16>(task);
    case CacheType::i8: return attention_as<CacheType::i8>(task);
    case CacheType::i4: return attention_as<CacheType::i4>(task);
  }
}

void join(const AttentionTask& t) {
  const std::int64_t rows = t.num_tokens * t.group, floats = partial_floats(t.head_dim);
  for (std::int64_t r = 0; r < rows; ++r) {
    const Pieces own(t, r / t.group, r / t.group);
    float* const out = t.out + r / t.group * t.out_stride + r % t.group * t.head_dim;
    Weights weights, more;
    for (std::int64_t p = own.begin; p < own.end; ++p) {
      const float *const from = t.partial + (p * rows + r) * floats, *const values = from + kLanes;
      __builtin_memcpy(&more, from, sizeof more);
      if (p > own.begin) {
        add_piece(weights, out, more, values, t.head_dim, p + 1 == own.end);
        continue;
      }
      weights = more;
      const f32x16 share = broadcast(p + 1 == own.end ? 1.0f / weights.sum : 1.0f);
      for (std::int64_t d = 0; d < t.head_dim; d += 16) store_first(out + d, load(values + d) * share, t.head_dim - d);
    }
  }
}
