// Multi-head latent attention (DeepSeek-V2, 2024): nanoinfer/models/other_attention.py has the formulas. All heads share one key,
// rotated values and then the latent, and one value, zeros and then the latent.
//
// Each head has a matrix before attention, which takes queries to the width of latents, and one after it, from latents to
// values. The matrices of all heads lie one below the other. Their products write a row of H outputs, one a head.
#pragma once

#include <cstdint>

#include "forward.h"

namespace nanoinfer {

class LatentHeads {
 public:
  LatentHeads(const DecoderShape& shape, std::int64_t max_rows);

  const std::int64_t down_stride, up_stride;
  float *down, *up;  // (max_rows, stride): outputs of c_attn, and of q_b if queries have a latent

  // The prepared input of a head, for a product of `rows` rows.
  std::uint8_t* prepared(const Matrix& w, std::int64_t head, std::int64_t rows) const {
    return prepared_ + head * padded_rows(rows) * w.prepared;
  }
  // The items of a product with `width` outputs a head, and some of them.
  std::int64_t items(std::int64_t width) const;
  void multiply(const Kernels& kernels, const Matrix& w, std::int64_t width, std::int64_t rows, Range items) const;
  // What the last product wrote for a head of a row, (width).
  const float* output(std::int64_t row, std::int64_t head, std::int64_t width) const;

 private:
  const std::int64_t n_head_, head_stride_;
  Buffer memory_;
  float* out_;  // (max_rows, n_head, head_stride)
  std::uint8_t* prepared_;
};

}  // namespace nanoinfer
