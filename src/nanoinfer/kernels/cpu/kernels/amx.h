// Matrix products with AMX: tiles of 16 rows of activations times 16 outputs, in bfloat16 and in all formats whose
// activations are integers.
// Part of kernels.cpp, which includes it in the namespace of the instruction set `amx`.
//
// A tile register holds 16 rows of 64 bytes. One instruction multiplies a tile of activations (16 rows, 32 bfloat16, or a
// group of 32 int8) by a tile of weights (as many inputs, 16 outputs), whose layout is that of half a panel.
// Activations are therefore not interleaved as products.h has it (RowTile).
//
// bfloat16 and i8: the sums stay in tile registers, and weights are multiplied as they lie. A scale for each group of int8
// would have every tile of sums stored and scaled, which takes longer than its product; two digits for each number, which is
// another product, do not. So a row for i8 has 16 bits and one scale here. The tiles of a block of rows follow each other, so that a
// thread reads them as one stream (AmxRows). Beside 16 or more rows, those after the last one, up to a multiple of 16, are
// read and their results dropped, and blocks of bfloat16 have 32, so the memory of prepared rows is that large (padded_rows).
// Other formats have scales of groups of weights, so that the sums of each group are stored and scaled, unless these scales
// are integers (blocks_amx.h). Beside tile instructions, a core starts one multiplication or conversion of 512 bits in a
// cycle, not two, so three of these for 16 sums take longer than the product of tiles. Weights are unpacked to signed bytes,
// which many rows share, and rows of int8 lie as tiles: 64 inputs of 16 rows follow each other.
//
// A row's result does not depend on the number of rows. bfloat16 always takes this path: its instruction adds in an
// order of its own. Sums of integers are exact, so few rows take vector registers, with the same result.
#pragma once

#include "blocks.h"

constexpr std::int64_t kAmxRows = 16, kAmxBytes = kAmxRows * 64;
constexpr std::int64_t kRowsAtOnce = 256, kBlockRows = 512;
// As kRowBlockBytes: CPUs with AMX have 2 MiB of second-level cache. Each block reads the weights again.
constexpr std::size_t kRowBlockBytesAmx = 832 << 10;
// The rows up to which VNNI is faster: it computes no padding. Groups of 32 inputs use half of a tile register.
constexpr std::int64_t rows_in_registers(WeightType type) {
  return type == WeightType::bf16 ? 0 : type == WeightType::i8 ? 2 : whole_scales(type) ? 8 : 24;
}
constexpr bool uses_amx(WeightType type, std::int64_t rows) {
  return (type == WeightType::bf16 || group_of(type)) && rows > rows_in_registers(type);
}

// Where 16 prepared rows for weights with scales of groups have their parts, in bytes: tiles of 64 inputs of each row; for each group
// of inputs 16 scales and 16 sums, as floats; for each 256 inputs a tile of sums (rows.h).
constexpr std::int64_t tile_at(std::int64_t input) { return input / 64 * kAmxBytes + input % 64; }
constexpr std::int64_t floats_at(std::int64_t depth) { return (depth + 63) / 64 * kAmxBytes; }
constexpr std::int64_t sums_at(std::int64_t depth) { return floats_at(depth) + depth / kSmallGroup * 2 * kAmxRows * 4; }
NI_INLINE const float* group_floats(const MatmulTask& task, std::int64_t row) {
  return (const float*)(task.x + row * task.x_stride + floats_at(task.w->depth));
}

// The compiler knows of no memory that a tile is loaded from: what was stored before must not be moved behind the load.
NI_INLINE void finish_stores() { asm volatile("" ::: "memory"); }

// The tile registers for the life of this object: those of sums (0 to 3) have `rows` rows of 64 bytes. Those of activations (4,
// 5) have as many, of `inputs` bytes, or `inputs_5`; weights (6, 7) have rows of 64 bytes, each with 4 bytes of inputs.
struct AmxRegisters {
  struct alignas(64) Config {
    std::uint8_t palette = 1, start_row = 0, reserved[14] = {};
    std::uint16_t bytes[16] = {};
    std::uint8_t rows[16] = {};
  };
  explicit AmxRegisters(std::int64_t inputs = 64) : AmxRegisters(inputs, kAmxRows, inputs) {}
  AmxRegisters(std::int64_t inputs, std::int64_t rows, std::int64_t inputs_5) {
    Config config;
    for (int i = 0; i < 8; ++i) {
      const std::int64_t own = i % 2 ? inputs_5 : inputs;
      config.bytes[i] = (std::uint16_t)(i == 4 || i == 5 ? own : 64);
      config.rows[i] = (std::uint8_t)(i >= 6 ? own / 4 : rows);
    }
    asm volatile("" ::"r"(&config) : "memory");  // GCC's declaration of the next instruction says that it reads 8 bytes
    _tile_loadconfig(&config);
  }
  ~AmxRegisters() { _tile_release(); }
};

NI_INLINE void zero_tiles() {
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
}

// How prepared rows lie for sums that stay in tiles: blocks of rows, in which a step's two tiles follow each other, and then the
// next step's. bfloat16: 32 inputs of up to 16 rows and of the next 16. i8: 64 inputs of up to 16 rows, their first digits
// and then their second. Fewer rows make lower tiles, so that no other row is loaded.
struct AmxRows {
  std::int64_t height, tiles;  // rows of a tile; tiles of a step

  NI_INLINE AmxRows of(bool digits, std::int64_t rows) {
    return {rows < kAmxRows ? rows : kAmxRows, digits || rows > kAmxRows ? 2 : 1};
  }
  std::int64_t step_bytes() const { return tiles * height * 64; }
};

// Write row `row` of `rows` rows in bfloat16. The conversion makes subnormal numbers zero, as the product of tiles does.
NI_INLINE void prepare_bf16_tiles(const float* x, std::int64_t n, std::int64_t depth, std::int64_t row, std::int64_t rows,
                                  std::size_t stride, std::uint8_t* out) {
  const AmxRows layout = AmxRows::of(/*digits=*/false, rows);
  const std::int64_t at = row % (layout.tiles * layout.height);
  std::uint8_t* to = out + (row - at) * stride + at * 64;
  for (std::int64_t k = 0; k < depth; k += 32, to += layout.step_bytes()) {
    const f32x16 low = load_first(x + k, n - k), high = load_first(x + k + 16, n - k - 16);
    const __m512bh both = _mm512_cvtne2ps_pbh((__m512)high.v[0], (__m512)low.v[0]);
    __builtin_memcpy(to, &both, 64);
  }
}

// `once`: a hint that the memory is not loaded again soon.
#define NI_LOAD_TILE(once, tile, from, stride)                \
  if constexpr (once) _tile_stream_loadd(tile, from, stride); \
  else _tile_loadd(tile, from, stride)

// A step multiplies up to two tiles of activations by two tiles of weights, and adds to up to four tiles of sums.
constexpr std::int64_t kStepBytes = 2 * kAmxBytes;  // of weights
template <WeightType type>
struct Steps {
  static constexpr bool kDigits = type == WeightType::i8;
  static constexpr std::int64_t kRows = kDigits ? kAmxRows : 2 * kAmxRows, kInputs = kDigits ? 64 : 32;

  NI_INLINE int instructions(bool second) { return kDigits || second ? 8 : 5; }

  // many: the weights stay in the first-level cache, and the activations pass through it; or the other way round.
  template <bool many>
  NI_INLINE void multiply(const std::uint8_t* x, std::int64_t tile, const std::uint8_t* w, bool second, Prefetches ahead) {
    NI_LOAD_TILE(many, 4, x, 64);
    ahead.next();
    NI_LOAD_TILE(!many, 6, w, 128);
    ahead.next();
    NI_LOAD_TILE(!many, 7, w + 64, 128);
    ahead.next();
    if constexpr (kDigits) _tile_dpbsud(0, 4, 6);
    else _tile_dpbf16ps(0, 4, 6);
    ahead.next();
    if constexpr (kDigits) _tile_dpbsud(1, 4, 7);
    else _tile_dpbf16ps(1, 4, 7);
    ahead.next();
    if (!kDigits && !second) return;
    NI_LOAD_TILE(many, 5, x + tile, 64);
    ahead.next();
    if constexpr (kDigits) _tile_dpbsud(2, 5, 6);
    else _tile_dpbf16ps(2, 5, 6);
    ahead.next();
    if constexpr (kDigits) _tile_dpbsud(3, 5, 7);
    else _tile_dpbf16ps(3, 5, 7);
    ahead.next();
  }
};

// The outputs of a row from its sums of both digits. They do not overflow for up to kMostInputsInt8 inputs (layout.h).
NI_INLINE f32x16 of_digits(i32x16 high, i32x16 low, float row_scale, f32x16 scale, f32x16 bias) {
  return fma(fma(to_float(high), broadcast(256.0f), to_float(low)), broadcast(row_scale) * scale, bias);
}

// Outputs of some rows and one panel that are left to write from their sums, as these are stored. Their epilogue is computed by the
// vector units while the tiles of the next block are multiplied: one after the other, both would take a third longer. A copy of it, and of
// the task, has to be used: what is written might otherwise be a part of them, which the compiler would read again for each vector.
template <WeightType type>
struct Outputs {
  const std::int32_t (*sums)[kPanel];  // float32 in bfloat16; i8: those of the second digits follow those of the first
  const float *bias, *scale;           // of the panel
  const float* of_row;                 // i8: a row's scale and, `height` and twice as much further, its shifts
  float* y;
  std::int64_t rows = 0;

  __attribute__((always_inline)) void finish_some(const MatmulTask& task, std::int64_t height, std::int64_t most) {
    const std::int64_t count = rows < most ? rows : most;
    rows -= count;
    for (std::int64_t r = 0; r < count; ++r, ++sums, ++of_row, y += task.y_stride)
      NI_HALVES {
        const std::int32_t* own = sums[0] + 16 * h;
        f32x16 sum;
        if constexpr (Steps<type>::kDigits) {
          const std::int32_t* shift = (const std::int32_t*)of_row + height;
          const i32x16 high = load_ints(own) + broadcast(shift[0]);
          const i32x16 low = load_ints(own + kAmxRows * kPanel) + broadcast(shift[height]);
          sum = of_digits(high, low, *of_row, load(scale + 16 * h), load(bias + 16 * h));
        } else {
          sum = load((const float*)own) + load(bias + 16 * h);
        }
        store(y + 16 * h, finish(task, sum, y + 16 * h));
      }
  }
};

template <WeightType type>
struct alignas(64) StoredSums {
  std::int32_t of[2][2 * kAmxRows][kPanel];  // of the last block and of this one, in turn
  int turn = 0;
  Outputs<type> left;
};

NI_INLINE void load_tiles(const std::int32_t (*from)[kPanel]) {
  _tile_loadd(0, from[0], kPanel * 4);
  _tile_loadd(1, from[0] + 16, kPanel * 4);
  _tile_loadd(2, from[kAmxRows], kPanel * 4);
  _tile_loadd(3, from[kAmxRows] + 16, kPanel * 4);
}
NI_INLINE void store_tiles(std::int32_t (*to)[kPanel]) {
  _tile_stored(0, to[0], kPanel * 4);
  _tile_stored(1, to[0] + 16, kPanel * 4);
  _tile_stored(2, to[kAmxRows], kPanel * 4);
  _tile_stored(3, to[kAmxRows] + 16, kPanel * 4);
}

constexpr std::int64_t kMostSteps = 12;  // 24 KiB of weights, which stay in the first-level cache for all rows

// Rows [top, bottom), at most kBlockRows, times one panel, in chunks of the inputs. While the rows are multiplied by a chunk,
// the next one is prefetched. A single block of rows has no time for that and prefetches kPrefetchFar bytes ahead.
template <WeightType type, bool many>
inline void multiply_panel(const MatmulTask& given, std::int64_t panel, std::int64_t top, std::int64_t bottom,
                           StoredSums<type>& stored) {
  using S = Steps<type>;
  const MatmulTask task = given;
  const Matrix m = *task.w;
  Outputs<type> before = stored.left;
  const AmxRows layout = AmxRows::of(S::kDigits, task.rows);
  const std::int64_t step_bytes = layout.step_bytes(), tile = layout.height * 64;
  const std::int64_t steps = m.depth / S::kInputs, rest = m.depth - steps * S::kInputs;
  const std::int64_t count = (bottom - top + S::kRows - 1) / S::kRows, column = panel * kPanel;  // of blocks
  const std::int64_t chunks = count <= 2 || steps < kMostSteps ? 1 : (steps + kMostSteps - 1) / kMostSteps;
  alignas(64) std::int32_t partial[chunks == 1 ? 1 : count][2 * kAmxRows][kPanel];
  for (std::int64_t c = 0; c < chunks; ++c) {
    const std::int64_t from = steps * c / chunks, to = steps * (c + 1) / chunks;
    const std::uint8_t* const begin = m.data + panel * m.panel_bytes + from * kStepBytes;
    const std::int64_t share = (kStepBytes / count + 63) / 64 * 64;
    const bool ends = c == chunks - 1;
    for (std::int64_t i = 0; i < count; ++i) {
      const std::int64_t row = top + i * S::kRows, rows = bottom - row < S::kRows ? bottom - row : S::kRows;
      const std::uint8_t *w = begin, *x = task.x + row * task.x_stride + from * step_bytes;
      const std::uint8_t* ahead = count == 1 ? w + kPrefetchFar : begin + (to - from) * kStepBytes + i * share * (to - from);
      const bool second = rows > kAmxRows;
      const std::int64_t first = from + (to - from) / 4, some = before.rows / (to - first + 1) + 1;
      if (c == 0) zero_tiles();
      else load_tiles(partial[i]);
      for (std::int64_t k = from; k < to; ++k, w += kStepBytes, x += step_bytes, ahead += share) {
        S::template multiply<many>(x, tile, w, second, {ahead, share, S::instructions(second)});
        if (k >= first) before.finish_some(task, layout.height, some);
      }
      if (!ends) {
        store_tiles(partial[i]);
        continue;
      }
      if (rest) {  // the panel ends inside a tile; prepared rows end with zeros
        alignas(64) std::uint8_t copy[kStepBytes] = {};
        __builtin_memcpy(copy, w, rest * kPanel * 2);
        finish_stores();
        S::template multiply<many>(x, tile, copy, second, {nullptr, 0, 1});
      }
      before.finish_some(task, layout.height, before.rows);
      std::int32_t(*const sums)[kPanel] = stored.of[stored.turn ^= 1];
      store_tiles(sums);
      before = {sums, m.bias + column, m.scale + column, (const float*)(task.x + row * task.x_stride + 2 * layout.height * m.depth),
                task.y + row * task.y_stride + column, rows};
    }
  }
  stored.left = before;
}

template <WeightType type>
void matmul_tiles(const MatmulTask& task, std::int64_t begin, std::int64_t end) {
  constexpr std::int64_t kRows = Steps<type>::kRows;
  const AmxRegisters registers(64, AmxRows::of(Steps<type>::kDigits, task.rows).height, 64);
  std::int64_t height = (std::int64_t)(kRowBlockBytesAmx / task.x_stride) / kRows * kRows;
  if (height < kRows) height = kRows;
  if (height > kBlockRows) height = kBlockRows;
  StoredSums<type> stored;
  for (std::int64_t top = 0; top < task.rows; top += height)
    for (std::int64_t panel = begin; panel < end; ++panel) {
      const std::int64_t bottom = top + height < task.rows ? top + height : task.rows;
      const auto multiply = bottom - top > kRows ? multiply_panel<type, true> : multiply_panel<type, false>;
      multiply(task, panel, top, bottom, stored);
    }
  stored.left.finish_some(task, AmxRows::of(Steps<type>::kDigits, task.rows).height, kAmxRows * 2);
}

// M rows in i8, whose digits are interleaved: 4 inputs of each row's first digits, then of their second digits.
template <int M>
void multiply_digits(const MatmulTask& task, std::int64_t begin, std::int64_t end) {
  const Matrix& m = *task.w;
  const std::int64_t quads = m.depth / 4;
  const float* row_scale = (const float*)(task.x + 2 * m.depth * M);
  const std::int32_t* shift = (const std::int32_t*)row_scale + M;
  for (std::int64_t panel = begin; panel < end; ++panel) {
    const std::uint8_t* w = m.data + panel * m.panel_bytes;
    const std::int32_t* x = (const std::int32_t*)task.x;
    i32x16 dot[M][2][2];  // row, digit, half
    NI_ROWS for (int d = 0; d < 2; ++d) NI_HALVES dot[m][d][h] = broadcast(shift[d * M + m]);
    for (std::int64_t k = 0; k < quads; ++k, w += kLine, x += 2 * M) {
      for (int at = 0; at < 128; at += 64) prefetch_l2(w + kPrefetchDigits + at);
      const i32x16 w0 = load_ints(w), w1 = load_ints(w + 64);
      NI_ROWS NI_UNROLL(2) for (int d = 0; d < 2; ++d) {
        dot[m][d][0] = dot4(dot[m][d][0], w0, x[d * M + m]);
        dot[m][d][1] = dot4(dot[m][d][1], w1, x[d * M + m]);
      }
    }
    f32x16 sums[M][2];
    NI_HALVES {
      const std::int64_t column = panel * kPanel + 16 * h;
      const f32x16 bias = load(task.w->bias + column), scale = load(task.w->scale + column);
      NI_ROWS sums[m][h] = of_digits(dot[m][0][h], dot[m][1][h], row_scale[m], scale, bias);
    }
    finish_rows(task, panel, 0, M, sums);
  }
}

// Formats whose groups of weights have scales: unpacked weights for tiles. Tile t of a chunk has a group of inputs, as signed
// bytes. `add` adds its sums with a row, of which `of_row[16 i]` are the floats of the group (rows.h), to those before.
template <WeightType type>
struct AmxWeights {
  using C = ChunkOf<type>;
  C chunk;

  void unpack(const Matrix& m, std::int64_t panel, std::int64_t from, std::int64_t count) {
    unpack_chunk<type>(m.data + panel * m.panel_bytes, from, (int)count, chunk);
    if constexpr (!C::kMinimum) {  // the instruction takes signed bytes
      const __m512i offset = _mm512_set1_epi8((char)BlockFormat(type).offset);
      for (int i = 0; i < count * 16; ++i) {
        std::int32_t* codes = chunk.codes[i / 16][i / 2 % 8][i % 2];
        _mm512_store_si512(codes, _mm512_sub_epi8(_mm512_load_si512(codes), offset));
      }
    }
  }
  const void* tile(std::int64_t t, int half) const { return chunk.codes[t][0][half]; }
  f32x16 scale(std::int64_t t, int half) const { return C::scale(chunk, t, 0, half); }
  f32x16 minimum(std::int64_t t, int half) const {
    if constexpr (C::kMinimum) return C::minimum(chunk, t, 0, half);
    return broadcast(0.0f);
  }
  NI_INLINE f32x16 add(f32x16 sum, f32x16 dot, f32x16 scale, f32x16 minimum, const float* of_row) {
    f32x16 product = dot * scale;
    if constexpr (C::kMinimum) product = fma(minimum, broadcast(of_row[16]), product);
    return fma(product, broadcast(*of_row), sum);
  }
};
// Tile `sum` (0 to 3) of x times w.
NI_INLINE void multiply_tile(int sum, const std::uint8_t* x, const void* w) {
#define NI_MULTIPLY_TILE(sum, of_x, of_w) \
  case sum:                               \
    _tile_zero(sum);                      \
    _tile_loadd(of_x, x, 64);             \
    _tile_loadd(of_w, w, kLine);          \
    _tile_dpbssd(sum, of_x, of_w);        \
    break;
  switch (sum) {
    NI_MULTIPLY_TILE(0, 4, 6)
    NI_MULTIPLY_TILE(1, 5, 7)
    NI_MULTIPLY_TILE(2, 4, 6)
    NI_MULTIPLY_TILE(3, 5, 7)
  }
#undef NI_MULTIPLY_TILE
}
NI_INLINE void store_tile(int sum, std::int32_t (*to)[16]) {
  switch (sum) {
    case 0: _tile_stored(0, to, 64); break;
    case 1: _tile_stored(1, to, 64); break;
    case 2: _tile_stored(2, to, 64); break;
    case 3: _tile_stored(3, to, 64); break;
  }
}

#define NI_TILE_ROWS NI_UNROLL(16) for (int r = 0; r < kAmxRows; ++r)

// Rows [top, bottom), at most kRowsAtOnce, times a panel of weights with scales of groups. The exact sums of a tile are scaled
// and added as in products.h and blocks.h, four tiles in turn, while the next four are multiplied: a load of what was just
// stored waits until the store has left the core's queue.
template <WeightType type>
inline void multiply_groups(const MatmulTask& task, std::int64_t panel, std::int64_t top, std::int64_t bottom) {
  using W = AmxWeights<type>;
  constexpr std::int64_t kTurn = 4;
  const Matrix& m = *task.w;
  const std::int64_t groups = m.depth / kSmallGroup, blocks = (bottom - top + kAmxRows - 1) / kAmxRows;
  Prefetches ahead(m.data + (panel + 1) * m.panel_bytes, m.panel_bytes, 2 * blocks * groups);
  W weights;
  alignas(64) std::int32_t dots[2][kTurn][kAmxRows][16];
  f32x16 sums[kRowsAtOnce][2];
  for (std::int64_t from = 0; from < groups; from += kChunkGroups) {
    const std::int64_t count = groups - from < kChunkGroups ? groups - from : kChunkGroups;
    weights.unpack(m, panel, from, count);
    finish_stores();
    std::int64_t next_block = 0, next_tile = 0, turn = 0;  // what is multiplied next
    int next_half = 0;
    const auto multiply = [&](int i) __attribute__((always_inline)) {
      const std::int64_t t = next_tile + i < count ? next_tile + i : count - 1;
      const std::uint8_t* const x = task.x + (top + next_block * kAmxRows) * task.x_stride;
      ahead.next();
      multiply_tile(i, x + tile_at((from + t) * kSmallGroup), weights.tile(t, next_half));
    };
    const auto store_turn = [&]() __attribute__((always_inline)) {
      NI_UNROLL(4) for (int i = 0; i < kTurn; ++i) store_tile(i, dots[turn][i]);
      turn ^= 1;
      if ((next_tile += kTurn) < count) return;
      next_tile = 0;
      if ((next_half ^= 1) == 0 && next_block + 1 < blocks) ++next_block;
    };
    NI_UNROLL(4) for (int i = 0; i < kTurn; ++i) multiply(i);
    store_turn();
    for (std::int64_t b = 0; b < blocks; ++b) {
      const std::int64_t row = top + b * kAmxRows;
      const float* const of_rows = group_floats(task, row) + from * 2 * kAmxRows;
      f32x16(*const own)[2] = sums + b * kAmxRows;
      for (int half = 0; half < 2; ++half) {
        f32x16 acc[kAmxRows];
        NI_TILE_ROWS acc[r] = from ? own[r][half] : broadcast(0.0f);
        for (std::int64_t first = 0; first < count; first += kTurn) {
          NI_UNROLL(4) for (int i = 0; i < kTurn; ++i) multiply(i);
          NI_UNROLL(4) for (int i = 0; i < kTurn; ++i) {
            const std::int64_t t = first + i;
            if (t >= count) break;
            const f32x16 scale = weights.scale(t, half), minimum = weights.minimum(t, half);
            const float* const floats = of_rows + t * 2 * kAmxRows;
            NI_TILE_ROWS acc[r] = W::add(acc[r], to_float(load_ints(dots[turn ^ 1][i][r])), scale, minimum, floats + r);
          }
          store_turn();
        }
        const f32x16 bias = load(m.bias + panel * kPanel + 16 * half);
        NI_TILE_ROWS own[r][half] = from + count < groups ? acc[r] : acc[r] + bias;
      }
      if (from + count == groups)
        finish_rows(task, panel, row, bottom - row < kAmxRows ? bottom - row : kAmxRows, own);
    }
  }
}

template <WeightType type>
void matmul_groups(const MatmulTask& task, std::int64_t begin, std::int64_t end) {
  const AmxRegisters registers(kSmallGroup);
  for (std::int64_t top = 0; top < task.rows; top += kRowsAtOnce) {
    const std::int64_t bottom = top + kRowsAtOnce < task.rows ? top + kRowsAtOnce : task.rows;
    for (std::int64_t panel = begin; panel < end; ++panel) multiply_groups<type>(task, panel, top, bottom);
  }
}

// The arithmetic ceiling (peak.h): four independent sums of tiles in registers.
std::int64_t peak_amx(WeightType type, std::int64_t steps, const std::uint8_t* operands, float* sink) {
  const AmxRegisters registers;
  alignas(64) float sums[kAmxRows][16];
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
  return steps * 4 * kAmxRows * 16 * (floats ? 32 : 64) * 2;
}
