// The sampler without a sort against the definition with one, in double precision; and the random number of a token.
#include <algorithm>
#include <numeric>

#include "check.h"
#include "philox.h"
#include "sampler.h"

using namespace nanoinfer;
using namespace nanoinfer::test;

namespace {

// The token, as nanoinfer/sampling/sampler.py defines it.
std::int32_t reference(const Floats& logits, const SampleOptions& o) {
  const std::int32_t V = static_cast<std::int32_t>(logits.size());
  std::vector<double> z(logits.begin(), logits.end()), count(V), seen(V);
  for (const std::int32_t id : o.prompt_ids) seen[id] = 1;
  for (const std::int32_t id : o.output_ids) seen[id] = 1, ++count[id];
  for (std::int32_t i = 0; i < V; ++i) {
    if (seen[i]) z[i] = z[i] > 0 ? z[i] / o.repetition_penalty : z[i] * o.repetition_penalty;
    z[i] -= o.presence_penalty * (count[i] > 0) + o.frequency_penalty * count[i];
  }
  for (std::size_t i = 0; i < o.bias_ids.size(); ++i) z[o.bias_ids[i]] += o.bias_values[i];
  for (const std::int32_t id : o.excluded_ids) z[id] = -INFINITY;
  const auto best = std::max_element(z.begin(), z.end());
  if (o.temperature == 0) return static_cast<std::int32_t>(best - z.begin());
  const double most = *best;
  for (double& l : z) l = (l - most) / o.temperature;

  std::vector<double> sorted = z;
  std::sort(sorted.rbegin(), sorted.rend());
  double border = o.top_k ? sorted[std::min<std::int64_t>(o.top_k, V) - 1] : -INFINITY;
  if (o.top_p < 1) {
    double total = 0, before = 0;
    for (const double l : sorted) total += l >= border ? std::exp(l) : 0;
    std::size_t kept = 0;
    while (kept < sorted.size() && sorted[kept] >= border && before / total < o.top_p)
      before += std::exp(sorted[kept++]);
    border = std::max(border, sorted[kept - 1]);
  }
  if (o.min_p > 0) border = std::max(border, std::log(o.min_p));
  double total = 0, running = 0;
  for (const double l : z) total += l >= border ? std::exp(l) : 0;
  for (std::int32_t i = 0; i < V; ++i)
    if (z[i] >= border && (running += std::exp(z[i])) > o.uniform * total) return i;
  return -1;
}

SampleOptions some_options(std::uint32_t seed, std::int32_t V) {
  std::mt19937 bits(seed);
  const auto pick = [&bits](auto... choices) {
    const double all[] = {static_cast<double>(choices)...};
    return all[bits() % sizeof...(choices)];
  };
  SampleOptions o;
  o.uniform = philox_uniform(seed, 1, 2);
  o.temperature = pick(0, 0.3, 0.8, 1, 2);
  o.top_k = static_cast<std::int64_t>(pick(0, 0, 1, 5, 50, 5000));
  o.top_p = pick(1, 1, 0.05, 0.5, 0.95);
  o.min_p = pick(0, 0, 0, 0.02, 0.2);
  o.repetition_penalty = pick(1, 1, 1.3);
  o.presence_penalty = pick(0, 0, 0.5);
  o.frequency_penalty = pick(0, 0, 0.25);
  for (int i = 0; i < 20; ++i) o.prompt_ids.push_back(static_cast<std::int32_t>(bits() % V));
  for (int i = 0; i < 20; ++i) o.output_ids.push_back(static_cast<std::int32_t>(bits() % V));
  if (pick(0, 1) > 0) o.bias_ids = {V / 2, V - 1}, o.bias_values = {3.0, -2.0};
  if (pick(0, 1) > 0 && V > 1) o.excluded_ids = {0};
  return o;
}

void test_draws(Test& t) {
  SamplerScratch scratch;
  std::vector<std::int32_t> tokens;
  for (const std::int32_t V : {1, 65, 300, 2000})
    for (std::uint32_t seed = 0; seed < 200; ++seed) {
      const Floats logits = random(V, seed + 1000, 3.0f);
      const SampleOptions options = some_options(seed, V);
      const std::int32_t expected = reference(logits, options);
      tokens.push_back(sample_row(logits.data(), V, options, scratch));
      t.check(tokens.back() == expected, "draw %u of %d tokens is %d, must be %d", seed, V, tokens.back(), expected);
    }
  t.bits("tokens", tokens.data(), tokens.size() * sizeof tokens[0]);
}

void test_largest(Test& t) {
  SamplerScratch scratch;
  Floats logits = random(1000, 1);
  logits[700] = logits[300] = 50;
  t.check(argmax_row(logits.data(), 1000, scratch) == 300, "argmax is not the first of equals");
  logits[500] = NAN;
  t.check(argmax_row(logits.data(), 1000, scratch) == -1, "argmax does not see a NaN");
  t.check(sample_row(logits.data(), 1000, {}, scratch) == -1, "the sampler does not see a NaN");
}

// Random123 (Salmon et al. 2011), tests/kat_vectors, philox4x32 with 10 rounds.
void test_philox(Test& t) {
  constexpr std::uint32_t kAll = 0xffffffffu;
  t.check(philox4x32_10({}, {}) == PhiloxCounter{0x6627e8d5u, 0xe169c58du, 0xbc57ac4cu, 0x9b00dbd8u},
          "philox of zeros");
  t.check(philox4x32_10({kAll, kAll, kAll, kAll}, {kAll, kAll}) ==
              PhiloxCounter{0x408f276du, 0x41c83b0eu, 0xa20bc7c6u, 0x6d5451fdu}, "philox of ones");
}

}  // namespace

int main(int argc, char** argv) {
  Test t("sampler", argc, argv);
  test_philox(t);
  test_largest(t);
  test_draws(t);
  return t.result();
}
