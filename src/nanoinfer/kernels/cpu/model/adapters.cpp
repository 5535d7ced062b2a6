#include "adapters.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <string>

#include "decoder.h"
#include "latent.h"

namespace nanoinfer {

namespace {

// Write a float in a format: its bits, or those of the nearest bfloat16, ties to even.
void put(WeightType type, std::uint8_t* to, std::int64_t index, float value) {
  std::uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  if (type == WeightType::f32) {
    std::memcpy(to + 4 * index, &bits, sizeof bits);
  } else {
    const std::uint16_t half = static_cast<std::uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
    std::memcpy(to + 2 * index, &half, sizeof half);
  }
}

}  // namespace

void Adapters::load(std::int64_t adapter, const Matrix& input, const Matrix& output, WeightType type, const Factors& g) {
  Adapter& one = all_[adapter];
  List& readers = one.inputs[&input];
  auto update = std::make_shared<Update>();
  const std::int64_t first = g.first / kPanel, depth = (g.in + kLanes - 1) / kLanes * kLanes;
  const std::int64_t panels = (g.first + g.rows + kPanel - 1) / kPanel - first;
  update->factors = {.type = type, .rank = g.rank, .in = g.in, .depth = depth, .first = first, .panels = panels};
  update->at = readers.empty() ? 0 : readers.back()->at + readers.back()->factors.rank;
  const std::int64_t bytes = type == WeightType::f32 ? 4 : 2;
  update->memory = std::make_unique<std::uint8_t[]>(bytes * g.rank * (depth + panels * kPanel) + 64);
  std::uint8_t* const memory = update->memory.get();
  std::uint8_t* const a = memory + (64 - reinterpret_cast<std::uintptr_t>(memory) % 64) % 64;
  std::uint8_t* const b = a + bytes * g.rank * depth;
  for (std::int64_t j = 0; j < g.rank; ++j)
    for (std::int64_t i = 0; i < g.in; ++i) put(type, a, j * depth + i, g.a[j * g.in + i]);
  for (std::int64_t o = 0; o < g.rows; ++o) {
    const std::int64_t place = g.first + o - first * kPanel;
    for (std::int64_t j = 0; j < g.rank; ++j)
      put(type, b, (place / kPanel * g.rank + j) * kPanel + place % kPanel, g.b[o * g.rank + j]);
  }
  update->factors.a = a;
  update->factors.b = b;
  most_projected_ = std::max(most_projected_, update->at + g.rank);
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
  pass_.adapters().load(adapter, *input.matrix, *slot.matrix, model_.type == WeightType::f32 ? WeightType::f32 : WeightType::bf16,
                        given);
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
}

// Project the input of a product, if the row's adapter updates it.
void ForwardPass::project(const float* x, const Matrix& next, std::int64_t row) {
  const Adapters::List* const updates = adapters_.of_input(rows_[row].adapter, next);
  if (updates == nullptr) return;
  for (const auto& update : *updates)
    kernels_.project(update->factors, x, projected_.data() + row * projected_stride_ + update->at);
}

// What is added to some panels of a product's sums (MatmulTask::added), null if no row has an update of the matrix. Its
// panels are those from `first` on of all outputs. Adding -0 to the other rows changes no bit of their sums.
const float* ForwardPass::added(const Matrix& w, std::int64_t first, std::int64_t stride, Range rows, Range panels) {
  if (!has_adapters_) return nullptr;
  const auto updates_of = [&](std::int64_t r) { return adapters_.of_output(rows_[r].adapter, w); };
  std::int64_t with = rows.begin;
  while (with < rows.end && updates_of(with) == nullptr) ++with;
  if (with == rows.end) return nullptr;
  float* const all = reinterpret_cast<float*>(added_.data());
  const std::int64_t begin = first + panels.begin, end = first + panels.end;
  for (std::int64_t r = rows.begin; r < rows.end; ++r) {
    float* const y = all + r * stride;
    const Adapters::List* const updates = updates_of(r);
    std::fill(y + begin * kPanel, y + end * kPanel, updates ? 0.0f : -0.0f);
    if (updates == nullptr) continue;
    for (const auto& update : *updates)
      kernels_.expand(update->factors, projected_.data() + r * projected_stride_ + update->at, begin, end, y);
  }
  return all + rows.begin * stride + first * kPanel;
}

}  // namespace nanoinfer
