// Packed weights: conversion of a stored matrix to panels in each weight format, and back to float32.
//
// The panels do not depend on the instruction set. Folders of packed weights contain them
// (nanoinfer/checkpoints/packed.py), so a change of a format needs a new VERSION there.
//
//   f32, f16   (panels, in, 32)              one value for each output and input
//   bf16       (panels, in / 2, 32, 2)       pairs of inputs, for dot products of bfloat16
//   i8         (panels, in / 4, 32, 4)       w + 128 as a byte; one scale for each output: largest / 127
//   others     (panels, records): the blocks of a GGUF file in another order (BlockFormat in layout.h). For q8_0, q4_0:
//              [32 scales as float16, (8, 32, 4) bytes w / scale + 128], [32 scales, (4, 32, 4) bytes of two values]
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "kernels.h"

namespace nanoinfer {

std::int64_t padded_depth(WeightType type, std::int64_t in);
std::size_t panel_bytes(WeightType type, std::int64_t in);
// Bytes of one prepared row of activations, a multiple of 64.
std::size_t prepared_bytes(WeightType type, std::int64_t in);
std::size_t most_prepared_bytes(std::int64_t in);  // of all types
// A view of a matrix of this shape without its memory, which the owner sets: panels * panel_bytes bytes of data, and
// panels * kPanel scales and biases.
Matrix matrix_of(WeightType type, std::int64_t out, std::int64_t in);
// Let matrices take the same prepared rows; false if their formats do not.
bool share_rows(const std::vector<Matrix*>& matrices);

// A matrix, or a vector as one row, in the values and strides of a checkpoint. It is not owned and need not be aligned.
enum class ValueType : int { f32, f16, bf16 };
struct Stored {
  const void* data;
  ValueType type;
  std::int64_t rows, columns;
  std::int64_t row_stride, column_stride;  // in values; may be negative
};

// Whether floats can be packed in a format with rows of `in`; in the others, only blocks of a GGUF file.
bool packs_floats(WeightType type, std::int64_t in);

// Write rows [begin, end) as float32, (end - begin, columns), row-major.
void read_rows(const Stored& from, std::int64_t begin, std::int64_t end, float* to);

// Pack panels [begin, end) of weights (out, in): outputs [32 begin, 32 end). data: the first panel of the matrix; scale:
// its first scale, which only i8 writes. scratch: kPanel * in floats.
void pack_panels(WeightType type, const Stored& weights, std::int64_t begin, std::int64_t end,
                 std::uint8_t* data, float* scale, float* scratch);

// Round rows [begin, end) of weights, in whole blocks, to the blocks of a GGUF file. blocks: of row 0 on; scratch: the rows
// as floats. Formats: q8_0, q5_0, q4_k, q6_k.
void quantize_rows(WeightType type, const Stored& weights, std::int64_t begin, std::int64_t end, std::uint8_t* blocks,
                   float* scratch);

// A row of blocks in a GGUF file: the file's descriptor, and where the row begins.
struct RowPlace {
  std::int64_t descriptor, offset;
};
// Bytes of a row of blocks.
std::size_t row_bytes(WeightType type, std::int64_t in);
// Pack panels [begin, end) of `rows` rows of such blocks.
void pack_blocks(WeightType type, const std::uint8_t* blocks, std::int64_t rows, std::int64_t in, std::int64_t begin,
                 std::int64_t end, std::uint8_t* data);

// Write row `output` of a packed matrix as float32, to[0:w.in].
void unpack_row(const Matrix& w, std::int64_t output, float* to);

}  // namespace nanoinfer
