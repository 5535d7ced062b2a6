#include "adapters.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <stdexcept>
#include <string>

#include "decoder.h"
#include "latent.h"

namespace nanoinfer {

namespace {

WeightType type_of_factors(WeightType matrix) {
  if (matrix == WeightType::f32) return matrix;
  return matrix == WeightType::bf16 || matrix == WeightType::f16 ? WeightType::bf16 : WeightType::i8;
}

std::int64_t round_up(std::int64_t n, std::int64_t to) { return (n + to - 1) / to * to; }

std::int64_t bytes_of(WeightType type) { return type == WeightType::f32 ? 4 : type == WeightType::bf16 ? 2 : 1; }

// Write a float in a format: its bits, those of the nearest bfloat16, ties to even, or the nearest integer + 128.
void put(WeightType type, std::uint8_t* to, std::int64_t index, float value) {
  std::uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  if (type == WeightType::f32) {
    std::memcpy(to + 4 * index, &bits, sizeof bits);
  } else if (type == WeightType::bf16) {
    const std::uint16_t half = static_cast<std::uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
    std::memcpy(to + 2 * index, &half, sizeof half);
  } else {
    to[index] = static_cast<std::uint8_t>(std::lrint(value) + 128);
  }
}

// The scale by which n floats, a stride apart, become integers of at most 127: 0 if all are 0, NaN if one is not finite.
float scale_of(const float* values, std::int64_t n, std::int64_t stride) {
  float most = 0, check = 0;
  for (std::int64_t i = 0; i < n; ++i) most = std::max(most, std::fabs(values[i * stride])), check += values[i * stride] * 0;
  return most / 127 + check;
}

}  // namespace

void Adapters::load(std::int64_t adapter, const Matrix& input, const Matrix& output, const Factors& g) {
  Adapter& one = all_[adapter];
  List& readers = one.inputs[&input];
  auto update = std::make_shared<Update>();
  const WeightType type = type_of_factors(output.type);
  const std::int64_t quad = type == WeightType::i8 ? 4 : 1;  // inputs, or ranks, of an output that follow each other
  const std::int64_t first = g.first / kPanel, depth = round_up(g.in, quad == 4 ? kGroup : 1);
  const std::int64_t panels = round_up(g.first + g.rows, kPanel) / kPanel - first, bytes = bytes_of(type);
  const std::int64_t ranks = round_up(g.rank, kLanes), floats = panels * round_up(g.rank, quad) * kPanel;
  update->at = readers.empty() ? 0 : readers.back()->at + readers.back()->scale.size();
  update->scale.resize(ranks);
  const std::size_t size = round_up(bytes * (ranks * depth + floats), 64);
  if (one.memory.empty() || size > one.memory.back().size() - one.used)
    one.memory.emplace_back(std::max(size, kHugePage)), one.used = 0;
  std::uint8_t* const a = one.memory.back().data() + one.used;
  one.used += size;
  std::uint8_t* const b = a + bytes * ranks * depth;
  if (quad == 4) std::fill(b, b + floats, std::uint8_t{128});
  for (std::int64_t j = 0; j < g.rank; ++j) {
    float of_a = 1, of_b = 1;
    if (quad == 4) of_a = scale_of(g.a + j * g.in, g.in, 1), of_b = scale_of(g.b + j, g.rows, g.rank);
    update->scale[j] = of_a * of_b;
    if (!(update->scale[j] != 0)) continue;
    std::uint8_t* const lanes = a + bytes * (j / kLanes * kLanes * depth);
    for (std::int64_t i = 0; i < g.in; ++i)
      put(type, lanes, (i / quad * kLanes + j % kLanes) * quad + i % quad, g.a[j * g.in + i] / of_a);
    for (std::int64_t o = 0; o < g.rows; ++o) {
      const std::int64_t place = g.first + o - first * kPanel, line = place / kPanel * (round_up(g.rank, quad) / quad) + j / quad;
      put(type, b, (line * kPanel + place % kPanel) * quad + j % quad, g.b[o * g.rank + j] / of_b);
    }
  }
  update->factors = {type, g.rank, g.in, depth, first, panels, a, b, update->scale.data()};
  most_projected_ = std::max(most_projected_, update->at + ranks);
  readers.push_back(update);
  one.outputs[&output].push_back(std::move(update));
}

const Adapters::List* Adapters::find(std::int64_t adapter, Table Adapter::*table, const Matrix& w) const {
  if (adapter == 0) return nullptr;
  const Table& of = all_.at(adapter).*table;
  const auto found = of.find(&w);
  return found == of.end() ? nullptr : &found->second;
}

void Decoder::load_adapter(std::int64_t adapter, const std::string& name, const Factors& given) {
  const Slot& slot = find(name + ".weight");
  const std::string gate = "c_gate";  // reads the rows of c_fc
  const bool gates = name.size() > gate.size() && name.compare(name.size() - gate.size(), gate.size(), gate) == 0;
  const Slot& input = gates ? find(name.substr(0, name.size() - gate.size()) + "c_fc.weight") : slot;
  const std::int64_t out = slot.matrix && slot.bias ? slot.bias->columns : slot.rows;  // of all parts of a matrix
  const bool fits = slot.matrix && given.in == slot.columns && given.first >= 0 && given.rows <= out - given.first;
  if (adapter < 1 || !fits || given.rank < 1 || given.rows < 1)
    throw std::invalid_argument("tensor '" + name + "' does not take these factors");
  pass_.adapters().load(adapter, *input.matrix, *slot.matrix, given);
  pass_.make_room_for_adapters();
}

// The memory that steps with adapters need, which others do not have.
void ForwardPass::make_room_for_adapters() {
  projected_stride_ = adapters_.most_projected();
  projected_.resize(std::max(projected_.size(), static_cast<std::size_t>(max_rows_ * projected_stride_)));
  if (added_.size()) return;
  std::int64_t most = std::max({x_stride_, qkv_stride_, attended_stride_, hidden_stride_});
  if (latent_) most = std::max(most, latent_->down_stride);
  added_ = Buffer(max_rows_ * most * sizeof(float));
  normed_ = Buffer(max_rows_ * input_stride_ * sizeof(float));
}

// Call f for each part of some rows that have the same list of updates, which is not null.
template <class F>
void ForwardPass::with_updates(Range rows, const Adapters::List* (Adapters::*of)(std::int64_t, const Matrix&) const,
                               const Matrix& w, F&& f) const {
  for (std::int64_t from = rows.begin, to; from < rows.end; from = to) {
    const std::int64_t adapter = rows_[from].adapter;
    for (to = from + 1; to < rows.end && rows_[to].adapter == adapter;) ++to;
    if (const Adapters::List* const updates = (adapters_.*of)(adapter, w)) f(Range{from, to}, *updates);
  }
}

// Project the inputs of a product, for rows whose adapters update it.
void ForwardPass::project(const float* x, std::int64_t stride, const Matrix& next, Range rows) {
  if (!has_adapters_) return;
  const Range all = rows_with(rows.begin);
  const MatmulTask task = this->task(next, nullptr, 0, Epilogue::store, all);
  with_updates(rows, &Adapters::of_input, next, [&](Range some, const Adapters::List& updates) {
    for (const auto& update : updates)
      kernels_.project(update->factors, {.rows = some.end - some.begin,
                                         .t = projected_.data() + some.begin * projected_stride_ + update->at,
                                         .t_stride = projected_stride_,
                                         .x = x + some.begin * stride,
                                         .x_stride = stride,
                                         .prepared = &task,
                                         .first = some.begin - all.begin});
  });
}

// What is added to some panels of a product's sums (MatmulTask::added), null if no row has an update of the matrix. Its
// panels are those from `first` on of all outputs. Adding -0 to the other rows changes no bit of their sums.
const float* ForwardPass::added(const Matrix& w, std::int64_t first, std::int64_t stride, Range rows, Range panels) {
  if (!has_adapters_) return nullptr;
  float* const all = reinterpret_cast<float*>(added_.data());
  const std::int64_t begin = first + panels.begin, end = first + panels.end;
  const auto fill = [&](Range some, float value) {
    for (std::int64_t r = some.begin; r < some.end; ++r)
      std::fill(all + r * stride + begin * kPanel, all + r * stride + end * kPanel, value);
  };
  // Of the next adapter: the loads of a few panels of its factors would each wait for memory.
  const auto prefetch = [&](const Adapters::List* updates) {
    if (updates == nullptr) return;
    for (const auto& update : *updates) {
      const LowRank& u = update->factors;
      const std::int64_t from = std::max(begin, u.first) - u.first, to = std::min(end - u.first, u.panels);
      const std::int64_t bytes = bytes_of(u.type) * round_up(u.rank, u.type == WeightType::i8 ? 4 : 1) * kPanel;
      for (std::int64_t at = from * bytes; at < to * bytes; at += 64) __builtin_prefetch(u.b + at, 0, 2);
    }
  };
  std::int64_t filled = rows.begin;
  bool any = false;
  with_updates(rows, &Adapters::of_output, w, [&](Range some, const Adapters::List& updates) {
    any = true;
    fill({filled, some.begin}, -0.0f);
    fill(some, 0.0f);
    filled = some.end;
    if (filled < rows.end) prefetch(adapters_.of_output(rows_[filled].adapter, w));
    for (const auto& update : updates)
      kernels_.expand(update->factors, {.rows = some.end - some.begin,
                                        .t = projected_.data() + some.begin * projected_stride_ + update->at,
                                        .t_stride = projected_stride_,
                                        .y = all + some.begin * stride,
                                        .y_stride = stride}, begin, end);
  });
  if (!any) return nullptr;
  fill({filled, rows.end}, -0.0f);
  return all + rows.begin * stride + first * kPanel;
}

}  // namespace nanoinfer
