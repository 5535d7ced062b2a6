// Updates of low rank: both products of some rows. What a row takes does not depend on the other rows, bit for bit. A lane is a
// rank in the first product, an output in the second one. Factors of 8 bits are multiplied as the weights of i8 are: with integers
// that have a scale for each kGroup inputs, or ranks.
// Part of kernels.cpp, which includes it in the namespace of each instruction set.
#pragma once

#include "rows.h"

constexpr int kLowRows = kWidth == 16 ? 4 : 2;  // rows that share a pass over the factors, so that sums fit in the registers

NI_INLINE f32x16 factors_at(const float* p) { return load(p); }
NI_INLINE f32x16 factors_at(const std::uint16_t* p) { return load_bf16(p); }

// Some numbers of M rows as integers: fours of them in units, with what their products start from, and a scale.
template <int M>
struct LowGroup {
  const Unit* x[M];
  std::int64_t distance[M];  // of units
  std::int32_t shift[M];
  float scale[M];

  void set(int m, const void* quads, std::int64_t distance_of, std::int32_t shift_of, float scale_of) {
    x[m] = (const Unit*)quads, distance[m] = distance_of, shift[m] = shift_of, scale[m] = scale_of;
  }
  // Add their products with lines of `halves` vectors of bytes to sums.
  template <int halves>
  __attribute__((always_inline)) void add(const std::uint8_t* w, std::int64_t lines, f32x16 (*sums)[halves]) const {
    i32x16 dot[M][halves];
    NI_ROWS NI_UNROLL(2) for (int h = 0; h < halves; ++h) dot[m][h] = broadcast(shift[m]);
    for (std::int64_t i = 0; i < lines; ++i, w += 64 * halves) {
      i32x16 line[halves];
      NI_UNROLL(2) for (int h = 0; h < halves; ++h) prefetch_l2(w + kPrefetchRow + 64 * h), line[h] = load_ints(w + 64 * h);
      NI_ROWS NI_UNROLL(2) for (int h = 0; h < halves; ++h)
        dot[m][h] = dot4(dot[m][h], line[h], (std::int32_t)x[m][i * distance[m]]);
    }
    NI_ROWS NI_UNROLL(2) for (int h = 0; h < halves; ++h) sums[m][h] = fma(to_float(dot[m][h]), broadcast(scale[m]), sums[m][h]);
  }
};

// What a row takes of kLanes ranks, in the memory of so many floats.
struct __attribute__((may_alias)) LowRanks {
  std::int8_t q[kLanes];
  std::int32_t shift;
  float scale;
};

#if defined(__AMX_TILE__)
// M rows, kGroup floats of which become integers here: the forms that are prepared for tiles are others.
template <int M>
struct PreparedRows {
  static constexpr std::int64_t inputs = kGroup;
  const float* x;
  std::int64_t stride, n;
  Int8Group<kGroup> q[M];

  PreparedRows(const LowRank& u, const LowRankRows& r, std::int64_t row) : x(r.x + row * r.x_stride), stride(r.x_stride), n(u.in) {}
  LowGroup<M> group(std::int64_t g) {
    LowGroup<M> r;
    NI_ROWS {
      const float* const from = x + m * stride + g * kGroup;
      const std::int64_t count = n - g * kGroup;
      const RowScale<127> s = int8_scale(from, count < kGroup ? count : kGroup, /*given=*/0);
      q[m] = quantize_group<kGroup>(s, from, count);
      r.set(m, q[m].q, 1, -128 * q[m].sums[0], s.scale);
    }
    return r;
  }
};
#else
// M rows that are prepared for a product, with which they share the integers.
template <int M>
struct PreparedRows {
  const Unit* x[M];
  std::int64_t height[M], depth, inputs;  // inputs: of a scale

  PreparedRows(const LowRank&, const LowRankRows& r, std::int64_t row)
      : depth(r.prepared->w->depth), inputs(group_of(r.prepared->w->prepared_as)) {
    const MatmulTask& task = *r.prepared;
    row += r.first;
    const Tiling tiling(task.rows, kRowsInt);
    NI_ROWS {
      const std::int64_t tile = tiling.tile_of(row + m), from = tiling.begin(tile);
      x[m] = (const Unit*)(task.x + from * task.x_stride) + (row + m - from);
      height[m] = tiling.begin(tile + 1) - from;
    }
  }
  LowGroup<M> group(std::int64_t g) const {
    LowGroup<M> r;
    NI_ROWS {
      const Unit *const scales = x[m] + depth / 4 * height[m], *const after = scales + depth / inputs * height[m];
      const Unit shift = inputs == kGroup ? after[g * height[m]] : 128 * (after[2 * g * height[m]] + after[(2 * g + 1) * height[m]]);
      r.set(m, x[m] + g * inputs / 4 * height[m], height[m], (std::int32_t)shift, bits<float>((std::uint32_t)scales[g * height[m]]));
    }
    return r;
  }
};
#endif

// t of M rows, for kLanes ranks from j on.
template <class T, int M>
void project_tile(const LowRank& u, std::int64_t j, const LowRankRows& r, std::int64_t row) {
  const T* a = (const T*)u.a + j * u.depth;
  float* const t = r.t + row * r.t_stride + j;
  if constexpr (sizeof(T) == 1) {
    f32x16 sums[M][1];
    NI_ROWS sums[m][0] = broadcast(0.0f);
    PreparedRows<M> rows(u, r, row);
    for (std::int64_t k = 0; k < u.in; k += rows.inputs, a += rows.inputs * kLanes)
      rows.group(k / rows.inputs).template add<1>(a, rows.inputs / 4, sums);
    NI_ROWS {
      float y[kLanes];
      store(y, sums[m][0] * load(u.scale + j));
      const RowScale<127> scale = int8_scale(y, kLanes, /*given=*/0);
      const Int8Group<kLanes> q = quantize_group<kLanes>(scale, y, kLanes);
      LowRanks to{{}, -128 * q.sums[0], scale.scale};
      __builtin_memcpy(to.q, q.q, kLanes);
      __builtin_memcpy(t + m * r.t_stride, &to, sizeof to);
    }
  } else {
    const float* const x = r.x + row * r.x_stride;
    f32x16 sums[M][4];  // four: each waits for the one before
    NI_ROWS NI_UNROLL(4) for (int i = 0; i < 4; ++i) sums[m][i] = broadcast(0.0f);
    std::int64_t k = 0;
    for (; k + 4 <= u.in; k += 4)
      NI_UNROLL(4) for (int i = 0; i < 4; ++i, a += kLanes) {
        const f32x16 w = factors_at(a);
        NI_ROWS sums[m][i] = fma(w, broadcast(x[m * r.x_stride + k + i]), sums[m][i]);
      }
    for (; k < u.in; ++k, a += kLanes)
      NI_ROWS sums[m][0] = fma(factors_at(a), broadcast(x[m * r.x_stride + k]), sums[m][0]);
    NI_ROWS store(t + m * r.t_stride, (sums[m][0] + sums[m][1]) + (sums[m][2] + sums[m][3]));
  }
}

template <class T, int M>
void expand_rows(const LowRank& u, const LowRankRows& r, std::int64_t row, std::int64_t begin, std::int64_t end) {
  const std::int64_t depth = sizeof(T) == 1 ? (u.rank + 3) / 4 * 4 : u.rank;
  const float* const t = r.t + row * r.t_stride;
  const T* b = (const T*)u.b + (begin - u.first) * depth * kPanel;
  for (std::int64_t p = begin; p < end; ++p) {
    float* const y = r.y + row * r.y_stride + p * kPanel;
    Acc<M> acc;
    NI_ROWS NI_HALVES acc.v[m][h] = load(y + m * r.y_stride + 16 * h);
    for (std::int64_t j = 0; j < depth; j += kLanes) {
      const std::int64_t ranks = depth - j < kLanes ? depth - j : kLanes;
      if constexpr (sizeof(T) == 1) {
        LowGroup<M> group;
        NI_ROWS {
          const LowRanks* const from = (const LowRanks*)(t + m * r.t_stride + j);
          group.set(m, from->q, 1, from->shift, from->scale);
        }
        group.template add<2>(b, ranks / 4, acc.v);
      } else {
        for (std::int64_t i = 0; i < ranks; ++i) {
          const f32x16 low = factors_at(b + i * kPanel), high = factors_at(b + i * kPanel + 16);
          NI_ROWS {
            const f32x16 by = broadcast(t[m * r.t_stride + j + i]);
            acc.v[m][0] = fma(low, by, acc.v[m][0]);
            acc.v[m][1] = fma(high, by, acc.v[m][1]);
          }
        }
      }
      b += ranks * kPanel;
    }
    NI_ROWS NI_HALVES store(y + m * r.y_stride + 16 * h, acc.v[m][h]);
  }
}

template <class T>
void project_as(const LowRank& u, const LowRankRows& r) {
  std::int64_t row = 0;
  for (; row + kLowRows <= r.rows; row += kLowRows)
    for (std::int64_t j = 0; j < u.rank; j += kLanes) project_tile<T, kLowRows>(u, j, r, row);
  for (; row < r.rows; ++row)
    for (std::int64_t j = 0; j < u.rank; j += kLanes) project_tile<T, 1>(u, j, r, row);
}

template <class T>
void expand_as(const LowRank& u, const LowRankRows& r, std::int64_t begin, std::int64_t end) {
  if (begin < u.first) begin = u.first;
  if (end > u.first + u.panels) end = u.first + u.panels;
  std::int64_t row = 0;
  for (; row + kLowRows <= r.rows; row += kLowRows) expand_rows<T, kLowRows>(u, r, row, begin, end);
  for (; row < r.rows; ++row) expand_rows<T, 1>(u, r, row, begin, end);
}

void project(const LowRank& u, const LowRankRows& r) {
  if (u.type == WeightType::f32) return project_as<float>(u, r);
  if (u.type == WeightType::bf16) return project_as<std::uint16_t>(u, r);
  project_as<std::uint8_t>(u, r);
}

void expand(const LowRank& u, const LowRankRows& r, std::int64_t begin, std::int64_t end) {
  if (u.type == WeightType::f32) return expand_as<float>(u, r, begin, end);
  if (u.type == WeightType::bf16) return expand_as<std::uint16_t>(u, r, begin, end);
  expand_as<std::uint8_t>(u, r, begin, end);
}
