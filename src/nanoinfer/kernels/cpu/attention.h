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

// M rows of queries that share a pass over the keys: row r of a task is head r % group of token r / group.
template <int M>
struct Queries {
  const float* q[M];
  float* out[M];
  std::int64_t begin[M], end[M];  // positions that the row attends to
  std::int64_t lowest, highest;   // of all begins, and of all ends

  Queries(const AttentionTask& t, std::int64_t row) {
    NI_ROWS {
      const std::int64_t token = (row + m) / t.group, column = (row + m) % t.group * t.head_dim;
      q[m] = t.q + token * t.q_stride + column;
      out[m] = t.out + token * t.out_stride + column;
      end[m] = t.start + token + 1;
      begin[m] = end[m] > t.window ? end[m] - t.window : 0;
    }
    lowest = begin[0];  // tokens are in the order of their positions
    highest = end[M - 1];
  }
};

// Scores of M rows against the keys of B blocks; lanes are positions. A single row processes several blocks at once, so
// that additions of different scores overlap. Each score is summed in the order of the dimensions in all cases.
template <CacheType type, int M, int B>
NI_INLINE void scores(const AttentionTask& t, const std::uint8_t* const* blocks, const Queries<M>& rows, float* out,
                      std::int64_t stride) {
  using C = CacheOf<type>;
  const typename C::T* k[B];
  f32x16 acc[M][B];
  for (int b = 0; b < B; ++b) k[b] = (const typename C::T*)(blocks[b] + t.offset + C::kScales);
  NI_ROWS for (int b = 0; b < B; ++b) acc[m][b] = broadcast(0.0f);
  for (std::int64_t d = 0; d < t.head_dim; ++d)
    NI_UNROLL(4) for (int b = 0; b < B; ++b) {
      const f32x16 keys = C::get(k[b] + d * kBlock);
      NI_ROWS acc[m][b] = fma(keys, broadcast(rows.q[m][d]), acc[m][b]);
    }
  for (int b = 0; b < B; ++b) {
    f32x16 scale = broadcast(t.scale);
    if constexpr (type == CacheType::i8) scale = scale * load((const float*)(blocks[b] + t.offset));
    NI_ROWS {
      const f32x16 score = acc[m][b] * scale;
      store(out + m * stride + b * kBlock, t.softcap > 0 ? soft_cap(score, t.softcap) : score);
    }
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

// Softmax over the row's own positions, in place; all other weights become 0. s[0] is position `base`.
NI_INLINE void softmax(float* s, std::int64_t begin, std::int64_t end, std::int64_t stride) {
  const f32x16 nothing = broadcast(-__builtin_huge_valf());
  const auto own = [&](std::int64_t i, f32x16 x, float other) __attribute__((always_inline)) {
    if (begin > i) {
      float lanes[16];
      store(lanes, x);
      for (std::int64_t l = 0; l < 16 && i + l < begin; ++l) lanes[l] = other;
      x = load(lanes);
    }
    return first(end - i, x, other);
  };
  const std::int64_t from = begin / 16 * 16;
  f32x16 top = nothing, total = broadcast(0.0f);
  for (std::int64_t i = from; i < end; i += 16) top = max(own(i, load(s + i), -__builtin_huge_valf()), top);
  const f32x16 most = broadcast(largest(top));
  for (std::int64_t i = 0; i < from; i += 16) store(s + i, broadcast(0.0f));
  for (std::int64_t i = from; i < stride; i += 16) {
    const f32x16 e = end > i ? own(i, exp(load(s + i) - most), 0.0f) : broadcast(0.0f);
    store(s + i, e);
    if (end > i) total = total + e;
  }
  const f32x16 share = broadcast(1.0f / sum(total));
  for (std::int64_t i = from; i < end; i += 16) store(s + i, load(s + i) * share);
}

// Weighted sums of values for M rows, up to 64 dimensions at a time; lanes are dimensions. A row reads only its own
// positions, because a weight of 0 does not cancel a NaN. weights[0] is the first position of block `first_block`.
template <CacheType type, int M, int N>
NI_INLINE void mix(const AttentionTask& t, const float* weights, std::int64_t stride, const Queries<M>& rows,
                   std::int64_t first_block, std::int64_t d) {
  using C = CacheOf<type>;
  const std::int64_t width = padded(t.head_dim);
  const std::int64_t common_begin = rows.begin[M - 1], common_end = rows.end[0];  // attended by all rows
  f32x16 acc[M][N];
  NI_ROWS for (int j = 0; j < N; ++j) acc[m][j] = broadcast(0.0f);
  for (std::int64_t block = first_block; block * kBlock < rows.highest; ++block) {
    const std::int64_t base = block * kBlock;
    const std::uint8_t* part = t.blocks[block] + t.offset;
    const typename C::T* v = (const typename C::T*)values_at<type>(t, block) + d;
    const float* scale = (const float*)part + kBlock;  // scales of the values, int8 only
    const float* w = weights + (block - first_block) * kBlock;
    const auto add = [&](std::int64_t s, bool everyone) __attribute__((always_inline)) {
      f32x16 values[N];
      NI_UNROLL(4) for (int j = 0; j < N; ++j) values[j] = C::get(v + s * width + 16 * j);
      NI_ROWS {
        if (!everyone && (base + s >= rows.end[m] || base + s < rows.begin[m])) continue;
        float p = w[m * stride + s];
        if constexpr (type == CacheType::i8) p *= scale[s];
        const f32x16 share = broadcast(p);
        NI_UNROLL(4) for (int j = 0; j < N; ++j) acc[m][j] = fma(values[j], share, acc[m][j]);
      }
    };
    if (M <= 4 && (block + 2) * kBlock < rows.highest)
      prefetch_lines(values_at<type>(t, block + 2), kBlock * width * sizeof(*v));
    std::int64_t s = rows.lowest > base ? rows.lowest - base : 0;
    const std::int64_t count = rows.highest - base < kBlock ? rows.highest - base : kBlock;
    const std::int64_t from = common_begin - base < count ? common_begin - base : count;
    const std::int64_t to = common_end - base < count ? common_end - base : count;
    for (; s < from; ++s) add(s, /*everyone=*/false);
    for (; s < to; ++s) add(s, /*everyone=*/true);
    for (; s < count; ++s) add(s, /*everyone=*/false);
  }
  NI_ROWS for (int j = 0; j < N; ++j)
    store_first(rows.out[m] + d + 16 * j, acc[m][j], t.head_dim - d - 16 * j);
}

// Attention of M consecutive rows: scores, softmax over each row's own positions, weighted sums of values.
template <CacheType type, int M>
void attend(const AttentionTask& t, std::int64_t row) {
  const Queries<M> rows(t, row);
  const std::int64_t first_block = rows.lowest / kBlock, blocks = (rows.highest + kBlock - 1) / kBlock;
  const std::int64_t stride = (blocks - first_block) * kBlock;
  float* s = t.scratch;  // (M, stride); blocks before first_block are skipped
  constexpr int kAtOnce = M == 1 ? 4 : M <= 4 ? 2 : 1;
  const std::int64_t key_bytes = t.head_dim * kBlock * sizeof(typename CacheOf<type>::T);
  const auto at = [&](std::int64_t block) { return s + (block - first_block) * kBlock; };
  std::int64_t b = first_block;
  for (; b + kAtOnce <= blocks; b += kAtOnce) {
    if constexpr (M <= 4)
      for (std::int64_t next = b + kAtOnce; next < b + 2 * kAtOnce && next < blocks; ++next)
        prefetch_lines(t.blocks[next] + t.offset, key_bytes);
    scores<type, M, kAtOnce>(t, t.blocks + b, rows, at(b), stride);
  }
  if constexpr (M == 1) {
    if (blocks - b == 3) scores<type, 1, 3>(t, t.blocks + b, rows, at(b), stride), b += 3;
    if (blocks - b == 2) scores<type, 1, 2>(t, t.blocks + b, rows, at(b), stride), b += 2;
  }
  for (; b < blocks; ++b) scores<type, M, 1>(t, t.blocks + b, rows, at(b), stride);
  if constexpr (M <= 4)
    for (b = first_block; b < first_block + 2 && b < blocks; ++b)
      prefetch_lines(values_at<type>(t, b), kBlock * padded(t.head_dim) * sizeof(typename CacheOf<type>::T));
  const std::int64_t base = first_block * kBlock;
  NI_ROWS softmax(s + m * stride, rows.begin[m] - base, rows.end[m] - base, stride);
  std::int64_t d = 0;
  if constexpr (M <= kRowsFloat / 2)
    for (; d + 48 < t.head_dim; d += 64) mix<type, M, 4>(t, s, stride, rows, first_block, d);
  for (; d + 16 < t.head_dim; d += 32) mix<type, M, 2>(t, s, stride, rows, first_block, d);
  if (d < t.head_dim) mix<type, M, 1>(t, s, stride, rows, first_block, d);
}

// Rows are processed in tiles of 8, 4, 3, 2 and 1, as many as fit in the registers of the instruction set.
template <CacheType type>
void attention_as(const AttentionTask& task) {
  const std::int64_t rows = task.num_tokens * task.group;
  std::int64_t i = 0;
  if constexpr (kWidth == 16) {
    for (; i + 8 <= rows; i += 8) attend<type, 8>(task, i);
    if (i + 4 <= rows) attend<type, 4>(task, i), i += 4;
    if (i + 3 <= rows) attend<type, 3>(task, i), i += 3;
  }
  for (; i + 2 <= rows; i += 2) attend<type, 2>(task, i);
  if (i < rows) attend<type, 1>(task, i);
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
