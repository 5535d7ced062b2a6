// Updates of low rank: both products of some rows, each in the order of the inputs and of the ranks, whatever the other rows
// are. Part of kernels.cpp, which includes it in the namespace of each instruction set.
#pragma once

#include "products.h"

// Rows that share a pass over the factors, and ranks that share one over the rows, so that sums fit in the registers.
constexpr int kLowRows = kWidth == 16 ? 4 : 2, kLowRanks = kWidth == 16 ? 4 : 2;

NI_INLINE f32x16 factors_at(const float* p) { return load(p); }
NI_INLINE f32x16 factors_at(const std::uint16_t* p) { return load_bf16(p); }
NI_INLINE f32x16 factors_at(const std::int8_t* p) { return load_i8(p); }

// t[j] of M rows, for J ranks from j on.
template <class T, int M, int J>
NI_INLINE void project_tile(const LowRank& u, std::int64_t j, const LowRankRows& r, std::int64_t row) {
  const T* const a = (const T*)u.a + j * u.depth;
  const float* const x = r.x + row * r.x_stride;
  f32x16 sums[M][J];
  NI_ROWS NI_UNROLL(4) for (int i = 0; i < J; ++i) sums[m][i] = broadcast(0.0f);
  for (std::int64_t k = 0; k < u.in; k += 16) {
    f32x16 w[J];
    NI_UNROLL(4) for (int i = 0; i < J; ++i) w[i] = factors_at(a + i * u.depth + k);
    NI_ROWS {
      const f32x16 v = load_first(x + m * r.x_stride + k, u.in - k);
      NI_UNROLL(4) for (int i = 0; i < J; ++i) sums[m][i] = fma(w[i], v, sums[m][i]);
    }
  }
  NI_ROWS NI_UNROLL(4) for (int i = 0; i < J; ++i) r.t[(row + m) * r.t_stride + j + i] = sum(sums[m][i]) * u.scale[j + i];
}

template <class T, int M>
NI_INLINE void project_rows(const LowRank& u, const LowRankRows& r, std::int64_t row) {
  std::int64_t j = 0;
  for (; j + kLowRanks <= u.rank; j += kLowRanks) project_tile<T, M, kLowRanks>(u, j, r, row);
  for (; j < u.rank; ++j) project_tile<T, M, 1>(u, j, r, row);
}

template <class T, int M>
NI_INLINE void expand_rows(const LowRank& u, const LowRankRows& r, std::int64_t row, std::int64_t begin, std::int64_t end) {
  const std::int64_t last = u.first + u.panels;
  for (std::int64_t p = begin > u.first ? begin : u.first; p < (end < last ? end : last); ++p) {
    const T* b = (const T*)u.b + (p - u.first) * u.rank * kPanel;
    const float* const t = r.t + row * r.t_stride;
    float* const y = r.y + row * r.y_stride + p * kPanel;
    Acc<M> acc;
    NI_ROWS NI_HALVES acc.v[m][h] = load(y + m * r.y_stride + 16 * h);
    for (std::int64_t j = 0; j < u.rank; ++j, b += kPanel) {
      const f32x16 low = factors_at(b), high = factors_at(b + 16);
      NI_ROWS {
        const f32x16 by = broadcast(t[m * r.t_stride + j]);
        acc.v[m][0] = fma(low, by, acc.v[m][0]);
        acc.v[m][1] = fma(high, by, acc.v[m][1]);
      }
    }
    NI_ROWS NI_HALVES store(y + m * r.y_stride + 16 * h, acc.v[m][h]);
  }
}

template <class T>
void project_as(const LowRank& u, const LowRankRows& r) {
  std::int64_t row = 0;
  for (; row + kLowRows <= r.rows; row += kLowRows) project_rows<T, kLowRows>(u, r, row);
  for (; row < r.rows; ++row) project_rows<T, 1>(u, r, row);
}

template <class T>
void expand_as(const LowRank& u, const LowRankRows& r, std::int64_t begin, std::int64_t end) {
  std::int64_t row = 0;
  for (; row + kLowRows <= r.rows; row += kLowRows) expand_rows<T, kLowRows>(u, r, row, begin, end);
  for (; row < r.rows; ++row) expand_rows<T, 1>(u, r, row, begin, end);
}

void project(const LowRank& u, const LowRankRows& r) {
  if (u.type == WeightType::f32) return project_as<float>(u, r);
  if (u.type == WeightType::bf16) return project_as<std::uint16_t>(u, r);
  project_as<std::int8_t>(u, r);
}

void expand(const LowRank& u, const LowRankRows& r, std::int64_t begin, std::int64_t end) {
  if (u.type == WeightType::f32) return expand_as<float>(u, r, begin, end);
  if (u.type == WeightType::bf16) return expand_as<std::uint16_t>(u, r, begin, end);
  expand_as<std::int8_t>(u, r, begin, end);
}
