// Matrix products with AMX: tiles of 16 rows of activations times 16 outputs, in bfloat16 and in all formats whose
// activations are int8.
// Part of kernels.cpp, which includes it in the namespace of the instruction set `amx`.
//
// A tile register holds 16 rows of 64 bytes. One instruction multiplies a tile of activations (16 rows, 32 bfloat16, or a
// group of 32 or 64 int8) by a tile of weights (as many inputs, 16 outputs), whose layout is that of half a panel.
// Activations are therefore not interleaved as products.h has it (Tile). The bytes of 16 rows of bfloat16 lie tile after
// tile, so that a thread reads them as one stream; rows of int8 lie as they are. The rows after the last one, up to a
// multiple of 16, are read and their results dropped, so the memory of prepared rows must be that large (padded_rows).
// Weights in bfloat16 are multiplied as they lie; others are unpacked to signed bytes, which many rows share.
//
// A row's result does not depend on the number of rows. bfloat16 always takes this path: its instruction adds in an
// order of its own. Products of int8 are exact, so few rows take the faster path of products.h, with the same result.
#pragma once

#include "blocks.h"

constexpr std::int64_t kTileRows = 16, kTileBytes = kTileRows * 64;
// As kRowBlockBytes: CPUs with AMX have 2 MiB of second-level cache. Each block reads the weights again.
constexpr std::size_t kRowBlockBytesAmx = 768 << 10;
// With fewer rows, VNNI is faster: it computes no padding. Groups of 32 inputs use half of a tile register.
constexpr std::int64_t rows_amx_int8(WeightType type) { return 2 * kRowsInt * kGroup / group_of(type); }

NI_INLINE bool uses_amx(WeightType type, std::int64_t rows) {
  return type == WeightType::bf16 || (group_of(type) && rows > rows_amx_int8(type));
}

// The compiler knows of no memory that a tile is loaded from: what was stored before must not be moved behind the load.
NI_INLINE void finish_stores() { asm volatile("" ::: "memory"); }

// The tile registers for the life of this object: those of sums (0 to 3) have `rows` rows of 64 bytes. Those of activations (4,
// 5) have as many, of `inputs` bytes, or `inputs_5`; weights (6, 7) have rows of 64 bytes, each with 4 bytes of inputs.
struct TileRegisters {
  struct alignas(64) Config {
    std::uint8_t palette = 1, start_row = 0, reserved[14] = {};
    std::uint16_t bytes[16] = {};
    std::uint8_t rows[16] = {};
  };
  explicit TileRegisters(std::int64_t inputs = 64) : TileRegisters(inputs, kTileRows, inputs) {}
  TileRegisters(std::int64_t inputs, std::int64_t rows, std::int64_t inputs_5) {
    Config config;
    for (int i = 0; i < 8; ++i) {
      const std::int64_t own = i % 2 ? inputs_5 : inputs;
      config.bytes[i] = (std::uint16_t)(i == 4 || i == 5 ? own : 64);
      config.rows[i] = (std::uint8_t)(i >= 6 ? own / 4 : rows);
    }
    _tile_loadconfig(&config);
  }
  ~TileRegisters() { _tile_release(); }
};

// Write row `row` of the activations of a product in bfloat16. The conversion makes subnormal numbers zero, as the product
// of tiles does.
NI_INLINE void prepare_bf16_tiles(const float* x, std::int64_t n, std::int64_t depth, std::int64_t row,
                                  std::size_t stride, std::uint8_t* out) {
  std::uint8_t* to = out + row / kTileRows * kTileRows * stride + row % kTileRows * 64;
  for (std::int64_t k = 0; k < depth; k += 32, to += kTileBytes) {
    const f32x16 low = load_first(x + k, n - k), high = load_first(x + k + 16, n - k - 16);
    const __m512bh both = _mm512_cvtne2ps_pbh((__m512)high.v[0], (__m512)low.v[0]);
    __builtin_memcpy(to, &both, 64);
  }
}

// Up to 32 rows times one panel: four tiles of sums. The tiles of rows 16 to 31 are `next` bytes after those of the first.
NI_INLINE void amx_bf16_step(const std::uint8_t* x, std::int64_t next, const std::uint8_t* w, bool second) {
  _tile_loadd(4, x, 64);
  _tile_loadd(6, w, 128);
  _tile_loadd(7, w + 64, 128);
  _tile_dpbf16ps(0, 4, 6);
  _tile_dpbf16ps(1, 4, 7);
  if (second) {
    _tile_loadd(5, x + next, 64);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
  }
}

// The sums of up to 32 rows and one panel. Their epilogue is computed by the vector units while the tiles of the next
// block are multiplied: one after the other, both would take a third longer.
struct alignas(64) AmxBlock {
  float sums[2 * kTileRows][kPanel];
  std::int64_t panel = 0, row = 0;
  std::int64_t rows = 0, done = 0;  // how many there are, and how many are written

  __attribute__((always_inline)) void finish_some(const MatmulTask& task, std::int64_t most) {
    const std::int64_t end = rows - done < most ? rows : done + most, column = panel * kPanel;
    const float* bias = task.w->bias + column;
    for (float* y = task.y + (row + done) * task.y_stride + column; done < end; ++done, y += task.y_stride)
      NI_HALVES store(y + 16 * h, finish(task, load(sums[done] + 16 * h) + load(bias + 16 * h), y + 16 * h));
  }
};

constexpr std::int64_t kPrefetch = 4 << 10;
// While the rows are multiplied by a panel, in `parts` calls, the next panel is prefetched. A single call has no time for
// that and prefetches kPrefetch bytes ahead. `before` is finished, and `block` filled.
inline void amx_bf16(const MatmulTask& task, std::int64_t part, std::int64_t parts, AmxBlock& before, AmxBlock& block) {
  constexpr std::int64_t kInputs = 32, kBytes = kInputs * kPanel * 2;
  const Matrix& m = *task.w;
  const std::uint8_t *w = m.data + block.panel * m.panel_bytes, *x = task.x + block.row * task.x_stride;
  const bool second = block.rows > kTileRows;
  const std::int64_t next = kTileRows * task.x_stride, steps = m.depth / kInputs;
  const std::int64_t share = (kBytes / parts + 63) / 64 * 64;
  const std::uint8_t* ahead = parts == 1 ? w + kPrefetch : w + m.panel_bytes + part * share * steps;
  const std::int64_t some = before.rows / (steps + 1) + 1;
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  for (std::int64_t k = 0; k < steps; ++k, w += kBytes, x += kTileBytes, ahead += share) {
    for (std::int64_t at = 0; at < share; at += 64) prefetch_l2(ahead + at);
    amx_bf16_step(x, next, w, second);
    before.finish_some(task, some);
  }
  if (const std::int64_t rest = m.depth - steps * kInputs) {  // the panel ends inside a tile; prepared rows end with zeros
    alignas(64) std::uint8_t last[kBytes] = {};
    __builtin_memcpy(last, w, rest * kPanel * 2);
    finish_stores();
    amx_bf16_step(x, next, last, second);
  }
  before.finish_some(task, before.rows);
  _tile_stored(0, block.sums[0], kPanel * 4);
  _tile_stored(1, block.sums[0] + 16, kPanel * 4);
  if (second) {
    _tile_stored(2, block.sums[kTileRows], kPanel * 4);
    _tile_stored(3, block.sums[kTileRows] + 16, kPanel * 4);
  }
}

// Weights in i8 or i4 of 16 outputs and up to kChunk inputs: signed bytes, tile after tile, and what the groups are
// multiplied with.
constexpr std::int64_t kChunk = 1024;  // 16 KiB of weights, which stay in the first-level cache
struct alignas(64) AmxWeights {
  std::uint8_t tiles[kChunk * 16];
  float scale[kChunk / kGroup][16];  // i8 has one for all groups, which the epilogue multiplies with
  float zero[kChunk / kGroup][16];
};

// Unpack the groups [from, from + count) of half a panel.
template <WeightType type>
inline void unpack_amx(const Matrix& m, std::int64_t panel, int half, std::int64_t from, std::int64_t count, AmxWeights& to) {
  constexpr bool kNibbles = type == WeightType::i4;
  constexpr std::int64_t kBytes = kGroup * kPanel / (kNibbles ? 2 : 1);  // of a group
  const std::uint8_t* data = m.data + panel * m.panel_bytes;
  const std::uint8_t *meta = data + from * kInt4Group, *w = data + (kNibbles ? int4_numbers(m.depth) : 0) + from * kBytes;
  std::uint8_t* tile = to.tiles;
  for (std::int64_t g = 0; g < count; ++g, tile += kGroup * 16, meta += kInt4Group) {
    if constexpr (kNibbles) {
      store(to.scale[g], load_bf16((const std::uint16_t*)meta + 16 * half));
      store(to.zero[g], load_u8(meta + kInt4Zeros + 16 * half));
    }
    for (std::int64_t line = 0; line < kBytes / kLine; ++line, w += kLine) {
      const __m512i q = _mm512_loadu_si512(w + 64 * half);
      if constexpr (kNibbles) {  // the high halves are inputs of the second half of the group
        const __m512i mask = _mm512_set1_epi8(15);
        _mm512_store_si512(tile + 64 * line, _mm512_and_si512(q, mask));
        _mm512_store_si512(tile + kGroup * 8 + 64 * line, _mm512_and_si512(_mm512_srli_epi16(q, 4), mask));
      } else {
        _mm512_store_si512(tile + 64 * line, _mm512_xor_si512(q, _mm512_set1_epi8(-128)));
      }
    }
  }
}

// Call add(g, dot) for tiles 0 <= g < count of 16 rows times 16 outputs, which load(g) loads into the registers 4 and 6.
template <class Load, class Add>
NI_INLINE void amx_dots(std::int64_t count, Load load, Add add) {
  // A tile is read only after those that follow it were stored: a load of what was just stored waits until the store has
  // left the core's queue.
  constexpr std::int64_t kAhead = 4;
  alignas(64) std::int32_t dots[kAhead][kTileRows][16];
  const auto multiply = [&](std::int64_t g) __attribute__((always_inline)) {
    _tile_zero(0);
    load(g);
    _tile_dpbssd(0, 4, 6);
    _tile_stored(0, dots[g % kAhead], 64);
  };
  for (std::int64_t g = 0; g < kAhead - 1 && g < count; ++g) multiply(g);
  for (std::int64_t g = 0; g < count; ++g) {
    if (g + kAhead - 1 < count) multiply(g + kAhead - 1);
    add(g, dots[g % kAhead]);
  }
}

// Prefetches the next panel while a panel is multiplied, the same number of lines in each of `steps` steps.
struct NextPanel {
  const std::uint8_t *at, *end;
  std::int64_t share;

  NextPanel(const std::uint8_t* begin, std::int64_t bytes, std::int64_t steps)
      : at(begin), end(begin + bytes), share((bytes / steps + 64) / 64 * 64) {}
  __attribute__((always_inline)) void step() {
    for (std::int64_t i = 0; i < share && at < end; i += 64, at += 64) prefetch_l2(at);
  }
};

#define NI_TILE_ROWS NI_UNROLL(16) for (int r = 0; r < kTileRows; ++r)

// Rows [top, bottom), at most kRowsAtOnce, times half a panel. A group of inputs is one tile; its exact sums are scaled
// and added to a vector for each row, as in products.h.
constexpr std::int64_t kRowsAtOnce = 256;
template <WeightType type>
inline void amx_int(const MatmulTask& task, std::int64_t panel, int half, std::int64_t top, std::int64_t bottom) {
  constexpr std::int64_t kGroups = kChunk / kGroup;
  const Matrix& m = *task.w;
  const std::int64_t groups = m.depth / kGroup, column = panel * kPanel + 16 * half;
  const std::int64_t tiles = (bottom - top + kTileRows - 1) / kTileRows;
  const std::int64_t bytes = m.panel_bytes / 2;
  NextPanel next(m.data + (panel + 1) * m.panel_bytes + half * bytes, bytes, tiles * groups);
  AmxWeights weights;
  alignas(64) float sums[kRowsAtOnce][16];  // of the inputs before this chunk
  for (std::int64_t from = 0; from < groups; from += kGroups) {
    const std::int64_t count = groups - from < kGroups ? groups - from : kGroups;
    unpack_amx<type>(m, panel, half, from, count, weights);
    finish_stores();
    for (std::int64_t row = top; row < bottom; row += kTileRows) {
      const std::uint8_t* x = task.x + row * task.x_stride;
      const float* scales = (const float*)(x + m.depth) + from;  // of the first row; its shifts follow
      const std::int64_t stride = task.x_stride / sizeof(float);
      f32x16 acc[kTileRows];
      NI_TILE_ROWS acc[r] = from ? load(sums[row - top + r]) : broadcast(0.0f);
      amx_dots(
          count,
          [&](std::int64_t g) __attribute__((always_inline)) {
            next.step();
            _tile_loadd(4, x + (from + g) * kGroup, task.x_stride);
            _tile_loadd(6, weights.tiles + g * kGroup * 16, 64);
          },
          [&](std::int64_t g, const std::int32_t(*dot)[16]) __attribute__((always_inline)) {
            const f32x16 scale = load(weights.scale[g]), zero = load(weights.zero[g]);
            NI_TILE_ROWS {
              const float* of_row = scales + r * stride + g;
              const f32x16 own = broadcast(*of_row), shift = broadcast(of_row[groups]), sum = to_float(load_ints(dot[r]));
              if (type == WeightType::i8) acc[r] = fma(sum, own, acc[r]);
              else acc[r] = fma(fma(zero, shift, sum), scale * own, acc[r]);
            }
          });
      if (from + count < groups) {
        NI_TILE_ROWS store(sums[row - top + r], acc[r]);
        continue;
      }
      const f32x16 bias = load(m.bias + column), scale = load(m.scale + column);
      NI_TILE_ROWS {
        if (row + r >= bottom) break;
        float* y = task.y + (row + r) * task.y_stride + column;
        const f32x16 sum = type == WeightType::i8 ? fma(acc[r], scale, bias) : acc[r] + bias;
        store(y, finish(task, sum, y));
      }
    }
  }
}

// The same for a panel in a format of GGUF files (blocks.h). A tile has the 16 or 32 inputs that share a scale.
template <WeightType type>
inline void amx_blocks(const MatmulTask& task, std::int64_t panel, std::int64_t top, std::int64_t bottom) {
  using C = ChunkOf<type>;
  constexpr int kInputs = 32 / C::kScales, kQuads = kInputs / 4;
  const Matrix& m = *task.w;
  const std::int64_t groups = m.depth / 32, tiles = (bottom - top + kTileRows - 1) / kTileRows;
  NextPanel next(m.data + (panel + 1) * m.panel_bytes, m.panel_bytes, 2 * tiles * groups * C::kScales);
  C chunk;
  alignas(64) float sums[kRowsAtOnce][kPanel];
  for (std::int64_t from = 0; from < groups; from += kChunkGroups) {
    const int count = (int)(groups - from < kChunkGroups ? groups - from : kChunkGroups);
    unpack_chunk<type>(m.data + panel * m.panel_bytes, from, count, chunk);
    if constexpr (!C::kMinimum) {  // the instruction takes signed bytes
      const __m512i offset = _mm512_set1_epi8((char)BlockFormat(type).offset);
      for (int i = 0; i < count * 16; ++i) {
        std::int32_t* codes = chunk.codes[i / 16][i / 2 % 8][i % 2];
        _mm512_store_si512(codes, _mm512_sub_epi8(_mm512_load_si512(codes), offset));
      }
    }
    finish_stores();
    for (int half = 0; half < 2; ++half)
      for (std::int64_t row = top; row < bottom; row += kTileRows) {
        const std::uint8_t* x = task.x + row * task.x_stride;
        const float* scales = (const float*)(x + m.depth) + from;  // of the first row
        const std::int32_t* minus = (const std::int32_t*)(x + m.depth) + groups + 2 * from;
        const std::int64_t stride = task.x_stride / sizeof(float);
        f32x16 acc[kTileRows];
        NI_TILE_ROWS acc[r] = from ? load(sums[row - top + r] + 16 * half) : broadcast(0.0f);
        amx_dots(
            count * C::kScales,
            [&](std::int64_t t) __attribute__((always_inline)) {
              next.step();
              _tile_loadd(4, x + from * 32 + t * kInputs, task.x_stride);
              _tile_loadd(6, chunk.codes[t / C::kScales][t % C::kScales * kQuads][half], sizeof chunk.codes[0][0]);
            },
            [&](std::int64_t t, const std::int32_t(*dot)[16]) __attribute__((always_inline)) {
              const std::int64_t g = t / C::kScales, s = t % C::kScales;
              const f32x16 scale = C::scale(chunk, g, s, half);
              f32x16 minimum;
              if constexpr (C::kMinimum) minimum = C::minimum(chunk, g, s, half);
              NI_TILE_ROWS {
                f32x16 product = to_float(load_ints(dot[r])) * scale;
                if constexpr (C::kMinimum) {
                  const std::int32_t* of_row = minus + r * stride + 2 * g;
                  // Unsigned: those of rows after the last one may be any numbers.
                  const std::uint32_t both = (std::uint32_t)of_row[0] + (std::uint32_t)of_row[1];
                  const std::int32_t sum = C::kScales == 1 ? (std::int32_t)both : of_row[s];
                  product = fma(minimum, broadcast((float)sum), product);
                }
                acc[r] = fma(product, broadcast(scales[r * stride + g]), acc[r]);
              }
            });
        if (from + count < groups) {
          NI_TILE_ROWS store(sums[row - top + r] + 16 * half, acc[r]);
          continue;
        }
        const std::int64_t column = panel * kPanel + 16 * half;
        const f32x16 bias = load(m.bias + column);
        NI_TILE_ROWS {
          if (row + r >= bottom) break;
          float* y = task.y + (row + r) * task.y_stride + column;
          store(y, finish(task, acc[r] + bias, y));
        }
      }
  }
}

template <WeightType type>
void matmul_amx_int(const MatmulTask& task, std::int64_t begin, std::int64_t end) {
  const TileRegisters registers(has_blocks(type) ? BlockFormat(type).group : kGroup);
  for (std::int64_t top = 0; top < task.rows; top += kRowsAtOnce) {
    const std::int64_t bottom = top + kRowsAtOnce < task.rows ? top + kRowsAtOnce : task.rows;
    for (std::int64_t panel = begin; panel < end; ++panel)
      if constexpr (has_blocks(type)) amx_blocks<type>(task, panel, top, bottom);
      else
        for (int half = 0; half < 2; ++half) amx_int<type>(task, panel, half, top, bottom);
  }
}

void matmul_amx_bf16(const MatmulTask& task, std::int64_t begin, std::int64_t end) {
  const TileRegisters registers;
  constexpr std::int64_t kStep = 2 * kTileRows;
  std::int64_t height = (std::int64_t)(kRowBlockBytesAmx / task.x_stride) / kStep * kStep;
  if (height < kStep) height = kStep;
  AmxBlock blocks[2];  // the last one and this one, in turn
  int last = 0;
  for (std::int64_t top = 0; top < task.rows; top += height) {
    const std::int64_t bottom = top + height < task.rows ? top + height : task.rows, parts = (bottom - top + kStep - 1) / kStep;
    for (std::int64_t panel = begin; panel < end; ++panel) {
      for (std::int64_t row = top; row < bottom; row += kStep) {
        AmxBlock &before = blocks[last], &block = blocks[last ^= 1];
        block.panel = panel, block.row = row, block.done = 0;
        block.rows = bottom - row < kStep ? bottom - row : kStep;
        amx_bf16(task, (row - top) / kStep, parts, before, block);
      }
    }
  }
  blocks[last].finish_some(task, blocks[last].rows);
}

void matmul_amx(const MatmulTask& task, std::int64_t begin, std::int64_t end) {
  switch (task.w->type) {
    case WeightType::i8: return matmul_amx_int<WeightType::i8>(task, begin, end);
    case WeightType::i4: return matmul_amx_int<WeightType::i4>(task, begin, end);
#define NI_PRODUCT(name) \
  case WeightType::name: return matmul_amx_int<WeightType::name>(task, begin, end);
    NI_BLOCK_FORMATS(NI_PRODUCT)
#undef NI_PRODUCT
    default: return matmul_amx_bf16(task, begin, end);
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
