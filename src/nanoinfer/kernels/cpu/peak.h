// The arithmetic ceiling: the products of a tile with operands in registers and the first-level cache only, without
// reading weights. Part of kernels.cpp, which includes it in the namespace of each instruction set.
#pragma once

constexpr int kPeakInputs = 64;  // activations, read repeatedly: 256 bytes

// Each function repeats one step of the format's tile (products.h) with as many accumulators, and returns a value that
// depends on all of them. The barrier makes the compiler load the activations in every step, as a tile does.
#define NI_PEAK_LOOP(steps, body)                       \
  for (std::int64_t k = 0; k < steps; ++k) {            \
    asm volatile("" ::: "memory");                      \
    const auto* u = x + k % (kPeakInputs - M);          \
    body                                                \
  }

template <int M>
float peak_f32(const float* x, std::int64_t steps) {
  const f32x16 w0 = load(x), w1 = load(x + 16);
  Acc<M> acc;
  NI_ROWS NI_HALVES acc.v[m][h] = broadcast(0.0f);
  NI_PEAK_LOOP(steps, NI_ROWS {
    const f32x16 a = broadcast(u[m]);
    acc.v[m][0] = fma(w0, a, acc.v[m][0]);
    acc.v[m][1] = fma(w1, a, acc.v[m][1]);
  })
  float total = 0;
  NI_ROWS NI_HALVES total += sum(acc.v[m][h]);
  return total;
}

template <int M>
float peak_bf16(const std::int32_t* x, std::int64_t steps) {
  const i32x16 w0 = load_ints(x), w1 = load_ints(x + 16);
  Acc<M> acc;
  NI_ROWS NI_HALVES acc.v[m][h] = broadcast(0.0f);
  NI_PEAK_LOOP(steps, NI_ROWS {
    acc.v[m][0] = dot2_bf16(acc.v[m][0], w0, u[m]);
    acc.v[m][1] = dot2_bf16(acc.v[m][1], w1, u[m]);
  })
  float total = 0;
  NI_ROWS NI_HALVES total += sum(acc.v[m][h]);
  return total;
}

constexpr int kPeakRowsInt = kWidth == 16 ? kRowsFloat : kRowsInt;

template <int M>
float peak_i8(const std::int32_t* x, std::int64_t steps) {
  i32x16 w[kHalves], dot[M][kHalves];
  for (int n = 0; n < kHalves; ++n) {
    w[n] = load_ints(x + 16 * n);
    NI_ROWS dot[m][n] = broadcast(0);
  }
  NI_PEAK_LOOP(steps, NI_ROWS NI_UNROLL(2) for (int n = 0; n < kHalves; ++n) {
    dot[m][n] = kPairs ? add_sums(dot[m][n], dot_signed_pairs(w[n], u[m])) : dot4(dot[m][n], w[n], u[m]);
  })
  float total = 0;
  NI_ROWS for (int n = 0; n < kHalves; ++n) total += sum(to_float(dot[m][n]));
  return total;
}

// Run `steps` steps; return their number of multiplications and additions. The compiler cannot remove the steps,
// because `sink` depends on their results.
std::int64_t peak(WeightType type, std::int64_t steps, float* sink) {
  alignas(64) std::uint8_t x[4 * kPeakInputs];
  for (int i = 0; i < kPeakInputs; ++i) {  // a small number as float32, and as two bfloat16
    const std::uint32_t both = (bits<std::uint32_t>(1e-3f * (i + 1)) >> 16) * 0x10001u;
    __builtin_memcpy(x + 4 * i, &both, 4);
  }
  if (type == WeightType::f32 || type == WeightType::f16) {
    *sink = peak_f32<kRowsFloat>((const float*)x, steps);
    return steps * kRowsFloat * kPanel * 2;
  }
#if defined(__AMX_TILE__)
  return peak_amx(type, steps, x, sink);
#endif
  if (type == WeightType::bf16 && kRowsWide < INT64_MAX) {  // its pairs become float32 before the products
    *sink = peak_f32<kRowsFloat>((const float*)x, 2 * steps);
    return 2 * steps * kRowsFloat * kPanel * 2;
  }
  if (type == WeightType::bf16) {
    *sink = peak_bf16<kRowsFloat>((const std::int32_t*)x, steps);
    return steps * kRowsFloat * kPanel * 2 * 2;
  }
  *sink = peak_i8<kPeakRowsInt>((const std::int32_t*)x, steps);
  return steps * kPeakRowsInt * kHalves * 16 * 4 * 2;
}
