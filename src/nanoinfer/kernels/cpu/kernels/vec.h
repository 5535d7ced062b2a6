// Vector types of 16 elements for every instruction set, which kernels.cpp is written with.
//
// f32x16 is one AVX-512 register, two AVX2 registers, or four of SSE2 or NEON. The compiler's vector extension provides
// + - * / and comparisons; only operations that it lacks (fused multiply-add, half precision, dot products of bytes) use
// intrinsics. Only kernels.cpp includes this file, inside the namespace of the instruction set.
//
// Dot products of bytes are exact integers, so every instruction set gives the same sums.
#pragma once

constexpr int kWidth =
#if defined(__AVX512F__)
    16;
#elif defined(__AVX2__)
    8;
#else
    4;
#endif
constexpr int kParts = 16 / kWidth;
// One instruction for the dot product of four bytes (dot4), in wide registers or in AVX2's.
#if defined(__AVX512VNNI__) || defined(__AVXVNNI__)
#define NI_DOT4
#endif

typedef float vf __attribute__((vector_size(4 * kWidth)));
typedef std::int32_t vi __attribute__((vector_size(4 * kWidth)));
typedef std::uint32_t vu __attribute__((vector_size(4 * kWidth)));
typedef std::uint16_t vh __attribute__((vector_size(2 * kWidth)));
typedef std::uint8_t vb __attribute__((vector_size(kWidth)));
typedef std::int8_t vs __attribute__((vector_size(kWidth)));

struct f32x16 { vf v[kParts]; };
struct i32x16 { vi v[kParts]; };

#define NI_EACH for (int i = 0; i < kParts; ++i)
// Unroll the loop that follows, where speed is worth the time to compile the copies (sources.cmake).
#define NI_PRAGMA(text) _Pragma(#text)
#if defined(NANOINFER_ROLLED)
#define NI_UNROLL(n)
#else
#define NI_UNROLL(n) NI_PRAGMA(GCC unroll n)
#endif
#define NI_INLINE static inline __attribute__((always_inline))

template <class To, class From>
NI_INLINE To bits(From x) {
  static_assert(sizeof(To) == sizeof(From), "same size");
  To y;
  __builtin_memcpy(&y, &x, sizeof y);
  return y;
}
template <class Vector>
NI_INLINE Vector load_as(const void* p) {
  Vector y;
  __builtin_memcpy(&y, p, sizeof y);
  return y;
}

NI_INLINE f32x16 broadcast(float x) { f32x16 r; NI_EACH r.v[i] = x - vf{}; return r; }
NI_INLINE i32x16 broadcast(std::int32_t x) { i32x16 r; NI_EACH r.v[i] = x - vi{}; return r; }
// Copied part by part: GCC copies a whole f32x16 of several registers through the stack.
NI_INLINE f32x16 load(const float* p) { f32x16 r; NI_EACH r.v[i] = load_as<vf>(p + i * kWidth); return r; }
NI_INLINE i32x16 load_ints(const void* p) {
  i32x16 r;
  NI_EACH r.v[i] = load_as<vi>((const std::int32_t*)p + i * kWidth);
  return r;
}
NI_INLINE void store(float* p, f32x16 x) { NI_EACH __builtin_memcpy(p + i * kWidth, &x.v[i], sizeof(vf)); }
NI_INLINE void store_ints(void* p, i32x16 x) {
  NI_EACH __builtin_memcpy((std::int32_t*)p + i * kWidth, &x.v[i], sizeof(vi));
}
NI_INLINE f32x16 operator+(f32x16 a, f32x16 b) { NI_EACH a.v[i] += b.v[i]; return a; }
NI_INLINE f32x16 operator-(f32x16 a, f32x16 b) { NI_EACH a.v[i] -= b.v[i]; return a; }
NI_INLINE f32x16 operator*(f32x16 a, f32x16 b) { NI_EACH a.v[i] *= b.v[i]; return a; }
NI_INLINE f32x16 operator/(f32x16 a, f32x16 b) { NI_EACH a.v[i] /= b.v[i]; return a; }
NI_INLINE i32x16 operator+(i32x16 a, i32x16 b) { NI_EACH a.v[i] += b.v[i]; return a; }
NI_INLINE i32x16 operator-(i32x16 a, i32x16 b) { NI_EACH a.v[i] -= b.v[i]; return a; }
NI_INLINE i32x16 operator*(i32x16 a, i32x16 b) { NI_EACH a.v[i] *= b.v[i]; return a; }
NI_INLINE i32x16 operator|(i32x16 a, i32x16 b) { NI_EACH a.v[i] |= b.v[i]; return a; }
NI_INLINE i32x16 operator&(i32x16 a, std::uint32_t b) { NI_EACH a.v[i] &= (std::int32_t)b; return a; }
NI_INLINE i32x16 operator<<(i32x16 a, int n) { NI_EACH a.v[i] <<= n; return a; }
NI_INLINE i32x16 operator>>(i32x16 a, int n) { NI_EACH a.v[i] >>= n; return a; }  // keeps the sign
// If one of them is a NaN, the result is `a`: a NaN in `a` is kept, so that an overflow reaches the logits, where it is reported.
// Where there are masks, GCC would compare and select, which takes two instructions and twice as long.
#if defined(__AVX512F__)
NI_INLINE f32x16 max(f32x16 a, f32x16 b) { return {(vf)_mm512_max_ps((__m512)b.v[0], (__m512)a.v[0])}; }
NI_INLINE f32x16 min(f32x16 a, f32x16 b) { return {(vf)_mm512_min_ps((__m512)b.v[0], (__m512)a.v[0])}; }
#else
NI_INLINE f32x16 max(f32x16 a, f32x16 b) { NI_EACH a.v[i] = a.v[i] < b.v[i] ? b.v[i] : a.v[i]; return a; }
NI_INLINE f32x16 min(f32x16 a, f32x16 b) { NI_EACH a.v[i] = a.v[i] > b.v[i] ? b.v[i] : a.v[i]; return a; }
#endif
NI_INLINE f32x16 abs(f32x16 a) { NI_EACH a.v[i] = bits<vf>(bits<vu>(a.v[i]) & 0x7fffffffu); return a; }
NI_INLINE f32x16 to_float(i32x16 a) { f32x16 r; NI_EACH r.v[i] = __builtin_convertvector(a.v[i], vf); return r; }

// a * b + c, rounded once if the hardware supports it.
NI_INLINE f32x16 fma(f32x16 a, f32x16 b, f32x16 c) {
#if defined(__AVX512F__)
  c.v[0] = (vf)_mm512_fmadd_ps((__m512)a.v[0], (__m512)b.v[0], (__m512)c.v[0]);
#elif defined(__FMA__)
  NI_EACH c.v[i] = (vf)_mm256_fmadd_ps((__m256)a.v[i], (__m256)b.v[i], (__m256)c.v[i]);
#elif defined(NANOINFER_NEON)
  NI_EACH c.v[i] = (vf)vfmaq_f32((float32x4_t)c.v[i], (float32x4_t)a.v[i], (float32x4_t)b.v[i]);
#else
  NI_EACH c.v[i] += a.v[i] * b.v[i];
#endif
  return c;
}

// All lanes combined: lane l with l + 8, the results with l + 4, and so on.
#if defined(__AVX2__) && !defined(__AVX512F__)
template <class Combine>
NI_INLINE __m128i fold(__m256i a, Combine combine) {
  __m128i b = combine(_mm256_castsi256_si128(a), _mm256_extracti128_si256(a, 1));
  b = combine(b, _mm_shuffle_epi32(b, 0x4e));
  return combine(b, _mm_shuffle_epi32(b, 0xb1));
}
#define NI_FOLD(x, combine) \
  fold((__m256i)(x), [](__m128i a, __m128i b) __attribute__((always_inline)) { return (__m128i)combine; })
#endif
NI_INLINE float sum(f32x16 a) {
#if defined(__AVX512F__)
  return _mm512_reduce_add_ps((__m512)a.v[0]);
#elif defined(__AVX2__)
  return _mm_cvtss_f32((__m128)NI_FOLD(a.v[0] + a.v[1], _mm_add_ps((__m128)a, (__m128)b)));
#else
  float s[16];
  store(s, a);
  for (int step = 8; step; step /= 2)
    for (int l = 0; l < step; ++l) s[l] += s[l + step];
  return s[0];
#endif
}
NI_INLINE std::int32_t sum(i32x16 a) {
#if defined(__AVX512F__)
  return _mm512_reduce_add_epi32((__m512i)a.v[0]);
#elif defined(__AVX2__)
  return _mm_cvtsi128_si32(NI_FOLD(a.v[0] + a.v[1], _mm_add_epi32(a, b)));
#else
  std::int32_t total = 0;
  NI_EACH for (int l = 0; l < kWidth; ++l) total += a.v[i][l];
  return total;
#endif
}
NI_INLINE float largest(f32x16 a) {  // undefined if there is a NaN: callers check for NaN separately
#if defined(__AVX512F__)
  return _mm512_reduce_max_ps((__m512)a.v[0]);
#elif defined(__AVX2__)
  const __m256i both = (__m256i)_mm256_max_ps((__m256)a.v[0], (__m256)a.v[1]);
  return _mm_cvtss_f32((__m128)NI_FOLD(both, _mm_max_ps((__m128)a, (__m128)b)));
#else
  float s[16];
  store(s, a);
  for (int step = 8; step; step /= 2)
    for (int l = 0; l < step; ++l) s[l] = s[l] > s[l + step] ? s[l] : s[l + step];
  return s[0];
#endif
}
NI_INLINE std::int32_t largest(i32x16 a) {
#if defined(__AVX512F__)
  return _mm512_reduce_max_epi32((__m512i)a.v[0]);
#elif defined(__AVX2__)
  const __m256i both = _mm256_max_epi32((__m256i)a.v[0], (__m256i)a.v[1]);
  return _mm_cvtsi128_si32(NI_FOLD(both, _mm_max_epi32(a, b)));
#else
  std::int32_t most = a.v[0][0];
  NI_EACH for (int l = 0; l < kWidth; ++l) most = a.v[i][l] > most ? a.v[i][l] : most;
  return most;
#endif
}
// x where lane < n, else `other`.
NI_INLINE f32x16 first(std::int64_t n, f32x16 x, float other) {
  static const std::int32_t kLane[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  const i32x16 lanes = load_ints(kLane);
  const vi limit = (std::int32_t)(n < 16 ? n : 16) - vi{};
  const vf rest = other - vf{};
  NI_EACH x.v[i] = lanes.v[i] < limit ? x.v[i] : rest;
  return x;
}
// The first n floats at p (all 16 if n > 16), then zeros. Reads no further.
NI_INLINE f32x16 load_first(const float* p, std::int64_t n) {
  if (n >= 16) return load(p);
  float s[16] = {};
  for (std::int64_t l = 0; l < n; ++l) s[l] = p[l];
  return load(s);
}
NI_INLINE void store_first(float* p, f32x16 x, std::int64_t n) {
  if (n >= 16) return store(p, x);
  float s[16];
  store(s, x);
  for (std::int64_t l = 0; l < n; ++l) p[l] = s[l];
}

// Narrow types ------------------------------------------------------------------------------------------

// Widening loads use intrinsics: GCC 12 compiles the generic conversion to two halves and a shuffle.
NI_INLINE f32x16 load_bf16(const std::uint16_t* p) {
  f32x16 r;
#if defined(__AVX512F__)
  r.v[0] = (vf)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p)), 16);
#elif defined(__AVX2__)
  NI_EACH r.v[i] =
      (vf)_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)(p + i * kWidth))), 16);
#else
  NI_EACH r.v[i] = bits<vf>(__builtin_convertvector(load_as<vh>(p + i * kWidth), vu) << 16);
#endif
  return r;
}
NI_INLINE f32x16 load_i8(const std::int8_t* p) {
  f32x16 r;
#if defined(__AVX512F__)
  r.v[0] = (vf)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)p)));
#elif defined(__AVX2__)
  NI_EACH r.v[i] =
      (vf)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)(p + i * kWidth))));
#else
  NI_EACH r.v[i] = __builtin_convertvector(__builtin_convertvector(load_as<vs>(p + i * kWidth), vi), vf);
#endif
  return r;
}
NI_INLINE i32x16 load_bytes(const std::uint8_t* p) {
  i32x16 r;
#if defined(__AVX512F__)
  r.v[0] = (vi)_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)p));
#elif defined(__AVX2__)
  NI_EACH r.v[i] = (vi)_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)(p + i * kWidth)));
#else
  NI_EACH r.v[i] = __builtin_convertvector(load_as<vb>(p + i * kWidth), vi);
#endif
  return r;
}
NI_INLINE f32x16 load_u8(const std::uint8_t* p) { return to_float(load_bytes(p)); }
// 2^(e - 128) of bytes e.
NI_INLINE f32x16 load_exponents(const std::uint8_t* p) {
  const i32x16 bytes = load_bytes(p);
  f32x16 r;
  NI_EACH {
    const vi e = bytes.v[i];
    r.v[i] = bits<vf>(e > 1 ? (e - 1) << 23 : (e + 1) << 21);  // 2^-128 and 2^-127 are subnormal
  }
  return r;
}
#if !defined(__AVX512F__) && !defined(__F16C__)
NI_INLINE float half_to_float(std::uint16_t h) {  // exact; a float multiplication converts subnormals
  const std::uint32_t sign = (std::uint32_t)(h & 0x8000u) << 16, magnitude = (std::uint32_t)(h & 0x7fffu) << 13;
  if ((h & 0x7c00u) == 0x7c00u) return bits<float>(sign | 0x7f800000u | (magnitude & 0x007fffffu));
  return bits<float>(bits<std::uint32_t>(bits<float>(magnitude) * 0x1.0p112f) | sign);
}
#endif
NI_INLINE f32x16 load_f16(const std::uint16_t* p) {
  f32x16 r;
#if defined(__AVX512F__)
  r.v[0] = (vf)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p));
#elif defined(__F16C__)
  NI_EACH r.v[i] = (vf)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)(p + i * kWidth)));
#else
  NI_EACH for (int l = 0; l < kWidth; ++l) r.v[i][l] = half_to_float(p[i * kWidth + l]);
#endif
  return r;
}
// Narrowing stores, too: GCC 12 moves each number through a scalar register.
NI_INLINE void store_low16(void* p, i32x16 x) {  // the low 16 bits of each
#if defined(__AVX2__) && !defined(__AVX512F__)
  const __m256i low = _mm256_set1_epi32(0xffff);
  const __m256i y = _mm256_packus_epi32(_mm256_and_si256((__m256i)x.v[0], low), _mm256_and_si256((__m256i)x.v[1], low));
  _mm256_storeu_si256((__m256i*)p, _mm256_permute4x64_epi64(y, 0xd8));
#else
  NI_EACH {
    const vh h = __builtin_convertvector(bits<vu>(x.v[i]), vh);
    __builtin_memcpy((std::uint16_t*)p + i * kWidth, &h, sizeof h);
  }
#endif
}
// Round to nearest, ties to even; NaN stays NaN.
NI_INLINE void store_bf16(std::uint16_t* p, f32x16 x) {
#if defined(__AVX512BF16__)  // subnormal numbers become zero, as they do in products
  const __m256bh r = _mm512_cvtneps_pbh((__m512)x.v[0]);
  __builtin_memcpy(p, &r, sizeof r);
#else
  i32x16 r;
  NI_EACH {
    const vu u = bits<vu>(x.v[i]);
    const vu rounded = (u + 0x7fffu + ((u >> 16) & 1u)) >> 16, nan = (u >> 16) | 0x40u;
    r.v[i] = bits<vi>((u & 0x7fffffffu) > 0x7f800000u ? nan : rounded);
  }
  store_low16(p, r);
#endif
}
NI_INLINE void store_i8(std::int8_t* p, i32x16 x) {  // the low 8 bits of each
#if defined(__AVX2__) && !defined(__AVX512F__)
  const __m256i low = _mm256_set1_epi32(0xff);
  const __m256i y = _mm256_packus_epi32(_mm256_and_si256((__m256i)x.v[0], low), _mm256_and_si256((__m256i)x.v[1], low));
  const __m128i z = _mm_packus_epi16(_mm256_castsi256_si128(y), _mm256_extracti128_si256(y, 1));
  _mm_storeu_si128((__m128i*)p, _mm_shuffle_epi32(z, 0xd8));
#else
  NI_EACH {
    const vs s = __builtin_convertvector(x.v[i], vs);
    __builtin_memcpy(p + i * kWidth, &s, sizeof s);
  }
#endif
}

// Dot products of adjacent elements: each of 16 lanes has its own weights; all lanes share the activations ----

// The first and the second bfloat16 of each pair.
NI_INLINE f32x16 first_of(i32x16 x) { f32x16 r; NI_EACH r.v[i] = bits<vf>(bits<vu>(x.v[i]) << 16); return r; }
NI_INLINE f32x16 second_of(i32x16 x) { f32x16 r; NI_EACH r.v[i] = bits<vf>(bits<vu>(x.v[i]) & 0xffff0000u); return r; }
// acc[l] += w[l][0] * a[0] + w[l][1] * a[1], bfloat16 pairs in 32 bits.
NI_INLINE f32x16 dot2_bf16(f32x16 acc, i32x16 w, std::int32_t a) {
#if defined(__AVX512BF16__)
  acc.v[0] = (vf)_mm512_dpbf16_ps((__m512)acc.v[0], (__m512bh)w.v[0], (__m512bh)_mm512_set1_epi32(a));
  return acc;
#else
  const i32x16 both = broadcast(a);  // loaded and then shifted: as scalars they would be moved between registers
  return fma(second_of(w), second_of(both), fma(first_of(w), first_of(both), acc));
#endif
}

// Bytes of a lane as two pairs of 16-bit numbers: bytes 0 and 2, bytes 1 and 3.
struct Pairs { i32x16 even, odd; };
typedef std::int16_t v16 __attribute__((vector_size(4 * kWidth)));
#if defined(__AVX2__) && !defined(NI_DOT4)
constexpr bool kMultiplies16 = true;  // sums of two products of bytes could exceed 16 bits, so bytes are widened first
typedef std::uint16_t u16 __attribute__((vector_size(4 * kWidth)));
NI_INLINE Pairs widen_unsigned(i32x16 x) {
  Pairs r;
  NI_EACH r.even.v[i] = x.v[i] & 0x00ff00ff;
  NI_EACH r.odd.v[i] = bits<vi>(bits<u16>(x.v[i]) >> 8);
  return r;
}
NI_INLINE Pairs widen_signed(i32x16 x) {
  Pairs r;
  NI_EACH r.even.v[i] = bits<vi>(bits<v16>(bits<u16>(x.v[i]) << 8) >> 8);
  NI_EACH r.odd.v[i] = bits<vi>(bits<v16>(x.v[i]) >> 8);
  return r;
}
// Add the products of 4 numbers of each lane.
NI_INLINE i32x16 add_products(i32x16 acc, Pairs a, Pairs b) {
#if defined(__AVX512BW__)
  __m512i sum = _mm512_add_epi32((__m512i)acc.v[0], _mm512_madd_epi16((__m512i)a.even.v[0], (__m512i)b.even.v[0]));
  acc.v[0] = (vi)_mm512_add_epi32(sum, _mm512_madd_epi16((__m512i)a.odd.v[0], (__m512i)b.odd.v[0]));
#else
  NI_EACH {
    const __m256i sum = _mm256_add_epi32((__m256i)acc.v[i], _mm256_madd_epi16((__m256i)a.even.v[i], (__m256i)b.even.v[i]));
    acc.v[i] = (vi)_mm256_add_epi32(sum, _mm256_madd_epi16((__m256i)a.odd.v[i], (__m256i)b.odd.v[i]));
  }
#endif
  return acc;
}
// Store numbers of 16 bits, each four of them in the order of their pairs.
NI_INLINE void store_pairs(void* p, i32x16 x) {
#if defined(__AVX512F__)
  x.v[0] = (vi)_mm512_shuffle_epi32((__m512i)x.v[0], (_MM_PERM_ENUM)0xd8);
#else
  NI_EACH x.v[i] = (vi)_mm256_shuffle_epi32((__m256i)x.v[i], 0xd8);
#endif
  store_low16(p, x);
}
#else
constexpr bool kMultiplies16 = false;  // these are then not used
void store_pairs(void*, i32x16);
Pairs widen_unsigned(i32x16);
Pairs widen_signed(i32x16);
i32x16 add_products(i32x16, Pairs, Pairs);
#endif

// acc[l] += sum over j < 4 of u[l][j] * s[l][j]; u are 4 unsigned bytes a lane, s 4 signed bytes.
NI_INLINE i32x16 dot4(i32x16 acc, i32x16 u, i32x16 s) {
#if defined(__AVX512VNNI__)
  acc.v[0] = (vi)_mm512_dpbusd_epi32((__m512i)acc.v[0], (__m512i)u.v[0], (__m512i)s.v[0]);
#elif defined(__AVXVNNI__)
  NI_EACH acc.v[i] = (vi)_mm256_dpbusd_avx_epi32((__m256i)acc.v[i], (__m256i)u.v[i], (__m256i)s.v[i]);
#elif defined(__AVX2__)
  acc = add_products(acc, widen_unsigned(u), widen_signed(s));
#else
  for (int j = 0; j < 4; ++j)
    NI_EACH {
      const vi byte = (vi)(bits<vu>(s.v[i]) << (24 - 8 * j)) >> 24;
      acc.v[i] += (vi)((bits<vu>(u.v[i]) >> (8 * j)) & 0xffu) * byte;
    }
#endif
  return acc;
}
// The same four signed bytes for all lanes.
NI_INLINE i32x16 dot4(i32x16 acc, i32x16 u, std::int32_t s) { return dot4(acc, u, broadcast(s)); }

// The same in two steps, for w < 128: sums of two products each in 16 bits, which can be added while they fit, and then
// their sums of two. Exact, like dot4, which takes more instructions if the CPU has none for it.
#if defined(NI_DOT4) || !(defined(__AVX2__) || defined(NANOINFER_NEON))
constexpr bool kPairs = false;
#else
constexpr bool kPairs = true;
#endif
NI_INLINE i32x16 dot_pairs(i32x16 w, std::int32_t a) {
#if defined(__AVX512BW__)
  w.v[0] = (vi)_mm512_maddubs_epi16((__m512i)w.v[0], _mm512_set1_epi32(a));
#elif defined(__AVX2__)
  NI_EACH w.v[i] = (vi)_mm256_maddubs_epi16((__m256i)w.v[i], _mm256_set1_epi32(a));
#elif defined(NANOINFER_NEON)
  const int8x8_t x = vreinterpret_s8_s32(vdup_n_s32(a));
  NI_EACH {
    const int8x16_t v = (int8x16_t)w.v[i];
    w.v[i] = (vi)vpaddq_s16(vmull_s8(vget_low_s8(v), x), vmull_s8(vget_high_s8(v), x));
  }
#else
  (void)a;
#endif
  return w;
}
NI_INLINE i32x16 to_signed(i32x16 w) { NI_EACH w.v[i] ^= (std::int32_t)0x80808080; return w; }  // w - 128 of each byte
// As dot_pairs, for signed w; sums of two products fit in 16 bits, but sums of more do not.
NI_INLINE i32x16 dot_signed_pairs(i32x16 w, std::int32_t a) {
#if defined(__AVX512BW__)
  const __m512i v = (__m512i)w.v[0], x = _mm512_set1_epi32(a);
  const __m512i product_sign = _mm512_mask_sub_epi8(x, _mm512_movepi8_mask(v), _mm512_setzero_si512(), x);
  w.v[0] = (vi)_mm512_maddubs_epi16(_mm512_abs_epi8(v), product_sign);
#elif defined(__AVX2__)
  NI_EACH {
    const __m256i v = (__m256i)w.v[i];
    w.v[i] = (vi)_mm256_maddubs_epi16(_mm256_abs_epi8(v), _mm256_sign_epi8(_mm256_set1_epi32(a), v));
  }
#else
  w = dot_pairs(w, a);
#endif
  return w;
}
NI_INLINE i32x16 add_pairs(i32x16 a, i32x16 b) {
  NI_EACH a.v[i] = bits<vi>(bits<v16>(a.v[i]) + bits<v16>(b.v[i]));
  return a;
}
// Compute x here: GCC would compute the products of many lines first, and store them until they are added.
NI_INLINE void in_order(i32x16& x) {
#if defined(__AVX2__) && !defined(__AVX512F__)
  NI_EACH asm volatile("" : "+x"(x.v[i]));
#else
  (void)x;
#endif
}
NI_INLINE i32x16 add_sums(i32x16 acc, i32x16 pairs) {
#if defined(__AVX512BW__)
  acc.v[0] += (vi)_mm512_madd_epi16((__m512i)pairs.v[0], _mm512_set1_epi16(1));
#elif defined(__AVX2__)
  NI_EACH acc.v[i] += (vi)_mm256_madd_epi16((__m256i)pairs.v[i], _mm256_set1_epi16(1));
#elif defined(NANOINFER_NEON)
  NI_EACH acc.v[i] = (vi)vpadalq_s16((int32x4_t)acc.v[i], (int16x8_t)pairs.v[i]);
#else
  (void)pairs;
#endif
  return acc;
}
// What lies at bits `from` to `from + width` of each byte, moved to bit `to`.
NI_INLINE i32x16 bit_field(i32x16 x, int from, int width, int to) {
  const std::uint32_t mask = ((1u << width) - 1) * 0x01010101u << to;
  NI_EACH {
    const vu u = bits<vu>(x.v[i]);
    x.v[i] = bits<vi>((from > to ? u >> (from - to) : u << (to - from)) & mask);
  }
  return x;
}

// table[b] of each byte b < 16.
NI_INLINE i32x16 lookup(i32x16 q, const std::uint8_t* table) {
#if defined(__AVX512BW__)
  const __m512i all = _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i*)table));
  q.v[0] = (vi)_mm512_shuffle_epi8(all, (__m512i)q.v[0]);
#elif defined(__AVX2__)
  const __m256i all = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i*)table));
  NI_EACH q.v[i] = (vi)_mm256_shuffle_epi8(all, (__m256i)q.v[i]);
#elif defined(NANOINFER_NEON)
  NI_EACH q.v[i] = (vi)vqtbl1q_u8(vld1q_u8(table), (uint8x16_t)q.v[i]);
#else
  std::uint8_t b[64];
  store_ints(b, q);
  for (int l = 0; l < 64; ++l) b[l] = table[b[l]];
  q = load_ints(b);
#endif
  return q;
}

// Functions ---------------------------------------------------------------------------------------------

#if defined(__AVX512F__)
// 2^t, relative error 2e-7; 0 and infinity where it has no float32.
NI_INLINE f32x16 power_of_2(f32x16 t) {
  f32x16 r, p = broadcast(1.86712982e-3f);  // 2^r for 0 <= r <= 1, exact for 0 (least largest relative error, own fit)
  r.v[0] = (vf)_mm512_reduce_ps((__m512)t.v[0], _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);  // t - floor(t)
  p = fma(p, r, broadcast(9.01703071e-3f));
  p = fma(p, r, broadcast(5.57999127e-2f));
  p = fma(p, r, broadcast(2.40164444e-1f));
  p = fma(p, r, broadcast(6.93151295e-1f));
  p = fma(p, r, broadcast(1.0f));
  p.v[0] = (vf)_mm512_scalef_ps((__m512)p.v[0], (__m512)t.v[0]);  // times 2^floor(t)
  return p;
}
// e^x, relative error 2e-7 (1 + |x| / 3); at most 2^126.
NI_INLINE f32x16 exp(f32x16 x) { return power_of_2(min(x * broadcast(1.44269504f), broadcast(126.0f))); }
// e^(x - most), where `from` is exp_from(most). The rounding of `from` is a factor that all weights of a softmax have in common.
NI_INLINE f32x16 exp_from(f32x16 most) { return most * broadcast(-1.44269504f); }
NI_INLINE f32x16 exp_below(f32x16 x, f32x16 from) { return power_of_2(fma(x, broadcast(1.44269504f), from)); }
// The origin of the higher score, and what turns weights of origin `from` into those of `to`.
NI_INLINE f32x16 higher(f32x16 a, f32x16 b) { return min(a, b); }
NI_INLINE f32x16 exp_between(f32x16 from, f32x16 to) { return power_of_2(to - from); }
#else
// e^x to about 1 unit in the last place; x is clamped to [-87.3, 88.3].
// Method and coefficients: Cephes expf (Moshier): x = n ln 2 + r, a polynomial for e^r, n added to the exponent.
NI_INLINE f32x16 exp(f32x16 x) {
  x = min(max(x, broadcast(-87.3f)), broadcast(88.3f));
  const f32x16 magic = broadcast(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer in the low bits
  const f32x16 t = fma(x, broadcast(1.44269504f), magic), n = t - magic;
  f32x16 r = fma(n, broadcast(-0.693359375f), x);
  r = fma(n, broadcast(2.12194440e-4f), r);
  f32x16 p = broadcast(1.9875691500e-4f);
  p = fma(p, r, broadcast(1.3981999507e-3f));
  p = fma(p, r, broadcast(8.3334519073e-3f));
  p = fma(p, r, broadcast(4.1665795894e-2f));
  p = fma(p, r, broadcast(1.6666665459e-1f));
  p = fma(p, r, broadcast(5.0000001201e-1f));
  p = fma(p, r * r, r + broadcast(1.0f));
  NI_EACH p.v[i] = bits<vf>(bits<vu>(p.v[i]) + ((bits<vu>(t.v[i]) - 0x4b400000u) << 23));
  return p + (x - x);  // NaN + 0: the bits of a NaN are not an exponent
}
NI_INLINE f32x16 exp_from(f32x16 most) { return most; }
NI_INLINE f32x16 exp_below(f32x16 x, f32x16 from) { return exp(x - from); }
NI_INLINE f32x16 higher(f32x16 a, f32x16 b) { return max(a, b); }
NI_INLINE f32x16 exp_between(f32x16 from, f32x16 to) { return exp(from - to); }
#endif

// a / b for 1 <= b < 2^126, as 1 + exp(x) is. An instruction for the division of wide registers takes as long as ten others;
// this is off by up to 1.5 units in the last place.
NI_INLINE f32x16 over(f32x16 a, f32x16 b) {
#if defined(__AVX512F__)
  f32x16 r;
  r.v[0] = (vf)_mm512_rcp14_ps((__m512)b.v[0]);
  return a * fma(r, fma(broadcast(0.0f) - b, r, broadcast(1.0f)), r);  // a step of Newton's method
#else
  return a / b;
#endif
}

// GELU, tanh form: x (1 + tanh u) / 2 = x / (1 + e^-2u), u = sqrt(2 / pi) (x + 0.044715 x^3).
NI_INLINE f32x16 gelu_tanh(f32x16 x) {
  const f32x16 u2 = x * fma(x * x, broadcast(-2 * 0.7978845608f * 0.044715f), broadcast(-2 * 0.7978845608f));
  return over(x, broadcast(1.0f) + exp(u2));
}

// tanh(x) = 1 - 2 / (1 + e^2x)
NI_INLINE f32x16 tanh(f32x16 x) {
  return broadcast(1.0f) - over(broadcast(2.0f), broadcast(1.0f) + exp(x + x));
}
NI_INLINE f32x16 soft_cap(f32x16 x, float cap) { return broadcast(cap) * tanh(x * broadcast(1.0f / cap)); }

// x / (1 + e^-x)
NI_INLINE f32x16 silu(f32x16 x) { return over(x, broadcast(1.0f) + exp(broadcast(0.0f) - x)); }

// The square of max(x, 0); NaN stays NaN.
NI_INLINE f32x16 relu2(f32x16 x) {
  f32x16 y;
  NI_EACH y.v[i] = x.v[i] < 0 ? x.v[i] * 0.0f : x.v[i] * x.v[i];
  return y;
}

// x / (1 + e^-1.702x) for x clamped to at most kClamp: the gate of gpt-oss (arXiv 2508.10925, section 2.3). NaN stays NaN.
constexpr float kClamp = 7.0f;
NI_INLINE f32x16 clamped_silu(f32x16 x) {
  x = min(x, broadcast(kClamp));
  return over(x, broadcast(1.0f) + exp(x * broadcast(-1.702f)));
}
// 1 + x clamped to [-kClamp, kClamp].
NI_INLINE f32x16 clamped_plus_one(f32x16 x) {
  return max(min(x, broadcast(kClamp)), broadcast(-kClamp)) + broadcast(1.0f);
}

// GELU, exact form: x (1 + erf(x / sqrt 2)) / 2. erf by Abramowitz and Stegun 7.1.26, absolute error 1.5e-7:
// for z >= 0, 1 - erf(z) = t (a1 + t (a2 + ...)) e^(-z z), t = 1 / (1 + 0.3275911 z).
NI_INLINE f32x16 gelu_erf(f32x16 x) {
  const f32x16 z = abs(x) * broadcast(0.70710678f);
  const f32x16 t = over(broadcast(1.0f), fma(z, broadcast(0.3275911f), broadcast(1.0f)));
  f32x16 p = broadcast(1.061405429f);
  p = fma(p, t, broadcast(-1.453152027f));
  p = fma(p, t, broadcast(1.421413741f));
  p = fma(p, t, broadcast(-0.284496736f));
  p = fma(p, t, broadcast(0.254829592f));
  const f32x16 tail = p * t * exp(broadcast(0.0f) - z * z) * broadcast(0.5f);  // (1 - erf(z)) / 2
  f32x16 share;  // (1 + erf) / 2: 1 - tail for x >= 0, else tail; NaN stays NaN
  NI_EACH share.v[i] = x.v[i] < 0 ? tail.v[i] : 1 - tail.v[i];
  return x * share;
}
