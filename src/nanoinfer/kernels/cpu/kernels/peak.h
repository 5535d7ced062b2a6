// The arithmetic ceiling: the products of a tile with operands in registers and the first-level cache only, without
// reading weights. Part of kernels.cpp, which includes it in the namespace of each instruction set.
#pragma once

#include "matmul.h"

constexpr int kPeakInputs = 64;  // activations, read repeatedly: 256 bytes

// Repeat one step of a format's tile (products.h) with M x N accumulators, acc = add(acc, weights, activation), and return a
// value that depends on all of them. The barrier makes the compiler load the activations in every step, as a tile does.
template <class Sum, int M, int N, class X, class Add>
float repeat(const X* x, std::int64_t steps, Add add) {
  i32x16 w[N];
  Sum acc[M][N];
  for (int n = 0; n < N; ++n) {
    w[n] = load_ints(x + 16 * n);
    NI_ROWS acc[m][n] = Sum{};
  }
  for (std::int64_t k = 0; k < steps; ++k) {
    asm volatile("" ::: "memory");
    const X* u = x + k % (kPeakInputs - M);
    NI_ROWS NI_UNROLL(2) for (int n = 0; n < N; ++n) acc[m][n] = add(acc[m][n], w[n], u[m]);
  }
  float total = 0;
  NI_ROWS for (int n = 0; n < N; ++n) total += (float)sum(acc[m][n]);
  return total;
}

float peak_f32(const void* x, std::int64_t steps) {
  const auto add = [](f32x16 acc, i32x16 w, float a) __attribute__((always_inline)) { return fma(bits<f32x16>(w), broadcast(a), acc); };
  return repeat<f32x16, kRowsFloat, 2>((const float*)x, steps, add);
}

constexpr int kPeakRowsInt = kWidth == 16 ? kRowsFloat : kRowsInt;

// Run `steps` steps; return their number of multiplications and additions. The compiler cannot remove the steps,
// because `sink` depends on their results.
std::int64_t peak(WeightType type, std::int64_t steps, float* sink) {
  alignas(64) std::uint8_t x[4 * kPeakInputs];
  for (int i = 0; i < kPeakInputs; ++i) {  // a small number as float32, and as two bfloat16
    const std::uint32_t both = (bits<std::uint32_t>(1e-3f * (i + 1)) >> 16) * 0x10001u;
    __builtin_memcpy(x + 4 * i, &both, 4);
  }
  if (type == WeightType::f32 || type == WeightType::f16) {
    *sink = peak_f32(x, steps);
    return steps * kRowsFloat * kPanel * 2;
  }
#if defined(__AMX_TILE__)
  return peak_amx(type, steps, x, sink);
#endif
  if (type == WeightType::bf16 && kRowsWide < INT64_MAX) {  // its pairs become float32 before the products
    *sink = peak_f32(x, 2 * steps);
    return 2 * steps * kRowsFloat * kPanel * 2;
  }
  if (type == WeightType::bf16) {
    const auto add = [](f32x16 acc, i32x16 w, std::int32_t a) __attribute__((always_inline)) { return dot2_bf16(acc, w, a); };
    *sink = repeat<f32x16, kRowsFloat, 2>((const std::int32_t*)x, steps, add);
    return steps * kRowsFloat * kPanel * 2 * 2;
  }
  const auto add = [](i32x16 acc, i32x16 w, std::int32_t a) __attribute__((always_inline)) {
    return kPairs ? add_sums(acc, dot_signed_pairs(w, a)) : dot4(acc, w, a);
  };
  *sink = repeat<i32x16, kPeakRowsInt, kHalves>((const std::int32_t*)x, steps, add);
  return steps * kPeakRowsInt * kHalves * 16 * 4 * 2;
}
