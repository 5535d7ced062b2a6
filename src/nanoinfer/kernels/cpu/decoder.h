// The native decoder: a GPT on a CPU, one call a step. Weights are packed as they are given; see kernels.cpp for
// what the kernels do and cache.h for where keys and values live.
#pragma once

#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include "cache.h"
#include "forward.h"
#include "isa.h"
#include "memory.h"
#include "thread_pool.h"

namespace nanoinfer {

struct DecoderOptions {
  WeightType weights = WeightType::f32;
  CacheType cache = CacheType::f32;
  std::int64_t max_num_cached_tokens = 0;
  std::int64_t max_num_seqs = 0;
  int threads = 1;
  std::string isa;          // "" is the fastest that runs here
  bool huge_pages = true;
};

// New tokens for some sequences; nanoinfer.engines.base.StepBatch.
struct Step {
  std::vector<std::int64_t> handles, token_ids, num_new, num_logits;
};

class Decoder {
 public:
  // Throws std::invalid_argument for sizes that make no sense, std::bad_alloc, and std::runtime_error where the system
  // does not give as many threads.
  Decoder(const DecoderShape& shape, const DecoderOptions& options);

  // Give one tensor by its name in the checkpoint ("transformer.h.0.attn.c_attn.weight"), row-major float32; a
  // matrix is (out, in). It is packed at once and not kept. Throws std::invalid_argument: unknown, wrong shape.
  void load(const std::string& name, const float* values, std::int64_t rows, std::int64_t columns);
  // Throw std::invalid_argument unless every tensor was given. Biases count as zero.
  void check_loaded() const;

  Cache& cache() { return cache_; }
  const DecoderShape& shape() const { return model_.shape; }
  const char* isa() const { return kernels_.name; }
  int threads() const { return threads_->size(); }
  std::int64_t logits_stride() const;  // vocab_size, padded to whole panels
  const PartSeconds& part_seconds() const { return pass_.part_seconds(); }
  std::size_t weight_bytes() const { return weights_.size(); }

  // Throw std::invalid_argument or std::out_of_range for a step that makes no sense or does not fit; return
  // sum(num_logits).
  std::int64_t check(const Step& step) const;
  // Append the tokens of a step that `check` accepts and write logits, (sum(num_logits), logits_stride()).
  void extend(const Step& step, float* logits);
  // (sum(num_logits), n_embd) of the last step: the final hidden states that its logits were made from.
  const std::vector<float>& final_hidden() const { return pass_.final_hidden(); }

 private:
  struct Slot {  // where a tensor of the checkpoint goes
    Matrix* matrix = nullptr;  // packed
    float* vector = nullptr;   // or copied
    std::int64_t rows = 1, columns = 0;
    bool optional = false;     // biases: zero where the checkpoint has none
    bool given = false;
  };
  void add_matrix(const std::string& name, Matrix& m, std::int64_t out, std::int64_t in, bool with_bias);
  void add_norm(const std::string& name, std::vector<float>& norm);
  void place(Matrix& m);
  void pack(Matrix& m, const float* values);

  ModelWeights model_;
  const Kernels& kernels_;
  std::unordered_map<std::string, Slot> slots_;
  Buffer weights_;
  std::size_t placed_ = 0;
  Cache cache_;
  std::shared_ptr<ThreadPool> threads_;
  ForwardPass pass_;
};

}  // namespace nanoinfer
