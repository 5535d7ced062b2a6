// The layout of packed weights, which packing, products and unpacking share. format.h has a picture of each format.
//
// Numbers of 8 and 4 bits are stored in lines: 4 bytes of each of a panel's 32 outputs. A byte is the number of one
// input; of two inputs, half a group apart, in formats of 4 bits (the first one in the low half).
#pragma once

#include "kernels.h"

namespace nanoinfer {

#define NI_LAYOUT __attribute__((always_inline)) constexpr  // the linker must not keep one instruction set's copy (kernels.h)

constexpr std::int64_t kLine = 4 * kPanel;

NI_LAYOUT bool has_nibbles(WeightType type) {
  return type == WeightType::i4 || type == WeightType::q4_0 || type == WeightType::q4_1;
}

// i4: 32 scales (bfloat16) and 32 zero points (bytes) of each group lie at the beginning of a panel, the numbers after
// the last of them.
constexpr std::int64_t kInt4Zeros = 2 * kPanel, kInt4Group = 3 * kPanel;
NI_LAYOUT std::int64_t int4_numbers(std::int64_t depth) { return (depth / kGroup * kInt4Group + 63) / 64 * 64; }

// Formats of GGUF files: a group is a record of 32 scales, for q4_1 32 minimums (both float16), and its numbers. A block
// of a file is the same of one output.
constexpr std::int64_t kRecordMinimums = 2 * kPanel;
struct BlockFormat {
  std::int64_t header, numbers;  // bytes of a block: scale and minimum; numbers

  NI_LAYOUT explicit BlockFormat(WeightType type)
      : header(type == WeightType::q4_1 ? 4 : 2), numbers(has_nibbles(type) ? kSmallGroup / 2 : kSmallGroup) {}
  NI_LAYOUT std::int64_t block() const { return header + numbers; }
  NI_LAYOUT std::int64_t record_header() const { return header * kPanel; }
  NI_LAYOUT std::int64_t record() const { return block() * kPanel; }
};

#undef NI_LAYOUT

}  // namespace nanoinfer
