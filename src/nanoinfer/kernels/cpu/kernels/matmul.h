// The product of rows and a matrix in any format: in vector registers (products.h, blocks.h), or in tiles of AMX (amx.h, blocks_amx.h).
// Part of kernels.cpp, which includes it in the namespace of each instruction set.
#pragma once

#include "blocks.h"
#if defined(__AMX_TILE__)
#include "blocks_amx.h"
#else
NI_INLINE bool uses_amx(WeightType, std::int64_t) { return false; }
constexpr std::int64_t kBlockRows = 0;
#endif

template <WeightType type, int M>
constexpr auto tile_of() {
#if defined(__AMX_TILE__)
  if constexpr (whole_scales(type)) return tile_blocks<type, M, add_block_digits<type, M>>;
#endif
  if constexpr (has_blocks(type)) return tile_blocks<type, M, add_record<type, M>>;
  else return tile<type, M>;
}

// In tiles of up to `height` rows.
template <WeightType type, int height>
void matmul_as(const MatmulTask& task, std::int64_t begin, std::int64_t end) {
  const Tiling tiling(task.rows, height);
  // Bytes of a row that are read: AMX needs more for i8 (amx.h).
  const std::int64_t row = type == WeightType::i8 ? task.w->depth / 8 * 9 : (std::int64_t)task.x_stride;
  std::int64_t block = (std::int64_t)kRowBlockBytes / (row * height);  // tiles
  if (block < 1) block = 1;
  for (std::int64_t top = 0; top < tiling.tiles; top += block) {
    const std::int64_t bottom = top + block < tiling.tiles ? top + block : tiling.tiles;
    for (std::int64_t panel = begin; panel < end; ++panel)
      for (std::int64_t i = top; i < bottom; ++i) {
        const std::int64_t from = tiling.begin(i);
        with_height<height>(tiling.begin(i + 1) - from,
                            [&]<int M>() { tile_of<type, M>()(task, panel, from, i - top, bottom - top); });
      }
  }
}

// The most rows whose tiles each unpack the weights; for more, they are unpacked once for all (docs/log/2026-11.md, 26 and 27).
template <WeightType type>
constexpr std::int64_t kRowsDirect =
    kPairs ? kRowsInt : kWidth < 16 ? 2 : BlockFormat(type).bits == 8 ? INT64_MAX : 24;

template <WeightType type>
void matmul_blocks(const MatmulTask& task, std::int64_t begin, std::int64_t end) {
  constexpr std::int64_t most = kRowsDirect<type>;
  if (task.rows <= most) return matmul_as<type, (most == 2 ? 2 : kRowsInt)>(task, begin, end);
  if constexpr (most < INT64_MAX) matmul_chunks<ChunkOf<type>>(task, begin, end, unpack_chunk<type>);
}

// The fewest rows for which it pays to convert weights of 16 bits once for all.
constexpr std::int64_t kRowsWide = kWidth == 8 ? 4 * kRowsFloat : INT64_MAX;

template <WeightType type>
void matmul_16_bits(const MatmulTask& task, std::int64_t begin, std::int64_t end) {
  if constexpr (kRowsWide < INT64_MAX)
    if (task.rows >= kRowsWide) return matmul_chunks<WideChunk<type>>(task, begin, end, unpack_wide<type>);
  matmul_as<type, kRowsFloat>(task, begin, end);
}

void matmul(const MatmulTask& task, std::int64_t begin, std::int64_t end) {
#if defined(__AMX_TILE__)
  if (uses_amx(task.w->prepared_as, task.rows)) return matmul_amx(task, begin, end);
  if (task.w->type == WeightType::i8) return (task.rows == 1 ? multiply_digits<1> : multiply_digits<2>)(task, begin, end);
#endif
  switch (task.w->type) {
    case WeightType::f32: return matmul_as<WeightType::f32, kRowsFloat>(task, begin, end);
    case WeightType::f16: return matmul_16_bits<WeightType::f16>(task, begin, end);
    case WeightType::bf16: return matmul_16_bits<WeightType::bf16>(task, begin, end);
    case WeightType::i8: return matmul_as<WeightType::i8, kRowsInt>(task, begin, end);
#define NI_PRODUCT(name) \
  case WeightType::name: return matmul_blocks<WeightType::name>(task, begin, end);
    NI_BLOCK_FORMATS(NI_PRODUCT)
#undef NI_PRODUCT
  }
}
