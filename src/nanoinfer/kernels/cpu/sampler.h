// The native sampler: the token that the reference (nanoinfer/sampling/sampler.py) draws, without a sort.
//
// One row of logits and its settings go in, one token comes out. Why it is fast where the reference is not:
//
//   - Penalties, bias and min_tokens concern few tokens. Their changed logits are doubles in a side table
//     (`Patch`), their places in the row are made -inf, and every pass over the row stays a pass over floats.
//   - One pass takes the maximum of each block of 64 logits. Whoever then looks for the logits above some
//     border reads only the blocks that have one: 50 of 786 blocks for top_k=50 of GPT-2's vocabulary.
//   - top_k selects: the k-th largest block maximum is a lower bound of the k-th largest logit.
//   - top_p needs the sum of all weights (one vectorised pass of exp) and then only the tokens that can be in
//     the nucleus: all others together weigh less than 1 - top_p.
//   - A filter ends in one border; what lies above it is weighed and drawn from in vocabulary order.
//
// Exactness. A logit l counts as z(l) = (l - largest) / temperature in float64, and every border is a value
// of z, as in the reference. z never decreases with l, so a border in z is a border among floats, which a
// bisection finds (`float_border`): equal z are kept together also where different logits share one. What may
// differ from the reference is the last bit of an exp or of a sum; it moves a token only where the uniform
// (or top_p) falls that close to a border of the running sum.
//
// Bounds. Another thread may write the logits while they are read here: the token is then any or -1, but no loop and no
// index runs past the row. What is compared and then kept is read once (`read_once`), what is sorted holds no NaN.
//
// Files: sampler_passes (vectorised loops), sampler_nucleus (top_p), sampler (one draw), bind_sampler.
// Not here: randomness (the uniform is an argument), log-probabilities, threads (one scratch for each).
#pragma once

#include <cstdint>
#include <vector>

#include "sampler_nucleus.h"

namespace nanoinfer {

// How one row is sampled, in SamplingParams' names. The caller has checked every range; see bind_sampler.cpp.
struct SampleOptions {
  double uniform = 0.0;      // in [0, 1)
  double temperature = 1.0;  // 0: the first largest logit
  std::int64_t top_k = 0;    // 0: all
  double top_p = 1.0;        // in (0, 1], 1: all
  double min_p = 0.0;        // in [0, 1], 0: all
  double repetition_penalty = 1.0;
  double presence_penalty = 0.0;
  double frequency_penalty = 0.0;
  std::vector<std::int32_t> prompt_ids;  // ids may repeat; those past the vocabulary count for nothing
  std::vector<std::int32_t> output_ids;  // likewise
  std::vector<std::int32_t> bias_ids;    // below the vocabulary's size, as are excluded_ids
  std::vector<double> bias_values;       // one for each of bias_ids
  std::vector<std::int32_t> excluded_ids;
};

// A token whose logit the options change.
struct Patch {
  std::int32_t id;
  std::int32_t num_outputs = 0;
  bool seen = false;  // in the prompt or the output
  bool excluded = false;
  double bias = 0.0;
  double logit = 0.0;  // as changed
};

// Working memory: owned by the caller, one for each thread, grown to the largest vocabulary seen and kept, so
// that no token allocates. Its contents between calls mean nothing, but for `place`, which is all 0.
struct SamplerScratch {
  std::vector<float> row;                  // (V) the logits, -inf where patched
  std::vector<std::int32_t> maxima;        // (blocks) the largest logit of each block, as an ordered integer
  std::vector<std::int32_t> selected;      // (blocks) maxima, to be reordered
  std::vector<double> sums;                // (blocks) the weight of each block
  std::vector<std::int32_t> ids;           // (V) the tokens above a border, in vocabulary order
  std::vector<double> z;                   // (V) and their z
  std::vector<double> weights;             // (V) and their weights
  std::vector<double> values;              // (V) logits, to be reordered
  std::vector<sampling::Weighed> weighed;  // (V) tokens and weights, to be reordered
  std::vector<std::int32_t> place;         // (V) 1 + where in `patches` a token is, 0: nowhere
  std::vector<Patch> patches;              // in no order
  std::vector<Patch> near;                 // patches above a border

  void reserve(std::int32_t V);
};

// The first largest of V raw logits, V >= 1; -1 where the largest is not finite (or any logit is NaN).
std::int32_t argmax_row(const float* logits, std::int32_t V, SamplerScratch& scratch);

// The token that `options` draw from V logits, V >= 1; -1 where the largest, after penalties and bias, is not finite (or
// any logit is NaN). Nothing is changed but the scratch.
std::int32_t sample_row(const float* logits, std::int32_t V, const SampleOptions& options,
                        SamplerScratch& scratch);

}  // namespace nanoinfer
