// Packed weights: conversion between a float32 matrix and panels in one of five formats.
//
//   f32, f16   (panels, in, 32)              one value for each output and input
//   bf16       (panels, in / 2, 32, 2)       pairs of inputs, for dot products of bfloat16
//   i8         (panels, in / 4, 32, 4)       w + 128 as a byte; one scale for each output: largest / 127
//   i4         (panels, [groups: 32 scales as bfloat16, 32 zero points as bytes], [groups, 8, 32, 4])
//              two 4-bit values in a byte; scale and zero point for each output and group of 64 inputs, chosen for
//              the least squared error (quantize4)
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels.h"

namespace nanoinfer {

std::int64_t padded_depth(WeightType type, std::int64_t in);
std::size_t panel_bytes(WeightType type, std::int64_t in);
// Bytes of one prepared row of activations, a multiple of 64.
std::size_t prepared_bytes(WeightType type, std::int64_t in);

// Pack outputs [panel * 32, panel * 32 + 32) of weights (out, in), row-major float32. For i8, the panel's 32 scales are
// written to `scale`.
void pack_panel(WeightType type, const float* weights, std::int64_t out, std::int64_t in, std::int64_t panel,
                std::uint8_t* data, float* scale);

// Write row `output` of a packed matrix as float32, to[0:w.in].
void unpack_row(const Matrix& w, std::int64_t output, float* to);

}  // namespace nanoinfer
