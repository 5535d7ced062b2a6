// Matrix products with AMX: tiles of 16 rows of activations times 16 outputs, in bfloat16, int8 and int4.
// Part of kernels.cpp, which includes it in the namespace of the instruction set `amx`.
//
// A tile register holds 16 rows of 64 bytes. One instruction multiplies a tile of activations (16 rows, 32 bfloat16 or
// 64 int8) by a tile of weights (as many inputs, 16 outputs), whose layout is that of half a panel. Activations are
// therefore not interleaved (products.h, Tile): each row lies as it is. The rows after the last one, up to a multiple of
// 16, are read and their results dropped, so the memory of prepared rows must be that large (padded_rows).
//
// A row's result does not depend on the number of rows. bfloat16 always takes this path: its instruction adds in an
// order of its own. Products of int8 are exact, so few rows take the faster path of products.h, with the same result.
#pragma once

constexpr std::int64_t kTileRows = 16;
constexpr std::int64_t kRowsAmxInt8 = 2 * kRowsInt;  // with fewer rows, VNNI is faster: it computes no padding

NI_INLINE bool uses_amx(WeightType type, std::int64_t rows) {
  return type == WeightType::bf16 || ((type == WeightType::i8 || type == WeightType::i4) && rows > kRowsAmxInt8);
}

// All eight tile registers as 16 rows of 64 bytes, for the life of this object.
struct TileRegisters {
  struct alignas(64) Config {
    std::uint8_t palette = 1, start_row = 0, reserved[14] = {};
    std::uint16_t bytes[16] = {};
    std::uint8_t rows[16] = {};
  };
  TileRegisters() {
    Config config;
    for (int i = 0; i < 8; ++i) config.bytes[i] = 64, config.rows[i] = kTileRows;
    _tile_loadconfig(&config);
  }
  ~TileRegisters() { _tile_release(); }
};

// Up to 32 rows times one panel: four tiles of sums.
NI_INLINE void amx_bf16_step(const std::uint8_t* x, std::int64_t x_stride, const std::uint8_t* w, bool second) {
  _tile_loadd(4, x, x_stride);
  _tile_loadd(6, w, 128);
  _tile_loadd(7, w + 64, 128);
  _tile_dpbf16ps(0, 4, 6);
  _tile_dpbf16ps(1, 4, 7);
  if (second) {
    _tile_loadd(5, x + kTileRows * x_stride, x_stride);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
  }
}

inline void amx_bf16(const MatmulTask& task, std::int64_t panel, std::int64_t row, std::int64_t rows, bool first) {
  constexpr std::int64_t kInputs = 32, kBytes = kInputs * kPanel * 2;
  const Matrix& m = *task.w;
  const std::uint8_t *w = m.data + panel * m.panel_bytes, *x = task.x + row * task.x_stride;
  const bool second = rows > kTileRows;
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  std::int64_t k = 0;
  for (; k + kInputs <= m.depth; k += kInputs, w += kBytes, x += 64) {
    if (first)
      for (std::int64_t at = 0; at < kBytes; at += 64) prefetch(w + kPrefetch + at);
    amx_bf16_step(x, task.x_stride, w, second);
  }
  if (k < m.depth) {  // the panel ends inside a tile; prepared rows end with zeros
    alignas(64) std::uint8_t last[kBytes] = {};
    __builtin_memcpy(last, w, (m.depth - k) * kPanel * 2);
    amx_bf16_step(x, task.x_stride, last, second);
  }
  alignas(64) float sums[2 * kTileRows][kPanel];
  _tile_stored(0, sums[0], kPanel * 4);
  _tile_stored(1, sums[0] + 16, kPanel * 4);
  if (second) {
    _tile_stored(2, sums[kTileRows], kPanel * 4);
    _tile_stored(3, sums[kTileRows] + 16, kPanel * 4);
  }
  NI_HALVES {
    const std::int64_t column = panel * kPanel + 16 * h;
    const f32x16 bias = load(m.bias + column);
    for (std::int64_t r = 0; r < rows; ++r) {
      float* y = task.y + (row + r) * task.y_stride + column;
      store(y, finish(task, load(sums[r] + 16 * h) + bias, y));
    }
  }
}

// Up to 16 rows times half a panel. A group of 64 inputs is one tile; its exact sums are scaled and added to a vector
// for each row, as in tile_i8 and tile_i4.
template <WeightType type>
inline void amx_int(const MatmulTask& task, std::int64_t panel, int half, std::int64_t row, std::int64_t rows, bool first) {
  const Matrix& m = *task.w;
  const std::int64_t groups = m.depth / kGroup, column = panel * kPanel + 16 * half;
  constexpr bool kInt4 = type == WeightType::i4;
  constexpr std::int64_t kBytes = kGroup * kPanel / (kInt4 ? 2 : 1);  // of a group of a panel
  const std::uint8_t *meta = m.data + panel * m.panel_bytes, *w = meta, *x = task.x + row * task.x_stride;
  if (kInt4) w += (groups * 96 + 63) & ~std::int64_t{63};
  const float* scales = (const float*)(x + m.depth);  // of the first row; its shifts follow
  const std::int64_t next = task.x_stride / sizeof(float);
  f32x16 acc[kTileRows];
  _Pragma("GCC unroll 16") for (int r = 0; r < kTileRows; ++r) acc[r] = broadcast(0.0f);
  alignas(64) std::int32_t dots[2][kTileRows][16];  // alternating, so that a store does not wait for the last loads
  alignas(64) std::uint8_t levels[kTileRows][64];   // int4: the group's inputs of these outputs
  for (std::int64_t g = 0; g < groups; ++g, w += kBytes, meta += 96) {
    if (first)
      for (std::int64_t at = 0; at < kBytes / 2; at += 64) prefetch(w + kPrefetch + half * (kBytes / 2) + at);
    _tile_zero(0);
    _tile_loadd(4, x + g * kGroup, task.x_stride);
    if constexpr (kInt4) {
      for (int j = 0; j < 8; ++j) {
        const i32x16 q = load_ints(w + j * 128 + half * 64), low = low_nibbles(q), high = high_nibbles(q);
        __builtin_memcpy(levels[j], &low, 64);
        __builtin_memcpy(levels[8 + j], &high, 64);
      }
      _tile_loadd(6, levels, 64);
    } else {
      _tile_loadd(6, w + half * 64, 128);
    }
    _tile_dpbsud(0, 4, 6);
    std::int32_t(&dot)[kTileRows][16] = dots[g & 1];
    _tile_stored(0, dot, 64);
    if constexpr (kInt4) {
      const f32x16 scale = load_bf16((const std::uint16_t*)meta + 16 * half), zero = load_u8(meta + 64 + 16 * half);
      _Pragma("GCC unroll 16") for (int r = 0; r < kTileRows; ++r) {
        const float* of_row = scales + r * next + g;
        const f32x16 sum = fma(zero, broadcast(of_row[groups]), to_float(load_ints(dot[r])));
        acc[r] = fma(sum, scale * broadcast(*of_row), acc[r]);
      }
    } else {
      _Pragma("GCC unroll 16") for (int r = 0; r < kTileRows; ++r) {
        const float* of_row = scales + r * next + g;
        const i32x16 shift = broadcast(((const std::int32_t*)of_row)[groups]);
        i32x16 sum = load_ints(dot[r]);
        NI_EACH sum.v[i] += shift.v[i];
        acc[r] = fma(to_float(sum), broadcast(*of_row), acc[r]);
      }
    }
  }
  const f32x16 bias = load(m.bias + column), scale = load(m.scale + column);
  _Pragma("GCC unroll 16") for (int r = 0; r < kTileRows; ++r) {
    if (r >= rows) break;
    float* y = task.y + (row + r) * task.y_stride + column;
    const f32x16 sum = kInt4 ? acc[r] + bias : fma(acc[r], scale, bias);
    store(y, finish(task, sum, y));
  }
}

void matmul_amx(const MatmulTask& task, std::int64_t begin, std::int64_t end) {
  const TileRegisters registers;
  std::int64_t block = (std::int64_t)(kRowBlockBytes / task.x_stride) / 32 * 32;  // rows that stay in the cache
  if (block < 32) block = 32;
  for (std::int64_t top = 0; top < task.rows; top += block) {
    const std::int64_t bottom = top + block < task.rows ? top + block : task.rows;
    for (std::int64_t panel = begin; panel < end; ++panel) {
      const std::int64_t step = task.w->type == WeightType::bf16 ? 2 * kTileRows : kTileRows;
      for (std::int64_t row = top; row < bottom; row += step) {
        const std::int64_t rows = bottom - row < step ? bottom - row : step;
        switch (task.w->type) {
          case WeightType::bf16: amx_bf16(task, panel, row, rows, row == top); break;
          case WeightType::i8:
            for (int h = 0; h < 2; ++h) amx_int<WeightType::i8>(task, panel, h, row, rows, row == top);
            break;
          default:
            for (int h = 0; h < 2; ++h) amx_int<WeightType::i4>(task, panel, h, row, rows, row == top);
        }
      }
    }
  }
}

// The arithmetic ceiling (peak.h): four independent sums of tiles in registers.
std::int64_t peak_amx(WeightType type, std::int64_t steps, const std::uint8_t* operands, float* sink) {
  const TileRegisters registers;
  alignas(64) float sums[kTileRows][16];
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  _tile_loadd(4, operands, 0);
  _tile_loadd(5, operands, 0);
  _tile_loadd(6, operands, 0);
  _tile_loadd(7, operands, 0);
  const bool floats = type == WeightType::bf16;
  for (std::int64_t k = 0; k < steps; ++k) {
    if (floats) {
      _tile_dpbf16ps(0, 4, 6);
      _tile_dpbf16ps(1, 4, 7);
      _tile_dpbf16ps(2, 5, 6);
      _tile_dpbf16ps(3, 5, 7);
    } else {
      _tile_dpbsud(0, 4, 6);
      _tile_dpbsud(1, 4, 7);
      _tile_dpbsud(2, 5, 6);
      _tile_dpbsud(3, 5, 7);
    }
  }
  *sink = 0;
#define NI_ADD_TILE(tile)         \
  _tile_stored(tile, sums, 64);   \
  for (const auto& row : sums) *sink += row[0];
  NI_ADD_TILE(0) NI_ADD_TILE(1) NI_ADD_TILE(2) NI_ADD_TILE(3)
#undef NI_ADD_TILE
  return steps * 4 * kTileRows * 16 * (floats ? 32 : 64) * 2;
}
