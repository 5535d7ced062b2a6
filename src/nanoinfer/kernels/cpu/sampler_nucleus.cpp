// Bins of equal width reduce many tokens to those of one bin (`narrow`). A quickselect by weight finds the border among
// these: for each pivot, the border is either among the tokens of [first, last) above it, or among the others.
#include "sampler_nucleus.h"

#include <algorithm>
#include <utility>

namespace nanoinfer::sampling {
namespace {

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

}  // namespace

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

}  // namespace nanoinfer::sampling
