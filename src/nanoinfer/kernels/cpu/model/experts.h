// Mixtures of experts in place of an MLP (Shazeer et al. 2017). A router chooses a few experts for each row. The choices of
// all rows are then grouped by expert, so that a step reads the weights of the chosen experts alone, and each once.
//
// A choice is a pair of a row and one of its experts. Its slot is its row in the inputs and outputs of the experts'
// products, where the choices of an expert follow each other. A row adds the outputs of its experts in the order of their
// indices, so the result does not depend on the other rows.
#pragma once

#include <cstdint>
#include <vector>

#include "forward.h"

namespace nanoinfer {

// The outputs of a part of a stack of matrices are `width` rows of it. They need not begin with a panel: then the first and
// the last panel also have outputs of its neighbours, which are computed and not read.
constexpr std::int64_t shift_of(std::int64_t part, std::int64_t width) { return part * width % kPanel; }
// The panels of one part, and their largest number.
Matrix part_of(const Matrix& all, std::int64_t part, std::int64_t width);
constexpr std::int64_t panels_of(std::int64_t width) { return width / kPanel + (width % kPanel ? 2 : 0); }

class Mixture {
 public:
  explicit Mixture(const DecoderShape& shape);  // which it refers to

  // The inputs of the layer, (kMaxRows, x_stride), and the outputs of the router, (kMaxRows, logit_stride).
  float *x, *logits;
  const std::int64_t x_stride, logit_stride;

  // Choose the experts of a row, whose logits are there and may be changed.
  void choose(std::int64_t row, const ExpertWeights& w);
  // Give the choices of rows [0, num_rows) their slots; every row has chosen.
  void group(std::int64_t num_rows);
  // Begin to read the weights of the chosen experts from a mapped file.
  void read_ahead(const ExpertWeights& w) const;
  // Prepare the input of a slot: the row's x for the first two matrices, or what they made of it for the third.
  void prepare_x(const Kernels& kernels, const Matrix& c_fc, std::int64_t slot);
  void prepare_hidden(const Kernels& kernels, const Matrix& c_proj, std::int64_t slot);
  // The number of items of the products after `group`, and some of them. `most` limits the items of a part.
  std::int64_t hidden_items() const { return static_cast<std::int64_t>(groups_.size()) * panels_of(s_.expert_dim); }
  std::int64_t most_hidden_items() const;
  std::int64_t output_items() const { return static_cast<std::int64_t>(groups_.size()) * panels_of(s_.n_embd); }
  void multiply_hidden(const Kernels& kernels, const ExpertWeights& w, Epilogue activation, Range items) const;
  void multiply_output(const Kernels& kernels, const ExpertWeights& w, Range items) const;
  // y[0:C] += the sum over the row's experts.
  void add_to(std::int64_t row, float* y) const;

 private:
  struct Group {  // the choices of one expert
    std::int64_t expert, slot, rows;
    std::int64_t prepared;  // the first of its prepared rows
  };
  void prepare(const Kernels& kernels, const Matrix& w, const float* from, std::int64_t slot);
  void keep_groups(float* rank, float* scratch) const;
  template <class F>
  void each(Range items, std::int64_t width, F&& f) const;
  MatmulTask task(const Matrix& w, const Group& group, float* y, std::int64_t stride, Epilogue epilogue) const;

  const DecoderShape& s_;
  const std::int64_t choices_, hidden_stride_, out_stride_;
  Buffer memory_;
  float *hidden_, *out_;                         // (choices, stride), by slot
  std::uint8_t* prepared_;                       // by slot, the rows of each group padded to 16
  std::vector<float> ranks_;                     // (kMaxRows, 3 num_experts): what experts are chosen by, and scratch
  std::vector<float> weight_;                    // (kMaxRows, per_token): of the expert's output
  std::vector<std::int64_t> expert_, slot_;      // (kMaxRows, per_token), experts in ascending order
  std::vector<std::int64_t> row_of_, group_of_;  // of each slot
  std::vector<std::int64_t> rows_of_;            // (num_experts), used by `group`
  std::vector<Group> groups_;                    // experts in ascending order
};

}  // namespace nanoinfer
