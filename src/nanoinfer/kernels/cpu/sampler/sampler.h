// The native sampler: samples the same token as the reference (nanoinfer/sampling/sampler.py) without a sort.
//
//   - Penalties, bias and min_tokens change few logits. The changed ones are doubles in a side table (`Patch`), their
//     places in the row are set to -inf, and all passes over the row read floats.
//   - One pass computes the maximum of each block of 64 logits. A search for logits above a border then reads only
//     blocks with such a maximum; the k-th largest of them is a lower bound of the k-th largest logit.
//   - top_p needs the sum of all weights (one vectorised pass of exp), and then only the tokens that may be in the
//     nucleus: all others together have a weight below 1 - top_p.
//
// A logit l is compared as z(l) = (l - largest) / temperature in float64, as in the reference. z never decreases with l, so a
// border in z is a border among floats, which a bisection finds (`float_border`). Tokens with equal z are kept together.
// Only the last bit of an exp or of a sum may differ from the reference.
//
// Another thread may write the logits during the call. The token is then arbitrary or -1, but no loop and no index leaves
// the row: a logit that is compared and kept is read once (`read_once`), and sorted values contain no NaN.
#pragma once

#include <cstdint>
#include <vector>

namespace nanoinfer {

// A token's z and weight.
struct Weighed {
  double z;
  double weight;
};

// Sampling options of one row, with SamplingParams' names. The caller has checked all ranges (bind_sampler.cpp).
struct SampleOptions {
  double uniform = 0.0;      // in [0, 1)
  double temperature = 1.0;  // 0: the first largest logit
  std::int64_t top_k = 0;    // 0: all
  double top_p = 1.0;        // in (0, 1], 1: all
  double min_p = 0.0;        // in [0, 1], 0: all
  double repetition_penalty = 1.0;
  double presence_penalty = 0.0;
  double frequency_penalty = 0.0;
  std::vector<std::int32_t> prompt_ids;  // ids may repeat; ids >= V are ignored
  std::vector<std::int32_t> output_ids;  // ids may repeat; ids >= V are ignored
  std::vector<std::int32_t> bias_ids;    // ids < V
  std::vector<double> bias_values;       // one for each of bias_ids
  std::vector<std::int32_t> excluded_ids;  // ids < V
};

// A token whose logit the options change.
struct Patch {
  std::int32_t id;
  std::int32_t num_outputs = 0;
  bool seen = false;  // in the prompt or the output
  bool excluded = false;
  double bias = 0.0;
  double logit = 0.0;  // the changed logit
};

// Working memory, owned by the caller, one for each thread. It grows to the largest vocabulary and is reused, so that
// sampling does not allocate. Between calls, only `place` has defined contents: all 0.
struct SamplerScratch {
  std::vector<float> row;                  // (V) the logits, -inf where patched
  std::vector<std::int32_t> maxima;        // (blocks) the largest logit of each block, as an ordered integer
  std::vector<std::int32_t> selected;      // (blocks) maxima, reordered by the selection
  std::vector<double> sums;                // (blocks) the weight of each block
  std::vector<std::int32_t> ids;           // (V) the tokens above a border, in vocabulary order
  std::vector<double> z;                   // (V) their z
  std::vector<double> weights;             // (V) their weights
  std::vector<double> values;              // (V) logits, reordered by the selection
  std::vector<Weighed> weighed;            // (V) z and weights, reordered by the selection
  std::vector<std::int32_t> place;         // (V) 1 + index of a token in `patches`, 0: not in it
  std::vector<Patch> patches;              // unordered
  std::vector<Patch> near;                 // patches above a border

  void reserve(std::int32_t V);
};

// The index of the first largest of V raw logits, V >= 1; -1 if the largest is not finite (or any logit is NaN).
std::int32_t argmax_row(const float* logits, std::int32_t V, SamplerScratch& scratch);

// A token sampled from V logits with `options`, V >= 1; -1 if the largest logit after penalties and bias is not finite
// (or any logit is NaN). Only the scratch is changed.
std::int32_t sample_row(const float* logits, std::int32_t V, const SampleOptions& options,
                        SamplerScratch& scratch);

}  // namespace nanoinfer
