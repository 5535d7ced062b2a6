#include "experts.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <numeric>
#include <utility>

#include "format.h"

namespace nanoinfer {

Matrix part_of(const Matrix& all, std::int64_t part, std::int64_t width) {
  Matrix one = all;
  const std::int64_t first = part * width / kPanel;
  one.panels = ((part + 1) * width + kPanel - 1) / kPanel - first;
  one.out = one.panels * kPanel;
  one.data += first * all.panel_bytes;
  one.scale += first * kPanel;
  one.bias += first * kPanel;
  return one;
}

Mixture::Mixture(const DecoderShape& s)
    : x_stride(row_stride(s.n_embd)),
      logit_stride(row_stride(s.num_experts)),
      s_(s),
      choices_(kMaxRows * s.experts_per_token),
      hidden_stride_(row_stride(panels_of(s.expert_dim) * kPanel)),
      out_stride_(row_stride(panels_of(s.n_embd) * kPanel)),
      ranks_(3 * kMaxRows * s.num_experts),
      weight_(choices_),
      expert_(choices_),
      slot_(choices_),
      row_of_(choices_),
      group_of_(choices_),
      rows_of_(s.num_experts) {
  groups_.reserve(std::min(s_.num_experts, choices_));
  const std::int64_t floats = kMaxRows * (x_stride + logit_stride) + choices_ * (hidden_stride_ + out_stride_);
  const std::int64_t rows = choices_ + 15 * std::min(s_.num_experts, choices_);
  const std::size_t bytes = most_prepared_bytes(std::max(s_.n_embd, s_.expert_dim));
  memory_ = Buffer(floats * sizeof(float) + rows * bytes);
  float* at = reinterpret_cast<float*>(memory_.data());
  const auto take = [&at](std::int64_t n) { return std::exchange(at, at + n); };
  x = take(kMaxRows * x_stride);
  logits = take(kMaxRows * logit_stride);
  hidden_ = take(choices_ * hidden_stride_);
  out_ = take(choices_ * out_stride_);
  prepared_ = reinterpret_cast<std::uint8_t*>(at);
}

// The highest scores; of equal ones that of the expert with the lower index. If a logit or
// a correction is not finite, the weights are NaN.
void Mixture::choose(std::int64_t row, const ExpertWeights& w) {
  const std::vector<float>& correction = w.correction;
  float* logit = logits + row * logit_stride;
  std::int64_t* chosen = expert_.data() + row * s_.experts_per_token;
  float* weight = weight_.data() + row * s_.experts_per_token;
  float largest = logit[0], sum = 0, zero = 0;
  for (std::int64_t e = 0; e < s_.num_experts; ++e) {
    largest = std::max(largest, logit[e]);
    zero += 0 * logit[e];
  }
  for (const float c : correction) zero += 0 * c;
  if (s_.sigmoid_experts)
    for (std::int64_t e = 0; e < s_.num_experts; ++e) logit[e] = 1 / (1 + std::exp(-logit[e]));
  const float* rank = logit;  // of a softmax, logits have the order of the scores
  if (!correction.empty() || s_.expert_groups > 1) {
    float* own = ranks_.data() + 3 * row * s_.num_experts;
    const bool scores = !s_.sigmoid_experts && (!correction.empty() || s_.group_top > 1);
    for (std::int64_t e = 0; e < s_.num_experts; ++e) own[e] = scores ? std::exp(logit[e] - largest) : logit[e];
    if (scores) {
      const float all = std::accumulate(own, own + s_.num_experts, 0.0f);
      for (std::int64_t e = 0; e < s_.num_experts; ++e) own[e] /= all;
    }
    for (std::size_t e = 0; e < correction.size(); ++e) own[e] += correction[e];
    if (s_.expert_groups > 1 && zero == 0) keep_groups(own, own + s_.num_experts);
    rank = own;
  }
  for (std::int64_t i = 0; i < s_.experts_per_token; ++i) {
    std::int64_t best = -1;
    for (std::int64_t e = 0; e < s_.num_experts; ++e) {
      if (best >= 0 && !(rank[e] > rank[best])) continue;
      if (std::find(chosen, chosen + i, e) == chosen + i) best = e;
    }
    chosen[i] = best;
  }
  std::sort(chosen, chosen + s_.experts_per_token);
  for (std::int64_t i = 0; i < s_.experts_per_token; ++i)
    weight[i] = s_.sigmoid_experts ? logit[chosen[i]] : std::exp(logit[chosen[i]] - largest);
  if (s_.normalize_experts) sum = std::accumulate(weight, weight + s_.experts_per_token, 0.0f) + 1e-20f;  // sigmoids may all be 0
  else if (s_.sigmoid_experts) sum = 1;
  else for (std::int64_t e = 0; e < s_.num_experts; ++e) sum += std::exp(logit[e] - largest);
  for (std::int64_t i = 0; i < s_.experts_per_token; ++i) weight[i] = weight[i] / sum * s_.expert_scale + zero;
  if (!w.scale.empty())
    for (std::int64_t i = 0; i < s_.experts_per_token; ++i) weight[i] *= w.scale[chosen[i]];
}

// Set the ranks of experts of other groups than the best ones to -inf. scratch: 2 num_experts floats.
void Mixture::keep_groups(float* rank, float* scratch) const {
  const std::int64_t size = s_.num_experts / s_.expert_groups;
  float *score = scratch, *sorted = scratch + s_.num_experts;
  for (std::int64_t g = 0; g < s_.expert_groups; ++g) {
    std::copy_n(rank + g * size, size, sorted);
    std::partial_sort(sorted, sorted + s_.group_top, sorted + size, std::greater<>());
    score[g] = std::accumulate(sorted, sorted + s_.group_top, 0.0f);
  }
  float* kept = std::fill_n(sorted, s_.expert_groups, 0.0f) - s_.expert_groups;
  for (std::int64_t i = 0; i < s_.groups_per_token; ++i) {
    std::int64_t best = -1;
    for (std::int64_t g = 0; g < s_.expert_groups; ++g)
      if (kept[g] == 0 && (best < 0 || score[g] > score[best])) best = g;
    kept[best] = 1;
  }
  for (std::int64_t g = 0; g < s_.expert_groups; ++g)
    if (kept[g] == 0) std::fill_n(rank + g * size, size, -INFINITY);
}

void Mixture::group(std::int64_t num_rows) {
  const std::int64_t count = num_rows * s_.experts_per_token;
  std::fill(rows_of_.begin(), rows_of_.end(), 0);
  for (std::int64_t i = 0; i < count; ++i) ++rows_of_[expert_[i]];
  groups_.clear();
  std::int64_t slot = 0, prepared = 0;
  for (std::int64_t e = 0; e < s_.num_experts; ++e) {
    const std::int64_t rows = std::exchange(rows_of_[e], slot);  // from here on: the expert's next slot
    if (rows == 0) continue;
    std::fill_n(group_of_.begin() + slot, rows, static_cast<std::int64_t>(groups_.size()));
    groups_.push_back({e, slot, rows, prepared});
    slot += rows;
    prepared += padded_rows(rows);
  }
  for (std::int64_t i = 0; i < count; ++i) {
    slot_[i] = rows_of_[expert_[i]]++;
    row_of_[slot_[i]] = i / s_.experts_per_token;
  }
}

void Mixture::read_ahead(const ExpertWeights& w) const {
  for (const Group& g : groups_)
    for (const auto& [all, width] : {std::pair{&w.c_gate, s_.expert_dim}, {&w.c_fc, s_.expert_dim}, {&w.c_proj, s_.n_embd}}) {
      if (!all->panels) continue;  // experts without a gate
      const Matrix one = part_of(*all, g.expert, width);
      advise(one.data, one.panels * one.panel_bytes, Access::soon);
    }
}

std::int64_t Mixture::most_hidden_items() const {
  std::int64_t rows = 1;
  for (const Group& g : groups_) rows = std::max(rows, g.rows);
  return std::max<std::int64_t>(1, kGateFloats / (rows * kPanel));
}

void Mixture::prepare(const Kernels& kernels, const Matrix& w, const float* from, std::int64_t slot) {
  const Group& g = groups_[group_of_[slot]];
  kernels.prepare(w.prepared_as, from, w.in, w.depth, slot - g.slot, g.rows, w.prepared, prepared_ + g.prepared * w.prepared,
                  /*largest=*/0);
}

void Mixture::prepare_x(const Kernels& kernels, const Matrix& c_fc, std::int64_t slot) {
  prepare(kernels, c_fc, x + row_of_[slot] * x_stride, slot);
}

void Mixture::prepare_hidden(const Kernels& kernels, const Matrix& c_proj, std::int64_t slot) {
  const std::int64_t expert = groups_[group_of_[slot]].expert;
  prepare(kernels, c_proj, hidden_ + slot * hidden_stride_ + shift_of(expert, s_.expert_dim), slot);
}

MatmulTask Mixture::task(const Matrix& w, const Group& g, float* y, std::int64_t stride, Epilogue epilogue) const {
  return {&w, prepared_ + g.prepared * w.prepared, w.prepared, g.rows, y + g.slot * stride, stride, epilogue};
}

// Call f(group, the panels of its expert) for items of a product with `width` outputs an expert.
template <class F>
void Mixture::each(Range items, std::int64_t width, F&& f) const {
  const std::int64_t panels = panels_of(width);
  for (std::int64_t i = items.begin, next; i < items.end; i = next) {
    const std::int64_t first = i / panels * panels;
    next = std::min(items.end, first + panels);
    f(groups_[i / panels], Range{i - first, next - first});
  }
}

void Mixture::multiply_hidden(const Kernels& kernels, const ExpertWeights& w, Epilogue activation, Range items) const {
  each(items, s_.expert_dim, [&](const Group& g, Range part) {
    const Matrix fc = part_of(w.c_fc, g.expert, s_.expert_dim);
    const std::int64_t end = std::min(part.end, fc.panels);
    if (part.begin >= end) return;
    if (s_.gated_mlp) {
      const Matrix gate = part_of(w.c_gate, g.expert, s_.expert_dim);
      kernels.matmul(task(gate, g, hidden_, hidden_stride_, activation), part.begin, end);
    }
    kernels.matmul(task(fc, g, hidden_, hidden_stride_, s_.gated_mlp ? after_gate(activation) : activation), part.begin, end);
  });
}

void Mixture::multiply_output(const Kernels& kernels, const ExpertWeights& w, Range items) const {
  each(items, s_.n_embd, [&](const Group& g, Range part) {
    const Matrix proj = part_of(w.c_proj, g.expert, s_.n_embd);
    const std::int64_t end = std::min(part.end, proj.panels);
    if (part.begin < end) kernels.matmul(task(proj, g, out_, out_stride_, Epilogue::store), part.begin, end);
  });
}

void Mixture::add_to(std::int64_t row, float* y) const {
  for (std::int64_t i = row * s_.experts_per_token; i < (row + 1) * s_.experts_per_token; ++i) {
    const float* out = out_ + slot_[i] * out_stride_ + shift_of(expert_[i], s_.n_embd);
    for (std::int64_t c = 0; c < s_.n_embd; ++c) y[c] += weight_[i] * out[c];
  }
}

}  // namespace nanoinfer
