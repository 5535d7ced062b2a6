#include "experts.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <numeric>
#include <utility>

#include "format.h"

namespace nanoinfer {

namespace {

constexpr std::int64_t kGateFloats = 1 << 16;  // as in forward.cpp

}  // namespace

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
      n_embd_(s.n_embd),
      num_experts_(s.num_experts),
      per_token_(s.experts_per_token),
      expert_dim_(s.expert_dim),
      normalize_(s.normalize_experts),
      sigmoid_(s.sigmoid_experts),
      groups_count_(s.expert_groups),
      groups_per_token_(s.groups_per_token),
      group_top_(s.group_top),
      scale_(s.expert_scale),
      choices_(kMaxRows * s.experts_per_token),
      hidden_stride_(row_stride(panels_of(s.expert_dim) * kPanel)),
      out_stride_(row_stride(panels_of(s.n_embd) * kPanel)),
      ranks_(3 * kMaxRows * num_experts_),
      weight_(choices_),
      expert_(choices_),
      slot_(choices_),
      row_of_(choices_),
      group_of_(choices_),
      rows_of_(num_experts_) {
  groups_.reserve(std::min(num_experts_, choices_));
  const std::int64_t floats = kMaxRows * (x_stride + logit_stride) + choices_ * (hidden_stride_ + out_stride_);
  const std::int64_t rows = choices_ + 15 * std::min(num_experts_, choices_);
  const std::size_t bytes = most_prepared_bytes(std::max(n_embd_, expert_dim_));
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
  std::int64_t* chosen = expert_.data() + row * per_token_;
  float* weight = weight_.data() + row * per_token_;
  float largest = logit[0], sum = 0, zero = 0;
  for (std::int64_t e = 0; e < num_experts_; ++e) {
    largest = std::max(largest, logit[e]);
    zero += 0 * logit[e];
  }
  for (const float c : correction) zero += 0 * c;
  if (sigmoid_)
    for (std::int64_t e = 0; e < num_experts_; ++e) logit[e] = 1 / (1 + std::exp(-logit[e]));
  const float* rank = logit;  // of a softmax, logits have the order of the scores
  if (!correction.empty() || groups_count_ > 1) {
    float* own = ranks_.data() + 3 * row * num_experts_;
    const bool scores = !sigmoid_ && (!correction.empty() || group_top_ > 1);
    for (std::int64_t e = 0; e < num_experts_; ++e) own[e] = scores ? std::exp(logit[e] - largest) : logit[e];
    if (scores) {
      const float all = std::accumulate(own, own + num_experts_, 0.0f);
      for (std::int64_t e = 0; e < num_experts_; ++e) own[e] /= all;
    }
    for (std::size_t e = 0; e < correction.size(); ++e) own[e] += correction[e];
    if (groups_count_ > 1 && zero == 0) keep_groups(own, own + num_experts_);
    rank = own;
  }
  for (std::int64_t i = 0; i < per_token_; ++i) {
    std::int64_t best = -1;
    for (std::int64_t e = 0; e < num_experts_; ++e) {
      if (best >= 0 && !(rank[e] > rank[best])) continue;
      if (std::find(chosen, chosen + i, e) == chosen + i) best = e;
    }
    chosen[i] = best;
  }
  std::sort(chosen, chosen + per_token_);
  for (std::int64_t i = 0; i < per_token_; ++i)
    weight[i] = sigmoid_ ? logit[chosen[i]] : std::exp(logit[chosen[i]] - largest);
  if (normalize_) sum = std::accumulate(weight, weight + per_token_, 0.0f) + 1e-20f;  // sigmoids may all be 0
  else if (sigmoid_) sum = 1;
  else for (std::int64_t e = 0; e < num_experts_; ++e) sum += std::exp(logit[e] - largest);
  for (std::int64_t i = 0; i < per_token_; ++i) weight[i] = weight[i] / sum * scale_ + zero;
  if (!w.scale.empty())
    for (std::int64_t i = 0; i < per_token_; ++i) weight[i] *= w.scale[chosen[i]];
}

// Set the ranks of experts of other groups than the best ones to -inf. scratch: 2 num_experts floats.
void Mixture::keep_groups(float* rank, float* scratch) const {
  const std::int64_t size = num_experts_ / groups_count_;
  float *score = scratch, *sorted = scratch + num_experts_;
  for (std::int64_t g = 0; g < groups_count_; ++g) {
    std::copy_n(rank + g * size, size, sorted);
    std::partial_sort(sorted, sorted + group_top_, sorted + size, std::greater<>());
    score[g] = std::accumulate(sorted, sorted + group_top_, 0.0f);
  }
  float* kept = std::fill_n(sorted, groups_count_, 0.0f) - groups_count_;
  for (std::int64_t i = 0; i < groups_per_token_; ++i) {
    std::int64_t best = -1;
    for (std::int64_t g = 0; g < groups_count_; ++g)
      if (kept[g] == 0 && (best < 0 || score[g] > score[best])) best = g;
    kept[best] = 1;
  }
  for (std::int64_t g = 0; g < groups_count_; ++g)
    if (kept[g] == 0) std::fill_n(rank + g * size, size, -INFINITY);
}

void Mixture::group(std::int64_t num_rows) {
  const std::int64_t count = num_rows * per_token_;
  std::fill(rows_of_.begin(), rows_of_.end(), 0);
  for (std::int64_t i = 0; i < count; ++i) ++rows_of_[expert_[i]];
  groups_.clear();
  std::int64_t slot = 0, prepared = 0;
  for (std::int64_t e = 0; e < num_experts_; ++e) {
    const std::int64_t rows = std::exchange(rows_of_[e], slot);  // from here on: the expert's next slot
    if (rows == 0) continue;
    std::fill_n(group_of_.begin() + slot, rows, static_cast<std::int64_t>(groups_.size()));
    groups_.push_back({e, slot, rows, prepared});
    slot += rows;
    prepared += padded_rows(rows);
  }
  for (std::int64_t i = 0; i < count; ++i) {
    slot_[i] = rows_of_[expert_[i]]++;
    row_of_[slot_[i]] = i / per_token_;
  }
}

void Mixture::read_ahead(const ExpertWeights& w) const {
  for (const Group& g : groups_)
    for (const auto& [all, width] : {std::pair{&w.c_gate, expert_dim_}, {&w.c_fc, expert_dim_}, {&w.c_proj, n_embd_}}) {
      const Matrix one = part_of(*all, g.expert, width);
      advise(one.data, one.panels * one.panel_bytes, Access::soon);
    }
}

std::int64_t Mixture::most_hidden_items() const {
  std::int64_t rows = 1;
  for (const Group& g : groups_) rows = std::max(rows, g.rows);
  return std::max<std::int64_t>(1, kGateFloats / (rows * kPanel));
}

const float* Mixture::prepare(const Kernels& kernels, const Matrix& w, const float* from, std::int64_t slot) {
  const Group& g = groups_[group_of_[slot]];
  kernels.prepare(w.prepared_as, from, w.in, w.depth, slot - g.slot, g.rows, w.prepared, prepared_ + g.prepared * w.prepared,
                  /*largest=*/0);
  return from;
}

const float* Mixture::prepare_x(const Kernels& kernels, const Matrix& c_fc, std::int64_t slot) {
  return prepare(kernels, c_fc, x + row_of_[slot] * x_stride, slot);
}

const float* Mixture::prepare_hidden(const Kernels& kernels, const Matrix& c_proj, std::int64_t slot) {
  const std::int64_t expert = groups_[group_of_[slot]].expert;
  return prepare(kernels, c_proj, hidden_ + slot * hidden_stride_ + shift_of(expert, expert_dim_), slot);
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
  each(items, expert_dim_, [&](const Group& g, Range part) {
    const Matrix gate = part_of(w.c_gate, g.expert, expert_dim_), fc = part_of(w.c_fc, g.expert, expert_dim_);
    const std::int64_t end = std::min(part.end, fc.panels);
    if (part.begin >= end) return;
    kernels.matmul(task(gate, g, hidden_, hidden_stride_, activation), part.begin, end);
    kernels.matmul(task(fc, g, hidden_, hidden_stride_, after_gate(activation)), part.begin, end);
  });
}

void Mixture::multiply_output(const Kernels& kernels, const ExpertWeights& w, Range items) const {
  each(items, n_embd_, [&](const Group& g, Range part) {
    const Matrix proj = part_of(w.c_proj, g.expert, n_embd_);
    const std::int64_t end = std::min(part.end, proj.panels);
    if (part.begin < end) kernels.matmul(task(proj, g, out_, out_stride_, Epilogue::store), part.begin, end);
  });
}

void Mixture::add_to(std::int64_t row, float* y) const {
  for (std::int64_t i = row * per_token_; i < (row + 1) * per_token_; ++i) {
    const float* out = out_ + slot_[i] * out_stride_ + shift_of(expert_[i], n_embd_);
    for (std::int64_t c = 0; c < n_embd_; ++c) y[c] += weight_[i] * out[c];
  }
}

}  // namespace nanoinfer
