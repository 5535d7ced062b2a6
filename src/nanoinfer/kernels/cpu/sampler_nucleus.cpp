// Bins of equal width narrow many tokens down to the few of one bin (`narrow`); a quickselect by weight does
// the rest: of the tokens [first, last), those above a pivot either hold the border or do not.
#include "sampler_nucleus.h"

#include <algorithm>
#include <utility>

namespace nanoinfer::sampling {
namespace {

// The middle of three.
double median(double a, double b, double c) { return std::max(std::min(a, b), std::min(std::max(a, b), c)); }

// Fill `left` with the tokens among which the border lies, weights divided by the total; write their number,
// return what the more likely tokens add up to.
double narrow(const double* z, const double* weights, std::int32_t n, double p, double total, Weighed* left,
              std::int32_t* num_left) {
  constexpr std::int32_t kMany = 1024, kBins = 1024;
  double before = 0.0, scale = 0.0;
  std::int32_t bin = 0;
  // Larger z, smaller bin; equal z, equal bin. In [0, kBins) whatever z is.
  const auto bin_of = [&scale](double z) {
    const double bin = -z * scale;
    return bin < kBins ? bin > 0 ? static_cast<std::int32_t>(bin) : 0 : kBins - 1;
  };
  if (n > kMany) {
    const double lowest = *std::min_element(z, z + n);
    if (lowest < -1e-300) scale = kBins / -lowest;  // else all are as good as equal: one bin
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
  double before = narrow(z, weights, n, p, total, tokens, &last);  // what is above [first, last) adds up to
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
    if (running - tokens[i].weight >= p) break;  // as the reference rounds it
    border = tokens[i].z;
  }
  return border;
}

}  // namespace nanoinfer::sampling
