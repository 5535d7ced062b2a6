// The native decoder: runs a decoder-only transformer on a CPU, one call for each step. Weights are packed when they are loaded. kernels.cpp
// describes the kernels, and cache.h the KV cache.
#pragma once

#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include "cache.h"
#include "format.h"
#include "forward.h"
#include "isa.h"
#include "memory.h"
#include "thread_pool.h"

namespace nanoinfer {

struct DecoderOptions {
  WeightType weights = WeightType::f32;
  CacheType cache = CacheType::f32;
  std::int64_t max_num_cached_tokens = 0;  // rounded up to whole blocks
  std::int64_t num_states = 0;  // rows of states of recurrent layers, from 1 on
  int threads = 1;
  std::string isa;          // "": the fastest supported one
  bool packed = false;      // panels are not packed here: `load_packed` refers to them
  // Of matrices that are not in `weights`, by their names: the format of each part and its number of rows.
  std::unordered_map<std::string, std::vector<std::pair<WeightType, std::int64_t>>> formats;
};

// New tokens for some sequences: nanoinfer.engines.base.StepBatch.
struct Step {
  std::vector<std::int64_t> handles, token_ids, num_new, num_logits;
  std::vector<std::int64_t> adapters;  // of each sequence, 0: none; empty: no sequence has one
  // Of a model with recurrent layers (nanoinfer.kv.states.StatePool.step): rows of states to copy before, from and to, where row
  // 0 is that of an empty sequence; and each sequence's row, and the tokens that are pending in it.
  std::vector<std::pair<std::int64_t, std::int64_t>> copies, states;
  const float* previous = nullptr;  // of a model with `mtp`: (token_ids, source_dim)
  bool all_hidden = false;  // whether all tokens have a row of final hidden states, or those with logits
};

class Decoder {
 public:
  // Throws std::invalid_argument for sizes out of range, std::bad_alloc, and std::runtime_error if the threads cannot be
  // created. The embedding and the output head are those of `owner`, which is loaded and must outlive the decoder; nullptr: its own.
  // With a backbone, the embedding and the cache are those of the owner: handles are its handles, and steps append nothing.
  Decoder(const DecoderShape& given, const DecoderOptions& options, Decoder* owner = nullptr);

  // Load one tensor by its name in the checkpoint ("transformer.h.0.attn.c_attn.weight"); a matrix is (out, in). Parts of a
  // matrix after the first have names with their numbers ("...c_attn.weight:1"). A matrix is packed immediately, on all threads, and not kept. Throws std::invalid_argument if the name is unknown, the shape is
  // wrong, or the tensor is a matrix that must be packed already.
  void load(const std::string& name, const Stored& values);
  // Load rows of blocks of a GGUF file, (out, row_bytes), into a matrix in a format of these files: from places in files
  // (RowPlace) or from memory (std::uint8_t). Throws std::invalid_argument as `load`.
  template <class Source>
  void load_blocks(const std::string& name, const Source* source, std::int64_t rows, std::size_t bytes);
  // Use a matrix that is packed: all its panels, which are not copied and must outlive the decoder, and for int8 its
  // scales, which are copied. Throws std::invalid_argument for a wrong name, size or alignment, and without
  // DecoderOptions::packed.
  void load_packed(const std::string& name, const std::uint8_t* panels, std::size_t num_bytes, const float* scales,
                   std::size_t num_scales);
  // Throw std::invalid_argument if a tensor was not loaded. Biases are optional and default to zero.
  void check_loaded() const;
  // Add an update of a matrix, by its name without ".weight", to an adapter, from 1 on (adapters.h). Throws
  // std::invalid_argument if the name is unknown or the factors do not fit it.
  void load_adapter(std::int64_t adapter, const std::string& name, const Factors& given);
  void unload_adapter(std::int64_t adapter) { pass_.adapters().unload(adapter); }

  Cache& cache() { return cache_; }
  const DecoderShape& shape() const { return model_.shape; }
  const char* isa() const { return kernels_.name; }
  int threads() const { return threads_->size(); }
  std::int64_t logits_stride() const;  // vocab_size, padded to whole panels
  std::size_t weight_bytes() const { return panel_bytes_ + router_bytes_ + vector_floats_ * sizeof(float); }
  std::size_t state_bytes() const;  // of a row, 0: no layer is recurrent
  const PartSeconds& part_seconds() const { return pass_.part_seconds(); }
  const auto& phase_items() const { return pass_.phase_items(); }

  // Throw std::invalid_argument or std::out_of_range if a step is malformed or exceeds the limits; return
  // sum(num_logits).
  std::int64_t check(const Step& step) const;
  // Append the tokens of a step that `check` accepted and write logits, (sum(num_logits), logits_stride()); with
  // nullptr only the hidden states are computed.
  void extend(const Step& step, float* logits);
  // The final hidden states of the last step's logits, (sum(num_logits), n_embd); with all_hidden, of all its tokens.
  const std::vector<float>& final_hidden() const { return pass_.final_hidden(); }
  // The weights are in a mapped file that memory cannot hold: read the experts of a step before they are multiplied.
  void read_experts_ahead() { pass_.read_experts_ahead(); }

 private:
  struct Slot {  // destination of a tensor of the checkpoint
    Matrix* matrix = nullptr;        // of a tensor that is packed, to these panels and scales:
    std::uint8_t* panels = nullptr;  // none if they are packed already
    float* scale = nullptr;
    Slot* bias = nullptr;            // that of the matrix
    float* vector = nullptr;         // of a tensor that is copied
    std::int64_t rows = 1, columns = 0;
    bool optional = false;           // biases, which are zero if the checkpoint has none
    bool given = false;
    float offset = 0;                // added to the values
    bool transposed = false;         // whether they are kept as (columns, rows)
  };
  void add_matrix(const std::string& name, Matrix& m, std::int64_t out, std::int64_t in, bool with_bias);
  void add_part(const std::string& name, Matrix& m, WeightType type, std::int64_t out, std::int64_t in);
  void add_parts(const std::string& name, std::vector<Matrix>& parts, std::int64_t out, std::int64_t in);
  void add_norm(const std::string& name, NormWeights& norm, std::int64_t width);
  void add_layer(const std::string& prefix, std::int64_t index);
  void add_layer_inputs();
  void add_after(const std::string& prefix, LayerWeights& layer, bool scaled);
  void add_recurrent(const std::string& prefix, LayerWeights& layer, bool beside);  // recurrent.cpp
  void add_latent(const std::string& prefix, LayerWeights& layer);  // latent.cpp
  void add_mlp(const std::string& prefix, LayerWeights& layer, std::int64_t width);
  void add_experts(const std::string& prefix, LayerWeights& layer);
  void add_beside(const std::string& prefix, LayerWeights& layer, std::int64_t width);
  void place(Slot& slot, std::int64_t& panel_bytes, std::int64_t& outputs);
  Slot& find(const std::string& name);
  void check_states(const Step& step) const;

  decltype(DecoderOptions::formats) formats_;
  ModelWeights model_;
  const Kernels& kernels_;
  std::unordered_map<std::string, Slot> slots_;
  std::vector<Slot*> matrices_;  // in the order in which a step reads them
  Buffer panels_;   // none if they are packed already
  Buffer vectors_;  // biases and scales
  std::size_t panel_bytes_ = 0, router_bytes_ = 0, vector_floats_ = 0;  // vectors_: the biases of all matrices, then the scales
  Cache own_cache_;
  Cache& cache_;    // own_cache_, or the owner's
  std::shared_ptr<ThreadPool> threads_;
  ForwardPass pass_;
};

}  // namespace nanoinfer
