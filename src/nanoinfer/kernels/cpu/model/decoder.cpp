// Loads weights and checks steps. The forward pass is in forward.cpp.
#include "decoder.h"

#include <algorithm>
#include <cmath>
#include <stdexcept>
#include <unordered_set>

#include "packing.h"
#include "recurrent.h"

namespace nanoinfer {

namespace {

std::string str(std::int64_t n) { return std::to_string(n); }

void require(bool ok, const std::string& message) {
  if (!ok) throw std::invalid_argument(message);
}

void check_size(const std::string& name, std::int64_t value, std::int64_t low = 1) {
  require(value >= low && value <= (std::int64_t{1} << 24), name + " is out of range: " + str(value));
}

void check_float(const char* name, float value, float low, float high) {
  require(value >= low && value <= high, std::string(name) + " is out of range: " + std::to_string(value));
}

// Bytes of a matrix among others: each begins at a multiple of 64.
std::int64_t padded_bytes(const Matrix& m) { return (m.panels * m.panel_bytes + 63) / 64 * 64; }

// Fill in the fields that follow from others (DecoderShape).
void resolve(DecoderShape& s) {
  check_size("n_layer", s.n_layer);
  check_size("n_head", s.n_head);
  if (s.n_kv_head == 0) s.n_kv_head = s.n_head;
  if (s.head_dim == 0) {
    require(s.n_embd % s.n_head == 0, "n_embd=" + str(s.n_embd) + " is not a multiple of n_head=" + str(s.n_head));
    s.head_dim = s.n_embd / s.n_head;
  }
  if (s.windows.empty()) s.windows.assign(s.n_layer, 0);
  if (s.rotary.empty()) s.rotary.assign(s.n_layer, -1);
  if (s.sparse.empty()) s.sparse.assign(s.n_layer, 0);
  if (s.rotary_factors.empty()) s.rotary_factors.assign(s.frequencies.size(), 1);
  if (s.layers.empty())
    s.layers.assign(s.n_layer, {.n_head = s.n_head, .n_kv_head = s.n_kv_head, .head_dim = s.head_dim, .mlp_dim = s.mlp_dim});
  for (LayerShape& l : s.layers)
    l.scale = s.attention_scale != 0 ? s.attention_scale : 1.0f / std::sqrt(static_cast<float>(l.head_dim));
}

void check_layer(const DecoderShape& s, std::int64_t index, const DecoderShape* owner) {
  const LayerShape& l = s.layers[index];
  for (const auto& [name, value] : {std::pair{"n_head", l.n_head}, {"n_kv_head", l.n_kv_head}, {"head_dim", l.head_dim},
                                    {"mlp_dim", l.mlp_dim}})
    check_size(name, value);
  require(l.head_dim <= 65536, "head_dim is out of range: " + str(l.head_dim));
  check_size("attention's width", l.attn_dim());
  require(l.n_head % l.n_kv_head == 0,
          "n_head=" + str(l.n_head) + " is not a multiple of n_kv_head=" + str(l.n_kv_head));
  check_float("attention_scale", l.scale, 1e-6f, 1e6f);
  const std::int64_t rotary = s.rotary[index], of = l.kv_layer;
  require(rotary < 0 || static_cast<std::int64_t>(2 * s.frequencies[rotary].size()) <= l.head_dim,
          "frequencies must be at most half of head_dim");
  require(l.num_projections >= 1 && l.num_projections <= 3 && (l.num_projections == 1) == (of >= 0),
          "num_projections must be 2 or 3, or 1 of a layer with kv_layer: " + str(l.num_projections));
  require(l.mlp || !s.parallel_residual, "parallel_residual needs an MLP in each layer");
  if (of < 0) return;
  const std::vector<LayerShape>& layers = s.backbone ? owner->layers : s.layers;
  require(of < (s.backbone ? owner->n_layer : index) && layers[of].kv_layer < 0 && layers[of].attends() &&
              layers[of].n_kv_head == l.n_kv_head && layers[of].head_dim == l.head_dim,
          "kv_layer must be an earlier layer, or one of the owner, with the same heads of keys: " + str(of));
}

void check_recurrence(const DecoderShape& s, const DecoderOptions& o) {
  const StateShape& r = s.recurrence;
  const bool any = std::any_of(s.layers.begin(), s.layers.end(), [](const LayerShape& l) { return l.recurrent; });
  require(any == (r.rule != Rule::none), "recurrence must have a rule if a layer is recurrent, and none otherwise");
  require(!s.attention_gate || (!s.latent_rank && std::all_of(s.layers.begin(), s.layers.end(), [](const LayerShape& l) {
            return l.num_projections == 3;
          })), "attention_gate needs keys and values in all layers, and no latent attention");
  if (!any) return;
  require(!s.latent_rank && !s.sub_norms && !s.rounded_inputs, "recurrent layers have no latents, sub_norms or rounded_inputs");
  require(r.taps >= 2 && r.taps <= 64, "taps of a convolution are out of range: " + str(r.taps));
  check_size("num_states", o.num_states);
  check_size("num_pending", r.num_pending);
  check_size("heads of a state", r.num_heads);
  check_size("values of a state", r.value_dim);
  check_size("heads of keys of a state", r.num_key_heads, r.rule != Rule::conv);
  check_size("width of the keys of a state", r.key_dim, r.rule != Rule::conv);
  require(r.rule != Rule::conv || (r.num_heads == 1 && !r.key_dim && !r.num_key_heads), "a state of rule conv has no keys");
  require(!r.num_key_heads || r.num_heads % r.num_key_heads == 0,
          str(r.num_heads) + " heads of a state are no multiple of " + str(r.num_key_heads) + " of keys");
  check_size("groups of a state's norm", r.norm_groups, r.rule != Rule::mamba2);
  require(!r.norm_groups || r.inner_dim() % r.norm_groups == 0, "groups of a state's norm must divide its values: " + str(r.norm_groups));
  for (const LayerShape& l : s.layers) {
    require(!l.beside || (l.recurrent && !s.attention_gate && !s.sinks && !s.norm_after && s.qk_norm == QueryKeyNorm::none),
            "attention beside a state needs a recurrent layer, and no gate, sinks, qk_norm or norms after it");
    check_size("the projections of a recurrent layer", r.width() + l.attn_dim() + 2 * l.kv_dim());
  }
  check_size("the state of a layer", r.num_state());
}

void check(const DecoderShape& s, const DecoderOptions& o, const DecoderShape* owner) {
  for (const auto& [name, value] : {std::pair{"vocab_size", s.vocab_size}, {"block_size", s.block_size},
                                    {"n_layer", s.n_layer}, {"n_embd", s.n_embd},
                                    {"max_num_cached_tokens", o.max_num_cached_tokens / 1024 + 1},
                                    {"threads", o.threads * std::int64_t{1024}}})  // at most 16,384
    check_size(name, value);
  require(o.max_num_cached_tokens >= 1, "max_num_cached_tokens must be at least 1");
  check_float("norm_epsilon", s.epsilon, 0, 1);
  for (const auto& [name, value] : {std::pair{"attention_softcap", s.attention_softcap},
                                    {"logits_softcap", s.logits_softcap}, {"query_growth", s.query_growth}})
    check_float(name, value, 0, 1e6f);
  for (const auto& [name, value] : {std::pair{"embedding_scale", s.embedding_scale},
                                    {"residual_scale", s.residual_scale}, {"final_scale", s.final_scale}})
    check_float(name, value, 1e-6f, 1e6f);
  check_size("query_context", s.query_context);
  check_size("head_rows", s.head_rows, 0);
  check_size("per_layer_dim", s.per_layer_dim, 0);
  check_size("the rows of the per-layer embeddings", s.per_layer_dim ? s.vocab_size * s.n_layer : 0, 0);
  check_size("per_layer_dim * n_layer", s.per_layer_dim * s.n_layer, 0);
  require(s.rotary_factors.size() == s.frequencies.size(), "rotary_factors needs a number for each of frequencies");
  for (const float factor : s.rotary_factors) check_float("a rotary factor", factor, 1e-6f, 1e6f);
  const std::size_t layers = s.n_layer;
  require(s.windows.size() == layers && s.rotary.size() == layers, "windows and rotary need a number for each layer");
  for (const std::int64_t window : s.windows) require(window >= 0, "a window must be at least 0: " + str(window));
  for (const std::int64_t index : s.rotary)
    require(index >= -1 && index < static_cast<std::int64_t>(s.frequencies.size()),
            "rotary must be an index of frequencies or -1: " + str(index));
  require(s.gated_mlp || s.activation != Epilogue::clamped_silu, "clamped_silu needs gated_mlp");
  require(s.sparse.size() == layers, "sparse needs a number for each layer");
  require(!s.num_experts || !(s.sub_norms || s.rounded_inputs), "sub_norms and rounded_inputs are not supported with experts");
  if (s.num_experts) {
    check_size("num_experts", s.num_experts);
    check_size("expert_dim", s.expert_dim);
    check_size("shared_dim", s.shared_dim, 0);
    check_size("the experts' outputs together", s.num_experts * std::max(s.expert_dim, s.n_embd));
    require(s.experts_per_token >= 1 && s.experts_per_token <= s.num_experts,
            "experts_per_token must be from 1 to num_experts=" + str(s.num_experts) + ": " + str(s.experts_per_token));
    check_float("expert_scale", s.expert_scale, 1e-6f, 1e6f);
    require(!s.shared_gate || s.shared_dim, "shared_gate needs shared_dim");
    require(!s.experts_beside || (s.gated_mlp && s.norm == Norm::rms && s.norm_before && s.norm_after && !s.shared_dim),
            "experts_beside needs gated_mlp, rms norms before and after, and no shared_dim");
    require(s.expert_groups >= 1 && s.num_experts % s.expert_groups == 0,
            "num_experts=" + str(s.num_experts) + " is not a multiple of expert_groups=" + str(s.expert_groups));
    const std::int64_t size = s.num_experts / s.expert_groups;
    require(s.groups_per_token >= 1 && s.groups_per_token <= s.expert_groups &&
                s.experts_per_token <= size * s.groups_per_token,
            "groups_per_token must be at most expert_groups, and its groups must have experts_per_token experts: " +
                str(s.groups_per_token));
    require(s.group_top >= 1 && s.group_top <= size, "group_top is out of range: " + str(s.group_top));
    require(!s.parallel_residual && !s.shared_norm, "experts are not supported in parallel with attention");
  }
  if (s.latent_rank) {
    for (const std::int64_t width : {s.latent_rank, s.latent_turned, s.latent_plain, s.latent_value})
      check_size("a width of latent attention", width);
    check_size("latent_query_rank", s.latent_query_rank, 0);
    check_size("latent attention's outputs", std::max({s.down_dim(), s.n_head * s.query_dim(), s.values_dim()}));
    check_float("latent_epsilon", s.latent_epsilon, 0, 1);
    require(s.head_dim == s.latent_rank + s.latent_turned && s.n_kv_head == 1 && s.qk_norm == QueryKeyNorm::none,
            "latent attention needs head_dim=" + str(s.latent_rank + s.latent_turned) + ", n_kv_head=1 and no qk_norm");
    for (const std::vector<float>& f : s.frequencies)
      require(static_cast<std::int64_t>(2 * f.size()) <= s.latent_turned, "frequencies must be at most half of latent_turned");
    require(!s.sinks && !s.sub_norms && !s.rounded_inputs, "latent attention has no sinks, sub_norms or rounded_inputs");
    for (const LayerShape& l : s.layers)
      require(l.n_head == s.n_head && l.n_kv_head == 1 && l.head_dim == s.head_dim && l.num_projections == 3 && !l.value_norm,
              "latent attention needs the same heads in all layers");
  }
  check_recurrence(s, o);
  for (const std::int64_t one : s.sparse)
    require(one == 0 || (one == 1 && s.num_experts), "sparse must be 0, or 1 in a model with experts: " + str(one));
  require(s.frequencies.size() <= 16, "there are more than 16 frequencies");
  for (const std::vector<float>& f : s.frequencies)
    require(!f.empty(), "frequencies must be at least 1");
  require(s.layers.size() == layers, "layers needs sizes for each layer");
  check_size("backbone", s.backbone, 0);
  require(!s.backbone || (owner && !owner->latent_rank && s.mtp && s.tied && s.recurrence.rule == Rule::none && !s.latent_rank &&
                          std::all_of(s.layers.begin(), s.layers.end(), [](const LayerShape& l) { return l.kv_layer >= 0; })),
          "backbone needs an owner, mtp, tied embeddings, and layers that all have a kv_layer");
  for (std::int64_t i = 0; i < s.n_layer; ++i) check_layer(s, i, owner);
}

std::vector<LayerHeads> heads_of(const DecoderShape& s) {
  std::vector<LayerHeads> heads;
  for (std::int64_t i = 0; i < s.n_layer; ++i)
    heads.push_back({s.layers[i].attends() ? s.layers[i].n_kv_head : 0, s.layers[i].head_dim, s.layers[i].kv_layer < 0 ? i : s.layers[i].kv_layer});
  return heads;
}

// The weights of a model before they are added. Throws std::invalid_argument for sizes out of range.
ModelWeights weights_of(DecoderShape shape, const DecoderOptions& options, const DecoderShape* owner) {
  resolve(shape);
  check(shape, options, owner);
  ModelWeights weights;
  weights.shape = std::move(shape);
  weights.type = options.weights;
  return weights;
}

}  // namespace

Decoder::Decoder(const DecoderShape& given, const DecoderOptions& options, Decoder* owner)
    : formats_(options.formats),
      model_(weights_of(given, options, owner ? &owner->shape() : nullptr)),
      kernels_(kernels_for(options.isa)),
      own_cache_(options.cache, model_.shape.backbone ? std::vector<LayerHeads>() : heads_of(model_.shape),
                 (options.max_num_cached_tokens + kBlock - 1) / kBlock),
      cache_(model_.shape.backbone ? owner->cache_ : own_cache_),
      threads_(ThreadPool::shared(options.threads)),
      pass_(model_, kernels_, cache_, options.threads, options.num_states) {
  const DecoderShape& shape = model_.shape;
  const std::int64_t C = shape.n_embd;
  model_.layers.resize(shape.n_layer);
  if (owner) {
    const DecoderShape& other = owner->model_.shape;
    require(other.vocab_size == shape.vocab_size && other.n_embd == shape.source_dim() && (shape.backbone || other.tied == shape.tied),
            "the owner of the embedding must have the same vocab_size, tied, and n_embd or backbone");
    model_.wte = owner->model_.wte;
    if (shape.backbone) {
      add_matrix("transformer.wte", model_.lm_head, shape.vocab_size, C, /*with_bias=*/false);
    } else {
      model_.lm_head = owner->model_.lm_head;
    }
  } else {
    add_matrix("transformer.wte", model_.wte, shape.vocab_size, C, /*with_bias=*/false);
  }
  if (shape.learned_positions) {
    model_.wpe.resize(shape.block_size * C);
    slots_["transformer.wpe.weight"] = {.vector = model_.wpe.data(), .rows = shape.block_size, .columns = C};
  }
  if (shape.embedding_norm) add_norm("transformer.ln_e", model_.ln_e, C);
  if (shape.per_layer_dim) add_layer_inputs();
  if (shape.mtp) {
    if (!shape.backbone) add_norm("transformer.mtp.norm_e", model_.mtp_e, C);
    if (!shape.backbone) add_norm("transformer.mtp.norm_h", model_.mtp_h, C);
    add_matrix("transformer.mtp.c_in", model_.mtp_in, C, 2 * shape.source_dim(), /*with_bias=*/false);
  }
  for (std::int64_t i = 0; i < shape.n_layer; ++i) add_layer("transformer.h." + str(i) + ".", i);
  add_norm("transformer.ln_f", model_.ln_f, C);
  if (!shape.tied && !owner) add_matrix("lm_head", model_.lm_head, shape.vocab_size, C, /*with_bias=*/true);
  if (!options.packed) panels_ = Buffer(panel_bytes_);
  vectors_ = Buffer(vector_floats_ * sizeof(float));
  std::int64_t panel_bytes = 0, outputs = 0;
  for (Slot* slot : matrices_) place(*slot, panel_bytes, outputs);
  if (shape.tied && !owner) model_.lm_head = model_.wte;
  if (shape.head_rows) model_.lm_head.panels = std::min(model_.lm_head.panels, (shape.head_rows + kPanel - 1) / kPanel);
}

void Decoder::add_layer(const std::string& prefix, std::int64_t index) {
  const DecoderShape& s = model_.shape;
  const LayerShape& l = s.layers[index];
  LayerWeights& layer = model_.layers[index];
  const std::int64_t C = s.n_embd, q = l.attn_dim(), kv = l.kv_dim();
  if (s.norm_before) add_norm(prefix + "ln_1", layer.ln_1, C);
  if (s.sinks) {
    layer.sinks.resize(l.n_head);
    slots_[prefix + "attn.sinks"] = {.vector = layer.sinks.data(), .columns = l.n_head};
  }
  const std::int64_t projected = l.attends() ? (1 + s.attention_gate) * q + (l.num_projections - 1) * kv : 0;
  const std::int64_t width = projected + (l.recurrent ? s.recurrence.width() : 0);
  add_parts(prefix + "attn.c_attn", layer.c_attn, s.latent_rank ? s.down_dim() : width, C);
  if (s.latent_rank) add_latent(prefix + "attn.", layer);
  if (l.attends()) add_matrix(prefix + "attn.c_proj", layer.c_proj, C, s.latent_rank ? s.values_dim() : q, /*with_bias=*/true);
  if (l.recurrent) add_recurrent(prefix + "attn.", layer, l.beside);
  if (s.qk_norm != QueryKeyNorm::none && !l.recurrent) {
    const bool shared = s.qk_norm == QueryKeyNorm::head;
    add_norm(prefix + "attn.q_norm", layer.q_norm, shared ? l.head_dim : q);
    if (l.num_projections > 1) add_norm(prefix + "attn.k_norm", layer.k_norm, shared ? l.head_dim : kv);
  }
  if (l.value_norm && l.head_dim > static_cast<std::int64_t>(model_.value_norm.weight.size())) {
    model_.value_norm.weight.assign(l.head_dim, 1.0f);
    model_.value_norm.bias.assign(l.head_dim, 0.0f);
  }
  if (s.sub_norms) {
    add_norm(prefix + "attn.sub_norm", layer.attn_sub, q);
    add_norm(prefix + "mlp.sub_norm", layer.mlp_sub, l.mlp_dim);
  }
  if (s.norm_after) add_norm(prefix + "post_1", layer.post_1, C);
  if (!l.mlp) return add_after(prefix + "after.", layer, l.scaled);
  const bool beside = s.sparse[index] && s.experts_beside;
  if (s.norm_before && !s.shared_norm && !beside) add_norm(prefix + "ln_2", layer.ln_2, C);
  if (s.sparse[index]) add_experts(prefix + "mlp.", layer);
  else add_mlp(prefix + "mlp.", layer, l.mlp_dim);
  if (beside) add_beside(prefix + "mlp.", layer, l.mlp_dim);
  if (s.norm_after) add_norm(prefix + "post_2", layer.post_2, C);
  add_after(prefix + "after.", layer, l.scaled);
}

void Decoder::add_mlp(const std::string& prefix, LayerWeights& layer, std::int64_t width) {
  const std::int64_t C = model_.shape.n_embd;
  const bool gated = model_.shape.gated_mlp;
  if (gated) add_matrix(prefix + "c_gate", layer.c_gate, width, C, /*with_bias=*/true);
  add_matrix(prefix + "c_fc", layer.c_fc, width, C, /*with_bias=*/true);
  require(!gated || share_rows({&layer.c_gate, &layer.c_fc}),
          prefix + "c_gate and c_fc share their inputs: their formats must take the same activations");
  add_matrix(prefix + "c_proj", layer.mlp_proj, C, width, /*with_bias=*/true);
}

void Decoder::add_experts(const std::string& prefix, LayerWeights& layer) {
  const DecoderShape& s = model_.shape;
  const std::int64_t C = s.n_embd, F = s.expert_dim, E = s.num_experts;
  layer.experts = std::make_unique<ExpertWeights>();
  ExpertWeights& w = *layer.experts;
  Matrix& router = w.router = matrix_of(WeightType::f32, E, C);
  const std::size_t bytes = padded_bytes(router);
  w.router_memory = Buffer(bytes + router.panels * kPanel * sizeof(float), /*huge_pages=*/false);
  router.data = w.router_memory.data();
  float* const biases = reinterpret_cast<float*>(w.router_memory.data() + bytes);
  router.scale = router.bias = biases;  // float32 has no scales to write
  slots_[prefix + "router.bias"] = {.vector = biases, .columns = E, .optional = true};
  router_bytes_ += w.router_memory.size();
  slots_[prefix + "router.weight"] = {.matrix = &router, .panels = w.router_memory.data(), .scale = biases, .rows = E, .columns = C};
  if (s.corrected_experts) {
    w.correction.resize(E);
    slots_[prefix + "correction.bias"] = {.vector = w.correction.data(), .columns = E};
  }
  if (s.gated_mlp) add_matrix(prefix + "experts.c_gate", w.c_gate, E * F, C, /*with_bias=*/true);
  add_matrix(prefix + "experts.c_fc", w.c_fc, E * F, C, /*with_bias=*/true);
  require(!s.gated_mlp || share_rows({&w.c_gate, &w.c_fc}),
          prefix + "experts.c_gate and c_fc share their inputs: their formats must take the same activations");
  add_matrix(prefix + "experts.c_proj", w.c_proj, E * C, F, /*with_bias=*/true);
  if (s.shared_dim) add_mlp(prefix + "shared.", layer, s.shared_dim);
  if (!s.shared_gate) return;
  w.shared_gate.resize(C);
  slots_[prefix + "shared_gate.weight"] = {.vector = w.shared_gate.data(), .columns = C};
}

// The MLP beside a layer's experts, and the norms of both.
void Decoder::add_beside(const std::string& prefix, LayerWeights& layer, std::int64_t width) {
  const std::int64_t C = model_.shape.n_embd, E = model_.shape.num_experts;
  ExpertWeights& w = *layer.experts;
  add_mlp(prefix + "shared.", layer, width);
  for (const auto& [name, norm] : {std::pair{"ln_1", &w.mlp_in}, {"post_1", &w.mlp_out}, {"ln_2", &w.in}, {"post_2", &w.out}})
    add_norm(prefix + name, *norm, C);
  w.router_in.weight.resize(C);
  w.router_in.bias.assign(C, 0.0f);
  slots_[prefix + "router_scale"] = {.vector = w.router_in.weight.data(), .columns = C};
  w.scale.resize(E);
  slots_[prefix + "expert_scale"] = {.vector = w.scale.data(), .columns = E};
}

void Decoder::add_matrix(const std::string& name, Matrix& m, std::int64_t out, std::int64_t in, bool with_bias) {
  const auto found = formats_.find(name + ".weight");
  const bool given = found != formats_.end();
  require(!given || found->second.size() == 1, "tensor '" + name + ".weight' must be in one format");
  add_part(name + ".weight", m, given ? found->second[0].first : model_.type, out, in);
  if (with_bias) slots_[name + ".weight"].bias = &(slots_[name + ".bias"] = {.columns = out, .optional = true});
}

void Decoder::add_part(const std::string& name, Matrix& m, WeightType type, std::int64_t out, std::int64_t in) {
  m = matrix_of(type, out, in);
  require(!has_blocks(type) || type == WeightType::q8_0 || m.depth == in,
          "tensor '" + name + "' has " + str(in) + " columns, which are not whole blocks");
  panel_bytes_ += padded_bytes(m);
  vector_floats_ += 2 * m.panels * kPanel;
  Slot& slot = slots_[name] = {.matrix = &m, .rows = out, .columns = in};
  matrices_.push_back(&slot);
}

// A matrix of parts with the same inputs, whose outputs follow each other.
void Decoder::add_parts(const std::string& name, std::vector<Matrix>& parts, std::int64_t out, std::int64_t in) {
  const auto found = formats_.find(name + ".weight");
  if (found == formats_.end() || found->second.size() == 1) {
    parts.resize(1);
    return add_matrix(name, parts[0], out, in, /*with_bias=*/true);
  }
  const auto& formats = found->second;
  parts.resize(formats.size());
  std::vector<Matrix*> shared;
  std::int64_t first = 0;
  for (std::size_t i = 0; i < parts.size(); ++i) {
    const auto& [type, rows] = formats[i];
    require(has_blocks(type) && rows > 0 && rows <= out - first && first % kPanel == 0,
            "tensor '" + name + ".weight': its parts must be in blocks, and begin at multiples of " + str(kPanel));
    add_part(name + (i ? ".weight:" + str(i) : ".weight"), parts[i], type, rows, in);
    first += rows;
    shared.push_back(&parts[i]);
  }
  share_rows(shared);
  require(first == out, "tensor '" + name + ".weight' has parts of " + str(first) + " rows, must have " + str(out));
  slots_[name + ".weight"].bias = &(slots_[name + ".bias"] = {.columns = out, .optional = true});
}

// Without a weight, a norm multiplies by 1.
void Decoder::add_norm(const std::string& name, NormWeights& norm, std::int64_t width) {
  norm.weight.assign(width, 1.0f);
  norm.bias.assign(width, 0.0f);
  slots_[name + ".weight"] = {.vector = norm.weight.data(),
                              .columns = width,
                              .optional = !model_.shape.norm_weight,
                              .offset = model_.shape.norm_offset};
  slots_[name + ".bias"] = {.vector = norm.bias.data(), .columns = width, .optional = true};
}

// The biases of consecutive matrices follow each other, so those of a matrix of parts are one vector.
void Decoder::place(Slot& slot, std::int64_t& panel_bytes, std::int64_t& outputs) {
  Matrix& m = *slot.matrix;
  float* biases = reinterpret_cast<float*>(vectors_.data());
  m.bias = biases + outputs;
  if (slot.bias) slot.bias->vector = biases + outputs;
  m.scale = slot.scale = biases + vector_floats_ / 2 + outputs;
  outputs += m.panels * kPanel;
  if (panels_.size()) m.data = slot.panels = panels_.data() + panel_bytes;
  panel_bytes += padded_bytes(m);
}

Decoder::Slot& Decoder::find(const std::string& name) {
  const auto found = slots_.find(name);
  if (found == slots_.end()) throw std::invalid_argument("tensor '" + name + "' is not a tensor of this model");
  return found->second;
}

void Decoder::load(const std::string& name, const Stored& values) {
  Slot& slot = find(name);
  if (values.rows != slot.rows || values.columns != slot.columns)
    throw std::invalid_argument("tensor '" + name + "' is (" + str(values.rows) + ", " + str(values.columns) +
                                "), must be (" + str(slot.rows) + ", " + str(slot.columns) + ")");
  if (!slot.matrix) {
    read_rows(values, 0, values.rows, slot.vector);
    if (slot.offset != 0)
      for (std::int64_t i = 0; i < values.columns; ++i) slot.vector[i] += slot.offset;
    if (slot.transposed) {
      const std::vector<float> given(slot.vector, slot.vector + values.rows * values.columns);
      for (std::int64_t i = 0; i < values.rows; ++i)
        for (std::int64_t j = 0; j < values.columns; ++j) slot.vector[j * values.rows + i] = given[i * values.columns + j];
    }
  } else if (slot.panels) {
    Matrix& m = *slot.matrix;
    require(packs_floats(m.type, m.in), "tensor '" + name + "' must be given as blocks");
    pack(ThreadPool::current(threads_), m.type, values, slot.panels, slot.scale);
  } else {
    throw std::invalid_argument("tensor '" + name + "' must be packed already: use load_packed");
  }
  slot.given = true;
}

template <class Source>
void Decoder::load_blocks(const std::string& name, const Source* source, std::int64_t rows, std::size_t bytes) {
  Slot& slot = find(name);
  const bool fits = slot.matrix && slot.panels && has_blocks(slot.matrix->type) &&
                    slot.matrix->depth == slot.columns;
  require(fits, "tensor '" + name + "' cannot be given as blocks");
  Matrix& m = *slot.matrix;
  require(rows == slot.rows && bytes == row_bytes(m.type, slot.columns),
          "tensor '" + name + "' has " + str(rows) + " rows of " + str(bytes) + " bytes, must have " + str(slot.rows) +
              " of " + str(row_bytes(m.type, slot.columns)));
  slot.given = false;  // until all rows are read
  pack_blocks(ThreadPool::current(threads_), m.type, source, rows, slot.columns, slot.panels);
  slot.given = true;
}

template void Decoder::load_blocks(const std::string&, const RowPlace*, std::int64_t, std::size_t);
template void Decoder::load_blocks(const std::string&, const std::uint8_t*, std::int64_t, std::size_t);

void Decoder::load_packed(const std::string& name, const std::uint8_t* panels, std::size_t num_bytes,
                          const float* scales, std::size_t num_scales) {
  Slot& slot = find(name);
  if (!slot.matrix || slot.panels) throw std::invalid_argument("tensor '" + name + "' cannot be packed already");
  Matrix& m = *slot.matrix;
  const std::size_t wanted = padded_bytes(m), padded = m.type == WeightType::i8 ? m.panels * kPanel : 0;
  if (num_bytes != wanted || num_scales != padded)
    throw std::invalid_argument("tensor '" + name + "' has " + std::to_string(num_bytes) + " bytes and " +
                                std::to_string(num_scales) + " scales, must have " + std::to_string(wanted) + " and " +
                                std::to_string(padded));
  if (reinterpret_cast<std::uintptr_t>(panels) % 64)
    throw std::invalid_argument("tensor '" + name + "' is not aligned to 64 bytes");
  m.data = panels;
  std::copy(scales, scales + num_scales, slot.scale);
  if (model_.shape.tied && &m == &model_.wte) model_.lm_head = m;
  slot.given = true;
}

void Decoder::check_loaded() const {
  for (const auto& [name, slot] : slots_)
    if (!slot.given && !slot.optional) throw std::invalid_argument("tensor '" + name + "' was not loaded");
}

std::int64_t Decoder::logits_stride() const { return model_.wte.panels * kPanel; }

std::int64_t Decoder::check(const Step& s) const {
  const std::size_t n = s.handles.size();
  if (s.num_new.size() != n || s.num_logits.size() != n)
    throw std::invalid_argument("a step needs one num_new and one num_logits for each handle");
  for (const std::int64_t adapter : s.adapters)
    if (s.adapters.size() != n || (adapter != 0 && !pass_.has_adapter(adapter)))
      throw std::invalid_argument("adapter " + str(adapter) + " is not loaded, or not every handle has one");
  check_states(s);
  std::int64_t total = 0, logits = 0, blocks = 0;
  std::unordered_set<std::int64_t> seen;
  for (std::size_t i = 0; i < n; ++i) {
    const std::int64_t handle = s.handles[i], have = cache_.length(handle), more = s.num_new[i];
    if (!seen.insert(handle).second) throw std::invalid_argument("handle " + str(handle) + " appears twice in a step");
    if (more < 1 || s.num_logits[i] < 0 || s.num_logits[i] > more)
      throw std::invalid_argument("sequence " + str(handle) + ": num_new=" + str(more) + ", num_logits=" +
                                  str(s.num_logits[i]) + ": num_new must be >= 1, and num_logits in [0, num_new]");
    if (model_.shape.backbone && (more != 1 || have < 1))
      throw std::invalid_argument("sequence " + str(handle) + ": a step with a backbone is one token after others");
    if (more > model_.shape.block_size - have)
      throw std::out_of_range("sequence " + str(handle) + ": " + str(have) + " tokens and " + str(more) +
                              " new ones exceed the context length " + str(model_.shape.block_size));
    total += more;
    logits += s.num_logits[i];
    if (!model_.shape.backbone) blocks += cache_.blocks_needed(handle, more);
  }
  if (total != static_cast<std::int64_t>(s.token_ids.size()))
    throw std::invalid_argument("num_new adds up to " + str(total) + ", but there are " + str(s.token_ids.size()) +
                                " token_ids");
  for (const std::int64_t token : s.token_ids)
    if (token < 0 || token >= model_.shape.vocab_size)
      throw std::out_of_range("token id " + str(token) + " is outside the vocabulary of " + str(model_.shape.vocab_size));
  if (blocks > cache_.blocks_free())
    throw std::out_of_range("the KV cache is full: " + str(blocks) + " more blocks of " + str(kBlock) +
                            " tokens are needed, " + str(cache_.blocks_free()) + " of " +
                            str(cache_.blocks_total()) + " are free: raise kv_cache_memory, or close sequences");
  return logits;
}

void Decoder::check_states(const Step& s) const {
  const std::int64_t rows = pass_.states() ? pass_.states()->num_rows() : 0;
  const auto has = [rows](std::int64_t row, std::int64_t low) { return row >= low && row <= rows; };
  require(s.states.size() == (rows ? s.handles.size() : 0), "a step needs a state for each handle if layers are recurrent");
  std::unordered_set<std::int64_t> seen;
  for (const auto& [row, pending] : s.states)
    require(has(row, 1) && seen.insert(row).second && pending >= 0 && pending <= model_.shape.recurrence.num_pending,
            "state " + str(row) + " is out of range or appears twice, or its number of pending tokens is: " + str(pending));
  for (const auto& [from, to] : s.copies)
    require(has(from, 0) && has(to, 1), "states to copy are out of range: " + str(from) + " to " + str(to));
}

std::size_t Decoder::state_bytes() const { return pass_.states() ? pass_.states()->row_bytes() : 0; }

void Decoder::extend(const Step& step, float* logits) {
  ThreadPool& threads = ThreadPool::current(threads_);
  std::vector<Row> rows;
  rows.reserve(step.token_ids.size());
  std::int64_t logit = 0;
  std::unordered_set<std::int64_t> empty;  // rows of states
  for (const auto& [from, to] : step.copies)
    if (from) pass_.states()->copy(from, to);
    else empty.insert(to);
  for (std::size_t i = 0; i < step.handles.size(); ++i) {
    const std::int64_t start = cache_.length(step.handles[i]), n = step.num_new[i];
    for (std::int64_t j = 0; j < n; ++j) {
      const std::int64_t at = rows.size(), row = j >= n - step.num_logits[i] ? logit++ : -1;
      rows.push_back({step.handles[i], step.token_ids[at], start + j, row, step.all_hidden ? at : row,
                      step.adapters.empty() ? 0 : step.adapters[i]});
    }
    for (std::int64_t j = 0; j < n && !step.states.empty(); ++j) {
      Row& row = rows[rows.size() - n + j];
      row.state = step.states[i].first;
      row.num_pending = j ? 0 : step.states[i].second;
      row.few = n <= model_.shape.recurrence.num_pending;
      row.empty = j == 0 && empty.count(row.state);
    }
    for (std::int64_t j = 0; j < n && step.previous; ++j)
      rows[rows.size() - n + j].previous = step.previous + (rows.size() - n + j) * model_.shape.source_dim();
    if (!model_.shape.backbone) cache_.append(step.handles[i], n);  // no other code advances positions
  }
  pass_.run(threads, rows, logits, logits_stride());
}

}  // namespace nanoinfer
