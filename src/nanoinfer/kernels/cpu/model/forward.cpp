#include "forward.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <numeric>

#include "experts.h"
#include "format.h"
#include "latent.h"
#include "recurrent.h"

namespace nanoinfer {

namespace {

constexpr float kLeastRounded = 1e-5f;  // DecoderShape::rounded_inputs: the least magnitude that becomes 127
// Tokens of one attention item: few enough to give every thread kItems of them, many enough to share a pass over the keys.
constexpr std::int64_t kQueryChunk = 64, kLeastQueryChunk = 8, kItems = 4;

std::int64_t padded(std::int64_t n) { return (n + kPanel - 1) / kPanel * kPanel; }

}  // namespace

ForwardPass::ForwardPass(const ModelWeights& model, const Kernels& kernels, Cache& cache, int num_threads,
                         std::int64_t num_states)
    : model_(model),
      kernels_(kernels),
      cache_(cache),
      num_threads_(num_threads),
      max_rows_(kernels.block_rows && model.shape.num_experts == 0 ? kMaxRowsApart : kMaxRows) {
  const DecoderShape& s = model.shape;
  x_stride_ = row_stride(s.n_embd);
  const bool recurrent = s.recurrence.rule != Rule::none;
  std::int64_t qkv_dim = 0, group = 1;  // the largest of all layers
  std::int64_t attn_dim = std::max(s.values_dim(), s.recurrence.inner_dim());
  std::int64_t mlp_dim = std::max(s.shared_dim, s.per_layer_dim);
  for (const LayerShape& l : s.layers) {
    qkv_dim = std::max(qkv_dim, l.attends() * ((1 + s.attention_gate) * l.attn_dim() + 2 * l.kv_dim()) +
                                    (l.recurrent ? s.recurrence.width() : 0));
    attn_dim = std::max(attn_dim, l.attn_dim());
    mlp_dim = std::max(mlp_dim, l.mlp_dim);
    if (!l.attends()) continue;
    most_heads_ = std::max(most_heads_, l.n_head);
    most_kv_heads_ = std::max(most_kv_heads_, l.n_kv_head);
    most_head_dim_ = std::max(most_head_dim_, l.head_dim);
    group = std::max(group, l.n_head / l.n_kv_head);
  }
  qkv_stride_ = row_stride(qkv_dim);
  attended_stride_ = row_stride(std::max(attn_dim, s.n_embd));  // also the outputs of attention and MLP before a norm
  hidden_stride_ = row_stride(mlp_dim);
  const std::int64_t in = std::max({s.n_embd, s.mtp * 2 * s.source_dim(), attn_dim, mlp_dim, s.latent_query_rank});  // inputs of a product, at most
  input_stride_ = padded(in);
  scratch_stride_ = padded(std::max(attention_scratch(most_head_dim_, kQueryChunk * group), in));
  angle_stride_ = 0;
  for (const std::vector<float>& f : s.frequencies) {
    angle_at_.push_back(angle_stride_);
    angle_stride_ += 2 * padded(f.size());
  }
  prepared_bytes_ = most_prepared_bytes(in);
  const std::int64_t floats = max_rows_ * (x_stride_ + qkv_stride_ + attended_stride_ + hidden_stride_ + angle_stride_) +
                              num_threads * scratch_stride_;
  memory_ = Buffer(floats * sizeof(float) + max_rows_ * prepared_bytes_);
  float* at = reinterpret_cast<float*>(memory_.data());
  const auto take = [&at](std::int64_t n) { return std::exchange(at, at + n); };
  x_ = take(max_rows_ * x_stride_);
  attended_ = take(max_rows_ * attended_stride_);
  qkv_ = take(max_rows_ * qkv_stride_);
  hidden_ = take(max_rows_ * hidden_stride_);
  angles_ = take(max_rows_ * angle_stride_);
  scratch_ = take(num_threads * scratch_stride_);
  prepared_ = reinterpret_cast<std::uint8_t*>(at);
  if (s.latent_rank) latent_ = std::make_unique<LatentHeads>(s, max_rows_);
  if (s.num_experts) mixture_ = std::make_unique<Mixture>(s);
  if (recurrent) states_ = std::make_unique<RecurrentLayers>(s, num_states, num_threads);
  spent_.resize(num_threads);
  if (s.per_layer_dim == 0) return;
  inputs_stride_ = row_stride(s.n_layer * s.per_layer_dim);
  inputs_memory_ = Buffer(max_rows_ * inputs_stride_ * sizeof(float));
  inputs_ = reinterpret_cast<float*>(inputs_memory_.data());
}

ForwardPass::~ForwardPass() = default;

void ForwardPass::run(ThreadPool& threads, const std::vector<Row>& rows, float* logits, std::int64_t logits_stride) {
  const std::int64_t total = static_cast<std::int64_t>(rows.size());
  num_logits_ = std::count_if(rows.begin(), rows.end(), [](const Row& r) { return r.logit >= 0; });
  head_rows_.resize(padded_rows(num_logits_) * model_.lm_head.prepared);
  phase_items_.clear();
  final_hidden_.resize(std::count_if(rows.begin(), rows.end(), [](const Row& r) { return r.hidden >= 0; }) * model_.shape.n_embd);
  for (std::int64_t row = 0, count; row < total; row += count) {
    count = std::min(max_rows_, total - row);
    const bool last = row + count == total;
    while (!last && rows[row + count].few && rows[row + count].handle == rows[row + count - 1].handle) --count;
    select(rows.data() + row, count);
    phases_.clear();
    row_steps_.clear();
    embed();
    if (model_.shape.per_layer_dim) make_layer_inputs();
    if (model_.shape.mtp) join_previous();
    const std::int64_t with_keys = layers_with_keys();
    for (std::int64_t l = 0; l < model_.shape.n_layer; ++l) {
      if (l == with_keys && keep_rows_with_hidden(threads, rows.data() + row, count) == 0) break;
      layer(l);
      after_layer(l);
    }
    if (num_rows_) finish();
    if (last && num_logits_ && logits != nullptr) {
      const Matrix& w = model_.lm_head;
      const float cap = model_.shape.logits_softcap;
      const MatmulTask task{&w, head_rows_.data(), w.prepared, num_logits_, logits, logits_stride,
                            cap > 0 ? Epilogue::soft_cap : Epilogue::store, cap};
      add(&PartSeconds::head, w.panels, [this, task](int, Range panels) { kernels_.matmul(task, panels.begin, panels.end); });
    }
    add_blocks();
    mark_ = Clock::now();
    if (!phases_.empty()) threads.run(phases_);
  }
}

// Add a phase, whose time counts for `part`. The thread that ends it measures: another one may have waited for a core
// while the next phase was done already.
void ForwardPass::add(double PartSeconds::*part, std::int64_t count, decltype(Phase::body) body, std::int64_t most) {
  add_blocks();
  phase_items_.push_back({part, count});
  phases_.push_back({count, std::move(body), most, [this, part] {
                       const Clock::time_point now = Clock::now();
                       seconds_.*part += std::chrono::duration<double>(now - mark_).count();
                       mark_ = now;
                     }});
}

// Add a phase whose items are the rows. A thread calls `then` with the rows that it has processed.
void ForwardPass::add_rows(double PartSeconds::*part, std::function<void(int rank, std::int64_t row)> body,
                           std::function<void(Range rows)> then) {
  auto of_rows = [body = std::move(body), then = std::move(then)](int rank, Range rows) {
    for (std::int64_t r = rows.begin; r < rows.end; ++r) body(rank, r);
    if (then) then(rows);
  };
  if (block_rows_) row_steps_.push_back({part, std::move(of_rows)});
  else add(part, num_rows_, std::move(of_rows));
}

// Add a phase whose items are the panels of a product. The result of a panel does not depend on the thread or on the part that
// it is in.
void ForwardPass::add_products(double PartSeconds::*part, std::int64_t panels, std::function<void(Range, Range)> body) {
  if (block_rows_) row_steps_.push_back({part, [body = std::move(body), panels](int, Range rows) { body(rows, {0, panels}); }});
  else add(part, panels, [body = std::move(body), rows = Range{0, num_rows_}](int, Range some) { body(rows, some); });
}

// Add a phase whose items are blocks of rows, each of which goes through all steps since the last phase. Its time is divided
// in the proportion of what the threads have spent.
void ForwardPass::add_blocks() {
  if (row_steps_.empty()) return;
  const auto body = [this, steps = std::exchange(row_steps_, {})](int rank, Range blocks) {
    for (std::int64_t b = blocks.begin; b < blocks.end; ++b) {
      const Range rows = rows_with(b * block_rows_);
      Clock::time_point begin = Clock::now();
      for (const RowStep& step : steps) {
        step.body(rank, rows);
        const Clock::time_point end = Clock::now();
        spent_[rank].*step.part += std::chrono::duration<double>(end - std::exchange(begin, end)).count();
      }
    }
  };
  phase_items_.push_back({nullptr, (num_rows_ + block_rows_ - 1) / block_rows_});
  phases_.push_back({(num_rows_ + block_rows_ - 1) / block_rows_, body, /*most=*/1, [this] {
                       const Clock::time_point now = Clock::now();
                       const double elapsed = std::chrono::duration<double>(now - std::exchange(mark_, now)).count();
                       PartSeconds sum;
                       double total = 0;
                       constexpr double PartSeconds::*kParts[] = {&PartSeconds::products, &PartSeconds::attention,
                                                                  &PartSeconds::head, &PartSeconds::others};
                       for (PartSeconds& mine : spent_) {
                         for (const auto part : kParts) sum.*part += mine.*part, total += mine.*part;
                         mine = {};
                       }
                       for (const auto part : kParts) seconds_.*part += total > 0 ? elapsed * sum.*part / total : 0;
                     }});
}

// The rows that are prepared and multiplied together with a row.
Range ForwardPass::rows_with(std::int64_t row) const {
  if (block_rows_ == 0) return {0, num_rows_};
  const std::int64_t begin = row / block_rows_ * block_rows_;
  return {begin, std::min(begin + block_rows_, num_rows_)};
}

void ForwardPass::select(const Row* rows, std::int64_t count) {
  rows_ = rows;
  num_rows_ = count;
  const bool apart = max_rows_ == kMaxRowsApart && count >= num_threads_ * kLeastBlockRows;
  block_rows_ = apart ? std::min(kernels_.block_rows, padded_rows((count + num_threads_ - 1) / num_threads_)) : 0;
  has_adapters_ = std::any_of(rows, rows + count, [](const Row& r) { return r.adapter != 0; });
  if (states_) states_->select(rows, count);
  select_runs();
}

// Runs of rows, and the items of attention: those of a run that would take longer than a thread's share of all are the pieces of
// its keys. The result does not depend on either.
void ForwardPass::select_runs() {
  runs_.clear();
  items_.clear();
  block_of_.clear();
  if (most_kv_heads_ == 0) return;
  const std::int64_t wanted = kItems * num_threads_;
  const std::int64_t chunk = std::clamp(num_rows_ * most_kv_heads_ / wanted, kLeastQueryChunk, kQueryChunk);
  const auto pieces_of = [this](const Run& run) { return (last_key(run.row + run.count - 1) + kPiece) / kPiece; };
  std::int64_t total = 0;
  for (std::int64_t from = 0; from < num_rows_;) {
    std::int64_t to = from;
    while (to < num_rows_ && to - from < chunk && rows_[to].handle == rows_[from].handle)
      block_of_.push_back(cache_.block(rows_[to].handle, last_key(to))), ++to;
    runs_.push_back({cache_.blocks(rows_[from].handle).data(), from, to - from, 0});
    total += most_kv_heads_ * pieces_of(runs_.back());
    from = to;
  }
  std::size_t floats = 0;
  pieces_left_.assign(runs_.size() * most_kv_heads_, 0);
  for (std::int64_t i = 0; i < static_cast<std::int64_t>(runs_.size()); ++i) {
    Run& run = runs_[i];
    const std::int64_t pieces = pieces_of(run);
    if (num_threads_ == 1 || pieces == 1 || pieces * wanted <= total) {
      items_.push_back({i, -1});
      continue;
    }
    run.pieces = pieces;
    run.partial = floats;
    floats += pieces * run.count * most_heads_ * partial_floats(most_head_dim_);
    std::fill_n(pieces_left_.begin() + i * most_kv_heads_, most_kv_heads_, pieces);
    for (std::int64_t p = 0; p < pieces; ++p) items_.push_back({i, p});
  }
  if (partial_.size() < floats) partial_.resize(floats);
}

// The layers up to the last one with keys and values of its own: the others make nothing that later steps need.
std::int64_t ForwardPass::layers_with_keys() const {
  std::int64_t n = model_.shape.n_layer;
  while (n > 0 && model_.shape.layers[n - 1].kv_layer >= 0) --n;
  return n;
}

// Run the phases so far, and go on with the rows whose final hidden states are wanted. Return their number.
std::int64_t ForwardPass::keep_rows_with_hidden(ThreadPool& threads, const Row* rows, std::int64_t count) {
  if (std::all_of(rows, rows + count, [](const Row& r) { return r.hidden >= 0; })) return count;
  add_blocks();
  mark_ = Clock::now();
  threads.run(phases_);
  phases_.clear();
  kept_.clear();
  for (std::int64_t r = 0; r < count; ++r) {
    if (rows[r].hidden < 0) continue;
    const std::int64_t to = static_cast<std::int64_t>(kept_.size());
    kept_.push_back(rows[r]);
    for (const auto& [values, stride] : {std::pair{x_, x_stride_}, {angles_, angle_stride_}, {inputs_, inputs_stride_}})
      if (r != to) std::copy_n(values + r * stride, stride, values + to * stride);
  }
  select(kept_.data(), static_cast<std::int64_t>(kept_.size()));
  return num_rows_;
}

void ForwardPass::embed() {
  add_rows(&PartSeconds::others, [this](int, std::int64_t r) { embed_row(r); });
}

void ForwardPass::embed_row(std::int64_t r) const {
  const DecoderShape& s = model_.shape;
  float* x = x_ + r * x_stride_;
  if (!s.backbone) unpack_row(model_.wte, rows_[r].token, x);
  if (!s.backbone && s.embedding_scale != 1)
    for (std::int64_t i = 0; i < s.n_embd; ++i) x[i] *= s.embedding_scale;
  if (s.learned_positions) {
    const float* position = model_.wpe.data() + rows_[r].position * s.n_embd;
    for (std::int64_t i = 0; i < s.n_embd; ++i) x[i] += position[i];
  }
  if (s.embedding_norm) norm(model_.ln_e, x, s.n_embd, x);
  for (std::size_t f = 0; f < s.frequencies.size(); ++f) {
    const std::int64_t half = s.frequencies[f].size();
    float* cosines = angles_ + r * angle_stride_ + angle_at_[f];
    for (std::int64_t i = 0; i < half; ++i) {
      const float angle = static_cast<float>(rows_[r].position) * s.frequencies[f][i];
      cosines[i] = s.rotary_factors[f] * std::cos(angle);
      cosines[padded(half) + i] = s.rotary_factors[f] * std::sin(angle);
    }
  }
}

// The input of a block that predicts a further token: a product of its token's embedding and of the hidden state before, each after
// a norm; with a backbone, of both as they are.
void ForwardPass::join_previous() {
  add_rows(&PartSeconds::others, [this](int rank, std::int64_t r) {
    const std::int64_t C = model_.shape.source_dim();
    float* y = scratch_ + rank * scratch_stride_;
    if (model_.shape.backbone) {
      unpack_row(model_.wte, rows_[r].token, y);
      for (std::int64_t i = 0; i < C; ++i) y[i] *= model_.shape.embedding_scale;
      std::copy_n(rows_[r].previous, C, y + C);
    } else {
      norm(model_.mtp_e, x_ + r * x_stride_, C, y);
      norm(model_.mtp_h, rows_[r].previous, C, y + C);
    }
    prepare_row(y, model_.mtp_in, rank, r);
  });
  multiply(model_.mtp_in, x_, x_stride_, Epilogue::store);
}

void ForwardPass::layer(std::int64_t index) {
  if (model_.layers[index].experts != nullptr) {
    attention(index);
    return mixture(index);
  }
  if (!model_.shape.layers[index].mlp) return attention(index);
  if (model_.shape.parallel_residual) {  // both read the x before the layer
    mlp_hidden(index);
    attention(index);
  } else {
    attention(index);
    mlp_hidden(index);
  }
  mlp_output(index);
}

void ForwardPass::attention(std::int64_t index) {
  const LayerWeights& w = model_.layers[index];
  prepare_input(w.ln_1, w.c_attn[0]);
  if (latent_) latent_queries(w);
  else multiply_parts(w.c_attn, qkv_, qkv_stride_);
  if (!model_.shape.layers[index].attends()) return recurrent(index);
  store(index);
  attend(index);
  if (model_.shape.attention_gate) add_rows(&PartSeconds::others, [this, index](int, std::int64_t r) { gate_attended(index, r); });
  if (latent_) latent_values(w);
  else if (model_.shape.sub_norms) prepare_normed(w.attn_sub, attended_, attended_stride_, w.c_proj);
  else prepare(attended_, attended_stride_, w.c_proj);
  residual(w.c_proj, w.post_1);
  if (w.recurrent) recurrent(index);
}

void ForwardPass::mlp_hidden(std::int64_t index) {
  const LayerWeights& w = model_.layers[index];
  prepare_input(model_.shape.shared_norm ? w.ln_1 : w.ln_2, w.c_fc);
  hidden(w.c_gate, w.c_fc);
}

void ForwardPass::hidden(const Matrix& c_gate, const Matrix& c_fc) {
  if (!model_.shape.gated_mlp) return multiply(c_fc, hidden_, hidden_stride_, model_.shape.activation);
  add_products(&PartSeconds::products, c_fc.panels, [this, &c_gate, &c_fc](Range rows, Range panels) {
    // In parts: the outputs of the gate stay in the second-level cache until those of c_fc are multiplied by them.
    const std::int64_t part = std::max<std::int64_t>(1, kGateFloats / ((rows.end - rows.begin) * kPanel));
    MatmulTask gate = task(c_gate, hidden_, hidden_stride_, model_.shape.activation, rows);
    MatmulTask fc = task(c_fc, hidden_, hidden_stride_, after_gate(model_.shape.activation), rows);
    for (std::int64_t begin = panels.begin, end; begin < panels.end; begin = end) {
      end = std::min(begin + part, panels.end);
      gate.added = added(c_gate, 0, hidden_stride_, rows, {begin, end});
      kernels_.matmul(gate, begin, end);
      fc.added = added(c_fc, 0, hidden_stride_, rows, {begin, end});
      kernels_.matmul(fc, begin, end);
    }
  });
}

void ForwardPass::mlp_output(std::int64_t index) {
  const LayerWeights& w = model_.layers[index];
  if (model_.shape.sub_norms) prepare_normed(w.mlp_sub, hidden_, hidden_stride_, w.mlp_proj);
  else prepare(hidden_, hidden_stride_, w.mlp_proj);
  residual(w.mlp_proj, w.post_2);
}

// Add the product of the prepared rows to x, after a norm and a factor if the model has them there.
void ForwardPass::residual(const Matrix& w, const NormWeights& post) {
  if (!model_.shape.norm_after && model_.shape.residual_scale == 1)
    return multiply(w, x_, x_stride_, Epilogue::add);
  multiply(w, attended_, attended_stride_, Epilogue::store);
  add_rows(&PartSeconds::others, [this, &post](int, std::int64_t r) { add_to_residual(r, post); });
}

// Add a row of attended_, where attention or the MLP left its output, to x.
void ForwardPass::add_to_residual(std::int64_t row, const NormWeights& post) const {
  const DecoderShape& s = model_.shape;
  float *y = attended_ + row * attended_stride_, *x = x_ + row * x_stride_;
  if (s.norm_after) norm(post, y, s.n_embd, y);
  for (std::int64_t i = 0; i < s.n_embd; ++i) x[i] += y[i] * s.residual_scale;
}

// The MLP of a layer with experts (experts.h).
void ForwardPass::mixture(std::int64_t index) {
  const LayerWeights& layer = model_.layers[index];
  Mixture& m = *mixture_;
  route(layer);
  routed_experts(*layer.experts);
  const bool beside = model_.shape.experts_beside, shared = model_.shape.shared_dim > 0 || beside;
  if (shared) {
    if (beside) prepare_normed(layer.experts->mlp_in, x_, x_stride_, layer.c_fc);
    else prepare(m.x, m.x_stride, layer.c_fc);
    hidden(layer.c_gate, layer.c_fc);
    prepare(hidden_, hidden_stride_, layer.mlp_proj);
    multiply(layer.mlp_proj, attended_, attended_stride_, Epilogue::store);
  }
  if (beside) return add_rows(&PartSeconds::others, [this, &layer](int rank, std::int64_t r) { add_both(r, layer, rank); });
  add_rows(&PartSeconds::others, [this, &layer, &m, shared](int, std::int64_t r) {
    const std::int64_t C = model_.shape.n_embd;
    float* y = attended_ + r * attended_stride_;
    if (!shared) std::fill(y, y + C, 0.0f);
    if (const std::vector<float>& gate = layer.experts->shared_gate; !gate.empty()) {
      const float* x = m.x + r * m.x_stride;
      const float factor = 1 / (1 + std::exp(-std::inner_product(gate.begin(), gate.end(), x, 0.0f)));
      for (std::int64_t i = 0; i < C; ++i) y[i] *= factor;
    }
    m.add_to(r, y);
    add_to_residual(r, layer.post_2);
  });
}

// Add the output of an MLP and that of the experts beside it to x, each after its norm.
void ForwardPass::add_both(std::int64_t row, const LayerWeights& layer, int rank) {
  const std::int64_t C = model_.shape.n_embd;
  float *y = attended_ + row * attended_stride_, *mixed = scratch_ + rank * scratch_stride_;
  std::fill(mixed, mixed + C, 0.0f);
  mixture_->add_to(row, mixed);
  norm(layer.experts->out, mixed, C, mixed);
  norm(layer.experts->mlp_out, y, C, y);
  for (std::int64_t i = 0; i < C; ++i) y[i] += mixed[i];
  add_to_residual(row, layer.post_2);
}

// Normalise the rows, and multiply them by the router's matrix.
void ForwardPass::route(const LayerWeights& layer) {
  const ExpertWeights& w = *layer.experts;
  const Matrix& router = w.router;
  Mixture& m = *mixture_;
  add_rows(&PartSeconds::others, [this, &layer, &w, &router, &m](int rank, std::int64_t r) {
    const DecoderShape& s = model_.shape;
    const float* x = x_ + r * x_stride_;
    float* y = m.x + r * m.x_stride;
    if (s.norm_before) norm(s.experts_beside ? w.in : layer.ln_2, x, s.n_embd, y);
    else std::copy(x, x + s.n_embd, y);
    if (s.experts_beside) {
      y = scratch_ + rank * scratch_stride_;
      norm(w.router_in, x, s.n_embd, y);
      const float factor = 1 / std::sqrt(static_cast<float>(s.n_embd));
      for (std::int64_t i = 0; i < s.n_embd; ++i) y[i] *= factor;
    }
    kernels_.prepare(router.prepared_as, y, s.n_embd, router.depth, r, num_rows_, router.prepared, prepared_, /*largest=*/0);
  });
  multiply(router, m.logits, m.logit_stride, Epilogue::store);
}

// The products of the chosen experts. Their numbers of items are known when all rows have chosen.
void ForwardPass::routed_experts(const ExpertWeights& w) {
  Mixture& m = *mixture_;
  const std::int64_t choices = num_rows_ * model_.shape.experts_per_token;
  const std::size_t choose = phases_.size(), hidden = choose + 2, output = choose + 4;
  add_rows(&PartSeconds::others, [&w, &m](int, std::int64_t r) { m.choose(r, w); });
  phases_[choose].ended = [this, &w, &m, hidden, output, ended = std::move(phases_[choose].ended)] {
    m.group(num_rows_);
    if (read_experts_ahead_) m.read_ahead(w);
    phases_[hidden].count = m.hidden_items();
    phases_[hidden].most = m.most_hidden_items();
    phases_[output].count = m.output_items();
    ended();
  };
  add(&PartSeconds::others, choices, [this, &w, &m](int, Range slots) {
    for (std::int64_t i = slots.begin; i < slots.end; ++i) m.prepare_x(kernels_, w.c_fc, i);
  });
  add(&PartSeconds::products, 1, [this, &w, &m](int, Range items) {
    m.multiply_hidden(kernels_, w, model_.shape.activation, items);
  });
  add(&PartSeconds::others, choices, [this, &w, &m](int, Range slots) {
    for (std::int64_t i = slots.begin; i < slots.end; ++i) m.prepare_hidden(kernels_, w.c_proj, i);
  });
  add(&PartSeconds::products, 1, [this, &w, &m](int, Range items) { m.multiply_output(kernels_, w, items); });
}

void ForwardPass::norm(const NormWeights& weights, const float* x, std::int64_t n, float* y) const {
  kernels_.norm(model_.shape.norm, x, weights.weight.data(), weights.bias.data(), n, model_.shape.epsilon, y);
}

// x, after a norm if the model has one there, as prepared rows for the next product.
void ForwardPass::prepare_input(const NormWeights& weights, const Matrix& next) {
  if (!model_.shape.norm_before) return prepare(x_, x_stride_, next);
  prepare_normed(weights, x_, x_stride_, next);
}

void ForwardPass::prepare_normed(const NormWeights& weights, const float* from, std::int64_t stride, const Matrix& next) {
  float* const normed = reinterpret_cast<float*>(normed_.data());
  add_rows(&PartSeconds::others, [this, &weights, from, stride, &next, normed](int rank, std::int64_t r) {
    float* y = has_adapters_ ? normed + r * input_stride_ : scratch_ + rank * scratch_stride_;
    norm(weights, from + r * stride, next.in, y);
    prepare_row(y, next, rank, r);
  }, [this, normed, &next](Range rows) { project(normed, input_stride_, next, rows); });
}

void ForwardPass::prepare(const float* from, std::int64_t stride, const Matrix& next) {
  add_rows(&PartSeconds::others, [this, from, stride, &next](int rank, std::int64_t r) {
    prepare_row(from + r * stride, next, rank, r);
  }, [this, from, stride, &next](Range rows) { project(from, stride, next, rows); });
}

// Integers of 8 bits keep the row's scale, so that they are rounded once. Other types take the rounded values.
void ForwardPass::prepare_row(const float* x, const Matrix& next, int rank, std::int64_t row) {
  float largest = 0;
  if (model_.shape.rounded_inputs) {
    largest = kLeastRounded;
    for (std::int64_t i = 0; i < next.in; ++i) largest = std::max(largest, std::fabs(x[i]));
  }
  if (largest > 0 && group_of(next.type) == 0) {
    constexpr float magic = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer, ties to even
    float* y = scratch_ + rank * scratch_stride_;  // may be x
    for (std::int64_t i = 0; i < next.in; ++i) y[i] = ((x[i] * (127 / largest) + magic) - magic) / (127 / largest);
    x = y;
  }
  const Range rows = rows_with(row);
  kernels_.prepare(next.prepared_as, x, next.in, next.depth, row - rows.begin, rows.end - rows.begin, next.prepared, prepared(rows),
                   largest);
}

void ForwardPass::read_experts_ahead() {
  read_experts_ahead_ = true;
  for (const LayerWeights& l : model_.layers)
    if (l.experts)
      for (const Matrix* w : {&l.experts->c_gate, &l.experts->c_fc, &l.experts->c_proj})
        advise(w->data, w->panels * w->panel_bytes, Access::random);
}

MatmulTask ForwardPass::task(const Matrix& w, float* y, std::int64_t stride, Epilogue epilogue, Range rows) const {
  return {&w, prepared(rows), w.prepared, rows.end - rows.begin, y + rows.begin * stride, stride, epilogue};
}

void ForwardPass::multiply(const Matrix& w, float* y, std::int64_t stride, Epilogue epilogue) {
  add_products(&PartSeconds::products, w.panels, [this, &w, y, stride, epilogue](Range rows, Range panels) {
    MatmulTask one = task(w, y, stride, epilogue, rows);
    one.added = added(w, 0, stride, rows, panels);
    kernels_.matmul(one, panels.begin, panels.end);
  });
}

// The panels of all parts are shared among the threads together.
void ForwardPass::multiply_parts(const std::vector<Matrix>& parts, float* y, std::int64_t stride) {
  std::int64_t panels = 0;
  for (const Matrix& w : parts) panels += w.panels;
  add_products(&PartSeconds::products, panels, [this, &parts, y, stride](Range rows, Range some) {
    std::int64_t first = 0;  // of a part
    for (const Matrix& w : parts) {
      const std::int64_t begin = std::max(some.begin, first) - first, end = std::min(some.end - first, w.panels);
      if (begin < end) {
        MatmulTask one = task(w, y + first * kPanel, stride, Epilogue::store, rows);
        one.added = added(parts[0], first, stride, rows, {begin, end});
        kernels_.matmul(one, begin, end);
      }
      first += w.panels;
    }
  });
}

// Normalise and rotate the queries and keys of one row, in place.
void ForwardPass::position_queries_and_keys(std::int64_t layer, std::int64_t row) const {
  const DecoderShape& s = model_.shape;
  const LayerShape& l = s.layers[layer];
  const LayerWeights& w = model_.layers[layer];
  const bool keys = l.num_projections > 1;
  float *q = qkv_ + row * qkv_stride_, *k = q + l.attn_dim();
  if (s.qk_norm == QueryKeyNorm::whole) {
    norm(w.q_norm, q, l.attn_dim(), q);
    if (keys) norm(w.k_norm, k, l.kv_dim(), k);
  }
  const std::int64_t index = s.rotary[layer];
  const bool own = s.qk_norm == QueryKeyNorm::heads, of_heads = own || s.qk_norm == QueryKeyNorm::head;
  if (!of_heads && index < 0) return;
  const float* cosines = index < 0 ? nullptr : angles_ + row * angle_stride_ + angle_at_[index];
  const float growth = s.query_growth * std::log1p(static_cast<float>(rows_[row].position / s.query_context));
  for (std::int64_t h = 0; h < l.n_head + (keys ? l.n_kv_head : 0); ++h) {  // keys follow the queries
    float* x = q + h * l.head_dim;
    if (of_heads) {
      const NormWeights& n = h < l.n_head ? w.q_norm : w.k_norm;
      const std::int64_t at = own ? (h < l.n_head ? h : h - l.n_head) * l.head_dim : 0;
      kernels_.norm(s.norm, x, n.weight.data() + at, n.bias.data() + at, l.head_dim, s.epsilon, x);
    }
    if (index < 0) continue;
    const std::int64_t half = s.frequencies[index].size();
    kernels_.rotate(x, cosines, cosines + padded(half), half);
    if (growth > 0 && h < l.n_head)
      for (std::int64_t i = 0; i < l.head_dim; ++i) x[i] *= 1 + growth;
  }
}

void ForwardPass::store(std::int64_t layer) {
  add_rows(&PartSeconds::attention, [this, layer](int, std::int64_t r) {
    const LayerShape& l = model_.shape.layers[layer];
    float *k = qkv_ + r * qkv_stride_ + l.attn_dim(), *v = k + l.kv_dim();
    if (l.num_projections == 2) std::copy(k, v, v);  // before keys are normalised and rotated
    position_queries_and_keys(layer, r);
    if (cache_.is_rotated()) kernels_.hadamard(qkv_ + r * qkv_stride_, l.attn_dim(), l.head_dim);
    if (l.num_projections == 1) return;
    for (std::int64_t h = 0; h < l.n_kv_head; ++h, k += l.head_dim, v += l.head_dim) {
      if (l.value_norm)
        kernels_.norm(Norm::rms, v, model_.value_norm.weight.data(), model_.value_norm.bias.data(), l.head_dim,
                      model_.shape.epsilon, v);
      if (cache_.is_rotated())
        for (float* x : {k, v}) kernels_.hadamard(x, l.head_dim, l.head_dim);
      kernels_.store_kv(cache_.type(), k, v, l.head_dim, block_of_[r] + cache_.offset(layer, h),
                        rows_[r].position % kBlock);
    }
  });
}

// Items differ in length, so they are taken one by one. The result of an item does not depend on the thread.
void ForwardPass::attend(std::int64_t layer) {
  const auto body = [this, layer](int rank, Range one) {
    const std::int64_t heads = model_.shape.layers[layer].n_kv_head;
    attend_item(layer, items_[one.begin / heads], one.begin % heads, scratch_ + rank * scratch_stride_);
  };
  const std::int64_t items = static_cast<std::int64_t>(items_.size()) * model_.shape.layers[layer].n_kv_head;
  add(&PartSeconds::attention, items, body, /*most=*/1);
}

void ForwardPass::gate_attended(std::int64_t layer, std::int64_t row) const {
  const LayerShape& l = model_.shape.layers[layer];
  const float* z = qkv_ + row * qkv_stride_ + l.attn_dim() + (l.num_projections - 1) * l.kv_dim();
  kernels_.gate(attended_ + row * attended_stride_, z, l.attn_dim(), Gate::sigmoid);
}

void ForwardPass::attend_item(std::int64_t layer, const Item& item, std::int64_t head, float* scratch) {
  const DecoderShape& s = model_.shape;
  const Run& run = runs_[item.run];
  const LayerShape& l = s.layers[layer];
  const std::int64_t group = l.n_head / l.n_kv_head, column = head * group * l.head_dim;
  const AttentionTask task{.type = cache_.type(),
                           .head_dim = l.head_dim,
                           .blocks = run.blocks,
                           .offset = cache_.offset(l.kv_layer < 0 ? layer : l.kv_layer, head),
                           .start = last_key(run.row),
                           .num_tokens = run.count,
                           .group = group,
                           .window = s.windows[layer] ? s.windows[layer] : s.block_size,
                           .scale = l.scale,
                           .softcap = s.attention_softcap,
                           .sinks = s.sinks ? model_.layers[layer].sinks.data() + head * group : nullptr,
                           .q = qkv_ + run.row * qkv_stride_ + column,
                           .q_stride = qkv_stride_,
                           .out = attended_ + run.row * attended_stride_ + column,
                           .out_stride = attended_stride_,
                           .scratch = scratch,
                           .piece = item.piece,
                           .partial = partial_.data() + run.partial + run.pieces * run.count * head * group * partial_floats(l.head_dim)};
  kernels_.attention(task);
  if (item.piece >= 0) {
    std::int64_t& left = pieces_left_[item.run * most_kv_heads_ + head];  // whoever computes the last piece joins all
    if (std::atomic_ref(left).fetch_sub(1, std::memory_order_acq_rel) > 1) return;
    kernels_.join(task);
    left = run.pieces;  // of the next layer
  }
  for (std::int64_t r = run.row; cache_.is_rotated() && r < run.row + run.count; ++r)
    kernels_.hadamard(attended_ + r * attended_stride_ + column, group * l.head_dim, l.head_dim);
}

void ForwardPass::finish() {
  add_rows(&PartSeconds::others, [this](int, std::int64_t r) {
    const std::int64_t C = model_.shape.n_embd, logit = rows_[r].logit;
    if (rows_[r].hidden < 0) return;
    const Matrix& w = model_.lm_head;
    float* y = final_hidden_.data() + rows_[r].hidden * C;
    norm(model_.ln_f, x_ + r * x_stride_, C, y);
    if (model_.shape.final_scale != 1)
      for (std::int64_t i = 0; i < C; ++i) y[i] *= model_.shape.final_scale;
    if (logit < 0) return;
    kernels_.prepare(w.prepared_as, y, C, w.depth, logit, num_logits_, w.prepared, head_rows_.data(), /*largest=*/0);
  });
}

}  // namespace nanoinfer
