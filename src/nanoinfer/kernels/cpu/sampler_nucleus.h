// top_p among weighed tokens: where the nucleus ends, without sorting them all.
#pragma once

#include <cstdint>

namespace nanoinfer::sampling {

// A token and what it weighs.
struct Weighed {
  double z;
  double weight;
};

// The border of top_p: the least z of n tokens, such that the more likely ones add up to less than p. A token
// is kept with its equals, the most likely one always.
//
// z, weights: of n tokens in any order; z <= 0 and finite, 0 is the most likely.
// total: the weight of all tokens, of which the n may be the likelier part.
// scratch: room for n.
double nucleus_border(const double* z, const double* weights, std::int32_t n, double p, double total,
                      Weighed* scratch);

}  // namespace nanoinfer::sampling
