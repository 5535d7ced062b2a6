#include "recurrent.h"

#include <algorithm>
#include <cmath>

#include "decoder.h"

namespace nanoinfer {

namespace {

constexpr std::int64_t kChannels = 256;  // of an item without a matrix
constexpr std::int64_t kMostTaps = 64;

float softplus(float x) { return x > 20 ? x : std::log1p(std::exp(x)); }

}  // namespace

RecurrentLayers::RecurrentLayers(const DecoderShape& s, std::int64_t num_rows, int num_threads)
    : shape_(s.recurrence), num_rows_(num_rows) {
  layer_floats_ = shape_.num_state() + shape_.num_pending * shape_.num_inputs();
  for (const LayerShape& l : s.layers) {
    place_.push_back(row_floats_);
    row_floats_ += l.recurrent ? layer_floats_ : 0;
  }
  memory_ = Buffer(num_rows * row_bytes());
  const std::int64_t D = shape_.key_dim;
  token_stride_ = 2 * D + shape_.value_dim + 2;
  chunk_ = 2 * std::max<std::int64_t>(8, shape_.num_pending);
  scratch_stride_ = (chunk_ * token_stride_ + D * kPanel + kLanes - 1) / kLanes * kLanes;
  scratch_ = Buffer(num_threads * scratch_stride_ * sizeof(float));
  // x / sqrt(|x|^2 + 1e-6) is an rms norm times 1 / sqrt(D); queries are divided by sqrt(D) once more.
  key_scale_.assign(D, 1 / std::sqrt(static_cast<float>(D)));
  query_scale_.assign(D, 1 / static_cast<float>(D));
  zeros_.assign(std::max(D, (shape_.taps - 1) * shape_.num_channels()), 0.0f);
}

void RecurrentLayers::copy(std::int64_t from, std::int64_t to) {
  float* const rows = reinterpret_cast<float*>(memory_.data());
  std::copy_n(rows + (from - 1) * row_floats_, row_floats_, rows + (to - 1) * row_floats_);
}

void RecurrentLayers::select(const Row* rows, std::int64_t count) {
  runs_.clear();
  for (std::int64_t r = 0; r < count; ++r) {
    if (r == 0 || rows[r].handle != rows[r - 1].handle) runs_.push_back({r, 0, rows[r].state, rows[r].num_pending, rows[r].few, rows[r].empty});
    ++runs_.back().count;
  }
}

std::int64_t RecurrentLayers::items() const {
  return shape_.key_dim ? shape_.num_heads : (shape_.num_channels() + kChannels - 1) / kChannels;
}

float* RecurrentLayers::state(std::int64_t layer, const Run& run) const {
  return reinterpret_cast<float*>(memory_.data()) + (run.state - 1) * row_floats_ + place_[layer];
}

RecurrentLayers::Tokens RecurrentLayers::tokens(std::int64_t layer, const Outputs& rows, const Run& run) const {
  const float* at = state(layer, run);
  return {shape_, run.empty ? zeros_.data() : at, at + shape_.num_state(), rows.x + run.row * rows.x_stride, run.num_pending, rows.x_stride};
}

// The inputs of the convolution; a negative token is one of those that the state has.
const float* RecurrentLayers::Tokens::channels(std::int64_t token) const {
  if (token < 0) return last + (shape.taps - 1 + token) * shape.num_channels();
  if (token < num_pending) return pending + token * shape.num_inputs();
  return x + (token - num_pending) * x_stride + shape.channels_at();
}

const float* RecurrentLayers::Tokens::gates(std::int64_t token) const {
  if (token < num_pending) return pending + token * shape.num_inputs() + shape.num_channels();
  return x + (token - num_pending) * x_stride + shape.gates_at();
}

void RecurrentLayers::convolve(const Kernels& kernels, const RecurrentWeights& w, const Tokens& from, std::int64_t token,
                               std::int64_t first, std::int64_t count, float* y) const {
  const float* rows[kMostTaps];
  for (std::int64_t i = 0; i < shape_.taps; ++i) rows[i] = from.channels(token - shape_.taps + 1 + i) + first;
  kernels.convolve({rows, shape_.taps, w.conv.data() + first, shape_.num_channels(), w.conv_bias.data() + first, count,
                    /*activated=*/shape_.key_dim > 0, y});
}

// Write the query, key and value of a head, the factor of its decay, and its rate of learning or size of a step.
void RecurrentLayers::read_token(const Kernels& kernels, const RecurrentWeights& w, const Tokens& from, std::int64_t token,
                                 std::int64_t head, float* to) const {
  const bool delta = shape_.rule == Rule::delta;
  const std::int64_t D = shape_.key_dim, V = shape_.value_dim, keys = shape_.keys_dim();
  const std::int64_t shared = shape_.key_head(head) * D, inner = shape_.inner_dim();
  float *q = to, *k = q + D, *v = k + D, *gates = v + V;
  convolve(kernels, w, from, token, shared + (delta ? 0 : inner + keys), D, q);
  convolve(kernels, w, from, token, shared + (delta ? keys : inner), D, k);
  convolve(kernels, w, from, token, head * V + (delta ? 2 * keys : 0), V, v);
  const float* given = from.gates(token) + head;
  const float step = softplus(given[delta ? shape_.num_heads : 0] + w.dt_bias[head]);
  gates[0] = std::exp(-std::exp(w.a_log[head]) * step);
  gates[1] = delta ? 1 / (1 + std::exp(-given[0])) : step;
  if (!delta) return;
  const float epsilon = 1e-6f / static_cast<float>(D);
  kernels.norm(Norm::rms, q, query_scale_.data(), zeros_.data(), D, epsilon, q);
  kernels.norm(Norm::rms, k, key_scale_.data(), zeros_.data(), D, epsilon, k);
}

// An item is a head, or some channels of a layer without matrices. An empty sequence's matrix becomes zeros. The pending tokens are applied to the matrix. If there are few
// new ones, they then update a copy of it, but for the last, which only reads it.
void RecurrentLayers::process(const Kernels& kernels, const RecurrentWeights& w, std::int64_t layer, const Outputs& rows,
                              std::int64_t index, std::int64_t item, int rank) const {
  const Run& run = runs_[index];
  const Tokens from = tokens(layer, rows, run);
  const std::int64_t pending = run.num_pending, total = pending + run.count, D = shape_.key_dim, V = shape_.value_dim;
  float* const y = rows.y + run.row * rows.y_stride;
  if (D == 0) {
    const std::int64_t first = item * kChannels, count = std::min(kChannels, shape_.num_channels() - first);
    for (std::int64_t t = pending; t < total; ++t)
      convolve(kernels, w, from, t, first, count, y + (t - pending) * rows.y_stride + first);
    return;
  }
  float* const read = reinterpret_cast<float*>(scratch_.data()) + rank * scratch_stride_;
  float* const copied = read + chunk_ * token_stride_;
  float* const matrix = state(layer, run) + (shape_.taps - 1) * shape_.num_channels() + item * D * V;
  if (run.empty) std::fill_n(matrix, D * V, 0.0f);
  for (std::int64_t begin = 0, end; begin < total; begin = end) {  // once if there are few
    end = std::min(total, begin + chunk_);
    for (std::int64_t t = begin; t < end; ++t) read_token(kernels, w, from, t, item, read + (t - begin) * token_stride_);
    const std::int64_t old = std::clamp<std::int64_t>(pending - begin, 0, end - begin), added = begin + old - pending;
    for (std::int64_t first = 0; first < V; first += kPanel) {
      StateUpdate update{.matrix = matrix + first * D, .key_dim = D, .value_dim = V, .first = first,
                         .width = std::min(kPanel, V - first), .delta = shape_.rule == Rule::delta,
                         .skip = w.skip_scale.empty() ? 0 : w.skip_scale[item], .tokens = read, .num_tokens = old,
                         .token_stride = token_stride_, .y = nullptr, .y_stride = rows.y_stride};
      kernels.update_state(update);
      update.reads_last = run.few;
      if (run.few && run.count > 1) update.matrix = std::copy_n(update.matrix, D * update.width, copied) - D * update.width;
      update.tokens = read + old * token_stride_;
      update.num_tokens = end - begin - old;
      update.y = y + added * rows.y_stride + item * V + first;
      kernels.update_state(update);
    }
  }
}

// Write the last inputs of the convolution and what is pending.
void RecurrentLayers::keep(std::int64_t layer, const Outputs& rows, std::int64_t index) const {
  const Run& run = runs_[index];
  const Tokens from = tokens(layer, rows, run);
  const std::int64_t channels = shape_.num_channels(), before = shape_.taps - 1;
  const std::int64_t end = run.num_pending + (run.few ? 0 : run.count);  // of the tokens that are in the state
  float* to = state(layer, run);
  for (std::int64_t i = 0; (end > 0 || run.empty) && i < before; ++i)  // a row is read before it is overwritten
    std::copy_n(from.channels(end - before + i), channels, to + i * channels);
  to += shape_.num_state();
  for (std::int64_t t = run.num_pending; run.few && t < run.num_pending + run.count; ++t, to += shape_.num_inputs()) {
    std::copy_n(from.channels(t), channels, to);
    std::copy_n(from.gates(t), shape_.num_gates(), to + channels);
  }
}

// From the outputs of c_attn to the sum of x with the layer's.
void ForwardPass::recurrent(std::int64_t index) {
  const LayerWeights& layer = model_.layers[index];
  const RecurrentWeights& w = *layer.recurrent;
  const RecurrentLayers& states = *states_;
  const LayerShape& l = model_.shape.layers[index];
  float* const projected = qkv_ + (l.beside ? l.attn_dim() + 2 * l.kv_dim() : 0);
  if (model_.shape.recurrence.rule == Rule::conv)
    add_rows(&PartSeconds::others, [this, projected](int, std::int64_t r) {
      const std::int64_t n = model_.shape.recurrence.inner_dim();
      float *before = projected + r * qkv_stride_, *x = before + 2 * n;
      for (std::int64_t i = 0; i < n; ++i) x[i] *= before[i];
    });
  const RecurrentLayers::Outputs rows{projected, qkv_stride_, attended_, attended_stride_};
  add(&PartSeconds::attention, states.num_runs() * states.items(), [this, &w, &states, index, rows](int rank, Range some) {
    for (std::int64_t i = some.begin; i < some.end; ++i)
      states.process(kernels_, w, index, rows, i / states.items(), i % states.items(), rank);
  }, /*most=*/1);
  add(&PartSeconds::attention, states.num_runs(), [&states, index, rows](int, Range some) {
    for (std::int64_t i = some.begin; i < some.end; ++i) states.keep(index, rows, i);
  });
  add_rows(&PartSeconds::others, [this, projected, &w](int rank, std::int64_t r) {
    gate_outputs(w, projected + r * qkv_stride_, attended_ + r * attended_stride_);
    prepare_row(attended_ + r * attended_stride_, w.proj, rank, r);
  }, [this, &w](Range some) { project(attended_, attended_stride_, w.proj, some); });
  residual(w.proj, layer.post_1);
}

// The outputs of the states of a row, in place: their norm and their gate.
void ForwardPass::gate_outputs(const RecurrentWeights& w, const float* projected, float* y) const {
  const StateShape& s = model_.shape.recurrence;
  const std::int64_t n = s.inner_dim();
  const float* z = projected + s.output_gate_at();
  if (s.rule == Rule::conv)
    for (std::int64_t i = 0; i < n; ++i) y[i] *= z[i];
  if (s.rule == Rule::delta)
    for (std::int64_t i = 0; i < n; i += s.value_dim) norm(w.norm, y + i, s.value_dim, y + i);
  if (s.rule != Rule::conv) kernels_.gate(y, z, n, Gate::silu);
  if (s.rule != Rule::mamba2 || s.norm_groups == 0) return;
  const std::int64_t group = n / s.norm_groups;
  for (std::int64_t i = 0; i < n; i += group)
    kernels_.norm(Norm::rms, y + i, w.norm.weight.data() + i, w.norm.bias.data(), group, model_.shape.epsilon, y + i);
}

void Decoder::add_recurrent(const std::string& prefix, LayerWeights& layer, bool beside) {
  const DecoderShape& shape = model_.shape;
  const StateShape& s = shape.recurrence;
  layer.recurrent = std::make_unique<RecurrentWeights>();
  RecurrentWeights& w = *layer.recurrent;
  add_matrix(prefix + (beside ? "state_proj" : "c_proj"), w.proj, shape.n_embd, s.inner_dim(), /*with_bias=*/true);
  w.conv.resize(s.taps * s.num_channels());
  slots_[prefix + "conv"] = {.vector = w.conv.data(), .rows = s.num_channels(), .columns = s.taps, .transposed = true};
  const auto add = [&](const char* name, std::vector<float>& values, std::int64_t count, bool optional = false) {
    values.assign(count, 0.0f);
    slots_[prefix + name] = {.vector = values.data(), .columns = count, .optional = optional};
  };
  add("conv_bias", w.conv_bias, s.num_channels(), /*optional=*/true);
  if (s.rule == Rule::conv) return;
  add("a_log", w.a_log, s.num_heads);
  add("dt_bias", w.dt_bias, s.num_heads);
  if (s.rule == Rule::mamba2) add("skip_scale", w.skip_scale, s.num_heads);
  if (s.norm_groups == 0) return;
  const std::int64_t width = s.rule == Rule::mamba2 ? s.inner_dim() : s.value_dim;
  add("norm_scale", w.norm.weight, width);
  w.norm.bias.assign(width, 0.0f);
}

}  // namespace nanoinfer
