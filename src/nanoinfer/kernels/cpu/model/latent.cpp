#include "latent.h"

#include <algorithm>
#include <utility>

#include "decoder.h"
#include "experts.h"
#include "format.h"

namespace nanoinfer {

LatentHeads::LatentHeads(const DecoderShape& s, std::int64_t max_rows)
    : down_stride(row_stride(s.down_dim())),
      up_stride(row_stride(s.latent_query_rank ? s.n_head * s.query_dim() : 0)),
      n_head_(s.n_head),
      head_stride_(std::max(panels_of(s.latent_rank), panels_of(s.latent_value)) * kPanel) {
  const std::int64_t floats = max_rows * (down_stride + up_stride + n_head_ * head_stride_);
  const std::size_t bytes = most_prepared_bytes(std::max(s.latent_rank, s.latent_plain));
  memory_ = Buffer(floats * sizeof(float) + n_head_ * padded_rows(max_rows) * bytes);
  float* at = reinterpret_cast<float*>(memory_.data());
  const auto take = [&at](std::int64_t n) { return std::exchange(at, at + n); };
  down = take(max_rows * down_stride);
  up = take(max_rows * up_stride);
  out_ = take(max_rows * n_head_ * head_stride_);
  prepared_ = reinterpret_cast<std::uint8_t*>(at);
}

std::int64_t LatentHeads::items(std::int64_t width) const { return n_head_ * panels_of(width); }

void LatentHeads::multiply(const Kernels& kernels, const Matrix& w, std::int64_t width, std::int64_t rows,
                           Range items) const {
  const std::int64_t panels = panels_of(width);
  for (std::int64_t i = items.begin, next; i < items.end; i = next) {
    const std::int64_t head = i / panels, first = head * panels;
    next = std::min(items.end, first + panels);
    const Matrix one = part_of(w, head, width);
    const MatmulTask task{&one, prepared(w, head, rows), w.prepared, rows, out_ + head * head_stride_,
                          n_head_ * head_stride_, Epilogue::store};
    if (const std::int64_t end = std::min(next - first, one.panels); i - first < end) kernels.matmul(task, i - first, end);
  }
}

const float* LatentHeads::output(std::int64_t row, std::int64_t head, std::int64_t width) const {
  return out_ + (row * n_head_ + head) * head_stride_ + shift_of(head, width);
}

// From the prepared input of the layer to its queries, key and value in qkv_, not yet rotated.
void ForwardPass::latent_queries(const LayerWeights& w) {
  const DecoderShape& s = model_.shape;
  LatentHeads& heads = *latent_;
  multiply_parts(w.c_attn, heads.down, heads.down_stride);
  if (s.latent_query_rank) {
    add_rows(&PartSeconds::others, [this, &w, &heads](int rank, std::int64_t r) {
      float* y = scratch_ + rank * scratch_stride_;
      latent_norm(w.q_norm, heads.down + r * heads.down_stride, model_.shape.latent_query_rank, y);
      prepare_row(y, w.q_b, rank, r);
    });
    multiply(w.q_b, heads.up, heads.up_stride, Epilogue::store);
  }
  const float* q = s.latent_query_rank ? heads.up : heads.down;
  const std::int64_t q_stride = s.latent_query_rank ? heads.up_stride : heads.down_stride;
  multiply_heads(w.k_b, s.latent_rank, q, q_stride, s.query_dim());
  add_rows(&PartSeconds::others, [this, &w, &heads, q, q_stride](int, std::int64_t r) {
    const DecoderShape& s = model_.shape;
    const std::int64_t turned = s.latent_turned, rank = s.latent_rank;
    float* to = qkv_ + r * qkv_stride_;
    for (std::int64_t h = 0; h < s.n_head; ++h) {
      const float* rest = q + r * q_stride + h * s.query_dim() + s.latent_plain;
      to = std::copy(rest, rest + turned, to);
      const float* product = heads.output(r, h, rank);
      to = std::copy(product, product + rank, to);
    }
    const float* latent = heads.down + r * heads.down_stride + s.down_dim() - s.head_dim;
    to = std::copy(latent + rank, latent + rank + turned, to);
    latent_norm(w.kv_norm, latent, rank, to);
    float* value = std::fill_n(to + rank, turned, 0.0f);  // so that in 8 bits, values have a scale of their own
    std::copy(to, to + rank, value);
  });
}

// From the heads' sums of latents in attended_ to the prepared input of c_proj.
void ForwardPass::latent_values(const LayerWeights& w) {
  const DecoderShape& s = model_.shape;
  multiply_heads(w.v_b, s.latent_value, attended_ + s.latent_turned, attended_stride_, s.head_dim);
  add_rows(&PartSeconds::others, [this, &w](int rank, std::int64_t r) {
    const DecoderShape& s = model_.shape;
    float *y = attended_ + r * attended_stride_, *to = y;
    for (std::int64_t h = 0; h < s.n_head; ++h) {
      const float* value = latent_->output(r, h, s.latent_value);
      to = std::copy(value, value + s.latent_value, to);
    }
    prepare_row(y, w.c_proj, rank, r);
  }, [this, &w](Range rows) { project(attended_, attended_stride_, w.c_proj, rows); });
}

// Multiply the matrices of all heads, `width` outputs each, by their inputs: those of head h are at from + h * distance.
void ForwardPass::multiply_heads(const Matrix& w, std::int64_t width, const float* from, std::int64_t stride,
                                 std::int64_t distance) {
  LatentHeads& heads = *latent_;
  add_rows(&PartSeconds::others, [this, &w, &heads, from, stride, distance](int, std::int64_t r) {
    for (std::int64_t h = 0; h < model_.shape.n_head; ++h) {
      const float* x = from + r * stride + h * distance;
      kernels_.prepare(w.prepared_as, x, w.in, w.depth, r, num_rows_, w.prepared, heads.prepared(w, h, num_rows_),
                       /*largest=*/0);
    }
  });
  add(&PartSeconds::products, heads.items(width), [this, &w, &heads, width](int, Range items) {
    heads.multiply(kernels_, w, width, num_rows_, items);
  });
}

void ForwardPass::latent_norm(const NormWeights& weights, const float* x, std::int64_t n, float* y) const {
  const DecoderShape& s = model_.shape;
  kernels_.norm(s.norm, x, weights.weight.data(), weights.bias.data(), n, s.latent_epsilon, y);
}

void Decoder::add_latent(const std::string& prefix, LayerWeights& layer) {
  const DecoderShape& s = model_.shape;
  if (const std::int64_t from = s.latent_query_rank) {
    add_norm(prefix + "q_norm", layer.q_norm, from);
    add_matrix(prefix + "q_b", layer.q_b, s.n_head * s.query_dim(), from, /*with_bias=*/false);
  }
  add_norm(prefix + "kv_norm", layer.kv_norm, s.latent_rank);
  add_matrix(prefix + "k_b", layer.k_b, s.n_head * s.latent_rank, s.latent_plain, /*with_bias=*/false);
  add_matrix(prefix + "v_b", layer.v_b, s.values_dim(), s.latent_rank, /*with_bias=*/false);
}

}  // namespace nanoinfer
