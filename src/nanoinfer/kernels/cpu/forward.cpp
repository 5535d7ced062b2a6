#include "forward.h"

#include <algorithm>

#include "format.h"

namespace nanoinfer {

namespace {

constexpr std::int64_t kQueryChunk = 64;  // queries of one attention item: small enough to give every thread some items

std::int64_t padded(std::int64_t n) { return (n + kPanel - 1) / kPanel * kPanel; }

}  // namespace

ForwardPass::ForwardPass(const ModelWeights& model, const Kernels& kernels, Cache& cache, int num_threads)
    : model_(model), kernels_(kernels), cache_(cache) {
  const DecoderShape& s = model.shape;
  x_stride_ = padded(s.n_embd);
  qkv_stride_ = padded(3 * s.n_embd);
  hidden_stride_ = padded(s.mlp_dim);
  scratch_stride_ = padded(std::max({kQueryTile * (s.block_size + kBlock), s.n_embd, s.mlp_dim}));
  prepared_stride_ = std::max(prepared_bytes(model.type, s.n_embd), prepared_bytes(model.type, s.mlp_dim));
  head_stride_ = prepared_bytes(model.type, s.n_embd);
  const std::int64_t floats = kMaxRows * (2 * x_stride_ + qkv_stride_ + hidden_stride_) + num_threads * scratch_stride_;
  memory_ = Buffer(floats * sizeof(float) + kMaxRows * prepared_stride_);
  float* at = reinterpret_cast<float*>(memory_.data());
  const auto take = [&at](std::int64_t n) { return std::exchange(at, at + n); };
  x_ = take(kMaxRows * x_stride_);
  attended_ = take(kMaxRows * x_stride_);
  qkv_ = take(kMaxRows * qkv_stride_);
  hidden_ = take(kMaxRows * hidden_stride_);
  scratch_ = take(num_threads * scratch_stride_);
  prepared_ = reinterpret_cast<std::uint8_t*>(at);
  next_item_ = std::make_unique<std::atomic<std::int64_t>[]>(s.n_layer);
}

void ForwardPass::run(ThreadPool& threads, const std::vector<Row>& rows, float* logits, std::int64_t logits_stride) {
  threads_ = &threads;
  const std::int64_t total = static_cast<std::int64_t>(rows.size());
  num_logits_ = std::count_if(rows.begin(), rows.end(), [](const Row& r) { return r.logit >= 0; });
  head_rows_.resize(num_logits_ * head_stride_);
  final_hidden_.resize(num_logits_ * model_.shape.n_embd);
  for (std::int64_t row = 0; row < total; row += kMaxRows) {
    select(rows.data() + row, std::min(kMaxRows, total - row));
    const bool last = row + kMaxRows >= total;
    mark_ = Clock::now();
    threads.run([&](int rank) {
      embed(rank);
      for (std::int64_t l = 0; l < model_.shape.n_layer; ++l) layer(l, rank);
      finish(rank);
      if (last && num_logits_) {
        const Matrix& w = model_.lm_head;
        const MatmulTask task{&w, head_rows_.data(), head_stride_, num_logits_, logits, logits_stride, Epilogue::store};
        const Range mine = range(w.panels, rank);
        kernels_.matmul(task, mine.begin, mine.end);
        timed_barrier(&PartSeconds::head, rank);
      }
    });
  }
}

void ForwardPass::select(const Row* rows, std::int64_t count) {
  rows_ = rows;
  num_rows_ = count;
  items_.clear();
  block_of_.clear();
  for (std::int64_t from = 0; from < count;) {  // runs of rows of one sequence
    std::int64_t to = from;
    while (to < count && to - from < kQueryChunk && rows[to].handle == rows[from].handle)
      block_of_.push_back(cache_.block(rows[to].handle, rows[to].position)), ++to;
    const std::uint8_t* const* blocks = cache_.blocks(rows[from].handle).data();
    for (std::int64_t h = 0; h < model_.shape.n_head; ++h) items_.push_back({blocks, from, to - from, h});
    from = to;
  }
  for (std::int64_t l = 0; l < model_.shape.n_layer; ++l) next_item_[l].store(0, std::memory_order_relaxed);
}

void ForwardPass::embed(int rank) {
  const std::int64_t C = model_.shape.n_embd;
  const Range mine = range(num_rows_, rank);
  for (std::int64_t r = mine.begin; r < mine.end; ++r) {
    float* x = x_ + r * x_stride_;
    unpack_row(model_.wte, rows_[r].token, x);
    const float* position = model_.wpe.data() + rows_[r].position * C;
    for (std::int64_t i = 0; i < C; ++i) x[i] += position[i];
  }
}

// Wait for all threads, because the next operation reads the results of all. The time since the last barrier is added to
// `part`.
void ForwardPass::timed_barrier(double PartSeconds::*part, int rank) {
  threads_->barrier();
  if (rank != 0) return;
  const Clock::time_point now = Clock::now();
  seconds_.*part += std::chrono::duration<double>(now - mark_).count();
  mark_ = now;
}

void ForwardPass::layer(std::int64_t index, int rank) {
  const LayerWeights& w = model_.layers[index];
  const Epilogue gelu = model_.shape.gelu_tanh ? Epilogue::gelu_tanh : Epilogue::gelu_erf;
  norm(w.ln_1, w.c_attn, rank);
  timed_barrier(&PartSeconds::others, rank);
  multiply(w.c_attn, qkv_, qkv_stride_, Epilogue::store, rank);
  timed_barrier(&PartSeconds::products, rank);
  store(index, rank);
  timed_barrier(&PartSeconds::attention, rank);
  attend(index, rank);
  timed_barrier(&PartSeconds::attention, rank);
  prepare(attended_, x_stride_, w.c_proj, rank);
  timed_barrier(&PartSeconds::others, rank);
  multiply(w.c_proj, x_, x_stride_, Epilogue::add, rank);
  timed_barrier(&PartSeconds::products, rank);
  norm(w.ln_2, w.c_fc, rank);
  timed_barrier(&PartSeconds::others, rank);
  multiply(w.c_fc, hidden_, hidden_stride_, gelu, rank);
  timed_barrier(&PartSeconds::products, rank);
  prepare(hidden_, hidden_stride_, w.mlp_proj, rank);
  timed_barrier(&PartSeconds::others, rank);
  multiply(w.mlp_proj, x_, x_stride_, Epilogue::add, rank);
  timed_barrier(&PartSeconds::products, rank);
}

// Layer norm of x as prepared rows for the next product.
void ForwardPass::norm(const std::vector<float>& weights, const Matrix& next, int rank) {
  const std::int64_t C = model_.shape.n_embd;
  float* y = scratch_ + rank * scratch_stride_;
  const Range mine = range(num_rows_, rank);
  for (std::int64_t r = mine.begin; r < mine.end; ++r) {
    kernels_.layer_norm(x_ + r * x_stride_, weights.data(), weights.data() + C, C, model_.shape.epsilon, y);
    kernels_.prepare(next.type, y, C, next.depth, r, num_rows_, prepared_stride_, prepared_);
  }
}

void ForwardPass::prepare(const float* from, std::int64_t stride, const Matrix& next, int rank) {
  const Range mine = range(num_rows_, rank);
  for (std::int64_t r = mine.begin; r < mine.end; ++r)
    kernels_.prepare(next.type, from + r * stride, next.in, next.depth, r, num_rows_, prepared_stride_, prepared_);
}

void ForwardPass::multiply(const Matrix& w, float* y, std::int64_t stride, Epilogue epilogue, int rank) {
  const MatmulTask task{&w, prepared_, prepared_stride_, num_rows_, y, stride, epilogue};
  const Range mine = range(w.panels, rank);
  kernels_.matmul(task, mine.begin, mine.end);
}

void ForwardPass::store(std::int64_t layer, int rank) {
  const DecoderShape& s = model_.shape;
  const Range mine = range(num_rows_, rank);
  for (std::int64_t r = mine.begin; r < mine.end; ++r)
    for (std::int64_t h = 0; h < s.n_head; ++h) {
      const float* k = qkv_ + r * qkv_stride_ + s.n_embd + h * s.head_dim();
      kernels_.store_kv(cache_.shape().type, k, k + s.n_embd, s.head_dim(),
                        block_of_[r] + cache_.shape().offset(layer, h), rows_[r].position % kBlock);
    }
}

// Items differ in length, so each thread takes the next one when it is free. The result of an item does not depend on the
// thread.
void ForwardPass::attend(std::int64_t layer, int rank) {
  const DecoderShape& s = model_.shape;
  const CacheShape& shape = cache_.shape();
  const std::int64_t count = static_cast<std::int64_t>(items_.size());
  for (std::int64_t i; (i = next_item_[layer].fetch_add(1, std::memory_order_relaxed)) < count;) {
    const Item& item = items_[i];
    const std::int64_t column = item.head * s.head_dim();
    kernels_.attention({shape.type, s.head_dim(), item.blocks, shape.offset(layer, item.head),
                        rows_[item.row].position, item.count, qkv_ + item.row * qkv_stride_ + column, qkv_stride_,
                        attended_ + item.row * x_stride_ + column, x_stride_, scratch_ + rank * scratch_stride_});
  }
}

void ForwardPass::finish(int rank) {
  const std::int64_t C = model_.shape.n_embd;
  const Matrix& w = model_.lm_head;
  const Range mine = range(num_rows_, rank);
  for (std::int64_t r = mine.begin; r < mine.end; ++r)
    if (rows_[r].logit >= 0) {
      const float* norm = model_.ln_f.data();
      float* y = final_hidden_.data() + rows_[r].logit * C;
      kernels_.layer_norm(x_ + r * x_stride_, norm, norm + C, C, model_.shape.epsilon, y);
      kernels_.prepare(w.type, y, C, w.depth, rows_[r].logit, num_logits_, head_stride_, head_rows_.data());
    }
  timed_barrier(&PartSeconds::others, rank);
}

}  // namespace nanoinfer
