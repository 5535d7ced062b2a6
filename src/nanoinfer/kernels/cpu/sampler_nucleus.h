// The border of top_p among weighted tokens, without a full sort.
#pragma once

#include <cstdint>

namespace nanoinfer::sampling {

// A token's z and weight.
struct Weighed {
  double z;
  double weight;
};

// The border of top_p: the least z of a token for which the weights of all more likely tokens add up to less than p.
// Tokens with equal z are kept together; the most likely one is always kept.
//
// z, weights: of n tokens in any order; z <= 0 and finite, 0 for the most likely.
// total: the weight of all tokens; the n tokens may be only the most likely ones.
// scratch: n elements.
double nucleus_border(const double* z, const double* weights, std::int32_t n, double p, double total,
                      Weighed* scratch);

}  // namespace nanoinfer::sampling
