// Layer norm, attention in each form of keys and values, the states of recurrent layers, and the read of the memory ceiling, on
// every instruction set of this machine, against double precision.
#include <algorithm>

#include "cache.h"
#include "check.h"

using namespace nanoinfer;
using namespace nanoinfer::test;

namespace {

void test_layer_norm(Test& t, const Kernels& k) {
  for (const std::int64_t n : {1, 7, 16, 17, 100, 768})
    for (const float shift : {0.0f, 100.0f}) {
      Floats x = random(n, 1, 3.0f), y(n);
      for (float& v : x) v += shift;
      const Floats weight = random(n, 2), bias = random(n, 3);
      k.norm(Norm::layer, x.data(), weight.data(), bias.data(), n, 1e-5f, y.data());
      double mean = 0, variance = 0;
      for (const float v : x) mean += v / static_cast<double>(n);
      for (const float v : x) variance += (v - mean) * (v - mean) / static_cast<double>(n);
      for (std::int64_t i = 0; i < n; ++i) {
        const double expected = (x[i] - mean) / std::sqrt(variance + 1e-5) * weight[i] + bias[i];
        t.check(is_near(y[i], expected, 1e-4, 1e-5), "%s: layer norm of %lld, place %lld is %.9g, must be %.9g", k.name,
                (long long)n, (long long)i, y[i], expected);
      }
      x[n / 2] = NAN;
      k.norm(Norm::layer, x.data(), weight.data(), bias.data(), n, 1e-5f, y.data());
      t.check(std::all_of(y.begin(), y.end(), [](float v) { return std::isnan(v); }),
              "%s: layer norm of %lld hides a NaN", k.name, (long long)n);
    }
}

// Head 1 of two, T positions in blocks of exactly the size that the kernels are promised; what is not written is
// rubbish (all bits set: NaN), which no query may ever see.
struct Head {
  CacheShape shape;
  std::int64_t T;
  std::vector<std::vector<std::uint8_t>> blocks;
  std::vector<const std::uint8_t*> addresses;

  Head(const Kernels& kernels, CacheType type, std::int64_t D, const Floats& k, const Floats& v)
      : shape{type, 1, 2, D}, T(static_cast<std::int64_t>(k.size()) / D) {
    for (std::int64_t t = 0; t < T; ++t) {
      if (t % kBlock == 0) blocks.emplace_back(shape.block_bytes(), std::uint8_t{0xff});
      kernels.store_kv(type, &k[t * D], &v[t * D], D, blocks.back().data() + shape.offset(0, 1), t % kBlock);
    }
    for (const auto& block : blocks) addresses.push_back(block.data());
  }

  // Queries [begin, end) of q (T, D). They lie apart in memory, and so do their results.
  // What lies between them is not written.
  Floats attend(Test& t, const Kernels& kernels, const Floats& q, std::int64_t begin, std::int64_t end) const {
    const std::int64_t D = shape.head_dim, n = end - begin;
    Floats wide(n * (D + 3), NAN), out(n * (D + 5), 7.0f), result(n * D);
    Floats scratch(attention_scratch(D, n));
    for (std::int64_t i = 0; i < n; ++i) std::copy_n(&q[(begin + i) * D], D, &wide[i * (D + 3)]);
    AttentionTask task{shape.type, D, addresses.data(), shape.offset(0, 1), begin, n, /*group=*/1,
                       /*window=*/T, 1.0f / std::sqrt(static_cast<float>(D)), /*softcap=*/0, /*sinks=*/nullptr, wide.data(), D + 3,
                       out.data(), D + 5, scratch.data()};
    kernels.attention(task);
    if (const std::int64_t pieces = (T + kPiece - 1) / kPiece; pieces > 1) {  // each alone
      Floats joined(out.size(), 7.0f), partial(pieces * n * partial_floats(D), NAN);
      task.out = joined.data(), task.partial = partial.data();
      for (task.piece = pieces - 1; task.piece >= 0; --task.piece) kernels.attention(task);
      kernels.join(task);
      t.check(same_bits(joined.data(), out.data(), out.size()), "%s %s: attention by pieces, D %lld, differs", kernels.name,
              name_of(shape.type), (long long)D);
    }
    for (std::int64_t i = 0; i < n; ++i) {
      std::copy_n(&out[i * (D + 5)], D, &result[i * D]);
      t.check(std::all_of(&out[i * (D + 5) + D], &out[i * (D + 5)] + D + 5, [](float x) { return x == 7.0f; }),
              "%s %s: attention, D %lld, writes past a result", kernels.name, name_of(shape.type), (long long)D);
    }
    return result;
  }
};

// Rows (T, D) in a cache's type; int8: integers of at most `most`, with a scale for each row. Keys and values have 127; int4: an
// offset and integers of `width` bits, if it is given.
std::vector<double> rounded(CacheType type, const Floats& x, std::int64_t D, float most, int width = 0) {
  std::vector<double> y(x.begin(), x.end());
  for (std::size_t at = 0; at < x.size(); at += D) {
    const float top = largest(&x[at], D), scale = top / most, inverse = most / top;
    const auto [low, high] = std::minmax_element(&x[at], &x[at] + D);
    const float half = 1 << width >> 1, range = *high - *low + std::max(*high, -*low) / 256;
    const float step = as_bf16(range / (2 * half - 1)), offset = as_bf16((*high + *low + step) / 2);
    for (std::size_t i = at; i < at + D; ++i)
      if (type == CacheType::i4 && width)
        y[i] = offset + std::nearbyint(std::clamp((x[i] - offset) * (1 / step), -half, half - 1)) * static_cast<double>(step);
      else if (type == CacheType::bf16) y[i] = as_bf16(x[i]);
      else if (has_integers(type)) y[i] = std::nearbyint(x[i] * inverse) * static_cast<double>(scale);
  }
  return y;
}

// The query at position t, D numbers: over the keys and values of positions 0 to t.
std::vector<double> expected(const double* q, const std::vector<double>& k, const std::vector<double>& v,
                             std::int64_t D, std::int64_t t) {
  std::vector<double> share(t + 1), y(D);
  for (std::int64_t s = 0; s <= t; ++s)
    for (std::int64_t d = 0; d < D; ++d) share[s] += q[d] * k[s * D + d] / std::sqrt(static_cast<double>(D));
  const double most = *std::max_element(share.begin(), share.end());
  double total = 0;
  for (double& s : share) total += s = std::exp(s - most);
  for (std::int64_t s = 0; s <= t; ++s)
    for (std::int64_t d = 0; d < D; ++d) y[d] += share[s] / total * v[s * D + d];
  return y;
}

void test_attention(Test& t, const Kernels& kernels, CacheType type, std::int64_t D, std::int64_t T) {
  Floats q = random(T * D, 4, 2.0f);
  for (std::int64_t d = 0; d < D; ++d) q[(T - 1) * D + d] *= 50;  // a sharp softmax
  const Floats k = random(T * D, 5), v = random(T * D, 6);
  const Head head(kernels, type, D, k, v);
  const Floats all = head.attend(t, kernels, q, 0, T);
  const std::vector<double> keys = rounded(type, k, D, 127, 6), values = rounded(type, v, D, 127, 4);
  const std::vector<double> queries = rounded(type, q, D, 127 * 256);
  // Weights in bfloat16 differ by 2^-9 at most, and results are means of the values.
  const double atol = 2e-4 + (type == CacheType::bf16 ? largest(v.data(), T * D) / 256 : 0);
  for (std::int64_t i = 0; i < T; ++i) {
    const std::vector<double> y = expected(&queries[i * D], keys, values, D, i);
    for (std::int64_t d = 0; d < D; ++d)
      t.check(is_near(all[i * D + d], y[d], atol, 1e-4),
              "%s %s: attention of %lld, D %lld, query %lld: %.9g, must be %.9g", kernels.name, name_of(type),
              (long long)T, (long long)D, (long long)i, all[i * D + d], y[d]);
  }
  const auto same = [&](std::int64_t begin, std::int64_t end) {
    if (begin < end && end <= T)
      t.check(same_bits(head.attend(t, kernels, q, begin, end).data(), &all[begin * D], (end - begin) * D),
              "%s %s: attention of %lld, D %lld: queries %lld to %lld differ from those of the whole", kernels.name,
              name_of(type), (long long)T, (long long)D, (long long)begin, (long long)end);
  };
  for (std::int64_t i = 0; i < T; i += 1 + T / 100) same(i, i + 1);
  same(T / 3, T);
  same(0, T / 2);
  same(T / 2, T / 2 + 5);
}

void test_attention_and_nan(Test& t, const Kernels& kernels, CacheType type) {
  const std::int64_t D = 24, T = 20;
  for (const bool in_key : {true, false}) {
    const Floats q = random(T * D, 7);
    Floats k = random(T * D, 8), v = random(T * D, 9);
    (in_key ? k : v)[9 * D + 3] = NAN;
    const Floats y = Head(kernels, type, D, k, v).attend(t, kernels, q, 0, T);
    for (std::int64_t i = 0; i < T; ++i) {
      const bool finite = std::all_of(&y[i * D], &y[i * D] + D, [](float x) { return std::isfinite(x); });
      t.check(finite == (i < 9), "%s %s: a NaN in the %s of position 9, query %lld is %sfinite", kernels.name,
              name_of(type), in_key ? "key" : "value", (long long)i, finite ? "" : "not ");
    }
  }
}

void test_read(Test& t, const Kernels& k) {
  alignas(64) std::uint8_t data[1024];
  for (std::size_t i = 0; i < sizeof data; ++i) data[i] = static_cast<std::uint8_t>(i * 37);
  const std::uint64_t whole = k.read(data, sizeof data);
  t.check(whole == kernels_for("scalar").read(data, sizeof data), "%s: read differs from scalar's", k.name);
  for (std::uint8_t& byte : data) {
    byte ^= 0x10;
    t.check(k.read(data, sizeof data) != whole, "%s: read does not depend on byte %d", k.name,
            static_cast<int>(&byte - data));
    byte ^= 0x10;
  }
}

double sigmoid(double x) { return 1 / (1 + std::exp(-x)); }

void test_convolution_and_gates(Test& t, const Kernels& k) {
  for (const std::int64_t n : {1, 15, 16, 40})
    for (const bool activated : {false, true}) {
      const std::int64_t taps = 4, stride = n + 3;
      const Floats x = random(taps * n, 1), weight = random(taps * stride, 2), bias = random(n, 3);
      const float* rows[] = {&x[2 * n], &x[0], &x[n], &x[3 * n]};
      Floats y(n + 1, 7.0f), gated = bias, silu = bias;
      k.convolve({rows, taps, weight.data(), stride, bias.data(), n, activated, y.data()});
      t.check(y[n] == 7.0f, "%s: convolution of %lld writes past its result", k.name, (long long)n);
      k.gate(gated.data(), x.data(), n, Gate::sigmoid);
      k.gate(silu.data(), x.data(), n, Gate::silu);
      for (std::int64_t c = 0; c < n; ++c) {
        double expected = bias[c];
        for (std::int64_t i = 0; i < taps; ++i) expected += static_cast<double>(rows[i][c]) * weight[i * stride + c];
        if (activated) expected *= sigmoid(expected);
        t.check(is_near(y[c], expected, 1e-5, 1e-5), "%s: convolution of %lld, channel %lld is %.9g, must be %.9g", k.name,
                (long long)n, (long long)c, y[c], expected);
        t.check(is_near(gated[c], bias[c] * sigmoid(x[c]), 1e-6, 1e-5) &&
                    is_near(silu[c], bias[c] * x[c] * sigmoid(x[c]), 1e-6, 1e-5),
                "%s: a gate of %lld, place %lld", k.name, (long long)n, (long long)c);
      }
    }
}

// Columns [first, first + width) of a matrix of which other columns may be in other panels.
void test_state(Test& t, const Kernels& k, std::int64_t D, std::int64_t width, bool delta) {
  const std::int64_t first = 3, V = width + 5, T = 6, stride = 2 * D + V + 4;
  Floats tokens = random(T * stride, 4, 0.5f), matrix = random(D * width, 5), one_by_one = matrix;
  std::vector<double> state(matrix.begin(), matrix.end());
  for (std::int64_t i = 0; i < T; ++i) tokens[i * stride + 2 * D + V] = 0.5f + 0.07f * static_cast<float>(i);  // decays
  Floats y(T * (width + 2), 7.0f), last(width), read(width);
  StateUpdate update{matrix.data(), D, V, first, width, delta, /*skip=*/0.3f, tokens.data(), T, stride, y.data(), width + 2};
  k.update_state(update);
  update.matrix = one_by_one.data();
  update.y = nullptr;
  update.num_tokens = T - 1;
  k.update_state(update);
  update.tokens += (T - 1) * stride;
  update.num_tokens = 1;
  update.y = read.data();
  update.reads_last = true;
  const Floats before = one_by_one;
  k.update_state(update);
  t.check(one_by_one == before, "%s: a state of %lld x %lld is written", k.name, (long long)D, (long long)width);
  update.y = last.data();
  update.reads_last = false;
  k.update_state(update);
  for (std::int64_t c = 0; c < width; ++c)
    t.check(is_near(read[c], last[c], 1e-4, 1e-4), "%s: state of %lld x %lld, column %lld is read as %.9g, must be %.9g", k.name,
            (long long)D, (long long)width, (long long)c, read[c], last[c]);
  t.check(same_bits(one_by_one.data(), matrix.data(), D * width) && same_bits(last.data(), &y[(T - 1) * (width + 2)], width),
          "%s: a state of %lld x %lld depends on the tokens of a call", k.name, (long long)D, (long long)width);
  for (std::int64_t i = 0; i < T; ++i)
    for (std::int64_t c = 0; c < width; ++c) {
      const float *q = &tokens[i * stride], *key = q + D, *v = key + D + first, *gates = key + D + V;
      double found = 0, expected = 0.3f * static_cast<double>(v[c]);
      for (std::int64_t d = 0; d < D; ++d) found += gates[0] * state[d * width + c] * key[d];
      const double u = gates[1] * (v[c] - (delta ? found : 0));
      for (std::int64_t d = 0; d < D; ++d) {
        double& s = state[d * width + c];
        s = gates[0] * s + key[d] * u;
        expected += s * q[d];
      }
      t.check(is_near(y[i * (width + 2) + c], expected, 1e-3, 1e-4), "%s: state of %lld x %lld, token %lld: %.9g, must be %.9g",
              k.name, (long long)D, (long long)width, (long long)i, y[i * (width + 2) + c], expected);
    }
  t.check(std::all_of(state.begin(), state.end(), [](double x) { return std::fabs(x) < 1e3; }), "the test's state grows");
  for (std::int64_t i = 0; i < D * width; ++i)
    t.check(is_near(matrix[i], state[i], 1e-3, 1e-4), "%s: state of %lld x %lld, place %lld", k.name, (long long)D,
            (long long)width, (long long)i);
  t.check(y[width] == 7.0f, "%s: outputs of a state of %lld x %lld are too wide", k.name, (long long)D, (long long)width);
}

}  // namespace

int main(int argc, char** argv) {
  Test t("rows", argc, argv);
  for (const Kernels* k : kernels_to_test()) {
    test_layer_norm(t, *k);
    test_read(t, *k);
    test_convolution_and_gates(t, *k);
    for (const std::int64_t D : {1, 7, 16})
      for (const std::int64_t width : {1, 10, 16, 20, 32})
        for (const bool delta : {false, true}) test_state(t, *k, D, width, delta);
    for (const CacheType type : kCaches) {
      for (const std::int64_t D : {1, 8, 16, 24, 64, 80, 128})
        for (const std::int64_t T : {1, 15, 16, 17, 33, 100, D == 24 ? 1030 : 150}) test_attention(t, *k, type, D, T);
      test_attention_and_nan(t, *k, type);
    }
    std::printf("layer norm, attention, states and read on %s\n", k->name);
  }
  return t.result();
}
