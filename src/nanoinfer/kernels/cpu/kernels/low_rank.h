// Updates of low rank: both products of one row, in the order of the inputs and of the ranks, whatever the other rows are.
// Part of kernels.cpp, which includes it in the namespace of each instruction set.
#pragma once

#include "vec.h"

NI_INLINE f32x16 factors_at(const float* p) { return load(p); }
NI_INLINE f32x16 factors_at(const std::uint16_t* p) { return load_bf16(p); }

template <class T>
NI_INLINE void project_as(const LowRank& u, const float* x, float* t) {
  const T* a = (const T*)u.a;
  for (std::int64_t j = 0; j < u.rank; ++j, a += u.depth) {
    f32x16 sums[4];
    for (f32x16& s : sums) s = broadcast(0.0f);
    std::int64_t k = 0;
    for (; k + 64 <= u.in; k += 64)
      NI_UNROLL(4) for (int i = 0; i < 4; ++i) sums[i] = fma(factors_at(a + k + 16 * i), load(x + k + 16 * i), sums[i]);
    for (; k < u.in; k += 16) sums[0] = fma(factors_at(a + k), load_first(x + k, u.in - k), sums[0]);
    t[j] = sum((sums[0] + sums[1]) + (sums[2] + sums[3]));
  }
}

template <class T>
NI_INLINE void expand_as(const LowRank& u, const float* t, std::int64_t begin, std::int64_t end, float* y) {
  const std::int64_t last = u.first + u.panels;
  for (std::int64_t p = begin > u.first ? begin : u.first; p < (end < last ? end : last); ++p) {
    const T* b = (const T*)u.b + (p - u.first) * u.rank * kPanel;
    float* const to = y + p * kPanel;
    f32x16 low = load(to), high = load(to + 16);
    for (std::int64_t j = 0; j < u.rank; ++j, b += kPanel) {
      const f32x16 by = broadcast(t[j]);
      low = fma(factors_at(b), by, low);
      high = fma(factors_at(b + 16), by, high);
    }
    store(to, low);
    store(to + 16, high);
  }
}

void project(const LowRank& u, const float* x, float* t) {
  if (u.type == WeightType::f32) return project_as<float>(u, x, t);
  project_as<std::uint16_t>(u, x, t);
}

void expand(const LowRank& u, const float* t, std::int64_t begin, std::int64_t end, float* y) {
  if (u.type == WeightType::f32) return expand_as<float>(u, t, begin, end, y);
  expand_as<std::uint16_t>(u, t, begin, end, y);
}
