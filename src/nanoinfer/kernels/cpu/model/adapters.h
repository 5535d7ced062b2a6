// LoRA adapters: updates of low rank of a decoder's matrices (nanoinfer/checkpoints/adapters.py). A row of a step has at most
// one adapter. Its inputs are projected when they are prepared for a product (ForwardPass::project), and what they expand to
// is added to the product's sums before its epilogue (MatmulTask::added).
#pragma once

#include <cstdint>
#include <memory>
#include <unordered_map>
#include <vector>

#include "kernels.h"
#include "memory.h"

namespace nanoinfer {

// The factors of an update in float32, row-major: a is (rank, in), and b (rows, rank), of the outputs from `first` on.
struct Factors {
  const float *a, *b;
  std::int64_t rank, in, rows, first;
};

struct Update {
  LowRank factors;
  std::int64_t at;  // where its projection begins in those of a row
  std::vector<float> scale;
};

class Adapters {
 public:
  // Add an update of a matrix to an adapter, from 1 on; `input` is the matrix that the rows are prepared for.
  // The factors are float32 if the matrix is, bfloat16 if it has 16 bits, else int8.
  void load(std::int64_t adapter, const Matrix& input, const Matrix& output, const Factors& given);
  void unload(std::int64_t adapter) { all_.erase(adapter); }
  bool has(std::int64_t adapter) const { return all_.count(adapter) != 0; }
  // The updates that read the rows prepared for a matrix, and those of a matrix; null: there are none.
  using List = std::vector<std::shared_ptr<const Update>>;
  const List* of_input(std::int64_t adapter, const Matrix& w) const { return find(adapter, &Adapter::inputs, w); }
  const List* of_output(std::int64_t adapter, const Matrix& w) const { return find(adapter, &Adapter::outputs, w); }
  std::int64_t most_projected() const { return most_projected_; }  // floats of a row

 private:
  using Table = std::unordered_map<const Matrix*, List>;
  struct Adapter {
    Table inputs, outputs;
    std::vector<Buffer> memory;  // of the factors
    std::size_t used = 0;        // of the last one
  };
  const List* find(std::int64_t adapter, Table Adapter::*table, const Matrix& w) const;

  std::unordered_map<std::int64_t, Adapter> all_;
  std::int64_t most_projected_ = 0;
};

}  // namespace nanoinfer
