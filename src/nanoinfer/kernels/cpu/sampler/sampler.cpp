// The native sampler; sampler.h describes the method. `RowSampler` samples one row in the order of this file: patches,
// largest logit, borders, inverse transform.
#include "sampler.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <limits>
#include <utility>

#include "sampler_passes.h"

namespace nanoinfer {

using namespace sampling;

namespace {

// Samples one row. The methods must be called in the order of `sample_row`.
class RowSampler {
 public:
  RowSampler(const float* logits, std::int32_t V, const SampleOptions& options, SamplerScratch& scratch)
      : row_(logits), V_(V), options_(options), s_(scratch) {}

  // Apply penalties, bias and min_tokens: the changed logits go to the side table, their places in the row to -inf.
  void patch();
  // Find the largest logit; return whether it is finite.
  bool find_largest();
  // The index of the first largest logit; -1 if another thread has changed the row so that there is none.
  std::int32_t best() const;
  // The inverse transform of the uniform over the kept tokens; -1 if another thread changed the row so that none is left.
  std::int32_t sample();

 private:
  Patch& patch_of(std::int32_t id);
  double z(double logit) const { return (logit - largest_) / options_.temperature; }
  float float_border(double border) const;
  double top_k_border(std::int32_t k);
  float at_least_k_above(std::int32_t k);
  double weigh_all();
  void gather(double border);
  void keep(double border);
  void gather_nucleus(double total, double least);
  double sampled_border(double weight);
  std::int32_t sample_gathered();
  std::int32_t sample_all(double total);

  const float* row_;  // the logits, or a copy in the scratch with -inf for patched ones
  const std::int32_t V_;
  const SampleOptions& options_;
  SamplerScratch& s_;
  double largest_ = 0.0;
  std::int32_t num_gathered_ = 0;  // entries of s_.ids, s_.z and s_.weights
};

// 1. Penalties, bias, min_tokens --------------------------------------------------------------------------

Patch& RowSampler::patch_of(std::int32_t id) {
  std::int32_t& place = s_.place[id];
  if (place == 0) {
    s_.patches.push_back({.id = id});
    place = static_cast<std::int32_t>(s_.patches.size());
  }
  return s_.patches[place - 1];
}

// value - penalty * count with the product rounded as in the reference. Without `volatile`, the compiler may use a fused
// multiply-add, which changes the last bit.
double penalise(double value, double penalty, double count) {
  const volatile double product = penalty * count;
  return value - product;
}

void RowSampler::patch() {
  const SampleOptions& o = options_;
  s_.patches.clear();
  if (o.repetition_penalty != 1.0) {
    for (const auto* ids : {&o.prompt_ids, &o.output_ids}) {
      for (const std::int32_t id : *ids) {
        if (id < V_) patch_of(id).seen = true;
      }
    }
  }
  if (o.presence_penalty != 0.0 || o.frequency_penalty != 0.0) {
    for (const std::int32_t id : o.output_ids) {
      if (id < V_) ++patch_of(id).num_outputs;
    }
  }
  for (std::size_t i = 0; i < o.bias_ids.size(); ++i) patch_of(o.bias_ids[i]).bias += o.bias_values[i];
  for (const std::int32_t id : o.excluded_ids) patch_of(id).excluded = true;
  if (s_.patches.empty()) return;

  std::memcpy(s_.row.data(), row_, sizeof(float) * static_cast<std::size_t>(V_));
  for (Patch& p : s_.patches) {
    double logit = row_[p.id];
    if (p.seen) logit = logit > 0 ? logit / o.repetition_penalty : logit * o.repetition_penalty;
    if (p.num_outputs > 0) {
      logit = penalise(logit - o.presence_penalty, o.frequency_penalty, p.num_outputs);
    }
    p.logit = p.excluded ? kExcluded : logit + p.bias;
    s_.row[p.id] = -std::numeric_limits<float>::infinity();
    s_.place[p.id] = 0;
  }
  row_ = s_.row.data();
}

// 2. The largest logit ------------------------------------------------------------------------------------

bool RowSampler::find_largest() {
  bool numbers = block_maxima(row_, V_, s_.maxima.data());
  const std::int32_t* maxima = s_.maxima.data();
  largest_ = to_float(*std::max_element(maxima, maxima + num_blocks(V_, kBlock)));
  for (const Patch& p : s_.patches) {
    numbers = numbers && !std::isnan(p.logit);
    largest_ = std::max(largest_, p.logit);
  }
  if (!numbers) largest_ = std::numeric_limits<double>::quiet_NaN();
  return std::isfinite(largest_);
}

std::int32_t RowSampler::best() const {
  std::int32_t first = V_;
  for (const Patch& p : s_.patches) {
    if (p.logit == largest_) first = std::min(first, p.id);
  }
  // Compare floats, not their keys: -0 and +0 are equal.
  for (std::int32_t b = 0; b < num_blocks(V_, kBlock); ++b) {
    if (to_float(s_.maxima[b]) != largest_) continue;
    const std::int32_t end = std::min(V_, (b + 1) * kBlock);
    for (std::int32_t i = b * kBlock; i < end; ++i) {
      if (row_[i] == largest_) return std::min(first, i);
    }
  }
  return first < V_ ? first : -1;
}

// 3. Borders: a token is kept if its z is not below the border --------------------------------------------

// The smallest float whose z is not below the border, by bisection over all finite floats in their order.
float RowSampler::float_border(double border) const {
  std::int64_t low = to_key(kLowest), high = kInfKey;
  while (low < high) {
    const std::int64_t middle = (low + high) >> 1;
    if (z(to_float(static_cast<std::int32_t>(middle))) >= border) high = middle;
    else low = middle + 1;
  }
  return to_float(static_cast<std::int32_t>(low));
}

// A float with at least k finite logits of the row at or above it, and not many more if that is cheap to compute; the
// lowest float if the row has fewer than k.
float RowSampler::at_least_k_above(std::int32_t k) {
  const std::int32_t blocks = num_blocks(V_, kBlock);
  if (k <= blocks) {  // the k largest block maxima are k such logits
    auto* keys = s_.selected.data();
    std::copy_n(s_.maxima.data(), blocks, keys);
    std::nth_element(keys, keys + (k - 1), keys + blocks, std::greater<>());
    return std::max(kLowest, to_float(keys[k - 1]));
  }
  std::int64_t low = to_key(kLowest), high = kInfKey;  // k are at or above low, fewer at or above high
  const std::int64_t enough = std::int64_t{k} + k / 4;
  std::int64_t count = count_at_least(row_, V_, kLowest);
  while (count > enough && high - low > 1) {
    const std::int64_t middle = (low + high) >> 1;
    const std::int64_t above = count_at_least(row_, V_, to_float(static_cast<std::int32_t>(middle)));
    if (above >= k) low = middle, count = above;
    else high = middle;
  }
  return to_float(static_cast<std::int32_t>(low));
}

// The z of the k-th largest logit, or -inf if fewer than k are finite: excluded tokens have no weight, so keeping them
// does not change the result.
double RowSampler::top_k_border(std::int32_t k) {
  const float border = at_least_k_above(k);
  double* values = s_.values.data();
  std::int32_t n = 0;
  for (std::int32_t b = 0; b < num_blocks(V_, kBlock); ++b) {
    if (to_float(s_.maxima[b]) < border) continue;
    const std::int32_t end = std::min(V_, (b + 1) * kBlock);
    for (std::int32_t i = b * kBlock; i < end; ++i) {
      const float logit = read_once(row_ + i);
      values[n] = logit;
      n += logit >= border ? 1 : 0;
    }
  }
  for (const Patch& p : s_.patches) {
    if (p.logit >= border) values[n++] = p.logit;
  }
  // A patched logit may be finite and below every float. If fewer than k are above the border, add these.
  if (n < k) {
    for (const Patch& p : s_.patches) {
      if (p.logit < border && p.logit > kExcluded) values[n++] = p.logit;
    }
  }
  if (n < k) return kExcluded;
  std::nth_element(values, values + (k - 1), values + n, std::greater<>());
  return z(values[k - 1]);
}

// Fill s_.sums; return their sum.
double RowSampler::weigh_all() {
  double* sums = s_.sums.data();
  weigh_blocks(row_, V_, largest_, options_.temperature, sums);
  for (const Patch& p : s_.patches) sums[p.id / kSumBlock] += exp_nonpositive(z(p.logit));
  double total = 0.0;
  for (std::int32_t b = 0; b < num_blocks(V_, kSumBlock); ++b) total += sums[b];
  return total;
}

// The median of three values.
double median(double a, double b, double c) { return std::max(std::min(a, b), std::min(std::max(a, b), c)); }

// Write to `left` the tokens that contain the border, with weights divided by the total, and their number to `num_left`;
// return the sum of the weights of all more likely tokens.
double narrow(const double* z, const double* weights, std::int32_t n, double p, double total, Weighed* left,
              std::int32_t* num_left) {
  constexpr std::int32_t kMany = 1024, kBins = 1024;
  double before = 0.0, scale = 0.0;
  std::int32_t bin = 0;
  // Bins decrease with z; equal z have equal bins. The result is in [0, kBins) for all z.
  const auto bin_of = [&scale](double z) {
    const double bin = -z * scale;
    return bin < kBins ? bin > 0 ? static_cast<std::int32_t>(bin) : 0 : kBins - 1;
  };
  if (n > kMany) {
    const double lowest = *std::min_element(z, z + n);
    if (lowest < -1e-300) scale = kBins / -lowest;  // else all are practically equal: one bin
    double bins[kBins] = {};
    for (std::int32_t i = 0; i < n; ++i) bins[bin_of(z[i])] += weights[i];
    while (bin + 1 < kBins && before + bins[bin] / total < p) before += bins[bin++] / total;
  }
  *num_left = 0;
  for (std::int32_t i = 0; i < n; ++i) {
    if (bin_of(z[i]) == bin) left[(*num_left)++] = {z[i], weights[i] / total};
  }
  return before;
}

// The border of top_p: the least z of a token for which the weights of all more likely tokens add up to less than p.
// Tokens with equal z are kept together; the most likely one is always kept.
//
// z, weights: of n tokens in any order; z <= 0 and finite, 0 for the most likely.
// total: the weight of all tokens; the n tokens may be only the most likely ones.
// Bins of equal width reduce many tokens to those of one bin (`narrow`). A quickselect by weight finds the border among
// these: for each pivot, the border is either among the tokens of [first, last) above it, or among the others.
// tokens: n elements of scratch.
double nucleus_border(const double* z, const double* weights, std::int32_t n, double p, double total,
                      Weighed* tokens) {
  constexpr std::int32_t kFew = 32;
  std::int32_t first = 0, last = 0;
  double before = narrow(z, weights, n, p, total, tokens, &last);  // sum of the weights above [first, last)
  double border = 0.0;  // the most likely token is always kept
  while (last - first > kFew) {
    const double pivot = median(tokens[first].z, tokens[first + (last - first) / 2].z, tokens[last - 1].z);
    double above = 0.0, equal = 0.0;
    std::int32_t larger = first, smaller = last;  // [first, larger) > pivot, [smaller, last) < pivot
    for (std::int32_t i = first; i < smaller;) {
      if (tokens[i].z > pivot) {
        above += tokens[i].weight;
        std::swap(tokens[i++], tokens[larger++]);
      } else if (tokens[i].z < pivot) {
        std::swap(tokens[i], tokens[--smaller]);
      } else {
        equal += tokens[i++].weight;
      }
    }
    if (before + above >= p) {
      last = larger;
    } else {
      border = pivot;
      before += above + equal;
      if (before >= p) return border;
      first = smaller;
    }
  }
  std::sort(tokens + first, tokens + last, [](const Weighed& a, const Weighed& b) { return a.z > b.z; });
  double running = before;
  for (std::int32_t i = first; i < last; ++i) {
    running += tokens[i].weight;
    if (running - tokens[i].weight >= p) break;  // rounded as in the reference
    border = tokens[i].z;
  }
  return border;
}

// Gather the tokens with a weight that are not below the border, in vocabulary order, with their z and weights.
void RowSampler::gather(double border) {
  border = std::max(border, kWeightless);
  const float lowest = float_border(border);
  std::int32_t* ids = s_.ids.data();
  double* scaled = s_.z.data();
  std::int32_t n = 0;
  for (std::int32_t b = 0; b < num_blocks(V_, kBlock); ++b) {
    if (to_float(s_.maxima[b]) < lowest) continue;
    const std::int32_t end = std::min(V_, (b + 1) * kBlock);
    for (std::int32_t i = b * kBlock; i < end; ++i) {
      const float logit = read_once(row_ + i);
      ids[n] = i;
      scaled[n] = logit;
      n += logit >= lowest ? 1 : 0;
    }
  }
  scale_all(scaled, n, largest_, options_.temperature);

  s_.near.clear();
  for (const Patch& p : s_.patches) {
    if (z(p.logit) >= border) s_.near.push_back(p);
  }
  std::sort(s_.near.begin(), s_.near.end(), [](const Patch& a, const Patch& b) { return a.id < b.id; });
  auto from = n;
  num_gathered_ = n + static_cast<std::int32_t>(s_.near.size());
  for (auto to = num_gathered_; !s_.near.empty();) {  // merge from the back, in place
    --to;
    if (from > 0 && ids[from - 1] > s_.near.back().id) {
      --from;
      ids[to] = ids[from];
      scaled[to] = scaled[from];
    } else {
      ids[to] = s_.near.back().id;
      scaled[to] = z(s_.near.back().logit);
      s_.near.pop_back();
    }
  }
  exp_all(scaled, num_gathered_, s_.weights.data());
}

// Remove gathered tokens below the border.
void RowSampler::keep(double border) {
  std::int32_t n = 0;
  for (std::int32_t i = 0; i < num_gathered_; ++i) {
    s_.ids[n] = s_.ids[i];
    s_.weights[n] = s_.weights[i];
    n += s_.z[i] >= border ? 1 : 0;
  }
  num_gathered_ = n;
}

// Gather at least the tokens that top_p keeps and that are not below the border `least`. `total` is the weight of all
// tokens.
//
// The tokens below z have a weight of at most V exp(z); if that is less than 1 - top_p of the total, none of them is kept.
// This border is certain, but low. A higher border, estimated from a sample, is therefore tried first, and used if the
// weight above it is sufficient.
void RowSampler::gather_nucleus(double total, double least) {
  constexpr double kSlack = 1e-12;  // much larger than the rounding of the sums
  const double rest = 1.0 - options_.top_p - kSlack;
  const double proved = rest > 0 ? std::log(rest * total / V_) : kExcluded;
  const double guess = std::max(least, sampled_border(0.6 * rest * total));
  if (guess > std::max(least, proved)) {
    gather(guess);
    double sum = 0.0;
    for (std::int32_t i = 0; i < num_gathered_; ++i) sum += s_.weights[i];
    if (sum >= (options_.top_p + kSlack) * total) return;
  }
  gather(std::max(least, proved));
}

// Estimate, from evenly spaced tokens, the border below which all tokens together have the weight `weight`.
double RowSampler::sampled_border(double weight) {
  constexpr std::int32_t kSample = 512;
  if (V_ < 4 * kSample) return kExcluded;
  const std::int32_t step = V_ / kSample;
  double* values = s_.values.data();
  for (std::int32_t i = 0; i < kSample; ++i) values[i] = row_[i * step];
  scale_all(values, kSample, largest_, options_.temperature);
  std::sort(values, values + kSample);
  exp_all(values, kSample, s_.weights.data());
  double below = 0.0;
  std::int32_t i = 0;
  while (i + 1 < kSample && (below += step * s_.weights[i]) < weight) ++i;
  return values[i];
}

// 4. The inverse transform --------------------------------------------------------------------------------

// Running sums in vocabulary order, as in the reference.
std::int32_t RowSampler::sample_gathered() {
  if (num_gathered_ == 0) return -1;
  double total = 0.0;
  for (std::int32_t i = 0; i < num_gathered_; ++i) total += s_.weights[i];
  const double wanted = options_.uniform * total;
  double running = 0.0;
  std::int32_t last = 0;
  for (std::int32_t i = 0; i < num_gathered_; ++i) {
    if (s_.weights[i] <= 0) continue;
    running += s_.weights[i];
    last = i;
    if (running > wanted) break;
  }
  return s_.ids[last];
}

// Without a filter: the sums of the blocks give the block of the token, whose weights are computed again.
std::int32_t RowSampler::sample_all(double total) {
  const double wanted = options_.uniform * total;
  double running = 0.0;
  std::int32_t b = 0;
  while (b + 1 < num_blocks(V_, kSumBlock) && !(running + s_.sums[b] > wanted)) running += s_.sums[b++];
  const std::int32_t begin = b * kSumBlock, n = std::min(kSumBlock, V_ - begin);
  double weights[kSumBlock];
  weigh_block(row_ + begin, n, largest_, options_.temperature, weights);
  for (const Patch& p : s_.patches) {
    if (p.id >= begin && p.id < begin + n) weights[p.id - begin] = exp_nonpositive(z(p.logit));
  }
  std::int32_t last = 0;  // the last token with a weight, used if the block's sum was rounded up
  for (std::int32_t i = 0; i < n; ++i) {
    if (weights[i] <= 0) continue;
    running += weights[i];
    last = i;
    if (running > wanted) break;
  }
  return begin + last;
}

std::int32_t RowSampler::sample() {
  const SampleOptions& o = options_;
  const double least = o.min_p > 0 ? std::log(o.min_p) : kExcluded;  // relative to the largest z, which is 0
  double border = kExcluded;
  if (o.top_k > 0 && o.top_k < V_) border = top_k_border(static_cast<std::int32_t>(o.top_k));
  if (o.top_p < 1) {
    double total = 0.0;
    if (border > kExcluded) {
      gather(border);
      for (std::int32_t i = 0; i < num_gathered_; ++i) total += s_.weights[i];
    } else {
      total = weigh_all();
      gather_nucleus(total, least);
    }
    border = std::max(border, nucleus_border(s_.z.data(), s_.weights.data(), num_gathered_, o.top_p, total,
                                             s_.weighed.data()));
  }
  border = std::max(border, least);
  if (border == kExcluded) return sample_all(weigh_all());
  if (o.top_p < 1) keep(border);
  else gather(border);
  return sample_gathered();
}

}  // namespace

void SamplerScratch::reserve(std::int32_t V) {
  if (place.size() >= static_cast<std::size_t>(V)) return;
  const auto size = static_cast<std::size_t>(V);
  row.resize(size);
  maxima.resize(num_blocks(V, kBlock));
  selected.resize(maxima.size());
  sums.resize(num_blocks(V, kSumBlock));
  ids.resize(size);
  z.resize(size);
  weights.resize(size);
  values.resize(size);
  weighed.resize(size);
  patches.reserve(size);
  near.reserve(size);
  place.assign(size, 0);  // last: `place` gives the size, so a failed allocation before it leaves the size unchanged
}

std::int32_t argmax_row(const float* logits, std::int32_t V, SamplerScratch& scratch) {
  static const SampleOptions kNothing;
  scratch.reserve(V);
  scratch.patches.clear();
  RowSampler sampler(logits, V, kNothing, scratch);
  return sampler.find_largest() ? sampler.best() : -1;
}

std::int32_t sample_row(const float* logits, std::int32_t V, const SampleOptions& options,
                        SamplerScratch& scratch) {
  scratch.reserve(V);
  RowSampler sampler(logits, V, options, scratch);
  sampler.patch();
  if (!sampler.find_largest()) return -1;
  return options.temperature == 0 ? sampler.best() : sampler.sample();
}

}  // namespace nanoinfer
