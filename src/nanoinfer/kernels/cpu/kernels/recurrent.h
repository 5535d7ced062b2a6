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
// an addition does not wait for the one before. The output is that of the matrix before the token, decay * S^T q, and of the
// token, (k . q) u: the same bits whether the matrix is written or not. whole: the panel has kPanel columns.
template <bool whole, bool delta, bool reads>
NI_INLINE void update_panel(const StateUpdate& s, const float* token, float* y, bool writes) {
  const float *q = token, *k = q + s.key_dim, *v = k + s.key_dim + s.first, *gates = k + s.key_dim + s.value_dim;
  const std::int64_t width = whole ? kPanel : s.width, rows = s.key_dim;
  float* const matrix = s.matrix;
  const f32x16 decay = broadcast(gates[0]), zero = broadcast(0.0f);
  const auto get = [&](const float* p, int j) __attribute__((always_inline)) {
    return whole ? load(p + 16 * j) : load_first(p + 16 * j, width - 16 * j);
  };
  const auto put = [&](float* p, int j, f32x16 x) __attribute__((always_inline)) {
    if (whole) store(p + 16 * j, x);
    else store_first(p + 16 * j, x, width - 16 * j);
  };
  f32x16 found[2][2] = {{zero, zero}, {zero, zero}}, asked[2][2] = {{zero, zero}, {zero, zero}};
  const auto find = [&](std::int64_t i, int c) __attribute__((always_inline)) {
    for (int j = 0; j < 2; ++j) {
      const f32x16 x = get(matrix + i * width, j);
      if (delta) found[c][j] = fma(x, broadcast(k[i]), found[c][j]);
      if (reads) asked[c][j] = fma(x, broadcast(q[i]), asked[c][j]);
    }
  };
  std::int64_t i = 0;
  for (; (delta || reads) && i + 1 < rows; i += 2) find(i, 0), find(i + 1, 1);
  if (i < rows) find(i, 0);
  f32x16 u[2], both = zero;
  for (std::int64_t at = 0; reads && at < rows; at += 16) both = fma(load_first(k + at, rows - at), load_first(q + at, rows - at), both);
  if (reads) both = broadcast(sum(both));
  for (int j = 0; j < 2; ++j) {
    const f32x16 value = get(v, j);
    u[j] = broadcast(gates[1]) * (delta ? value - decay * (found[0][j] + found[1][j]) : value);
    if (reads) put(y, j, fma(both, u[j], fma(decay, asked[0][j] + asked[1][j], broadcast(s.skip) * value)));
  }
  for (i = 0; writes && i < rows; ++i)
    for (int j = 0; j < 2; ++j) put(matrix + i * width, j, fma(broadcast(k[i]), u[j], decay * get(matrix + i * width, j)));
}

template <bool whole, bool delta>
void update_matrix(const StateUpdate& s) {
  for (std::int64_t t = 0; t < s.num_tokens; ++t) {
    const float* token = s.tokens + t * s.token_stride;
    if (s.y) update_panel<whole, delta, true>(s, token, s.y + t * s.y_stride, !s.reads_last || t + 1 < s.num_tokens);
    else update_panel<whole, delta, false>(s, token, nullptr, /*writes=*/true);
  }
}

void update_state(const StateUpdate& s) {
  const bool whole = s.width == kPanel;
  if (whole) s.delta ? update_matrix<true, true>(s) : update_matrix<true, false>(s);
  else s.delta ? update_matrix<false, true>(s) : update_matrix<false, false>(s);
}
