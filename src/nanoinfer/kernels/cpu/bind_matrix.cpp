// A matrix for products outside a decoder (draft heads), on the threads that decoders use. NumPy's products run on threads
// of their own, which wait for each other at the end of each product, and for the cores that the pool's threads spin on.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <memory>
#include <stdexcept>
#include <vector>

#include "arrays.h"
#include "gil.h"
#include "isa.h"
#include "kernels.h"
#include "memory.h"
#include "packing.h"
#include "thread_pool.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace nanoinfer {
namespace {

using Floats = nb::ndarray<nb::numpy, float, nb::ndim<2>>;

// The first `columns` floats of rows of `stride`.
Floats to_numpy(std::unique_ptr<float[]> data, std::size_t rows, std::size_t columns, std::int64_t stride) {
  float* raw = data.release();
  const nb::capsule owner(raw, [](void* p) noexcept { delete[] static_cast<float*>(p); });
  return Floats(raw, {rows, columns}, owner, {stride, 1});
}

// Not changed after it was made, so several threads may use it.
class FloatMatrix {
 public:
  FloatMatrix(const Stored& values, int threads, const std::string& isa)
      : kernels_(kernels_for(isa)),
        threads_(ThreadPool::shared(threads)),
        m_(matrix_of(WeightType::f32, values.rows, values.columns)),
        panels_(m_.panels * m_.panel_bytes),
        zeros_(m_.panels * kPanel) {
    m_.data = panels_.data();
    m_.scale = m_.bias = zeros_.data();
    pack(*threads_, m_.type, values, nullptr, panels_.data(), zeros_.data());  // float32 has no scales, so it writes none
  }

  Floats multiply(const Floats2& x) const {
    const std::int64_t rows = x.shape(0), stride = m_.panels * kPanel;
    if (rows < 1 || static_cast<std::int64_t>(x.shape(1)) != m_.in)
      throw std::invalid_argument("x is (" + std::to_string(x.shape(0)) + ", " + std::to_string(x.shape(1)) +
                                  "), must be (rows, " + std::to_string(m_.in) + ") with at least one row");
    std::unique_ptr<float[]> y;
    {
      const ReleasedGil nogil;
      y.reset(new float[rows * stride]);  // not initialized
      std::vector<std::uint8_t> prepared(padded_rows(rows) * m_.prepared);
      const MatmulTask task{&m_, prepared.data(), m_.prepared, rows, y.get(), stride, Epilogue::store, 0};
      const Phase prepare{rows, [&](int, Range part) {
        for (std::int64_t r = part.begin; r < part.end; ++r)
          kernels_.prepare(m_.prepared_as, x.data() + r * m_.in, m_.in, m_.depth, r, rows, m_.prepared, prepared.data(), /*largest=*/0);
      }};
      const Phase multiply{m_.panels, [&](int, Range part) { kernels_.matmul(task, part.begin, part.end); }};
      std::shared_ptr<ThreadPool> threads = threads_;  // another one in a forked child
      ThreadPool::current(threads).run({prepare, multiply});
    }
    return to_numpy(std::move(y), rows, m_.out, stride);
  }

  Floats rows(const std::vector<std::int64_t>& ids) const {
    for (const std::int64_t id : ids)
      if (id < 0 || id >= m_.out)
        throw std::out_of_range("row " + std::to_string(id) + " is outside the matrix of " + std::to_string(m_.out));
    std::unique_ptr<float[]> y(new float[ids.size() * m_.in]);
    for (std::size_t r = 0; r < ids.size(); ++r) unpack_row(m_, ids[r], y.get() + r * m_.in);
    return to_numpy(std::move(y), ids.size(), m_.in, m_.in);
  }

 private:
  const Kernels& kernels_;
  std::shared_ptr<ThreadPool> threads_;
  Matrix m_;
  Buffer panels_;
  std::vector<float> zeros_;  // (panels * kPanel): biases
};

}  // namespace

void bind_matrix(nb::module_& m) {
  nb::class_<FloatMatrix>(m, "Matrix", "A float32 matrix (out, in), packed for products on the threads of decoders.")
      .def(
          "__init__",
          [](FloatMatrix* self, const Floats2& values, int threads, const std::string& isa) {
            if (threads < 1 || threads > 1024) throw std::invalid_argument("threads must be from 1 to 1024");
            if (values.size() == 0) throw std::invalid_argument("a matrix must have at least one output and one input");
            const Stored from{values.data(), ValueType::f32, static_cast<std::int64_t>(values.shape(0)),
                              static_cast<std::int64_t>(values.shape(1)), values.stride(0), values.stride(1)};
            const ReleasedGil nogil;
            new (self) FloatMatrix(from, threads, isa);
          },
          nb::kw_only(), "values"_a, "threads"_a, "isa"_a = "")
      .def("multiply", &FloatMatrix::multiply, "x"_a, "Return x W^T, (rows, out), for x of (rows, in).")
      .def("rows", &FloatMatrix::rows, "ids"_a, "Return rows of the matrix, (len(ids), in), as they were given.");
}

}  // namespace nanoinfer
