// Python bindings of single kernels, for the tests only (tests/native/test_native_kernels.py).
//
// Each function packs, prepares and computes with the decoder's code, but in separate buffers of exactly the size that
// the kernels may access. AddressSanitizer (make asan) then detects a read past the end; in the decoder, all buffers are
// in one mapping, where it cannot.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <memory>
#include <optional>
#include <stdexcept>
#include <vector>

#include "arrays.h"
#include "cache.h"
#include "format.h"
#include "isa.h"
#include "names.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace nanoinfer {
namespace {

using Array2 = nb::ndarray<nb::numpy, float, nb::ndim<2>>;

void require(bool ok, const char* message) {
  if (!ok) throw std::invalid_argument(message);
}

template <class Array>
std::int64_t size(const Array& a, int axis) {
  return static_cast<std::int64_t>(a.shape(axis));
}

// A new numpy array (rows, columns) of the first `columns` of each row of `from`.
Array2 to_numpy(const std::vector<float>& from, std::int64_t rows, std::int64_t columns, std::int64_t stride) {
  auto data = std::make_unique<float[]>(rows * columns);
  for (std::int64_t r = 0; r < rows; ++r) std::copy_n(from.data() + r * stride, columns, data.get() + r * columns);
  return owned(std::move(data), {static_cast<std::size_t>(rows), static_cast<std::size_t>(columns)});
}

// A packed matrix that owns its memory.
struct Packed {
  Matrix m{};
  std::vector<std::uint8_t> data;
  std::vector<float> scale, bias;

  // weights: (out, in), or for a format of GGUF files also its blocks, (out, bytes of a row) uint8.
  Packed(const Tensor& weights, const std::string& dtype, const std::optional<Floats1>& b, WeightType type) {
    const bool blocks = has_blocks(type) && weights.dtype() == nb::dtype<std::uint8_t>() && weights.ndim() == 2;
    require(blocks || packs_floats(type, size(weights, 1)), "weights of this format must be given as blocks");
    const std::int64_t block = blocks ? row_bytes(type, padded_depth(type, 1)) : 1;
    require(!blocks || (weights.shape(1) % block == 0 && weights.stride(1) == 1 &&
                        weights.stride(0) == static_cast<std::int64_t>(weights.shape(1))),
            "rows must have whole blocks, one after the other");
    const Stored values = blocks ? Stored{weights.data(), ValueType::f32, size(weights, 0),
                                          size(weights, 1) / block * padded_depth(type, 1), 0, 0}
                                 : stored(weights, dtype);
    require(values.rows > 0 && values.columns > 0, "weights must have at least one output and one input");
    require(!b || size(*b, 0) == values.rows, "bias must have one number for each output");
    m = matrix_of(type, values.rows, values.columns);
    data.resize(m.panels * m.panel_bytes);
    scale.resize(m.panels * kPanel);
    bias.resize(m.panels * kPanel);
    if (b) std::copy_n(b->data(), m.out, bias.data());
    if (blocks) {
      pack_blocks(type, static_cast<const std::uint8_t*>(values.data), m.out, m.in, 0, m.panels, data.data());
    } else {
      std::vector<float> scratch(kPanel * m.in);
      pack_panels(type, values, 0, m.panels, data.data(), scale.data(), scratch.data());
    }
    m.data = data.data();
    m.scale = scale.data();
    m.bias = bias.data();
  }
};

Array2 multiply(const Tensor& weights, std::optional<Floats1> bias, Floats2 x, std::optional<Floats2> y,
                const std::string& format, const std::string& epilogue, const std::string& isa) {
  const Packed w(weights, "float32", bias, weight_type(format));
  const Kernels& kernels = kernels_for(isa);
  using enum Epilogue;
  const Epilogue last = by_name<Epilogue>(
      "epilogue", epilogue,
      {{"store", store}, {"gelu_tanh", gelu_tanh}, {"gelu_erf", gelu_erf}, {"silu", silu}, {"relu", relu}, {"relu2", relu2},
       {"clamped_silu", clamped_silu}, {"add", add}, {"multiply", Epilogue::multiply},
       {"clamped_multiply", clamped_multiply}, {"soft_cap", soft_cap}});
  const std::int64_t rows = size(x, 0), stride = w.m.panels * kPanel;
  require(rows > 0 && size(x, 1) == w.m.in, "x must be (rows, in) with at least one row");
  require(!y || (size(*y, 0) == rows && size(*y, 1) == w.m.out), "y must be (rows, out)");
  std::vector<float> to(rows * stride);
  if (y)
    for (std::int64_t r = 0; r < rows; ++r) std::copy_n(y->data() + r * w.m.out, w.m.out, to.data() + r * stride);
  const std::size_t x_stride = w.m.prepared;
  std::vector<std::uint8_t> prepared(padded_rows(rows) * x_stride);
  for (std::int64_t r = 0; r < rows; ++r)
    kernels.prepare(w.m.prepared_as, x.data() + r * w.m.in, w.m.in, w.m.depth, r, rows, x_stride, prepared.data(), /*largest=*/0);
  kernels.matmul({&w.m, prepared.data(), x_stride, rows, to.data(), stride, last, 2.0f}, 0, w.m.panels);
  return to_numpy(to, rows, w.m.out, stride);
}

Array2 unpack(const Tensor& weights, const std::string& dtype, const std::string& format) {
  const Packed w(weights, dtype, std::nullopt, weight_type(format));
  std::vector<float> to(w.m.out * w.m.in);
  for (std::int64_t o = 0; o < w.m.out; ++o) unpack_row(w.m, o, to.data() + o * w.m.in);
  return to_numpy(to, w.m.out, w.m.in, w.m.in);
}

Array2 norm(const std::string& kind, Floats2 x, Floats1 weight, Floats1 bias, float eps, const std::string& isa) {
  const Kernels& kernels = kernels_for(isa);
  const Norm which = by_name<Norm>("norm", kind, {{"layer", Norm::layer}, {"rms", Norm::rms}});
  const std::int64_t rows = size(x, 0), n = size(x, 1);
  require(rows > 0 && n > 0, "x must have at least one row and one column");
  require(size(weight, 0) == n && size(bias, 0) == n, "weight and bias must be as wide as x");
  std::vector<float> to(rows * n);
  for (std::int64_t r = 0; r < rows; ++r)
    kernels.norm(which, x.data() + r * n, weight.data(), bias.data(), n, eps, to.data() + r * n);
  return to_numpy(to, rows, n, n);
}

Array2 rotate(Floats2 x, Floats1 cos, Floats1 sin, const std::string& isa) {
  const Kernels& kernels = kernels_for(isa);
  const std::int64_t rows = size(x, 0), n = size(x, 1), half = size(cos, 0);
  require(half > 0 && size(sin, 0) == half && 2 * half <= n, "cos and sin must have equal sizes, at most half of x's");
  std::vector<float> to(x.data(), x.data() + rows * n);
  for (std::int64_t r = 0; r < rows; ++r) kernels.rotate(to.data() + r * n, cos.data(), sin.data(), half);
  return to_numpy(to, rows, n, n);
}

Array2 hadamard(Floats2 x, const std::string& isa) {
  const std::int64_t rows = size(x, 0), n = size(x, 1);
  require(rows > 0 && n > 0, "x must have at least one row and one column");
  std::vector<float> to(x.data(), x.data() + rows * n);
  kernels_for(isa).hadamard(to.data(), rows * n, n);
  return to_numpy(to, rows, n, n);
}

// One head of keys and values of one sequence, with group heads of queries: q (Tq, group * D). Blocks are initialized
// with NaN (all bits set), which no query may read; keys and values before the first window stay NaN too.
Array2 attention(Floats2 q, Floats2 k, Floats2 v, std::int64_t start, const std::string& cache, std::int64_t group,
                 std::int64_t window, float scale, float softcap, const std::optional<Floats1>& sinks,
                 const std::string& isa) {
  const Kernels& kernels = kernels_for(isa);
  const std::int64_t queries = size(q, 0), T = size(k, 0), D = size(k, 1);
  require(queries > 0 && D > 0 && group > 0 && group <= size(q, 1), "q must have a query, a dimension and a head");
  require(size(q, 1) == group * D && size(v, 1) == D && size(v, 0) == T, "q must be (Tq, group * D), k and v (T, D)");
  require(start >= 0 && start <= T && queries <= T - start, "start + queries must be at most T");
  require(window >= 0, "window must be at least 0");
  require(!sinks || size(*sinks, 0) == group, "sinks must have one number for each head");
  const CacheShape shape{cache_type(cache), 1, 1, D};
  const std::int64_t num_blocks = (T + kBlock - 1) / kBlock, width = window ? window : T;
  std::vector<std::vector<std::uint8_t>> blocks;
  std::vector<const std::uint8_t*> addresses;
  for (std::int64_t b = 0; b < num_blocks; ++b) {
    blocks.emplace_back(shape.block_bytes(), std::uint8_t{0xff});
    addresses.push_back(blocks.back().data());
  }
  for (std::int64_t t = std::max<std::int64_t>(0, start + 1 - width); t < T; ++t)
    kernels.store_kv(shape.type, k.data() + t * D, v.data() + t * D, D, blocks[t / kBlock].data(), t % kBlock);
  std::vector<float> to(queries * group * D), scratch(attention_scratch(D, queries * group));
  kernels.attention({.type = shape.type,
                     .head_dim = D,
                     .blocks = addresses.data(),
                     .offset = 0,
                     .start = start,
                     .num_tokens = queries,
                     .group = group,
                     .window = width,
                     .scale = scale > 0 ? scale : 1.0f / std::sqrt(static_cast<float>(D)),
                     .softcap = softcap,
                     .sinks = sinks ? sinks->data() : nullptr,
                     .q = q.data(),
                     .q_stride = group * D,
                     .out = to.data(),
                     .out_stride = group * D,
                     .scratch = scratch.data()});
  return to_numpy(to, queries, group * D, group * D);
}

}  // namespace

void bind_kernels(nb::module_& m) {
  m.def("multiply", &multiply, nb::kw_only(), "weights"_a, "bias"_a.none(), "x"_a, "y"_a.none() = nb::none(),
        "format"_a, "epilogue"_a = "store", "isa"_a = "",
        "For tests: epilogue(x W^T + bias), weights (out, in) packed in `format`, or blocks of a GGUF file (out, bytes)"
        " uint8; `add` adds to y (rows, out).");
  m.def("unpack", &unpack, nb::kw_only(), "weights"_a, "dtype"_a = "float32", "format"_a,
        "For tests: weights (out, in) after packing, as by `pack`, and unpacking.");
  m.def("norm", &norm, nb::kw_only(), "kind"_a = "layer", "x"_a, "weight"_a, "bias"_a, "eps"_a, "isa"_a = "",
        "For tests: norm of the rows of x, layer or rms.");
  m.def("rotate", &rotate, nb::kw_only(), "x"_a, "cos"_a, "sin"_a, "isa"_a = "",
        "For tests: the rows of x with the pairs (i, i + half) rotated.");
  m.def("hadamard", &hadamard, "x"_a, "isa"_a = "",
        "For tests: the rows of x multiplied by a Hadamard matrix, as those of the KV cache in 8 and 4 bits are.");
  m.def("attention", &attention, nb::kw_only(), "q"_a, "k"_a, "v"_a, "start"_a, "cache"_a, "group"_a = 1,
        "window"_a = 0, "scale"_a = 0.0f, "softcap"_a = 0.0f, "sinks"_a = nb::none(), "isa"_a = "",
        "For tests: one head of keys and values (T, D) in blocks, group heads of queries (Tq, group * D) at positions"
        " start, ... Window 0: none; scale 0: 1 / sqrt(D).");
}

}  // namespace nanoinfer
