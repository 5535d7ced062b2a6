// Quantization of float rows to blocks of GGUF files. Part of format.cpp, which includes it in its namespace.
//
// Scales are searched: several are tried for each group, and the one with the least squared error is kept. The idea is
// that of make_qx_quants and make_qkx2_quants in ggml (ggml-quants.c).
#pragma once

// Adding 1.5 * 2^23 rounds to an integer.
f32x4 rounded(f32x4 x, float low, float high) {
  const f32x4 lowest = f32x4{} + low, highest = f32x4{} + high, magic = f32x4{} + 12582912.0f;
  x = x > lowest ? x : lowest;
  x = x < highest ? x : highest;
  return (x + magic) - magic;
}
float inverse_of(float x) { return std::fabs(x) > 1e-30f ? 1.0f / x : 0.0f; }
float half(float x) { return from_f16(to_f16(x)); }
bool is_finite(const f32x4* w, int n) {
  f32x4 bad{};
  for (int i = 0; i < n; ++i) bad += w[i] * 0.0f;  // NaN if there is a NaN or an infinity
  return sum(bad) == 0.0f;
}

// w ~ scale q - minimum, 0 <= q <= 15, of 32 weights. For the integers of a try, both come from a linear regression.
struct Affine {
  float scale = 0, minimum = 0;
};
constexpr int kVectors = 8;  // of 32 weights

Affine fit_affine(const f32x4* w) {
  constexpr float highest = 15;
  f32x4 lows{}, highs{}, all{}, squares{};  // the range always includes 0
  for (int i = 0; i < kVectors; ++i) {
    lows = w[i] < lows ? w[i] : lows;
    highs = w[i] > highs ? w[i] : highs;
    all += w[i];
    squares += w[i] * w[i];
  }
  const float low = std::min({lows[0], lows[1], lows[2], lows[3]}), n = 4 * kVectors, x = sum(all),
              xx = sum(squares);
  const float width = std::max({highs[0], highs[1], highs[2], highs[3]}) - low;
  Affine best{width / highest, -low};
  float least = INFINITY;
  if (inverse_of(width) == 0) return best;
  for (const float extra : {-0.8f, -0.6f, -0.4f, -0.2f, 0.0f, 0.2f, 0.4f, 0.6f, 0.8f, 1.0f}) {
    const float inverse = (highest + extra) / width;
    f32x4 sum_q{}, sum_qq{}, sum_qx{};
    for (int i = 0; i < kVectors; ++i) {
      const f32x4 q = rounded((w[i] - low) * inverse, 0, highest);
      sum_q += q;
      sum_qq += q * q;
      sum_qx += q * w[i];
    }
    const float q = sum(sum_q), qq = sum(sum_qq), qx = sum(sum_qx), spread = n * qq - q * q;
    if (!(spread > 1e-5f * n * qq)) continue;  // less than that is a rounding error of the difference
    const float base = std::min((qq * x - q * qx) / spread, 0.0f);
    const float scale = base < 0 ? (n * qx - x * q) / spread : qx / qq;
    const float error = xx + scale * (scale * qq + 2 * (base * q - qx)) + base * (n * base - 2 * x);
    if (error < least) least = error, best = {scale, -base};
  }
  return best;
}

// The scale of `n` weights for integers in [-levels, levels - 1]: the largest magnitude becomes about -levels.
template <int n, int levels>
float fit_symmetric(const f32x4* w) {
  float largest = 0, best = 0, scale = 0;
  for (int i = 0; i < n; ++i)
    if (std::fabs(w[i / 4][i % 4]) > std::fabs(largest)) largest = w[i / 4][i % 4];
  for (const float extra : {-0.9f, -0.6f, -0.3f, 0.0f, 0.3f, 0.6f, 0.9f}) {
    const float inverse = -(levels + extra) * inverse_of(largest);
    f32x4 sum_qq{}, sum_qx{};
    for (int i = 0; i < n / 4; ++i) {
      const f32x4 q = rounded(w[i] * inverse, -levels, levels - 1);
      sum_qq += q * q;
      sum_qx += q * w[i];
    }
    const float qq = sum(sum_qq), qx = sum(sum_qx);
    if (qq > 0 && qx * qx / qq > best) best = qx * qx / qq, scale = qx / qq;
  }
  return scale;
}

void put_half(float x, std::uint8_t* to) {
  const std::uint16_t bits = to_f16(x);
  std::memcpy(to, &bits, 2);
}
// The codes of 4 n weights, one in each byte: integers in [low, high], less low.
void codes_of(const f32x4* w, int n, float scale, float minimum, float low, float high, std::uint8_t* codes) {
  const float inverse = inverse_of(scale);
  for (int i = 0; i < n; ++i) {
    const f32x4 q = rounded((w[i] + minimum) * inverse, low, high) - low;
    for (int l = 0; l < 4; ++l) codes[4 * i + l] = static_cast<std::uint8_t>(q[l]);
  }
}

void quantize_q5_0(const f32x4* w, std::uint8_t* block) {
  const float scale = fit_symmetric<32, 16>(w);
  put_half(scale, block);
  std::uint8_t codes[32];
  codes_of(w, kVectors, half(scale), 0, -16, 15, codes);
  for (int i = 0; i < 32; ++i) block[2 + i / 8] |= codes[i] >> 4 << i % 8;
  for (int i = 0; i < 16; ++i) block[6 + i] = (codes[i] & 15) | (codes[i + 16] & 15) << 4;
}

void quantize_q4_k(const f32x4* w, std::uint8_t* block) {
  Affine fits[8], most;
  for (int g = 0; g < 8; ++g) {
    fits[g] = fit_affine(w + g * kVectors);
    most = {std::max(most.scale, fits[g].scale), std::max(most.minimum, fits[g].minimum)};
  }
  put_half(most.scale / 63, block);
  put_half(most.minimum / 63, block + 2);
  const float d = half(most.scale / 63), below = half(most.minimum / 63);
  const auto integer = [](float x, float unit) {
    return static_cast<std::uint8_t>(std::clamp(std::nearbyint(x * inverse_of(unit)), 0.0f, 63.0f));
  };
  std::uint8_t codes[256], s[8], m[8], *scales = block + 4;
  for (int g = 0; g < 8; ++g) {
    s[g] = integer(fits[g].scale, d), m[g] = integer(fits[g].minimum, below);
    codes_of(w + g * kVectors, kVectors, d * s[g], below * m[g], 0, 15, codes + 32 * g);
  }
  for (int i = 0; i < 4; ++i) {
    scales[i] = s[i] | s[i + 4] >> 4 << 6, scales[i + 4] = m[i] | m[i + 4] >> 4 << 6;
    scales[i + 8] = (s[i + 4] & 15) | (m[i + 4] & 15) << 4;
  }
  for (int i = 0; i < 128; ++i) block[16 + i] = codes[i / 32 * 64 + i % 32] | codes[i / 32 * 64 + i % 32 + 32] << 4;
}

void quantize_q6_k(const f32x4* w, std::uint8_t* block) {
  float scales[16], largest = 0;
  for (int g = 0; g < 16; ++g) {
    scales[g] = fit_symmetric<16, 32>(w + 4 * g);
    if (std::fabs(scales[g]) > std::fabs(largest)) largest = scales[g];
  }
  put_half(largest / -128, block + 208);
  const float d = half(largest / -128);
  std::uint8_t codes[256];
  for (int g = 0; g < 16; ++g) {
    const float s = std::clamp(std::nearbyint(scales[g] * inverse_of(d)), -128.0f, 127.0f);
    block[192 + g] = static_cast<std::uint8_t>(static_cast<std::int8_t>(s));
    codes_of(w + 4 * g, 4, d * s, 0, -32, 31, codes + 16 * g);
  }
  for (int i = 0; i < 128; ++i) {
    const std::uint8_t* c = codes + i / 64 * 128 + i % 64;
    block[i] = (c[0] & 15) | (c[64] & 15) << 4;
  }
  for (int i = 0; i < 64; ++i) {
    const std::uint8_t* c = codes + i / 32 * 128 + i % 32;
    block[128 + i] = c[0] >> 4 | c[32] >> 4 << 2 | c[64] >> 4 << 4 | c[96] >> 4 << 6;
  }
}

// scale = largest / 127, as GGUF's reference does.
void quantize_q8_0(const f32x4* w, std::uint8_t* block) {
  float most = 0;
  for (int i = 0; i < 32; ++i) most = std::max(most, std::fabs(w[i / 4][i % 4]));
  put_half(most / 127.0f, block);
  const float inverse = half(most / 127.0f) > 0 ? 1.0f / half(most / 127.0f) : 0.0f;
  for (int i = 0; i < 32; ++i)
    block[2 + i] = static_cast<std::uint8_t>(static_cast<std::int8_t>(
        std::clamp(std::nearbyint(w[i / 4][i % 4] * inverse), -127.0f, 127.0f)));
}

// Call f<type>() for a format that floats are rounded to.
template <class F>
void with_quantized(WeightType type, F&& f) {
  switch (type) {
    case WeightType::q8_0: return f.template operator()<WeightType::q8_0>();
    case WeightType::q5_0: return f.template operator()<WeightType::q5_0>();
    case WeightType::q4_k: return f.template operator()<WeightType::q4_k>();
    case WeightType::q6_k: return f.template operator()<WeightType::q6_k>();
    default: return;
  }
}

// Round a row to blocks, and call take(index, block) for each. A block with a NaN or an infinity becomes NaN, so that an
// overflow reaches the logits. The last block ends with zeros.
template <WeightType type, class Take>
void quantize_row(const float* row, std::int64_t in, Take take) {
  constexpr BlockFormat f(type);
  constexpr auto quantize = type == WeightType::q8_0   ? quantize_q8_0
                            : type == WeightType::q5_0 ? quantize_q5_0
                            : type == WeightType::q4_k ? quantize_q4_k
                                                       : quantize_q6_k;
  f32x4 w[f.inputs / 4];
  for (std::int64_t b = 0; b * f.inputs < in; ++b) {
    std::uint8_t block[f.block] = {};
    std::memset(w, 0, sizeof w);
    std::memcpy(w, row + b * f.inputs, std::min<std::int64_t>(f.inputs, in - b * f.inputs) * sizeof(float));
    if (is_finite(w, f.inputs / 4)) quantize(w, block);
    else put_half(NAN, block + f.at_scale);
    take(b, block);
  }
}
