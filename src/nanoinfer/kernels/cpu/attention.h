// Attention over blocks of keys and values, and the storage of new ones.
// Part of kernels.cpp, which includes it in the namespace of each instruction set.
#pragma once

// A head's part of a block:  keys (D, kBlock), transposed    values (kBlock, D rounded up to 16)
// For int8, float scales precede them: one for each key (kBlock), then one for each value (kBlock).

NI_INLINE std::int64_t padded(std::int64_t head_dim) { return (head_dim + 15) & ~std::int64_t{15}; }

template <CacheType type>
struct CacheOf;
template <>
struct CacheOf<CacheType::f32> {
  using T = float;
  static constexpr std::size_t kScales = 0;
  NI_INLINE f32x16 get(const T* p) { return load(p); }
};
template <>
struct CacheOf<CacheType::bf16> {
  using T = std::uint16_t;
  static constexpr std::size_t kScales = 0;
  NI_INLINE f32x16 get(const T* p) { return load_bf16(p); }
};
template <>
struct CacheOf<CacheType::i8> {
  using T = std::int8_t;
  static constexpr std::size_t kScales = 2 * kBlock * sizeof(float);
  NI_INLINE f32x16 get(const T* p) { return load_i8(p); }
};

// Scores of M queries against the keys of B blocks; lanes are positions. A single query processes several blocks at once,
// so that additions of different scores overlap. Each score is summed in the order of the dimensions in all cases.
template <CacheType type, int M, int B>
NI_INLINE void scores(const AttentionTask& t, const std::uint8_t* const* blocks, const float* q, float* out,
                      std::int64_t row) {
  using C = CacheOf<type>;
  const typename C::T* k[B];
  f32x16 acc[M][B];
  for (int b = 0; b < B; ++b) k[b] = (const typename C::T*)(blocks[b] + t.offset + C::kScales);
  NI_ROWS for (int b = 0; b < B; ++b) acc[m][b] = broadcast(0.0f);
  for (std::int64_t d = 0; d < t.head_dim; ++d)
    _Pragma("GCC unroll 4") for (int b = 0; b < B; ++b) {
      const f32x16 keys = C::get(k[b] + d * kBlock);
      NI_ROWS acc[m][b] = fma(keys, broadcast(q[m * t.q_stride + d]), acc[m][b]);
    }
  for (int b = 0; b < B; ++b) {
    f32x16 scale = broadcast(1.0f / __builtin_sqrtf((float)t.head_dim));
    if constexpr (type == CacheType::i8) scale = scale * load((const float*)(blocks[b] + t.offset));
    NI_ROWS store(out + m * row + b * kBlock, acc[m][b] * scale);
  }
}

// Blocks are far apart in memory, so the hardware prefetcher does not predict the next one.
NI_INLINE void prefetch_lines(const std::uint8_t* p, std::int64_t bytes) {
  for (std::int64_t at = 0; at < bytes; at += 64) prefetch(p + at);
}

template <CacheType type>
NI_INLINE const std::uint8_t* values_at(const AttentionTask& t, std::int64_t block) {
  using C = CacheOf<type>;
  return t.blocks[block] + t.offset + C::kScales + t.head_dim * kBlock * sizeof(typename C::T);
}

// Weighted sums of values for M queries, up to 64 dimensions at a time; lanes are dimensions. Query m reads only the
// positions below shortest + m, because a weight of 0 does not cancel a NaN.
template <CacheType type, int M, int N>
NI_INLINE void mix(const AttentionTask& t, const float* weights, std::int64_t row, std::int64_t shortest,
                   std::int64_t d, float* out) {
  using C = CacheOf<type>;
  const std::int64_t width = padded(t.head_dim), length = shortest + M - 1;
  f32x16 acc[M][N];
  NI_ROWS for (int j = 0; j < N; ++j) acc[m][j] = broadcast(0.0f);
  for (std::int64_t base = 0; base < length; base += kBlock) {
    const std::uint8_t* part = t.blocks[base / kBlock] + t.offset;
    const typename C::T* v = (const typename C::T*)values_at<type>(t, base / kBlock) + d;
    const float* scale = (const float*)part + kBlock;  // scales of the values, int8 only
    const std::int64_t count = length - base < kBlock ? length - base : kBlock;
    const std::int64_t common = shortest - base < count ? shortest - base : count;  // attended by all queries
    const auto add = [&](std::int64_t s, bool everyone) __attribute__((always_inline)) {
      f32x16 values[N];
      _Pragma("GCC unroll 4") for (int j = 0; j < N; ++j) values[j] = C::get(v + s * width + 16 * j);
      NI_ROWS {
        if (!everyone && base + s >= shortest + m) continue;
        float p = weights[m * row + base + s];
        if constexpr (type == CacheType::i8) p *= scale[s];
        const f32x16 share = broadcast(p);
        _Pragma("GCC unroll 4") for (int j = 0; j < N; ++j) acc[m][j] = fma(values[j], share, acc[m][j]);
      }
    };
    if (M == 1 && base + 2 * kBlock < length)
      prefetch_lines(values_at<type>(t, base / kBlock + 2), kBlock * width * sizeof(*v));
    std::int64_t s = 0;
    for (; s < common; ++s) add(s, /*everyone=*/true);
    for (; s < count; ++s) add(s, /*everyone=*/false);
  }
  NI_ROWS for (int j = 0; j < N; ++j) store_first(out + m * t.out_stride + d + 16 * j, acc[m][j], t.head_dim - d - 16 * j);
}

// Attention of M consecutive queries: scores, softmax over each query's own length, weighted sums of values.
template <CacheType type, int M>
void attend(const AttentionTask& t, std::int64_t query) {
  const float* q = t.q + query * t.q_stride;
  float* out = t.out + query * t.out_stride;
  const std::int64_t shortest = t.start + query + 1, length = shortest + M - 1;
  const std::int64_t row = (length + kBlock - 1) / kBlock * kBlock;
  float* s = t.scratch;  // (M, row)
  constexpr int kAtOnce = M == 1 ? 4 : 1;
  const std::int64_t blocks = row / kBlock;
  std::int64_t b = 0;
  for (; b + kAtOnce <= blocks; b += kAtOnce) {
    if constexpr (M == 1)
      for (std::int64_t next = b + kAtOnce; next < b + 2 * kAtOnce && next < blocks; ++next)
        prefetch_lines(t.blocks[next] + t.offset, t.head_dim * kBlock * sizeof(typename CacheOf<type>::T));
    scores<type, M, kAtOnce>(t, t.blocks + b, q, s + b * kBlock, row);
  }
  if constexpr (M == 1) {
    if (blocks - b == 3) scores<type, 1, 3>(t, t.blocks + b, q, s + b * kBlock, row), b += 3;
    if (blocks - b == 2) scores<type, 1, 2>(t, t.blocks + b, q, s + b * kBlock, row), b += 2;
  }
  for (; b < blocks; ++b) scores<type, M, 1>(t, t.blocks + b, q, s + b * kBlock, row);
  if constexpr (M == 1)
    for (b = 0; b < 2 && b < blocks; ++b) prefetch_lines(values_at<type>(t, b), kBlock * padded(t.head_dim) * sizeof(typename CacheOf<type>::T));
  NI_ROWS {
    const std::int64_t own = shortest + m;
    float* mine = s + m * row;
    f32x16 top = broadcast(-__builtin_huge_valf()), total = broadcast(0.0f);
    for (std::int64_t i = 0; i < own; i += 16) top = max(first(own - i, load(mine + i), -__builtin_huge_valf()), top);
    const f32x16 most = broadcast(largest(top));
    for (std::int64_t i = 0; i < row; i += 16) {
      const f32x16 e = own > i ? first(own - i, exp(load(mine + i) - most), 0.0f) : broadcast(0.0f);
      store(mine + i, e);
      if (own > i) total = total + e;
    }
    const f32x16 share = broadcast(1.0f / sum(total));
    for (std::int64_t i = 0; i < own; i += 16) store(mine + i, load(mine + i) * share);
  }
  std::int64_t d = 0;
  if constexpr (M <= kRowsFloat / 2)
    for (; d + 48 < t.head_dim; d += 64) mix<type, M, 4>(t, s, row, shortest, d, out);
  for (; d + 16 < t.head_dim; d += 32) mix<type, M, 2>(t, s, row, shortest, d, out);
  if (d < t.head_dim) mix<type, M, 1>(t, s, row, shortest, d, out);
}

template <CacheType type>
void attention_as(const AttentionTask& task) {
  constexpr int kTall = kWidth == 16 ? (int)kQueryTile : 2;
  std::int64_t i = 0;
  for (; i + kTall <= task.num_queries; i += kTall) attend<type, kTall>(task, i);
  for (; i < task.num_queries; ++i) attend<type, 1>(task, i);
}

void attention(const AttentionTask& task) {
  switch (task.type) {
    case CacheType::f32: return attention_as<CacheType::f32>(task);
    case CacheType::bf16: return attention_as<CacheType::bf16>(task);
    case CacheType::i8: return attention_as<CacheType::i8>(task);
  }
}

NI_INLINE float int8_scale(const float* x, std::int64_t n) {
  float most = 0, check = 0;
  for (std::int64_t i = 0; i < n; ++i) {
    most = __builtin_fabsf(x[i]) > most ? __builtin_fabsf(x[i]) : most;
    check += x[i] * 0.0f;
  }
  return most / 127.0f + check;
}
NI_INLINE std::int8_t to_int8(float x, float scale) {  // scale 0: all values are 0; NaN: the scale carries it
  return scale > 1e-32f && scale < __builtin_huge_valf() ? (std::int8_t)__builtin_rintf(x / scale) : (std::int8_t)0;
}

void store_kv(CacheType type, const float* k, const float* v, std::int64_t head_dim, std::uint8_t* part,
              std::int64_t slot) {
  const std::int64_t width = padded(head_dim);
  if (type == CacheType::f32) {
    float *keys = (float*)part, *values = keys + head_dim * kBlock + slot * width;
    for (std::int64_t d = 0; d < head_dim; ++d) keys[d * kBlock + slot] = k[d];
    for (std::int64_t d = 0; d < head_dim; ++d) values[d] = v[d];
  } else if (type == CacheType::bf16) {
    std::uint16_t *keys = (std::uint16_t*)part, *values = keys + head_dim * kBlock + slot * width;
    for (std::int64_t d = 0; d < head_dim; d += 16) {
      std::uint16_t narrow[16];
      store_bf16(narrow, load_first(k + d, head_dim - d));
      for (std::int64_t j = 0; j < 16 && d + j < head_dim; ++j) keys[(d + j) * kBlock + slot] = narrow[j];
      store_bf16(values + d, load_first(v + d, head_dim - d));  // the row is padded to 16
    }
  } else {
    float* scales = (float*)part;
    const float key_scale = scales[slot] = int8_scale(k, head_dim);
    const float value_scale = scales[kBlock + slot] = int8_scale(v, head_dim);
    std::int8_t* keys = (std::int8_t*)(scales + 2 * kBlock);
    std::int8_t* values = keys + head_dim * kBlock + slot * width;
    for (std::int64_t d = 0; d < head_dim; ++d) keys[d * kBlock + slot] = to_int8(k[d], key_scale);
    for (std::int64_t d = 0; d < head_dim; ++d) values[d] = to_int8(v[d], value_scale);
  }
}
