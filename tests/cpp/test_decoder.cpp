// The whole decoder: a small model with random weights, in every format of weights and of keys and values.
//
// A prompt in one step is the reference: token by token, in a batch, by two threads, after a fork and a truncation it
// must give the same logits bit for bit, and every instruction set nearly those of `scalar`. That `scalar` is right
// is shown elsewhere (tests/native/test_native_engine.py, against the PyTorch model); so its bits are written down, and a
// machine that cannot run those tests must have the same (make neon).
#include <algorithm>
#include <memory>

#include "check.h"
#include "decoder.h"

using namespace nanoinfer;
using namespace nanoinfer::test;

namespace {

constexpr std::int64_t kLayers = 2, kWidth = 72, kMlp = 200, kVocab = 97, kContext = 64, kPrompt = 37;
constexpr std::int64_t kRank = 21, kTurned = 6, kPlain = 10, kValue = 13, kQueryRank = 14;
constexpr std::int64_t kExperts = 6, kExpert = 40, kShared = 24;  // neither kExpert nor kWidth is a number of whole panels

struct Case {
  WeightType weights;
  CacheType cache;
  bool experts = false;  // in the last layer, and gated MLPs
  bool latent = false;   // attention; experts are then chosen by sigmoids, corrected and in groups

  std::string name() const {
    return std::string(name_of(weights)) + " weights, " + name_of(cache) + " keys" + (experts ? ", experts" : "") +
           (latent ? ", latent" : "");
  }
  // Two of the model's variants are spread over the formats.
  bool tied() const { return cache != CacheType::bf16; }
  bool gelu_tanh() const { return cache != CacheType::i8; }
};

std::unique_ptr<Decoder> make_decoder(const Case& c, const std::string& isa, int threads) {
  DecoderShape shape;
  shape.vocab_size = kVocab;
  shape.block_size = kContext;
  shape.n_layer = kLayers;
  shape.n_head = 3;
  shape.n_embd = kWidth;
  shape.mlp_dim = kMlp;
  shape.activation = c.gelu_tanh() ? Epilogue::gelu_tanh : Epilogue::gelu_erf;
  shape.tied = c.tied();
  if (c.experts) {
    shape.gated_mlp = shape.normalize_experts = shape.shared_gate = true;
    shape.num_experts = kExperts;
    shape.experts_per_token = 2;
    shape.expert_dim = kExpert;
    shape.expert_scale = 1.5f;
    shape.shared_dim = kShared;
    shape.sparse = {0, 1};
  }
  if (c.latent) {
    shape.n_kv_head = 1;
    shape.head_dim = kRank + kTurned;
    shape.latent_rank = kRank;
    shape.latent_turned = kTurned;
    shape.latent_plain = kPlain;
    shape.latent_value = kValue;
    shape.latent_query_rank = kQueryRank;
    shape.sigmoid_experts = shape.corrected_experts = true;
    shape.expert_groups = 3;
    shape.groups_per_token = shape.group_top = 2;
  }
  DecoderOptions options;
  options.weights = c.weights;
  options.cache = c.cache;
  options.max_num_cached_tokens = 4 * kContext;
  options.threads = threads;
  options.isa = isa;
  auto d = std::make_unique<Decoder>(shape, options);
  std::uint32_t seed = 0;
  const auto load = [&](const std::string& name, std::int64_t rows, std::int64_t columns, float scale, float shift) {
    Floats x = random(rows * columns, ++seed, scale);
    for (float& v : x) v += shift;
    d->load(name, {x.data(), ValueType::f32, rows, columns, columns, 1});
  };
  const auto load_norm = [&](const std::string& name, std::int64_t width = kWidth) {
    load(name + ".weight", 1, width, 0.1f, 1.0f);
    load(name + ".bias", 1, width, 0.1f, 0.0f);
  };
  const auto load_linear = [&](const std::string& name, std::int64_t out, std::int64_t in) {
    load(name + ".weight", out, in, 0.15f, 0.0f);
    load(name + ".bias", 1, out, 0.1f, 0.0f);
  };
  load("transformer.wte.weight", kVocab, kWidth, 0.15f, 0.0f);
  load("transformer.wpe.weight", kContext, kWidth, 0.1f, 0.0f);
  for (std::int64_t i = 0; i < kLayers; ++i) {
    const std::string h = "transformer.h." + std::to_string(i) + ".";
    load_norm(h + "ln_1");
    if (c.latent) {
      load_linear(h + "attn.c_attn", kQueryRank + kRank + kTurned, kWidth);
      load_norm(h + "attn.q_norm", kQueryRank);
      load(h + "attn.q_b.weight", 3 * (kPlain + kTurned), kQueryRank, 0.3f, 0.0f);
      load_norm(h + "attn.kv_norm", kRank);
      load(h + "attn.k_b.weight", 3 * kRank, kPlain, 0.3f, 0.0f);
      load(h + "attn.v_b.weight", 3 * kValue, kRank, 0.3f, 0.0f);
      load_linear(h + "attn.c_proj", kWidth, 3 * kValue);
    } else {
      load_linear(h + "attn.c_attn", 3 * kWidth, kWidth);
      load_linear(h + "attn.c_proj", kWidth, kWidth);
    }
    load_norm(h + "ln_2");
    const auto load_mlp = [&](const std::string& mlp, std::int64_t width) {
      if (c.experts) load_linear(mlp + "c_gate", width, kWidth);
      load_linear(mlp + "c_fc", width, kWidth);
      load_linear(mlp + "c_proj", kWidth, width);
    };
    if (!c.experts || i == 0) {
      load_mlp(h + "mlp.", kMlp);
      continue;
    }
    load(h + "mlp.router.weight", kExperts, kWidth, 1.0f, 0.0f);
    if (c.latent) load(h + "mlp.correction.bias", 1, kExperts, 0.3f, 0.0f);
    load(h + "mlp.experts.c_gate.weight", kExperts * kExpert, kWidth, 0.15f, 0.0f);
    load(h + "mlp.experts.c_fc.weight", kExperts * kExpert, kWidth, 0.15f, 0.0f);
    load(h + "mlp.experts.c_proj.weight", kExperts * kWidth, kExpert, 0.15f, 0.0f);
    load_mlp(h + "mlp.shared.", kShared);
    load(h + "mlp.shared_gate.weight", 1, kWidth, 0.15f, 0.0f);
  }
  load_norm("transformer.ln_f");
  if (!c.tied()) load("lm_head.weight", kVocab, kWidth, 0.15f, 0.0f);
  d->check_loaded();
  return d;
}

std::int64_t token_at(std::int64_t position) { return (position * 31 + 7) % kVocab; }

// Tokens [begin, end) of the text, with logits for all of them.
void add(Step& step, std::int64_t handle, std::int64_t begin, std::int64_t end) {
  step.handles.push_back(handle);
  for (std::int64_t p = begin; p < end; ++p) step.token_ids.push_back(token_at(p));
  step.num_new.push_back(end - begin);
  step.num_logits.push_back(end - begin);
}

Floats run(Decoder& d, const Step& step) {  // (tokens, kVocab)
  const std::int64_t rows = static_cast<std::int64_t>(step.token_ids.size()), stride = d.logits_stride();
  Floats wide(rows * stride), logits(rows * kVocab);
  d.extend(step, wide.data());
  for (std::int64_t r = 0; r < rows; ++r) std::copy_n(&wide[r * stride], kVocab, &logits[r * kVocab]);
  return logits;
}

Floats extend(Decoder& d, std::int64_t handle, std::int64_t begin, std::int64_t end) {
  Step step;
  add(step, handle, begin, end);
  return run(d, step);
}

Floats prompt_logits(const Case& c, const std::string& isa) {
  const auto d = make_decoder(c, isa, /*threads=*/1);
  return extend(*d, d->cache().open(), 0, kPrompt);
}

void test_same_bits(Test& t, const Case& c, const std::string& isa, const Floats& whole) {
  const std::string what = isa + ", " + c.name();
  const auto same = [&](const char* how, const float* got, std::int64_t from, std::int64_t count) {
    t.check(same_bits(got, &whole[from * kVocab], count * kVocab), "%s: %s, logits differ from those of one step",
            what.c_str(), how);
  };
  for (const int threads : {1, 2}) {
    const auto d = make_decoder(c, isa, threads);
    Cache& cache = d->cache();
    const std::int64_t one = cache.open(), two = cache.open(), three = cache.open();
    for (std::int64_t p = 0; p < kPrompt; ++p) same("token by token", extend(*d, one, p, p + 1).data(), p, 1);

    Step step;  // a prompt's beginning and a longer one, then each continues, in a batch
    add(step, two, 0, 5);
    add(step, three, 0, kPrompt - 1);
    Floats y = run(*d, step);
    same("in a batch", y.data(), 0, 5);
    same("in a batch", &y[5 * kVocab], 0, kPrompt - 1);

    step = {};
    const std::int64_t fork = cache.fork(one);  // of a block that is partly full
    cache.truncate(fork, kPrompt - 8);
    add(step, three, kPrompt - 1, kPrompt);
    add(step, fork, kPrompt - 8, kPrompt);
    add(step, two, 5, 22);
    y = run(*d, step);
    same("continued", y.data(), kPrompt - 1, 1);
    same("after a fork", &y[kVocab], kPrompt - 8, 8);
    same("in chunks", &y[9 * kVocab], 5, 17);
    cache.truncate(one, kPrompt - 8);
    same("after truncation", extend(*d, one, kPrompt - 8, kPrompt).data(), kPrompt - 8, 8);
  }
}

// float32 sums in another order; where activations are rounded, one may fall on the other side. With AMX those for int8 are rounded
// less, so 4-bit keys do in many places: they are as far from those of float32 weights as `scalar`'s, or nearer.
double tolerance(const Case& c, bool amx) {
  const bool exact = c.weights == WeightType::f32 || c.weights == WeightType::f16;
  if (amx && c.weights == WeightType::i8 && c.cache == CacheType::i4) return 0.25;
  return exact && c.cache == CacheType::f32 ? 1e-5 : 5e-2;
}

// One case on every instruction set. Each lane adds in the same order on all of them, so sets that fuse multiplication
// and addition agree bit for bit (not avx512_vnni: its dot products of bfloat16 round in another way).
void test_case(Test& t, const Case& c) {
  const Floats scalar = prompt_logits(c, "scalar");
  const float most = largest(scalar.data(), static_cast<std::int64_t>(scalar.size()));
  for (const Kernels* k : kernels_here()) {
    const std::string isa = k->name;
    const Floats logits = prompt_logits(c, isa);
    double worst = 0;
    for (std::size_t i = 0; i < logits.size(); ++i) {
      const double difference = std::fabs(logits[i] - scalar[i]);
      worst = difference <= worst ? worst : difference;  // a NaN stays
    }
    t.check(worst <= tolerance(c, isa.starts_with("amx")) * most, "%s, %s: logits differ from scalar's by %g of %g", isa.c_str(),
            c.name().c_str(), worst, most);
    test_same_bits(t, c, isa, logits);
    const bool libm = c.experts;  // its exponential, which may round in another way on another machine
    if (!libm && (isa == "scalar" || isa == "avx2" || isa == "neon"))
      t.bits((isa == "scalar" ? "scalar, " : "fused, ") + c.name(), logits.data(), logits.size() * sizeof(float));
  }
}

}  // namespace

int main(int argc, char** argv) {
  Test t("decoder", argc, argv);
  for (const WeightType weights : kTypes)
    for (const CacheType cache : kCaches) test_case(t, {weights, cache});
  for (const WeightType weights : kTypes) test_case(t, {weights, CacheType::f32, /*experts=*/true});
  for (const CacheType cache : kCaches) test_case(t, {WeightType::i8, cache, /*experts=*/true, /*latent=*/true});
  for (const WeightType weights : {WeightType::f32, WeightType::bf16})
    test_case(t, {weights, CacheType::f32, /*experts=*/true, /*latent=*/true});
  return t.result();
}
