// Arrays as arguments from Python: on the CPU, read-only.
#pragma once

#include <nanobind/ndarray.h>

#include <memory>
#include <stdexcept>
#include <string>

#include "format.h"
#include "names.h"

namespace nanoinfer {

using Floats1 = nanobind::ndarray<const float, nanobind::ndim<1>, nanobind::c_contig, nanobind::device::cpu>;
using Floats2 = nanobind::ndarray<const float, nanobind::ndim<2>, nanobind::c_contig, nanobind::device::cpu>;
using Bytes1 = nanobind::ndarray<const std::uint8_t, nanobind::ndim<1>, nanobind::c_contig, nanobind::device::cpu>;
using Bytes2 = nanobind::ndarray<const std::uint8_t, nanobind::ndim<2>, nanobind::c_contig, nanobind::device::cpu>;
using Tensor = nanobind::ndarray<nanobind::ro, nanobind::device::cpu>;  // any type, shape and strides

// A new array that owns its memory. strides: in items, or nullptr: items follow each other.
template <class T, std::size_t N>
nanobind::ndarray<nanobind::numpy, T, nanobind::ndim<N>> owned(std::unique_ptr<T[]> data, const std::size_t (&shape)[N],
                                                               const std::int64_t* strides = nullptr) {
  T* const raw = data.release();
  const nanobind::capsule owner(raw, [](void* p) noexcept { delete[] static_cast<T*>(p); });
  return {raw, N, shape, owner, strides};
}

// A tensor of a checkpoint; a vector is one row. bfloat16 values are given as uint16. Throws std::invalid_argument.
inline Stored stored(const Tensor& a, const std::string& dtype) {
  const ValueType type = by_name<ValueType>(
      "dtype", dtype, {{"float32", ValueType::f32}, {"float16", ValueType::f16}, {"bfloat16", ValueType::bf16}});
  const nanobind::dlpack::dtype wanted{
      static_cast<std::uint8_t>(type == ValueType::bf16 ? nanobind::dlpack::dtype_code::UInt
                                                        : nanobind::dlpack::dtype_code::Float),
      static_cast<std::uint8_t>(type == ValueType::f32 ? 32 : 16), 1};
  if (a.dtype() != wanted)
    throw std::invalid_argument("dtype='" + dtype + "' must be given as " +
                                (type == ValueType::bf16 ? "uint16, the bits of the values" : dtype));
  if (a.ndim() < 1 || a.ndim() > 2)
    throw std::invalid_argument("a tensor must have 1 or 2 dimensions, not " + std::to_string(a.ndim()));
  const auto size = [&a](std::size_t axis) { return static_cast<std::int64_t>(a.shape(axis)); };
  if (a.ndim() == 1) return {a.data(), type, 1, size(0), 0, a.stride(0)};
  return {a.data(), type, size(0), size(1), a.stride(0), a.stride(1)};
}

}  // namespace nanoinfer
