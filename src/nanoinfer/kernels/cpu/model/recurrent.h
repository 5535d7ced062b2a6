// Layers with a state of constant size in place of keys and values: nanoinfer/models/recurrent.py has the formulas, and
// nanoinfer/kv/states.py says which rows of states a step reads and writes.
//
// A row has for each recurrent layer, in float32:
//   the last taps - 1 inputs of the convolution     (taps - 1, channels)
//   the matrices of the heads, in panels of columns (heads, value_dim / kPanel, key_dim, kPanel); the last panel may be narrower
//   the inputs of tokens that are not in these yet  (num_pending, inputs)
#pragma once

#include <cstdint>
#include <vector>

#include "forward.h"

namespace nanoinfer {

class RecurrentLayers {
 public:
  // Throws std::bad_alloc. Rows are numbered from 1 on.
  RecurrentLayers(const DecoderShape& shape, std::int64_t num_rows, int num_threads);

  std::int64_t num_rows() const { return num_rows_; }
  std::size_t row_bytes() const { return row_floats_ * sizeof(float); }
  void copy(std::int64_t from, std::int64_t to);

  // The outputs of c_attn and those of the layer, as rows of a step.
  struct Outputs {
    const float* x;
    std::int64_t x_stride;
    float* y;
    std::int64_t y_stride;
  };
  // The new tokens of a sequence are a run. A run has items, which write the outputs and the matrices; `keep` then writes the rest
  // of the state.
  void select(const Row* rows, std::int64_t count);
  std::int64_t num_runs() const { return static_cast<std::int64_t>(runs_.size()); }
  std::int64_t items() const;
  void process(const Kernels& kernels, const RecurrentWeights& w, std::int64_t layer, const Outputs& rows, std::int64_t run,
               std::int64_t item, int rank) const;
  void keep(std::int64_t layer, const Outputs& rows, std::int64_t run) const;

 private:
  struct Run {
    std::int64_t row, count;          // in the step
    std::int64_t state, num_pending;
    bool few;                         // whether its tokens will be pending; else the state will be that after them
    bool empty;                       // whether they are its first: the row may have anything
  };
  // What the tokens of a run are computed from: those that are pending are followed by the new ones.
  struct Tokens {
    const StateShape& shape;
    const float *last, *pending, *x;  // x: of the first new token
    std::int64_t num_pending, x_stride;

    const float* channels(std::int64_t token) const;
    const float* gates(std::int64_t token) const;
  };
  float* state(std::int64_t layer, const Run& run) const;
  Tokens tokens(std::int64_t layer, const Outputs& rows, const Run& run) const;
  void convolve(const Kernels& kernels, const RecurrentWeights& w, const Tokens& from, std::int64_t token, std::int64_t first,
                std::int64_t count, float* y) const;
  void read_token(const Kernels& kernels, const RecurrentWeights& w, const Tokens& from, std::int64_t token, std::int64_t head,
                  float* to) const;

  const StateShape shape_;
  const std::int64_t num_rows_;
  std::vector<std::int64_t> place_;   // of each layer in a row, in floats
  std::int64_t layer_floats_ = 0, row_floats_ = 0;
  std::int64_t chunk_ = 0;  // tokens that an item reads before it updates the matrix by them
  std::int64_t token_stride_ = 0, scratch_stride_ = 0;
  Buffer memory_, scratch_;
  std::vector<float> key_scale_, query_scale_, zeros_;  // (key_dim)
  std::vector<Run> runs_;
};

}  // namespace nanoinfer
