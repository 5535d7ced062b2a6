// Per-layer embeddings (nanoinfer/models/layers.py has the formulas): each token has an input for each layer, made before the
// first layer, of which a gate adds a part to x after each layer; and x is scaled there. The table has a row for each token and
// layer, those of a token one after the other, so that a row of a step reads few cache lines of panels.
#include <cmath>

#include "decoder.h"
#include "format.h"

namespace nanoinfer {

void Decoder::add_layer_inputs() {
  const DecoderShape& s = model_.shape;
  const std::int64_t P = s.per_layer_dim;
  add_matrix("transformer.per_layer.wte", model_.inputs_wte, s.vocab_size * s.n_layer, P, /*with_bias=*/false);
  add_matrix("transformer.per_layer.c_in", model_.inputs_in, s.n_layer * P, s.n_embd, /*with_bias=*/false);
  add_norm("transformer.per_layer.norm", model_.inputs_norm, P);
}

void Decoder::add_after(const std::string& prefix, LayerWeights& layer, bool scaled) {
  const std::int64_t C = model_.shape.n_embd, P = model_.shape.per_layer_dim;
  if (scaled) slots_[prefix + "scale"] = {.vector = &layer.scale, .columns = 1};
  if (P == 0) return;
  add_matrix(prefix + "c_gate", layer.after_gate, P, C, /*with_bias=*/false);
  add_matrix(prefix + "c_proj", layer.after_proj, C, P, /*with_bias=*/false);
  add_norm(prefix + "post", layer.after_post, C);
}

void ForwardPass::make_layer_inputs() {
  prepare(x_, x_stride_, model_.inputs_in);
  multiply(model_.inputs_in, inputs_, inputs_stride_, Epilogue::store);
  add_rows(&PartSeconds::others,
           [this](int rank, std::int64_t r) { make_row_inputs(r, scratch_ + rank * scratch_stride_); });
}

void ForwardPass::make_row_inputs(std::int64_t row, float* scratch) const {
  const DecoderShape& s = model_.shape;
  const std::int64_t P = s.per_layer_dim;
  const float of_product = 1.0f / std::sqrt(static_cast<float>(s.n_embd)), of_table = std::sqrt(static_cast<float>(P));
  float* u = inputs_ + row * inputs_stride_;
  for (std::int64_t l = 0; l < s.n_layer; ++l, u += P) {
    for (std::int64_t i = 0; i < P; ++i) u[i] *= of_product;
    norm(model_.inputs_norm, u, P, u);
    unpack_row(model_.inputs_wte, rows_[row].token * s.n_layer + l, scratch);
    for (std::int64_t i = 0; i < P; ++i) u[i] = (u[i] + scratch[i] * of_table) * 0.70710678f;  // 1 / sqrt(2)
  }
}

void ForwardPass::after_layer(std::int64_t index) {
  const LayerWeights& w = model_.layers[index];
  const std::int64_t C = model_.shape.n_embd, P = model_.shape.per_layer_dim;
  if (P == 0) {
    if (!model_.shape.layers[index].scaled) return;
    return add_rows(&PartSeconds::others, [this, &w, C](int, std::int64_t r) {
      for (float *x = x_ + r * x_stride_, *end = x + C; x < end; ++x) *x *= w.scale;
    });
  }
  prepare(x_, x_stride_, w.after_gate);
  multiply(w.after_gate, hidden_, hidden_stride_, model_.shape.activation);
  add_rows(&PartSeconds::others, [this, &w, index, P](int rank, std::int64_t r) {
    float* h = hidden_ + r * hidden_stride_;
    const float* u = inputs_ + r * inputs_stride_ + index * P;
    for (std::int64_t i = 0; i < P; ++i) h[i] *= u[i];
    prepare_row(h, w.after_proj, rank, r);
  });
  multiply(w.after_proj, attended_, attended_stride_, Epilogue::store);
  add_rows(&PartSeconds::others, [this, &w, C](int, std::int64_t r) {
    float *y = attended_ + r * attended_stride_, *x = x_ + r * x_stride_;
    norm(w.after_post, y, C, y);
    for (std::int64_t i = 0; i < C; ++i) x[i] = (x[i] + y[i]) * w.scale;
  });
}

}  // namespace nanoinfer
