// The forward pass of one step, which the threads of the pool compute together. A row is one new token of one sequence;
// the matrix products process the rows of all sequences together.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "adapters.h"
#include "cache.h"
#include "kernels.h"
#include "memory.h"
#include "thread_pool.h"

namespace nanoinfer {

// The sizes of one layer, and what it projects to.
struct LayerShape {
  std::int64_t n_head = 0, n_kv_head = 0, head_dim = 0, mlp_dim = 0;
  std::int64_t kv_layer = -1;         // earlier layer whose keys and values it attends to, -1: its own
  std::int64_t num_projections = 3;   // of queries, keys and values, in this order
  bool value_norm = false;            // of each head, without a weight
  bool recurrent = false;             // whether it has a state in place of attention (recurrent.h)
  bool beside = false;                // whether it has attention beside the state, of the same input
  bool mlp = true;                    // whether it has an MLP or experts
  bool scaled = false;                // whether x is multiplied by a parameter after the layer
  float scale = 0;                    // of the scores: DecoderShape::attention_scale, or 1 / sqrt(head_dim)

  std::int64_t attn_dim() const { return n_head * head_dim; }
  std::int64_t kv_dim() const { return n_kv_head * head_dim; }
  bool attends() const { return beside || !recurrent; }
};

// What a layer has in place of attention (nanoinfer.recurrence.Recurrence, which describes the fields).
enum class Rule { none, conv, delta, mamba2 };
struct StateShape {
  Rule rule = Rule::none;             // none: no layer is recurrent
  std::int64_t taps = 0, num_heads = 0, value_dim = 0, num_key_heads = 0, key_dim = 0;
  std::int64_t norm_groups = 1;       // of mamba2, of its values; 0: no norm
  bool tiled = false;
  std::int64_t num_pending = 1;       // tokens whose inputs a state keeps

  std::int64_t inner_dim() const { return num_heads * value_dim; }
  std::int64_t key_head(std::int64_t head) const { return tiled ? head % num_key_heads : head / (num_heads / num_key_heads); }
  std::int64_t keys_dim() const { return num_key_heads * key_dim; }
  std::int64_t num_channels() const { return 2 * keys_dim() + inner_dim(); }
  std::int64_t num_gates() const { return rule == Rule::delta ? 2 * num_heads : rule == Rule::mamba2 ? num_heads : 0; }
  std::int64_t num_inputs() const { return num_channels() + num_gates(); }
  std::int64_t num_state() const { return (taps - 1) * num_channels() + num_heads * key_dim * value_dim; }
  // Outputs of c_attn, and where the inputs of the convolution, a token's gates, and the gate of the layer's output begin.
  std::int64_t width() const { return rule == Rule::conv ? 3 * inner_dim() : inner_dim() + num_inputs(); }
  std::int64_t channels_at() const { return rule == Rule::conv ? 2 * inner_dim() : rule == Rule::mamba2 ? inner_dim() : 0; }
  std::int64_t gates_at() const { return inner_dim() + num_channels(); }
  std::int64_t output_gate_at() const { return rule == Rule::conv ? inner_dim() : rule == Rule::mamba2 ? 0 : num_channels(); }
};

// The norm of queries and keys: of each head, with the same weights or with weights of its own, or of all heads together.
enum class QueryKeyNorm { none, head, heads, whole };

// nanoinfer.config.ModelConfig; the defaults are GPT-2's.
struct DecoderShape {
  std::int64_t vocab_size = 0, block_size = 0, n_layer = 0, n_head = 0, n_embd = 0, mlp_dim = 0;
  std::int64_t n_kv_head = 0;         // 0: n_head
  std::int64_t head_dim = 0;          // 0: n_embd / n_head
  Epilogue activation = Epilogue::gelu_tanh;
  Norm norm = Norm::layer;
  float epsilon = 1e-5f;
  bool norm_weight = true;            // whether norms have weights
  float norm_offset = 0;              // added to the weights of norms
  bool norm_before = true, norm_after = false;  // whether blocks have norms before attention and MLP, and after them
  bool shared_norm = false;           // ln_1 is also the norm before the MLP
  QueryKeyNorm qk_norm = QueryKeyNorm::none;
  bool embedding_norm = false;
  bool learned_positions = true;
  bool parallel_residual = false;
  bool gated_mlp = false;
  bool sub_norms = false;             // norms of attention's output and of the MLP's hidden layer
  bool rounded_inputs = false;        // the inputs of a layer's matrices have 8 bits, and one scale for each row
  bool tied = true;                   // the output head shares the token embedding's weights
  float attention_scale = 0;          // of the scores; 0: 1 / sqrt(head_dim)
  float attention_softcap = 0, logits_softcap = 0;  // 0: none
  bool attention_gate = false;        // whether the outputs of attention are multiplied by sigmoids of the last outputs of c_attn
  bool sinks = false;                 // whether heads have a score without a value
  float embedding_scale = 1;
  float residual_scale = 1;           // of the outputs of attention and MLP before they are added to x
  float final_scale = 1;              // of the final hidden states
  float query_growth = 0;             // queries that are rotated: times 1 + growth * ln(1 + position / context)
  std::int64_t query_context = 1;     // of query_growth; the quotient is rounded down
  std::vector<std::int64_t> windows;  // of each layer, 0: none; empty: no layer has one
  std::vector<std::int64_t> rotary;   // index in `frequencies` for each layer, -1: none; empty: no layer has one
  std::vector<std::vector<float>> frequencies;  // radians a position of each pair of dimensions
  std::vector<float> rotary_factors;  // of the cosines and sines of each of `frequencies`; empty: all 1
  // Mixtures of experts (experts.cpp), MLPs each.
  std::int64_t num_experts = 0, experts_per_token = 0, expert_dim = 0;  // 0: no layer has one
  bool normalize_experts = false;     // whether the weights of the experts of a token add up to 1
  float expert_scale = 1;             // of the sum of their outputs
  std::int64_t shared_dim = 0;        // of an expert that all tokens take, 0: none
  bool shared_gate = false;           // whether its output is multiplied by sigmoid(x . w)
  bool sigmoid_experts = false;       // whether scores are sigmoids of the router's outputs; else their softmax
  bool experts_beside = false;        // whether they stand beside the layer's MLP, with norms of their own (models/experts.py)
  bool corrected_experts = false;     // whether a number of each expert is added to its score where experts are chosen
  std::int64_t expert_groups = 1, groups_per_token = 1;  // of consecutive experts; only some may be chosen for a token
  std::int64_t group_top = 1;         // the score of a group is the sum of its so many highest scores
  std::vector<std::int64_t> sparse;   // of each layer, 1: its MLP is a mixture; empty: no layer's is
  std::vector<LayerShape> layers;     // empty: all have the sizes above
  std::int64_t per_layer_dim = 0;     // of the embedding that each token has for each layer (per_layer.cpp), 0: none
  StateShape recurrence;              // of the recurrent layers
  std::int64_t head_rows = 0;         // of the output head that are multiplied, the first ones; 0: all
  bool mtp = false;                   // the input is a product of an embedding and a hidden state (models/layers.py, MTPInput)
  // Of another decoder, the owner: the width of its embedding and its hidden states, with `mtp`. All layers then attend to keys of
  // the owner, and `kv_layer` are layers of it. 0: there is no other.
  std::int64_t backbone = 0;

  // Latent attention (latent.h), in all layers: head_dim is latent_turned + latent_rank, and n_kv_head is 1.
  std::int64_t latent_rank = 0;       // width of the latent of keys and values, 0: there is none
  std::int64_t latent_turned = 0, latent_plain = 0;  // widths of the rotated and the other part of queries
  std::int64_t latent_value = 0;      // width of the values of a head
  std::int64_t latent_query_rank = 0;  // width of the latent of queries, 0: they are a product of x
  float latent_epsilon = 1e-6f;       // of the norms of latents

  std::int64_t source_dim() const { return backbone ? backbone : n_embd; }  // of the embedding and of hidden states before
  std::int64_t query_dim() const { return latent_plain + latent_turned; }
  std::int64_t down_dim() const { return (latent_query_rank ? latent_query_rank : n_head * query_dim()) + head_dim; }
  std::int64_t values_dim() const { return n_head * latent_value; }  // inputs of c_proj
};

struct NormWeights {  // empty if the model does not have the norm
  std::vector<float> weight, bias;
};

struct ExpertWeights {
  Matrix router{};                        // (E, C) in float32, in memory of its own
  Buffer router_memory;
  Matrix c_gate{}, c_fc{}, c_proj{};      // those of all experts, one below the other: (E F, C), (E F, C), (E C, F)
  std::vector<float> shared_gate;         // (C)
  std::vector<float> correction;          // (E), or none
  // Of experts beside an MLP: the norms before and after both, that of the router's input, and a factor of each expert.
  NormWeights mlp_in, mlp_out, in, out, router_in;
  std::vector<float> scale;               // (E), or none
};

struct RecurrentWeights {
  std::vector<float> conv, conv_bias;             // (taps, channels), (channels)
  std::vector<float> a_log, dt_bias, skip_scale;  // (heads) each, or none
  NormWeights norm;                               // of the outputs: (value_dim), or of mamba2 (inner_dim)
  Matrix proj{};                                  // of the outputs
};

struct LayerWeights {
  std::vector<Matrix> c_attn;  // parts in several formats, or one: outputs follow each other
  Matrix c_proj{}, c_gate{}, c_fc{}, mlp_proj{};  // c_gate: gated MLPs only; of a mixture, its shared expert or MLP
  std::unique_ptr<ExpertWeights> experts;         // of a mixture
  Matrix q_b{}, k_b{}, v_b{};                     // of latent attention
  std::unique_ptr<RecurrentWeights> recurrent;    // of a recurrent layer
  NormWeights ln_1, ln_2, post_1, post_2, q_norm, k_norm, kv_norm, attn_sub, mlp_sub;
  std::vector<float> sinks;                       // (H), or empty
  Matrix after_gate{}, after_proj{};              // of models with per-layer embeddings
  NormWeights after_post;
  float scale = 1;                                // of x after the layer
};

struct ModelWeights {
  DecoderShape shape;
  WeightType type = WeightType::f32;
  Matrix wte{}, lm_head{};         // lm_head is wte if they are tied
  std::vector<float> wpe;
  NormWeights ln_e, ln_f;
  NormWeights value_norm;          // ones and zeros, where a layer normalises values
  Matrix inputs_wte{}, inputs_in{};  // per-layer embeddings: (vocab_size * n_layer, per_layer_dim), (n_layer * per_layer_dim, C)
  NormWeights inputs_norm;
  Matrix mtp_in{};                   // (C, 2 source_dim), of a model with `mtp`
  NormWeights mtp_e, mtp_h;          // of its embeddings and of the hidden states
  std::vector<LayerWeights> layers;
};

struct Row {
  std::int64_t handle, token, position;
  std::int64_t logit;  // its row of the logits, -1: none
  std::int64_t hidden;  // its row of the final hidden states, -1: none
  std::int64_t adapter = 0;  // from 1 on, 0: none
  std::int64_t state = 0;    // its sequence's row of states, in a model with recurrent layers
  std::int64_t num_pending = 0;  // tokens to apply to the states before this one
  bool few = false;          // whether the sequence has at most StateShape::num_pending new tokens
  bool empty = false;        // whether its row of states has not been written: it counts as zeros
  const float* previous = nullptr;  // of a model with `mtp`: (source_dim)
};

// Seconds spent in each part of the model since the decoder was created.
struct PartSeconds {
  double products = 0, attention = 0, head = 0, others = 0;
};

// Maximum number of rows that go through the layers together. With more, their data would not stay in the caches, and
// the buffers would grow. Further rows read the weights again, which takes little time compared to this many rows, but
// where products are so fast that it does not: there a thread takes rows of its own through a layer.
constexpr std::int64_t kMaxRows = 256, kMaxRowsApart = 1024;
constexpr std::int64_t kLeastBlockRows = 128;  // of a thread
constexpr std::int64_t kGateFloats = 1 << 16;  // outputs of a gate that are computed before those of c_fc

// The stride of rows of n floats that a product writes: an odd number of panels, so that the rows of a tile lie in
// different sets of the first-level cache.
constexpr std::int64_t row_stride(std::int64_t n) { return ((n + kPanel - 1) / kPanel | 1) * kPanel; }

class LatentHeads;
class Mixture;
class RecurrentLayers;

class ForwardPass {
 public:
  ~ForwardPass();
  ForwardPass(const ModelWeights& model, const Kernels& kernels, Cache& cache, int num_threads, std::int64_t num_states);

  // Run rows through the model on a pool of num_threads threads. The cache must already count them (Cache::append).
  // Final hidden states of rows with logits are collected; the output head multiplies them after the last row.
  void run(ThreadPool& threads, const std::vector<Row>& rows, float* logits, std::int64_t logits_stride);
  // The final hidden states of the last step, (rows that have one, n_embd), before they were rounded for the head.
  const std::vector<float>& final_hidden() const { return final_hidden_; }
  const PartSeconds& part_seconds() const { return seconds_; }
  // The phases of the last step: the part whose time each counts for (of blocks of rows, none), and its items.
  const std::vector<std::pair<double PartSeconds::*, std::int64_t>>& phase_items() const { return phase_items_; }
  // From here on, ask the system for the experts that a step has chosen before they are multiplied, and for no others. The
  // weights must be loaded.
  void read_experts_ahead();
  RecurrentLayers* states() const { return states_.get(); }  // null: no layer is recurrent
  Adapters& adapters() { return adapters_; }
  bool has_adapter(std::int64_t adapter) const { return adapters_.has(adapter); }
  void make_room_for_adapters();  // call it after an update was loaded

 private:
  using Clock = std::chrono::steady_clock;
  // A part of a step on some rows, which needs the results of these rows alone.
  struct RowStep {
    double PartSeconds::*part;
    std::function<void(int rank, Range rows)> body;
  };
  struct Run {  // some rows of one sequence
    const std::uint8_t* const* blocks;
    std::int64_t row, count;
    std::int64_t pieces;       // of keys that are items of their own for each head of keys and values; 0: they are one item
    std::size_t partial = 0;   // where the results of its pieces begin
  };
  struct Item {  // of attention, for each head of keys and values
    std::int64_t run, piece;   // -1: all
  };
  void select(const Row* rows, std::int64_t count);
  void select_runs();
  // The last position that a row attends to: its own, or that before it, whose token is the last in the cache of an owner.
  std::int64_t last_key(std::int64_t row) const { return rows_[row].position - (model_.shape.backbone > 0); }
  std::int64_t layers_with_keys() const;
  std::int64_t keep_rows_with_hidden(ThreadPool& threads, const Row* rows, std::int64_t count);
  // Each of these adds phases to the step, which are processed in the order in which they were added.
  void embed();
  void layer(std::int64_t index);
  void attention(std::int64_t index);
  void recurrent(std::int64_t index);
  void mlp_hidden(std::int64_t index);
  void mlp_output(std::int64_t index);
  void make_layer_inputs();
  void join_previous();
  void after_layer(std::int64_t index);
  void latent_queries(const LayerWeights& w);
  void latent_values(const LayerWeights& w);
  void multiply_heads(const Matrix& w, std::int64_t width, const float* from, std::int64_t stride, std::int64_t distance);
  void mixture(std::int64_t index);
  void route(const LayerWeights& layer);
  void add_both(std::int64_t row, const LayerWeights& layer, int rank);
  void routed_experts(const ExpertWeights& w);
  void prepare_input(const NormWeights& weights, const Matrix& next);
  void prepare_normed(const NormWeights& weights, const float* from, std::int64_t stride, const Matrix& next);
  void prepare(const float* from, std::int64_t stride, const Matrix& next);
  void multiply(const Matrix& w, float* y, std::int64_t stride, Epilogue epilogue);
  void multiply_parts(const std::vector<Matrix>& parts, float* y, std::int64_t stride);
  void hidden(const Matrix& c_gate, const Matrix& c_fc);  // without c_gate if MLPs are not gated
  void residual(const Matrix& w, const NormWeights& post);
  void store(std::int64_t layer);
  void attend(std::int64_t layer);
  void finish();
  void add_rows(double PartSeconds::*part, std::function<void(int rank, std::int64_t row)> body,
                std::function<void(Range rows)> then = nullptr);
  void add_products(double PartSeconds::*part, std::int64_t panels, std::function<void(Range rows, Range panels)> body);
  void add_blocks();
  void add(double PartSeconds::*part, std::int64_t count, decltype(Phase::body) body, std::int64_t most = INT64_MAX);
  Range rows_with(std::int64_t row) const;
  std::uint8_t* prepared(Range rows) const { return prepared_ + rows.begin * prepared_bytes_; }
  // What the phases call.
  void embed_row(std::int64_t row) const;
  void make_row_inputs(std::int64_t row, float* scratch) const;
  void add_to_residual(std::int64_t row, const NormWeights& post) const;
  void norm(const NormWeights& weights, const float* x, std::int64_t n, float* y) const;
  void latent_norm(const NormWeights& weights, const float* x, std::int64_t n, float* y) const;
  void gate_outputs(const RecurrentWeights& w, const float* projected, float* y) const;
  void gate_attended(std::int64_t layer, std::int64_t row) const;
  void position_queries_and_keys(std::int64_t layer, std::int64_t row) const;
  void prepare_row(const float* x, const Matrix& next, int rank, std::int64_t row);
  template <class F>
  void with_updates(Range rows, const Adapters::List* (Adapters::*of)(std::int64_t, const Matrix&) const, const Matrix& w,
                    F&& f) const;
  void project(const float* x, std::int64_t stride, const Matrix& next, Range rows);
  const float* added(const Matrix& w, std::int64_t first, std::int64_t stride, Range rows, Range panels);
  void attend_item(std::int64_t layer, const Item& item, std::int64_t head, float* scratch);
  MatmulTask task(const Matrix& w, float* y, std::int64_t stride, Epilogue epilogue, Range rows) const;

  const ModelWeights& model_;
  const Kernels& kernels_;
  Cache& cache_;
  const int num_threads_;
  const std::int64_t max_rows_;
  std::int64_t x_stride_, qkv_stride_, attended_stride_, hidden_stride_, scratch_stride_, angle_stride_;  // in floats
  std::int64_t input_stride_;  // of what products read, in floats
  std::size_t prepared_bytes_ = 0;  // of one row, at most
  Buffer memory_;
  float *x_, *qkv_, *attended_, *hidden_, *scratch_;  // (max_rows_, stride); scratch_: (num_threads, stride)
  float* angles_;  // (max_rows_, stride): the cosines and sines of each of `frequencies` at the row's position
  std::vector<std::int64_t> angle_at_;                // where each of `frequencies` starts in a row
  std::uint8_t* prepared_;                            // rows for the next product
  std::vector<std::uint8_t> head_rows_;               // num_logits_ prepared rows for the output head
  std::vector<float> final_hidden_;                   // (rows with one, n_embd)
  const Row* rows_ = nullptr;
  std::int64_t num_rows_ = 0, num_logits_ = 0;
  std::vector<Row> kept_;                             // of `keep_rows_with_hidden`
  std::vector<Run> runs_;
  std::vector<Item> items_;
  std::vector<std::int64_t> pieces_left_;             // (runs, heads of keys and values), of runs in pieces
  std::vector<float> partial_;                        // AttentionTask::partial
  std::vector<std::uint8_t*> block_of_;               // the cache block of each row
  std::vector<Phase> phases_;                         // of the step
  std::int64_t block_rows_ = 0;  // that a thread takes through all steps up to the next attention; 0: threads share panels
  std::vector<RowStep> row_steps_;                    // since the last phase
  std::vector<PartSeconds> spent_;                    // by each thread, in the steps of its rows
  std::unique_ptr<LatentHeads> latent_;               // of models with latent attention
  std::unique_ptr<Mixture> mixture_;                  // of models that have mixtures of experts
  std::unique_ptr<RecurrentLayers> states_;           // of models with recurrent layers
  bool read_experts_ahead_ = false;
  std::int64_t inputs_stride_ = 0;
  std::int64_t most_heads_ = 0, most_kv_heads_ = 0, most_head_dim_ = 0;  // of all layers
  Buffer inputs_memory_;                              // of models with per-layer embeddings:
  float* inputs_ = nullptr;                           // (max_rows_, stride), per_layer_dim for each layer
  Adapters adapters_;
  bool has_adapters_ = false;                         // whether a row of the step has one
  Buffer added_;                                      // of `added`
  Buffer normed_;                                     // (max_rows_, input_stride_): rows to project
  std::vector<float> projected_;                      // (max_rows_, stride)
  std::int64_t projected_stride_ = 0;
  PartSeconds seconds_;
  std::vector<std::pair<double PartSeconds::*, std::int64_t>> phase_items_;
  Clock::time_point mark_;
};

}  // namespace nanoinfer
