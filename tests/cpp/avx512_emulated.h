// The instructions of AVX-512 that the kernels use as functions, so that their code for it, and for AMX, runs on every x86-64 CPU
// with AVX2. The compiler includes this file before kernels.cpp (CMakeLists.txt). Operations as in Intel's Software
// Developer's Manual, volume 2.
#pragma once

#include <immintrin.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>

namespace emulated {

template <class T>
struct Lanes {
  T v[64 / sizeof(T)];
};
template <class T, class V>
Lanes<T> lanes(V x) {
  Lanes<T> y;
  static_assert(sizeof x == sizeof y);
  std::memcpy(&y, &x, sizeof y);
  return y;
}
template <class V, class T>
V vector(const Lanes<T>& x) {
  V y;
  std::memcpy(&y, &x, sizeof y);
  return y;
}
// f(lane of a, lane of b) in each lane of type T.
template <class T, class F>
__m512i each(__m512i a, __m512i b, F f) {
  auto x = lanes<T>(a);
  const auto y = lanes<T>(b);
  for (std::size_t i = 0; i < 64 / sizeof(T); ++i) x.v[i] = static_cast<T>(f(x.v[i], y.v[i]));
  return vector<__m512i>(x);
}
template <class T>
__m512i all(T x) {
  Lanes<T> y;
  for (T& v : y.v) v = x;
  return vector<__m512i>(y);
}
inline float of_bf16(std::uint32_t bits) {
  bits <<= 16;
  float x;
  std::memcpy(&x, &bits, 4);
  return x;
}

using i8 = std::int8_t;
using u8 = std::uint8_t;
using i16 = std::int16_t;
using u16 = std::uint16_t;
using i32 = std::int32_t;
using u32 = std::uint32_t;

inline __m512 max_ps(__m512 a, __m512 b) {
  auto x = lanes<float>(a);
  const auto y = lanes<float>(b);
  for (int i = 0; i < 16; ++i) x.v[i] = x.v[i] > y.v[i] ? x.v[i] : y.v[i];
  return vector<__m512>(x);
}
inline __m512 min_ps(__m512 a, __m512 b) {
  auto x = lanes<float>(a);
  const auto y = lanes<float>(b);
  for (int i = 0; i < 16; ++i) x.v[i] = x.v[i] < y.v[i] ? x.v[i] : y.v[i];
  return vector<__m512>(x);
}
// Pack the lanes of type From as To, saturated: 16 bytes of a, then of b, in turn.
template <class From, class To>
__m512i pack(__m512i a, __m512i b) {
  const Lanes<From> from[2] = {lanes<From>(a), lanes<From>(b)};
  Lanes<To> to;
  constexpr int kMany = 16 / sizeof(From), kMost = sizeof(To) == 1 ? 127 : 32767;
  for (int i = 0; i < int(64 / sizeof(To)); ++i)
    to.v[i] = static_cast<To>(std::clamp<int>(from[i / kMany % 2].v[i / (2 * kMany) * kMany + i % kMany], -kMost - 1, kMost));
  return vector<__m512i>(to);
}
inline __m512i packs_epi32(__m512i a, __m512i b) { return pack<std::int32_t, std::int16_t>(a, b); }
inline __m512i packs_epi16(__m512i a, __m512i b) { return pack<std::int16_t, std::int8_t>(a, b); }
inline __m512i permutex2var_epi32(__m512i a, __m512i index, __m512i b) {
  const auto x = lanes<i32>(a), y = lanes<i32>(b), n = lanes<i32>(index);
  Lanes<i32> z;
  for (int i = 0; i < 16; ++i) z.v[i] = (n.v[i] & 16 ? y : x).v[n.v[i] & 15];
  return vector<__m512i>(z);
}
inline __m512i permutexvar_epi32(__m512i index, __m512i a) {
  auto to = lanes<std::uint32_t>(index);
  const auto from = lanes<std::uint32_t>(a);
  for (std::uint32_t& v : to.v) v = from.v[v % 16];
  return vector<__m512i>(to);
}
inline __m512i add_epi32(__m512i a, __m512i b) { return each<u32>(a, b, [](u32 x, u32 y) { return x + y; }); }
inline __m512i sub_epi8(__m512i a, __m512i b) { return each<u8>(a, b, [](u8 x, u8 y) { return x - y; }); }
inline __m512i and_si512(__m512i a, __m512i b) { return each<u32>(a, b, [](u32 x, u32 y) { return x & y; }); }
inline __m512i xor_si512(__m512i a, __m512i b) { return each<u32>(a, b, [](u32 x, u32 y) { return x ^ y; }); }
inline __m512i abs_epi8(__m512i a) { return each<i8>(a, a, [](i8 x, i8) { return x < 0 ? -x : x; }); }
inline __m512i slli_epi16(__m512i a, int n) { return each<u16>(a, a, [n](u16 x, u16) { return x << n; }); }
inline __m512i srli_epi16(__m512i a, int n) { return each<u16>(a, a, [n](u16 x, u16) { return x >> n; }); }
inline __m512i srai_epi16(__m512i a, int n) { return each<i16>(a, a, [n](i16 x, i16) { return x >> n; }); }
inline __m512i slli_epi32(__m512i a, int n) { return each<u32>(a, a, [n](u32 x, u32) { return x << n; }); }
inline __m512i set1_epi8(int x) { return all(static_cast<i8>(x)); }
inline __m512i set1_epi16(int x) { return all(static_cast<i16>(x)); }
inline __m512i set1_epi32(int x) { return all(static_cast<i32>(x)); }
inline __m512i setzero() { return all<i32>(0); }
inline __m512i load(const void* p) {
  __m512i x;
  std::memcpy(&x, p, 64);
  return x;
}
inline void store(void* p, __m512i x) { std::memcpy(p, &x, 64); }
template <class T>
void mask_store(void* p, std::uint64_t mask, __m512i x) {
  const auto from = lanes<T>(x);
  for (std::size_t i = 0; i < 64 / sizeof(T); ++i)
    if (mask >> i & 1) std::memcpy(static_cast<T*>(p) + i, &from.v[i], sizeof(T));
}
inline __mmask64 movepi8_mask(__m512i a) {
  __mmask64 mask = 0;
  const auto x = lanes<i8>(a);
  for (int i = 0; i < 64; ++i) mask |= static_cast<__mmask64>(x.v[i] < 0) << i;
  return mask;
}
inline __m512i mask_sub_epi8(__m512i other, __mmask64 mask, __m512i a, __m512i b) {
  auto to = lanes<u8>(other);
  const auto difference = lanes<u8>(sub_epi8(a, b));
  for (int i = 0; i < 64; ++i)
    if (mask >> i & 1) to.v[i] = difference.v[i];
  return vector<__m512i>(to);
}
inline __m512i shuffle_epi8(__m512i table, __m512i index) {
  const auto from = lanes<u8>(table), at = lanes<u8>(index);
  Lanes<u8> to;
  for (int i = 0; i < 64; ++i) to.v[i] = at.v[i] & 128 ? 0 : from.v[i / 16 * 16 + at.v[i] % 16];
  return vector<__m512i>(to);
}
inline __m512i mask_shuffle_epi8(__m512i other, __mmask64 mask, __m512i table, __m512i index) {
  return mask_sub_epi8(other, mask, shuffle_epi8(table, index), all<u8>(0));
}
inline __m512i shuffle_epi32(__m512i a, int order) {
  const auto from = lanes<i32>(a);
  Lanes<i32> to;
  for (int i = 0; i < 16; ++i) to.v[i] = from.v[i / 4 * 4 + (order >> 2 * (i % 4) & 3)];
  return vector<__m512i>(to);
}
inline __m512i broadcast_i32x4(__m128i a) {
  Lanes<i32> to;
  for (int i = 0; i < 4; ++i) std::memcpy(to.v + 4 * i, &a, 16);
  return vector<__m512i>(to);
}
inline __m512i madd_epi16(__m512i a, __m512i b) {
  const auto x = lanes<i16>(a), y = lanes<i16>(b);
  Lanes<i32> to;
  for (int i = 0; i < 16; ++i) to.v[i] = x.v[2 * i] * y.v[2 * i] + x.v[2 * i + 1] * y.v[2 * i + 1];
  return vector<__m512i>(to);
}
inline __m512i maddubs_epi16(__m512i a, __m512i b) {  // saturates
  const auto x = lanes<u8>(a);
  const auto y = lanes<i8>(b);
  Lanes<i16> to;
  for (int i = 0; i < 32; ++i) {
    const int sum = x.v[2 * i] * y.v[2 * i] + x.v[2 * i + 1] * y.v[2 * i + 1];
    to.v[i] = static_cast<i16>(sum > 32767 ? 32767 : sum < -32768 ? -32768 : sum);
  }
  return vector<__m512i>(to);
}
inline __m512i dpbusd_epi32(__m512i sums, __m512i a, __m512i b) {
  auto to = lanes<i32>(sums);
  const auto x = lanes<u8>(a);
  const auto y = lanes<i8>(b);
  for (int i = 0; i < 64; ++i) to.v[i / 4] += x.v[i] * y.v[i];
  return vector<__m512i>(to);
}
template <class T, class V>
__m512i widen(V a) {
  T from[16];
  static_assert(sizeof from == sizeof a);
  std::memcpy(from, &a, sizeof from);
  Lanes<i32> to;
  for (int i = 0; i < 16; ++i) to.v[i] = from[i];
  return vector<__m512i>(to);
}
inline __m512i cvtepi8_epi32(__m128i a) { return widen<i8>(a); }
inline __m512i cvtepu8_epi32(__m128i a) { return widen<u8>(a); }
inline __m512i cvtepu16_epi32(__m256i a) { return widen<u16>(a); }
inline __m512 cvtepi32_ps(__m512i a) {
  const auto x = lanes<i32>(a);
  Lanes<float> to;
  for (int i = 0; i < 16; ++i) to.v[i] = static_cast<float>(x.v[i]);
  return vector<__m512>(to);
}
inline __m512 cvtph_ps(__m256i a) {
  __m256 halves[2] = {_mm256_cvtph_ps(_mm256_castsi256_si128(a)), _mm256_cvtph_ps(_mm256_extracti128_si256(a, 1))};
  __m512 to;
  std::memcpy(&to, halves, sizeof to);
  return to;
}
inline __m512 fmadd_ps(__m512 a, __m512 b, __m512 c) {
  const auto x = lanes<float>(a), y = lanes<float>(b);
  auto to = lanes<float>(c);
  for (int i = 0; i < 16; ++i) to.v[i] = std::fma(x.v[i], y.v[i], to.v[i]);
  return vector<__m512>(to);
}
inline __m512 scalef_ps(__m512 a, __m512 b) {
  auto x = lanes<float>(a);
  const auto y = lanes<float>(b);
  for (int i = 0; i < 16; ++i) x.v[i] *= y.v[i] == y.v[i] ? std::exp2(std::floor(y.v[i])) : y.v[i];
  return vector<__m512>(x);
}
inline __m512 reduce_ps(__m512 a, int mode) {  // x - floor(x)
  auto x = lanes<float>(a);
  if (mode != (_MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC)) std::abort();
  for (float& v : x.v) v = std::isinf(v) ? 0 : v - std::floor(v);
  return vector<__m512>(x);
}
inline __m512 rcp14_ps(__m512 a) {  // the relative error of the instruction is at most 2^-14
  auto x = lanes<float>(a);
  for (float& v : x.v) v = (1 + 0x1p-15f) / v;
  return vector<__m512>(x);
}
inline float reduce_add_ps(__m512 a) {  // in the order of the compiler's: halves, then halves of these
  auto x = lanes<float>(a);
  for (int step = 8; step; step /= 2)
    for (int i = 0; i < step; ++i) x.v[i] += x.v[i + step];
  return x.v[0];
}
inline float reduce_max_ps(__m512 a) {
  auto x = lanes<float>(a);
  for (const float v : x.v) x.v[0] = v > x.v[0] ? v : x.v[0];
  return x.v[0];
}
inline i32 reduce_max_epi32(__m512i a) {
  const auto x = lanes<i32>(a);
  return *std::max_element(x.v, x.v + 16);
}
inline i32 reduce_add_epi32(__m512i a) {
  i32 sum = 0;
  for (const i32 v : lanes<i32>(a).v) sum += v;
  return sum;
}
typedef u16 bf16x32 __attribute__((vector_size(64)));
inline u16 to_bf16(float x) {  // subnormal numbers become zero
  u32 u;
  std::memcpy(&u, &x, 4);
  if ((u & 0x7f800000u) == 0) return static_cast<u16>(u >> 16 & 0x8000u);
  if (x != x) return static_cast<u16>(u >> 16 | 0x40u);
  return static_cast<u16>((u + 0x7fffu + (u >> 16 & 1u)) >> 16);
}
inline bf16x32 cvtne2ps_pbh(__m512 high, __m512 low) {
  const auto a = lanes<float>(low), b = lanes<float>(high);
  bf16x32 to;
  for (int i = 0; i < 16; ++i) to[i] = to_bf16(a.v[i]), to[i + 16] = to_bf16(b.v[i]);
  return to;
}
typedef u16 bf16x16 __attribute__((vector_size(32)));
inline bf16x16 cvtneps_pbh(__m512 a) {
  const auto x = lanes<float>(a);
  bf16x16 to;
  for (int i = 0; i < 16; ++i) to[i] = to_bf16(x.v[i]);
  return to;
}
inline __m512 dpbf16_ps(__m512 sums, bf16x32 a, bf16x32 b) {
  auto to = lanes<float>(sums);
  for (int i = 0; i < 16; ++i) {
    to.v[i] = std::fma(of_bf16(a[2 * i + 1]), of_bf16(b[2 * i + 1]), to.v[i]);
    to.v[i] = std::fma(of_bf16(a[2 * i]), of_bf16(b[2 * i]), to.v[i]);
  }
  return vector<__m512>(to);
}

}  // namespace emulated

#define __AVX512F__ 1
#define __AVX512BW__ 1
#if defined(EMULATE_VNNI)
#define __AVX512VNNI__ 1
#define __AVX512BF16__ 1
#endif
#define __m512bh emulated::bf16x32
#define __m256bh emulated::bf16x16
#define _mm512_abs_epi8 emulated::abs_epi8
#define _mm512_add_epi32 emulated::add_epi32
#define _mm512_and_si512 emulated::and_si512
#define _mm512_broadcast_i32x4 emulated::broadcast_i32x4
#define _mm512_cvtepi32_ps emulated::cvtepi32_ps
#define _mm512_cvtepi8_epi32 emulated::cvtepi8_epi32
#define _mm512_cvtepu16_epi32 emulated::cvtepu16_epi32
#define _mm512_cvtepu8_epi32 emulated::cvtepu8_epi32
#define _mm512_cvtne2ps_pbh emulated::cvtne2ps_pbh
#define _mm512_cvtneps_pbh emulated::cvtneps_pbh
#undef _mm512_cvtph_ps
#define _mm512_cvtph_ps emulated::cvtph_ps
#define _mm512_dpbf16_ps emulated::dpbf16_ps
#define _mm512_dpbusd_epi32 emulated::dpbusd_epi32
#define _mm512_fmadd_ps emulated::fmadd_ps
#define _mm512_load_si512 emulated::load
#define _mm512_loadu_si512 emulated::load
#define _mm512_madd_epi16 emulated::madd_epi16
#define _mm512_maddubs_epi16 emulated::maddubs_epi16
#define _mm512_mask_shuffle_epi8 emulated::mask_shuffle_epi8
#define _mm512_mask_storeu_epi16 emulated::mask_store<emulated::u16>
#define _mm512_mask_storeu_epi8 emulated::mask_store<emulated::u8>
#define _mm512_mask_sub_epi8 emulated::mask_sub_epi8
#define _mm512_max_ps emulated::max_ps
#define _mm512_min_ps emulated::min_ps
#define _mm512_packs_epi32 emulated::packs_epi32
#define _mm512_packs_epi16 emulated::packs_epi16
#define _mm512_permutex2var_epi32 emulated::permutex2var_epi32
#define _mm512_permutexvar_epi32 emulated::permutexvar_epi32
#define _mm512_storeu_si512 emulated::store
#define _mm512_movepi8_mask emulated::movepi8_mask
#define _mm512_rcp14_ps emulated::rcp14_ps
#define _mm512_reduce_add_epi32 emulated::reduce_add_epi32
#define _mm512_reduce_add_ps emulated::reduce_add_ps
#define _mm512_reduce_max_epi32 emulated::reduce_max_epi32
#define _mm512_reduce_max_ps emulated::reduce_max_ps
#undef _mm512_reduce_ps
#define _mm512_reduce_ps emulated::reduce_ps
#define _mm512_scalef_ps emulated::scalef_ps
#define _mm512_set1_epi16 emulated::set1_epi16
#define _mm512_set1_epi32 emulated::set1_epi32
#define _mm512_set1_epi8 emulated::set1_epi8
#define _mm512_setzero_si512 emulated::setzero
#undef _mm512_shuffle_epi32
#define _mm512_shuffle_epi32 emulated::shuffle_epi32
#define _mm512_shuffle_epi8 emulated::shuffle_epi8
#undef _mm512_slli_epi16
#undef _mm512_slli_epi32
#undef _mm512_srai_epi16
#undef _mm512_srli_epi16
#define _mm512_slli_epi16 emulated::slli_epi16
#define _mm512_slli_epi32 emulated::slli_epi32
#define _mm512_srai_epi16 emulated::srai_epi16
#define _mm512_srli_epi16 emulated::srli_epi16
#define _mm512_store_si512 emulated::store
#define _mm512_sub_epi8 emulated::sub_epi8
#define _mm512_xor_si512 emulated::xor_si512
