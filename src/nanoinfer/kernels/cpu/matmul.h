// The product of rows and a matrix in any format: in vector registers (products.h, blocks.h), or in tiles of AMX (amx.h).
// Part of kernels.cpp, which includes it in the namespace of each instruction set.
#pragma once

#include "blocks.h"
#if defined(__AMX_TILE__)
#include "amx.h"
#else
NI_INLINE bool uses_amx(WeightType, std::int64_t) { return false; }
#endif

void matmul(const MatmulTask& task, std::int64_t begin, std::int64_t end) {
#if defined(__AMX_TILE__)
  if (uses_amx(task.w->type, task.rows)) return matmul_amx(task, begin, end);
#endif
  switch (task.w->type) {
    case WeightType::f32: return matmul_as<TilesFor<WeightType::f32, kRowsFloat>>(task, begin, end);
    case WeightType::f16: return matmul_as<TilesFor<WeightType::f16, kRowsFloat>>(task, begin, end);
    case WeightType::bf16: return matmul_as<TilesFor<WeightType::bf16, kRowsFloat>>(task, begin, end);
    case WeightType::i8: return matmul_as<TilesFor<WeightType::i8, kRowsInt>>(task, begin, end);
    case WeightType::i4: return matmul_as<TilesFor<WeightType::i4, kRowsInt>>(task, begin, end);
#define NI_PRODUCT(name) \
  case WeightType::name: return matmul_blocks<WeightType::name>(task, begin, end);
    NI_BLOCK_FORMATS(NI_PRODUCT)
#undef NI_PRODUCT
  }
}
