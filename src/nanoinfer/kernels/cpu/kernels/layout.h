// The layout of packed weights, which packing, products and unpacking share. format.h has a picture of each format.
//
// Numbers of 8 bits and fewer are stored in lines: 4 inputs of each of a panel's 32 outputs, a byte each. In formats of
// fewer than 8 bits, a byte contains a number of each of several inputs.
#pragma once

#include "kernels.h"

namespace nanoinfer {

#define NI_LAYOUT __attribute__((always_inline)) constexpr  // the linker must not keep one instruction set's copy (kernels.h)

constexpr std::int64_t kLine = 4 * kPanel;

// i8: with two digits, up to 128 * 127 is added for each input.
constexpr std::int64_t kMostInputsInt8 = 1 << 17;

// The values of codes that are indices of a table, plus BlockFormat::offset (ggml-common.h: kvalues_iq4nl, kvalues_mxfp4).
constexpr std::uint8_t kTableIq4[16] = {1, 24, 45, 63, 79, 93, 106, 118, 129, 141, 153, 166, 181, 197, 217, 241};
constexpr std::uint8_t kTableMxfp4[16] = {16, 17, 18, 19, 20, 22, 24, 28, 16, 15, 14, 13, 12, 10, 8, 4};

// A format of GGUF files (github.com/ggml-org/ggml, ggml-common.h). A block of a file has `inputs` weights of one output,
//   w = scale (code - offset) - minimum
// where scale and minimum belong to a group of inputs. They are those of the block, or if the format has group scales,
// the products of the block's and of integers of 4, 6 or 8 bits.
//
// A panel is a sequence of records. A record is a block of each of 32 outputs, and has as many bytes:
//   32 scales, 32 minimums                    float16 (mxfp4: scales are exponents, a byte each)
//   group scales, rows of 32 outputs          8 bits: a row for each; 4 bits: value v is in row v % (n / 2), its low half
//                                             if v < n / 2; 6 bits: the low 4 bits as before, then the high 2, of value v
//                                             in row v % (n / 4), bits 2 (v / (n / 4)) and the next (n: num_values)
//   for every 32 inputs: `bits` lines, `more` lines
// The low `bits` of inputs 4 i ... 4 i + 3, 0 <= i < 8, are in line i % bits at bit (i / bits) bits of their bytes; the high
// `more` bits in line i % more of those that follow, at bit (i / more) more.
struct BlockFormat {
  int inputs = 32;       // of a block
  int block = 0;         // bytes of a block
  int group = 32;        // inputs that share a scale and a minimum
  int bits = 4, more = 0;
  int offset = 0;        // a power of 2, or 0
  const std::uint8_t* table = nullptr;
  bool minimum = false, exponent = false;  // exponent: the block's scale is 2^(byte - 128)
  int num_scales = 0, scale_bits = 0;      // group scales of a block, then as many minimums; 0: none
  int scale_zero = 0;                      // subtracted from group scales
  // Where a block of a file has its parts, in bytes. Codes of a field: the lowest bits of `span` bytes, then their next bits.
  int at_scale = 0, at_minimum = 0, at_scales = 0, at_low = 0, low_span = 16, at_high = 0, high_span = 0;

  NI_LAYOUT explicit BlockFormat(WeightType type) {
    switch (type) {
      case WeightType::q8_0: block = 34, bits = 8, offset = 128, at_low = 2, low_span = 32; break;
      case WeightType::q4_0: block = 18, offset = 8, at_low = 2; break;
      case WeightType::q4_1: block = 20, minimum = true, at_minimum = 2, at_low = 4; break;
      case WeightType::q5_0: block = 22, more = 1, offset = 16, at_high = 2, high_span = 1, at_low = 6; break;
      case WeightType::q5_1:
        block = 24, more = 1, minimum = true, at_minimum = 2, at_high = 4, high_span = 1, at_low = 8;
        break;
      case WeightType::iq4_nl: block = 18, offset = 128, table = kTableIq4, at_low = 2; break;
      case WeightType::mxfp4: block = 17, offset = 16, table = kTableMxfp4, exponent = true, at_low = 1; break;
      case WeightType::q2_k:
        block = 84, group = 16, bits = 2, minimum = true, num_scales = 16, scale_bits = 4;
        at_low = 16, low_span = 32, at_scale = 80, at_minimum = 82;
        break;
      case WeightType::q3_k:
        block = 110, group = 16, bits = 2, more = 1, offset = 4, num_scales = 16, scale_bits = 6, scale_zero = 32;
        high_span = 32, at_low = 32, low_span = 32, at_scales = 96, at_scale = 108;
        break;
      case WeightType::q4_k:
        block = 144, minimum = true, num_scales = 8, scale_bits = 6, at_minimum = 2, at_scales = 4, at_low = 16, low_span = 32;
        break;
      case WeightType::q5_k:
        block = 176, more = 1, minimum = true, num_scales = 8, scale_bits = 6;
        at_minimum = 2, at_scales = 4, at_high = 16, high_span = 32, at_low = 48, low_span = 32;
        break;
      case WeightType::q6_k:
        block = 210, group = 16, more = 2, offset = 32, num_scales = 16, scale_bits = 8;
        low_span = 64, at_high = 128, high_span = 32, at_scales = 192, at_scale = 208;
        break;
      case WeightType::iq4_xs:
        block = 136, offset = 128, table = kTableIq4, num_scales = 8, scale_bits = 6, scale_zero = 32;
        at_scales = 2, at_low = 8;
        break;
      case WeightType::tq2_0: inputs = 256, block = 66, bits = 2, offset = 1, low_span = 32, at_scale = 64; break;
      default: break;
    }
    if (num_scales) inputs = 256;
  }
  NI_LAYOUT int scale_bytes() const { return exponent ? 1 : 2; }
  NI_LAYOUT int num_values() const { return minimum ? 2 * num_scales : num_scales; }  // group scales and minimums
  NI_LAYOUT int groups() const { return 32 / group; }                                 // of 32 inputs
  NI_LAYOUT int lines() const { return bits + more; }                                 // of 32 inputs
  // Places in a record, in bytes.
  NI_LAYOUT std::int64_t minimums() const { return scale_bytes() * kPanel; }
  NI_LAYOUT std::int64_t values() const { return minimums() + (minimum ? 2 * kPanel : 0); }
  NI_LAYOUT std::int64_t codes() const { return values() + num_values() * scale_bits / 8 * kPanel; }
  NI_LAYOUT std::int64_t record() const { return block * kPanel; }
  // Bytes that a product of one or two rows prefetches ahead with wide registers (products.h says why).
  NI_LAYOUT std::int64_t ahead() const { return bits == 8 ? 3 << 10 : bits == 4 && more == 0 ? 1 << 10 : 12 << 10; }
};

// Whether a block of 256 inputs has one scale, and groups in it integers or none.
NI_LAYOUT bool whole_scales(WeightType type) { return BlockFormat(type).inputs == 256; }

#undef NI_LAYOUT

}  // namespace nanoinfer
