// The interface between the decoder and the kernels: plain structs, and one table of functions per instruction set.
//
// kernels.cpp is compiled once for each instruction set and fills one table; isa.cpp selects one at run time. This file
// must not use templates or inline functions of the standard library that a kernel file also uses: the linker keeps one
// copy of such a function, which may be the one compiled for AVX-512.
//
// Sizes, in every comment:  C = n_embd   H heads   K heads of keys and values   D = head_dim   V = vocab_size
//   T tokens of context
//   kPanel outputs are interleaved in packed weights; kGroup inputs share a scale; kBlock positions share a
//   block of the key/value cache.
#pragma once

#include <cstddef>
#include <cstdint>

namespace nanoinfer {

constexpr std::int64_t kLanes = 16;   // floats that one kernel operation processes, on every instruction set
constexpr std::int64_t kPanel = 32;   // two vectors of outputs: two independent sums hide the latency of additions
constexpr std::int64_t kGroup = 64;
constexpr std::int64_t kSmallGroup = 32;  // inputs of a scale of activations for the formats of GGUF files
constexpr std::int64_t kBlock = 16;   // one vector of positions
constexpr std::int64_t kSpan = 64;    // positions that share a scale of the weights of int8 values: whole blocks
constexpr std::int64_t kPiece = 512;  // positions whose scores a tile of queries has at a time: whole spans, few enough for a first-level cache
constexpr std::int64_t kQueryTile = 16;  // queries, of one or several heads, that share a pass over a sequence's keys

// The formats of GGUF files (BlockFormat in layout.h).
#define NI_BLOCK_FORMATS(f)                                                                                          \
  f(q8_0) f(q4_0) f(q4_1) f(q5_0) f(q5_1) f(iq4_nl) f(mxfp4) f(q2_k) f(q3_k) f(q4_k) f(q5_k) f(q6_k) f(iq4_xs) f(tq2_0)
#define NI_NAME(name) , name
enum class WeightType : int { f32, f16, bf16, i8 NI_BLOCK_FORMATS(NI_NAME) };
#undef NI_NAME
constexpr bool has_blocks(WeightType type) { return type >= WeightType::q8_0; }

// Inputs that share a scale of their 8-bit activations; 0: activations are not quantized.
constexpr std::int64_t group_of(WeightType type) {
  return has_blocks(type) ? kSmallGroup : type == WeightType::i8 ? kGroup : 0;
}
enum class CacheType : int { f32, bf16, i8, i4 };
constexpr bool has_integers(CacheType type) { return type >= CacheType::i8; }
enum class Norm : int { layer, rms };
// add: to the output (the residual). multiply: with the output (gated MLPs). soft_cap: cap * tanh(y / cap).
// clamped_silu is of a gate; clamped_multiply is of what it multiplies (vec.h).
enum class Epilogue : int {
  store, gelu_tanh, gelu_erf, silu, relu, relu2, clamped_silu, add, multiply, clamped_multiply, soft_cap
};
constexpr Epilogue after_gate(Epilogue activation) {
  return activation == Epilogue::clamped_silu ? Epilogue::clamped_multiply : Epilogue::multiply;
}

// Packed weights of y = W x + b: a view, whose memory belongs to a Decoder or a test. W is (out, in). Outputs are padded with zeros to whole panels, and inputs to `depth`.
// A thread reads its panels, and therefore memory, in order.
struct Matrix {
  WeightType type;
  WeightType prepared_as;    // the format that rows are prepared for: `type`, or that of another matrix with the same inputs
  std::int64_t out, in;
  std::int64_t depth;        // `in`, padded as the type requires
  std::int64_t panels;       // ceil(out / kPanel)
  std::size_t prepared;      // bytes of one row of inputs in the form that the products take
  std::size_t panel_bytes;
  const std::uint8_t* data = nullptr;  // (panels, panel_bytes), 64-byte aligned
  const float* scale = nullptr;        // (panels * kPanel), scale of each int8 output; unused for other types
  const float* bias = nullptr;         // (panels * kPanel), zeros if the layer has no bias
};

// Kernels may read, but do not use, prepared rows up to a multiple of 32.
constexpr std::int64_t padded_rows(std::int64_t rows) { return (rows + 31) / 32 * 32; }

// Prepared rows: activations in the form that a product with a weight type needs. Each is a list of 4-byte units:
//   f32, f16: float[depth]     bf16: bfloat16[depth]
//   i8:       int8[depth], float scale[depth / 64], int32 shift[depth / 64]
//   i8, AMX:  int8 digits[2][depth], float scale, int32 shift[2] (amx.h)
//   others:   int8[depth], float scale[depth / 32], int32 sum[depth / 16], negative
// and in tiles of AMX, other forms of the same numbers (rows.h). With AMX, rows for blocks of 256 inputs (whole_scales in layout.h)
// have one scale for these.
// A shift is what the sum s of a group's int8 contributes to its products: -128 s. Matrices in different formats of GGUF files may take the same rows (Matrix::prepared_as).
// Units of rows that are multiplied together are interleaved (products.h, RowTile), so the layout of a row depends on the
// number of rows; the result does not.
struct MatmulTask {
  const Matrix* w;
  const std::uint8_t* x;     // all rows, prepared, in memory for padded_rows(rows)
  std::size_t x_stride;      // bytes of one prepared row
  std::int64_t rows;
  float* y;                  // (rows, y_stride), y_stride >= panels * kPanel
  std::int64_t y_stride;
  Epilogue epilogue;
  float cap = 0;             // of soft_cap
  const float* added = nullptr;  // (rows, y_stride), to the sums in front of the epilogue; null: nothing
};

// An update of low rank, B A x, of the outputs of a matrix from panel `first` on, in float32, bfloat16, or 8 bits, stored as
// w + 128, with one scale for each rank of both. A is (ranks / kLanes, depth, kLanes), B (panels, rank, kPanel); in 8 bits
// (ranks / kLanes, depth / 4, kLanes, 4), and (panels, quads of ranks, kPanel, 4). Both are padded with zeros.
struct LowRank {
  WeightType type;
  std::int64_t rank, in;
  std::int64_t depth;                // `in`, in 8 bits padded to kGroup
  std::int64_t first, panels;
  const std::uint8_t *a = nullptr, *b = nullptr;
  const float* scale = nullptr;      // (ranks, padded to kLanes): 1 unless the factors have 8 bits, then 0
};

// Rows with an update: x to t = A x, and t to y, to which B t is added. In 8 bits, t is what kernels/low_rank.h makes of it.
struct LowRankRows {
  std::int64_t rows;
  float* t;
  std::int64_t t_stride;
  const float* x = nullptr;
  std::int64_t x_stride = 0;
  const MatmulTask* prepared = nullptr;  // of x and other rows, for the matrix that reads them
  std::int64_t first = 0;                // of these rows among them
  float* y = nullptr;                    // all outputs
  std::int64_t y_stride = 0;
};

// A causal convolution of `count` channels, each of which has `taps` weights, for one token: rows[i] has the inputs of the token
// that is taps - 1 - i tokens before it.
struct Convolution {
  const float* const* rows;
  std::int64_t taps;
  const float* weight;               // (taps, stride), `count` used
  std::int64_t stride;
  const float* bias;                 // (count)
  std::int64_t count;
  bool activated;                    // whether y becomes silu(y)
  float* y;                          // (count)
};

// What y is multiplied by: 1 / (1 + e^-z), or z times that.
enum class Gate : int { sigmoid, silu };

// Tokens that update the columns from `first` on of the matrix of a head, S: the formulas of nanoinfer/models/recurrent.py. Columns
// do not depend on each other.
struct StateUpdate {
  float* matrix;                     // (key_dim, width)
  std::int64_t key_dim, value_dim;
  std::int64_t first, width;         // width: at most kPanel
  bool delta;                        // u = rate * (v - decay * S^T k); else u = rate * v
  float skip;                        // y = S^T q + skip * v
  const float* tokens;               // (num_tokens, token_stride): q, k, v, decay, rate
  std::int64_t num_tokens, token_stride;
  float* y;                          // (num_tokens, y_stride), `width` written; null: no outputs
  std::int64_t y_stride;
  bool reads_last = false;           // whether the matrix stays as it is before the last token
};

// One head of keys and values of one sequence: tokens at positions start, start + 1, ... attend to the keys up to their
// own position, the last `window` of them, with `group` heads of queries each.
//
// Positions from 512 p on are piece p. A row has a softmax of its own over each piece, and joins them in the order of the pieces, so
// its result does not depend on how the pieces are shared among tasks.
struct AttentionTask {
  CacheType type;
  std::int64_t head_dim;
  const std::uint8_t* const* blocks;  // blocks of the sequence: kBlock positions of all layers and heads each
  std::size_t offset;                 // offset of this layer and head in a block
  std::int64_t start, num_tokens;
  std::int64_t group;                 // H / K
  std::int64_t window;                // at least 1
  float scale;                        // of the scores
  float softcap;                      // scores become softcap * tanh(score / softcap); 0: they do not
  const float* sinks;                 // (group): a score without a value in the softmax of each head; null: none
  const float* q;                     // (num_tokens, q_stride), group * head_dim read
  std::int64_t q_stride;
  float* out;                         // (num_tokens, out_stride), group * head_dim written
  std::int64_t out_stride;
  float* scratch;                     // attention_scratch(head_dim, num_tokens * group) floats
  // Part of a sequence: compute this piece alone, and leave `out` to `join`; -1: all pieces.
  std::int64_t piece = -1;
  float* partial = nullptr;           // (pieces of the sequence, rows, partial_floats(head_dim)), where join finds them
};
// What a row has of a piece: the origin of its weights (kernels/vec.h), their sum, and from kLanes on the sums of values.
constexpr std::int64_t partial_floats(std::int64_t head_dim) { return kLanes + (head_dim + kLanes - 1) / kLanes * kLanes; }
// Queries, scores and partial results of a tile, and two numbers of each row.
constexpr std::int64_t attention_scratch(std::int64_t head_dim, std::int64_t rows) {
  return kQueryTile * ((head_dim + 63) / 64 * 64 + kPiece + kLanes + partial_floats(head_dim)) +
         (2 * rows + kLanes - 1) / kLanes * kLanes;
}

struct Kernels {
  const char* name;
  // The most rows that a thread takes through a layer by itself, where products are faster than cores exchange rows; 0:
  // threads share the panels of all rows.
  std::int64_t block_rows;
  // Compute panels [begin, end) of y = epilogue(x W^T + b) for all rows.
  void (*matmul)(const MatmulTask& task, std::int64_t begin, std::int64_t end);
  // Write prepared row `row` of `rows` rows: x[0:n], padded with zeros to `depth`. largest: the magnitude that becomes 127
  // in all groups of int8; 0: the largest of each group.
  void (*prepare)(WeightType type, const float* x, std::int64_t n, std::int64_t depth, std::int64_t row,
                  std::int64_t rows, std::size_t stride, std::uint8_t* out, float largest);
  // layer: y[0:n] = (x - mean) / sqrt(variance + eps) * weight + bias.
  // rms:   y[0:n] = x / sqrt(mean of squares + eps) * weight + bias. y may be x.
  void (*norm)(Norm norm, const float* x, const float* weight, const float* bias, std::int64_t n, float eps, float* y);
  // Rotate pairs (x[i], x[i + half]) by angles with these cosines and sines, (half) each, in place.
  void (*rotate)(float* x, const float* cos, const float* sin, std::int64_t half);
  // Multiply each `width` of n numbers, a multiple of it, by a Hadamard matrix, in place, which is its own inverse.
  void (*hadamard)(float* x, std::int64_t n, std::int64_t width);
  // Store one position's key and value, D floats each, at index `slot` of a head's part of a block.
  void (*store_kv)(CacheType type, const float* k, const float* v, std::int64_t head_dim, std::uint8_t* part,
                   std::int64_t slot);
  void (*attention)(const AttentionTask& task);
  // Join the results of all pieces of a task, which attention() has left in task.partial.
  void (*join)(const AttentionTask& task);
  // Read n bytes (a multiple of 256, 64-byte aligned) and return a value that depends on all of them.
  std::uint64_t (*read)(const std::uint8_t* data, std::size_t n);
  // Run `steps` steps of a weight type's products without memory traffic; return the multiplications and additions.
  std::int64_t (*peak)(WeightType type, std::int64_t steps, float* sink);
  // t = A x, times the scale.
  void (*project)(const LowRank& u, const LowRankRows& rows);
  // y += B t, in panels [begin, end) of the matrix.
  void (*expand)(const LowRank& u, const LowRankRows& rows, std::int64_t begin, std::int64_t end);
  void (*convolve)(const Convolution& c);
  // y[0:n] *= the gate of z[0:n].
  void (*gate)(float* y, const float* z, std::int64_t n, Gate kind);
  // Compute the tokens one after the other; the matrix is then that after the last, or after the last but one (reads_last).
  void (*update_state)(const StateUpdate& s);
};

}  // namespace nanoinfer
