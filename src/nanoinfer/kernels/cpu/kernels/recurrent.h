// The states of recurrent layers: convolutions over the last tokens, and updates of matrices by tokens.
// Part of kernels.cpp, which includes it in the namespace of each instruction set.
#pragma once

#include "rows.h"

void convolve(const Convolution& c) {
  for (std::int64_t at = 0; at < c.count; at += 16) {
    const std::int64_t n = c.count - at;
    f32x16 y = broadcast(0.0f);
    for (std::int64_t i = 0; i < c.taps; ++i)
      y = fma(load_first(c.rows[i] + at, n), load_first(c.weight + i * c.stride + at, n), y);
    y = y + load_first(c.bias + at, n);
    store_first(c.y + at, c.activated ? silu(y) : y, n);
  }
}

void gate(float* y, const float* z, std::int64_t n, Gate kind) {
  for (std::int64_t at = 0; at < n; at += 16) {
    const f32x16 x = load_first(z + at, n - at);
    const f32x16 factor = kind == Gate::silu ? silu(x) : over(broadcast(1.0f), broadcast(1.0f) + exp(broadcast(0.0f) - x));
    store_first(y + at, load_first(y + at, n - at) * factor, n - at);
  }
}

// One token. A lane has a column of the matrix, whose rows are added in their order to two sums, of even and of odd rows, so that
// an addition does not wait for the one before. whole: the panel has kPanel columns.
template <bool whole>
NI_INLINE void update_panel(const StateUpdate& s, const float* token, float* y) {
  const float *q = token, *k = q + s.key_dim, *v = k + s.key_dim + s.first, *gates = k + s.key_dim + s.value_dim;
  const std::int64_t width = whole ? kPanel : s.width;
  const f32x16 decay = broadcast(gates[0]), rate = broadcast(gates[1]), skip = broadcast(s.skip);
  const auto get = [&](const float* p, int j) __attribute__((always_inline)) {
    return whole ? load(p + 16 * j) : load_first(p + 16 * j, width - 16 * j);
  };
  const auto put = [&](float* p, int j, f32x16 x) __attribute__((always_inline)) {
    if (whole) store(p + 16 * j, x);
    else store_first(p + 16 * j, x, width - 16 * j);
  };
  f32x16 u[2], sum[2][2];
  for (int j = 0; j < 2; ++j) u[j] = get(v, j), sum[0][j] = u[j] * skip, sum[1][j] = broadcast(0.0f);
  if (s.delta) {
    f32x16 found[2][2] = {{broadcast(0.0f), broadcast(0.0f)}, {broadcast(0.0f), broadcast(0.0f)}};
    const auto find = [&](std::int64_t i, int c) __attribute__((always_inline)) {
      const f32x16 key = broadcast(k[i]);
      for (int j = 0; j < 2; ++j) found[c][j] = fma(get(s.matrix + i * width, j), key, found[c][j]);
    };
    std::int64_t i = 0;
    for (; i + 1 < s.key_dim; i += 2) find(i, 0), find(i + 1, 1);
    if (i < s.key_dim) find(i, 0);
    for (int j = 0; j < 2; ++j) u[j] = u[j] - decay * (found[0][j] + found[1][j]);
  }
  for (int j = 0; j < 2; ++j) u[j] = u[j] * rate;
  const auto update = [&](std::int64_t i, int c) __attribute__((always_inline)) {
    const f32x16 key = broadcast(k[i]), query = broadcast(q[i]);
    for (int j = 0; j < 2; ++j) {
      const f32x16 x = fma(key, u[j], decay * get(s.matrix + i * width, j));
      put(s.matrix + i * width, j, x);
      sum[c][j] = fma(x, query, sum[c][j]);
    }
  };
  std::int64_t i = 0;
  for (; i + 1 < s.key_dim; i += 2) update(i, 0), update(i + 1, 1);
  if (i < s.key_dim) update(i, 0);
  if (y == nullptr) return;
  for (int j = 0; j < 2; ++j) put(y, j, sum[0][j] + sum[1][j]);
}

// The outputs of one token, in one pass over the matrix, which is not written: S^T q of the matrix after the token is
// decay * S^T q + (k . q) u.
template <bool whole>
NI_INLINE void read_panel(const StateUpdate& s, const float* token, float* y) {
  const float *q = token, *k = q + s.key_dim, *v = k + s.key_dim + s.first, *gates = k + s.key_dim + s.value_dim;
  const std::int64_t width = whole ? kPanel : s.width;
  const f32x16 decay = broadcast(gates[0]), rate = broadcast(gates[1]), skip = broadcast(s.skip);
  f32x16 found[2] = {broadcast(0.0f), broadcast(0.0f)}, asked[2] = {found[0], found[0]}, both = found[0];
  for (std::int64_t at = 0; at < s.key_dim; at += 16)
    both = fma(load_first(k + at, s.key_dim - at), load_first(q + at, s.key_dim - at), both);
  both = broadcast(sum(both));
  for (std::int64_t i = 0; i < s.key_dim; ++i)
    for (int j = 0; j < 2; ++j) {
      const float* p = s.matrix + i * width + 16 * j;
      const f32x16 x = whole ? load(p) : load_first(p, width - 16 * j);
      found[j] = fma(x, broadcast(k[i]), found[j]);
      asked[j] = fma(x, broadcast(q[i]), asked[j]);
    }
  for (int j = 0; j < 2; ++j) {
    const f32x16 value = load_first(v + 16 * j, width - 16 * j);
    const f32x16 u = rate * (s.delta ? value - decay * found[j] : value);
    store_first(y + 16 * j, fma(both, u, fma(decay, asked[j], skip * value)), width - 16 * j);
  }
}

void update_state(const StateUpdate& s) {
  for (std::int64_t t = 0; t < s.num_tokens; ++t) {
    const float* token = s.tokens + t * s.token_stride;
    float* y = s.y ? s.y + t * s.y_stride : nullptr;
    const bool reads = s.reads_last && t == s.num_tokens - 1;
    if (reads && s.width == kPanel) read_panel<true>(s, token, y);
    else if (reads) read_panel<false>(s, token, y);
    else if (s.width == kPanel) update_panel<true>(s, token, y);
    else update_panel<false>(s, token, y);
  }
}
