// Matrix products: tiles of rows times panels of packed weights. blocks.h has those in the formats of GGUF files.
// Part of kernels.cpp, which includes it in the namespace of each instruction set.
#pragma once

#include "prefetch.h"

// Rows of activations that share one pass over a panel: as many as fit in the registers for accumulators.
constexpr int kRowsFloat = kWidth == 16 ? 12 : kWidth == 8 ? 3 : 2;
// In few bits, each row needs an integer and a float accumulator; AVX2 without dot4 also those of its pairs.
constexpr int kRowsInt = kWidth == 16 ? 6 : kWidth == 8 ? (kPairs ? 4 : 6) : 2;
// Size limit of the prepared rows that are processed together, so that they fit in the second-level cache.
constexpr std::size_t kRowBlockBytes = 384 << 10;

// Rows are processed in tiles of M. A prepared row is a list of 4-byte units (a float, two bfloat16, four int8); a tile
// stores unit 0 of its M rows, then unit 1, and so on, so that one pointer reads all rows.
struct RowTile {
  const std::uint8_t* w;
  const std::uint8_t* x;
  std::int64_t depth;
  const std::uint8_t* ahead;  // what to prefetch, `stride` bytes for each line of weights
  std::int64_t stride;

  template <class T>
  const T* units(std::int64_t from, int rows) const {
    return (const T*)x + from * rows;
  }
};

// The split of `rows` rows into tiles of nearly equal height, at most `most` rows each.
struct Tiling {
  std::int64_t rows, tiles;

  Tiling(std::int64_t rows, std::int64_t most) : rows(rows), tiles((rows + most - 1) / most) {}
  std::int64_t begin(std::int64_t tile) const { return rows * tile / tiles; }
  std::int64_t tile_of(std::int64_t row) const { return ((row + 1) * tiles + rows - 1) / rows - 1; }
};

// Call f<M>() for the height M of a tile, 1 <= M <= most.
template <int most, class F>
NI_INLINE void with_height(std::int64_t rows, F f) {
  if constexpr (most > 1)
    if (rows < most) return with_height<most - 1>(rows, f);
  f.template operator()<most>();
}

template <int M>
struct Acc {
  f32x16 v[M][2];
};

#define NI_ROWS NI_UNROLL(16) for (int m = 0; m < M; ++m)
#define NI_HALVES NI_UNROLL(2) for (int h = 0; h < 2; ++h)

NI_INLINE f32x16 weights_at(const float* w) { return load(w); }
NI_INLINE f32x16 weights_at(const std::uint16_t* w) { return load_f16(w); }

// Add the products of one input: a line of weights, floats or the bits of float16, and a float of each row.
template <class W, int M>
NI_INLINE void add_input(const W* w, const float* x, Acc<M>& acc) {
  const f32x16 w0 = weights_at(w), w1 = weights_at(w + 16);
  NI_ROWS {
    const f32x16 a = broadcast(x[m]);
    acc.v[m][0] = fma(w0, a, acc.v[m][0]);
    acc.v[m][1] = fma(w1, a, acc.v[m][1]);
  }
}

template <class W, int M>
NI_INLINE void tile_floats(const RowTile& t, Acc<M>& acc) {
  const W* w = (const W*)t.w;
  const std::uint8_t* ahead = t.ahead;
  const float* x = t.units<float>(0, M);
  for (std::int64_t k = 0; k < t.depth; ++k, w += kPanel, x += M) {
    prefetch_line<M>(w, ahead, t.stride);
    add_input(w, x, acc);
  }
}

template <int M>
NI_INLINE void tile_bf16(const RowTile& t, Acc<M>& acc) {  // two inputs in each step
  const std::uint8_t *w = t.w, *ahead = t.ahead;
  const std::int32_t* x = t.units<std::int32_t>(0, M);
  for (std::int64_t k = 0; k < t.depth / 2; ++k, w += 128, x += M) {
    prefetch_line<M>(w, ahead, t.stride);
    const i32x16 w0 = load_ints(w), w1 = load_ints(w + 64);
    NI_ROWS {
      acc.v[m][0] = dot2_bf16(acc.v[m][0], w0, x[m]);
      acc.v[m][1] = dot2_bf16(acc.v[m][1], w1, x[m]);
    }
  }
}

// The units of a row for i8: depth / 4 units of four int8, then the scale and then the shift of each group.
struct Int8Units {
  const std::int32_t* x;
  const float* scale;
  const std::int32_t* shift;
};
template <int M>
NI_INLINE Int8Units int8_units(const RowTile& t) {
  const std::int64_t quads = t.depth / 4, groups = t.depth / kGroup;
  return {t.units<std::int32_t>(0, M), t.units<float>(quads, M), t.units<std::int32_t>(quads + groups, M)};
}

// The halves of a panel whose sums are held in registers. Narrow registers have space for one.
constexpr int kHalves = kWidth == 16 ? 2 : 1;

// Weights are stored as w + 128, unsigned. sum (w + 128) a - 128 sum a = sum w a, so a group's sum starts at the shift; where
// pairs of signed bytes take fewer instructions, at 0.
template <int M>
NI_INLINE void tile_i8(const RowTile& t, Acc<M>& acc) {
  constexpr bool kSigned = kPairs && (M > 1 || !kMultiplies16);
  constexpr int N = M == 1 ? 2 : kHalves;
  const std::uint8_t *w = t.w, *ahead = t.ahead;
  Int8Units u = int8_units<M>(t);
  for (std::int64_t g = 0; g < t.depth / kGroup; ++g) {
    NI_UNROLL(2) for (int h = 0; h < 2; h += N) {
      i32x16 dot[M][N];
      NI_ROWS NI_UNROLL(2) for (int n = 0; n < N; ++n) dot[m][n] = broadcast(kSigned ? 0 : u.shift[m]);
      for (int k = 0; k < kGroup / 4; ++k) {
        if (h == 0) prefetch_line<M>(w + k * kLine, ahead, t.stride);
        i32x16 v[N];
        NI_UNROLL(2) for (int n = 0; n < N; ++n) v[n] = load_ints(w + k * kLine + 64 * (h + n));
        NI_ROWS NI_UNROLL(2) for (int n = 0; n < N; ++n) {
          const std::int32_t x = u.x[k * M + m];
          dot[m][n] = kSigned ? add_sums(dot[m][n], dot_signed_pairs(to_signed(v[n]), x)) : dot4(dot[m][n], v[n], x);
        }
      }
      NI_ROWS NI_UNROLL(2) for (int n = 0; n < N; ++n)
        acc.v[m][h + n] = fma(to_float(dot[m][n]), broadcast(u.scale[m]), acc.v[m][h + n]);
    }
    w += kLine * (kGroup / 4), u.x += M * (kGroup / 4), u.scale += M, u.shift += M;
  }
}

NI_INLINE f32x16 finish(const MatmulTask& task, f32x16 y, const float* at) {
  if (task.added != nullptr) y = y + load(task.added + (at - task.y));
  switch (task.epilogue) {
    case Epilogue::gelu_tanh: return gelu_tanh(y);
    case Epilogue::gelu_erf: return gelu_erf(y);
    case Epilogue::silu: return silu(y);
    case Epilogue::relu: return max(y, broadcast(0.0f));
    case Epilogue::relu2: return relu2(y);
    case Epilogue::clamped_silu: return clamped_silu(y);
    case Epilogue::add: return load(at) + y;
    case Epilogue::multiply: return load(at) * y;
    case Epilogue::clamped_multiply: return load(at) * clamped_plus_one(y);
    case Epilogue::soft_cap: return soft_cap(y, task.cap);
    default: return y;
  }
}

// Write the outputs of a panel for `rows` rows from their sums, biases included. Not inlined: each tile would contain every
// epilogue several times, which takes most of the time to compile it.
__attribute__((noinline)) void finish_rows(const MatmulTask& task, std::int64_t panel, std::int64_t row, std::int64_t rows,
                                           const f32x16 (*sums)[2]) {
  for (std::int64_t m = 0; m < rows; ++m)
    NI_HALVES {
      float* y = task.y + (row + m) * task.y_stride + panel * kPanel + 16 * h;
      store(y, finish(task, sums[m][h], y));
    }
}

// The same from the sums of a tile, which are scaled if each output has a scale.
template <bool scaled, int M>
NI_INLINE void finish_panel(const MatmulTask& task, std::int64_t panel, std::int64_t row, const Acc<M>& acc) {
  f32x16 sums[M][2];  // a copy: what has an address is not kept in registers
  NI_HALVES {
    const std::int64_t column = panel * kPanel + 16 * h;
    const f32x16 bias = load(task.w->bias + column);
    f32x16 scale = broadcast(1.0f);
    if constexpr (scaled) scale = load(task.w->scale + column);
    NI_ROWS sums[m][h] = scaled ? fma(acc.v[m][h], scale, bias) : acc.v[m][h] + bias;
  }
  finish_rows(task, panel, row, M, sums);
}

// Tile `part` of `parts` that are multiplied with a panel in turn. Several prefetch a part each of the next panel: otherwise
// the first of them would wait for memory, and the others not use it.
template <WeightType type, int M>
__attribute__((noinline)) void tile(const MatmulTask& task, std::int64_t panel, std::int64_t row, std::int64_t part, std::int64_t parts) {
  const Matrix& w = *task.w;
  const std::uint8_t* const data = w.data + panel * w.panel_bytes;
  const std::int64_t bytes = (std::int64_t)w.panel_bytes;
  RowTile t{data, task.x + row * task.x_stride, w.depth, data + bytes + bytes * part / parts, (kLine + parts - 1) / parts};
  if (parts == 1) {
    constexpr bool far = M > kRowsNear;
    t.ahead = far ? data + kPrefetchFar : data;
    t.stride = far ? kLine : 0;
  }
  Acc<M> acc;
  NI_ROWS NI_HALVES acc.v[m][h] = broadcast(0.0f);
  if constexpr (type == WeightType::f32) tile_floats<float, M>(t, acc);
  if constexpr (type == WeightType::f16) tile_floats<std::uint16_t, M>(t, acc);
  if constexpr (type == WeightType::bf16) tile_bf16<M>(t, acc);
  if constexpr (type == WeightType::i8) tile_i8<M>(t, acc);
  static_assert(type <= WeightType::i8, "a format without a tile");
  finish_panel<type == WeightType::i8, M>(task, panel, row, acc);
}
