// Products of many rows: weights are unpacked, a chunk of the inputs of a panel at a time, once for all rows of a block.
// Here for weights of 16 bits and narrow registers, where converting them takes as long as the products of a tile of rows;
// blocks.h has chunks of the formats of GGUF files.
// Part of kernels.cpp, which includes it in the namespace of each instruction set.
#pragma once

#include "products.h"

// A chunk C has up to C::kMost units of C::kUnit inputs, for tiles of up to C::kRows rows. A tile of rows times the `count`
// units of a chunk: `sums` are the tile's sums of the units before `from`, or of all.
template <class C, int M>
__attribute__((noinline)) void multiply_chunk(const MatmulTask& task, const C& chunk, std::int64_t from, int count, std::int64_t panel,
                    std::int64_t row, float (*sums)[kPanel]) {
  const Matrix& w = *task.w;
  Acc<M> acc;
  NI_ROWS NI_HALVES acc.v[m][h] = from ? load(sums[m] + 16 * h) : broadcast(0.0f);
  const RowTile t{nullptr, task.x + row * task.x_stride, w.depth, nullptr, 0};
  add_chunk(chunk, t, from, count, acc);
  if (from + count == w.depth / C::kUnit) return finish_panel<false, M>(task, panel, row, acc);
  NI_ROWS NI_HALVES store(sums[m] + 16 * h, acc.v[m][h]);
}

// unpack(panel, from, count, chunk) fills a chunk with the units [from, from + count) of a panel.
template <class C, class Unpack>
void matmul_chunks(const MatmulTask& task, std::int64_t begin, std::int64_t end, Unpack unpack) {
  constexpr std::int64_t kBlockTiles = 96 / C::kRows;  // 12 KiB of sums
  const Matrix& w = *task.w;
  const Tiling tiling(task.rows, C::kRows);
  const std::int64_t length = w.depth / C::kUnit;
  C chunk;
  alignas(64) float sums[kBlockTiles * C::kRows][kPanel];
  for (std::int64_t top = 0; top < tiling.tiles; top += kBlockTiles) {
    const std::int64_t bottom = top + kBlockTiles < tiling.tiles ? top + kBlockTiles : tiling.tiles;
    for (std::int64_t panel = begin; panel < end; ++panel)
      for (std::int64_t from = 0; from < length; from += C::kMost) {
        const int count = (int)(length - from < C::kMost ? length - from : C::kMost);
        unpack(w.data + panel * w.panel_bytes, from, count, chunk);
        for (std::int64_t i = top; i < bottom; ++i) {
          const std::int64_t row = tiling.begin(i), height = tiling.begin(i + 1) - row;
          with_height<C::kRows>(height, [&]<int M>() {
            multiply_chunk<C, M>(task, chunk, from, count, panel, row, sums + (row - tiling.begin(top)));
          });
        }
      }
  }
}

// Weights of 16 bits as float32.
template <WeightType type>
struct WideChunk {
  static constexpr int kUnit = 1, kMost = 128, kRows = kRowsFloat;
  alignas(64) float weights[kMost][kPanel];
};

// Convert the inputs [from, from + count) of a panel; pairs of bfloat16 become two lines.
template <WeightType type>
void unpack_wide(const std::uint8_t* panel, std::int64_t from, int count, WideChunk<type>& to) {
  const std::uint8_t* w = panel + from * 2 * kPanel;
  for (int k = 0; k < count; k += 2, w += 4 * kPanel) {
    for (int at = 0; at < 128; at += 64) prefetch_l2(w + kPrefetchFar + at);
    NI_HALVES {
      if constexpr (type == WeightType::bf16) {
        const i32x16 pairs = load_ints(w + 64 * h);
        store(to.weights[k] + 16 * h, first_of(pairs));
        store(to.weights[k + 1] + 16 * h, second_of(pairs));
      } else {
        const std::uint16_t* line = (const std::uint16_t*)w + 16 * h;
        store(to.weights[k] + 16 * h, load_f16(line));
        if (k + 1 < count) store(to.weights[k + 1] + 16 * h, load_f16(line + kPanel));
      }
    }
  }
}

// The operations of tile_floats and tile_bf16 in the same order.
template <int M>
NI_INLINE void add_chunk(const WideChunk<WeightType::f16>& chunk, const RowTile& t, std::int64_t from, int count, Acc<M>& acc) {
  const float* x = t.units<float>(from, M);
  for (int k = 0; k < count; ++k, x += M) add_input(chunk.weights[k], x, acc);
}
template <int M>
NI_INLINE void add_chunk(const WideChunk<WeightType::bf16>& chunk, const RowTile& t, std::int64_t from, int count, Acc<M>& acc) {
  constexpr int kSize = WideChunk<WeightType::bf16>::kMost / 2 * M;
  alignas(64) float first[kSize], second[kSize];
  const std::int32_t* x = t.units<std::int32_t>(from / 2, M);
  for (int u = 0; u < count / 2 * M; u += 16) {  // a row's bytes are a multiple of 64
    const i32x16 pairs = load_ints(x + u);
    store(first + u, first_of(pairs));
    store(second + u, second_of(pairs));
  }
  for (int k = 0; k < count; k += 2) {
    add_input(chunk.weights[k], first + k / 2 * M, acc);
    add_input(chunk.weights[k + 1], second + k / 2 * M, acc);
  }
}
