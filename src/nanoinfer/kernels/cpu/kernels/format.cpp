#include "format.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <stdexcept>
#include <string>
#include <type_traits>

#include "layout.h"

namespace nanoinfer {

namespace {

std::int64_t round_up(std::int64_t n, std::int64_t to) { return (n + to - 1) / to * to; }

std::uint16_t to_bf16(float x) {  // nearest, ties to even
  std::uint32_t u;
  std::memcpy(&u, &x, 4);
  if ((u & 0x7fffffffu) > 0x7f800000u) return static_cast<std::uint16_t>((u >> 16) | 0x40u);
  return static_cast<std::uint16_t>((u + 0x7fffu + ((u >> 16) & 1u)) >> 16);
}
float from_bf16(std::uint16_t h) {
  const std::uint32_t u = static_cast<std::uint32_t>(h) << 16;
  float x;
  std::memcpy(&x, &u, 4);
  return x;
}
std::uint16_t to_f16(float x) {  // nearest, ties to even; overflows to infinity
  std::uint32_t u;
  std::memcpy(&u, &x, 4);
  const std::uint16_t sign = static_cast<std::uint16_t>((u >> 16) & 0x8000u);
  const std::uint32_t magnitude = u & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return sign | 0x7e00u;
  if (magnitude >= 0x477ff000u) return sign | 0x7c00u;
  if (magnitude < 0x38800000u) {  // subnormal: the float addition rounds to multiples of 2^-24
    float shifted = std::fabs(x) + 0.5f;
    std::memcpy(&u, &shifted, 4);
    return sign | static_cast<std::uint16_t>(u - 0x3f000000u);
  }
  const std::uint32_t rounded = magnitude - 0x38000000u + 0xfffu + ((magnitude >> 13) & 1u);
  return sign | static_cast<std::uint16_t>(rounded >> 13);
}
float from_f16(std::uint16_t h) {  // without branches, so that loops become vector instructions
  const std::uint32_t magnitude = (h & 0x7fffu) << 13, subnormal = magnitude < 0x00800000u;
  std::uint32_t u = magnitude + 0x38000000u;     // the exponent's bias is 127 instead of 15
  u += (magnitude >= 0x0f800000u) * 0x38000000u;  // infinity and NaN
  u += subnormal * 0x00800000u;                   // 2^-14 (1 + m / 1024), of which 2^-14 is subtracted
  const std::uint32_t excess = subnormal * 0x38800000u;
  float x, y;
  std::memcpy(&x, &u, 4);
  std::memcpy(&y, &excess, 4);
  x -= y;
  std::memcpy(&u, &x, 4);
  u |= static_cast<std::uint32_t>(h & 0x8000u) << 16;
  std::memcpy(&x, &u, 4);
  return x;
}

// Stored values as float32. Sources need not be aligned.
struct F32 {
  static constexpr std::int64_t kBytes = 4;
  static float at(const std::uint8_t* p) {
    float x;
    std::memcpy(&x, p, 4);
    return x;
  }
};
template <float (*convert)(std::uint16_t)>
struct Half {
  static constexpr std::int64_t kBytes = 2;
  static float at(const std::uint8_t* p) {
    std::uint16_t h;
    std::memcpy(&h, p, 2);
    return convert(h);
  }
};

constexpr std::int64_t kColumnsAtOnce = 16;  // columns that are transposed at a time: a cache line of the result

// Rows that are contiguous, or nearly.
template <class V>
void read_along(const std::uint8_t* from, std::int64_t rows, std::int64_t columns, std::int64_t row_bytes,
                std::int64_t column_bytes, float* to) {
  for (std::int64_t r = 0; r < rows; ++r, from += row_bytes, to += columns)
    if (column_bytes == V::kBytes)
      for (std::int64_t c = 0; c < columns; ++c) to[c] = V::at(from + c * V::kBytes);
    else
      for (std::int64_t c = 0; c < columns; ++c) to[c] = V::at(from + c * column_bytes);
}

// A transposed matrix: up to kPanel values are adjacent in each column, and a column is read as whole cache lines.
template <class V>
void read_across(const std::uint8_t* from, std::int64_t rows, std::int64_t columns, std::int64_t row_bytes,
                 std::int64_t column_bytes, float* to) {
  float tile[kColumnsAtOnce][kPanel];
  for (std::int64_t r0 = 0; r0 < rows; r0 += kPanel)
    for (std::int64_t c0 = 0; c0 < columns; c0 += kColumnsAtOnce) {
      const std::int64_t height = std::min(kPanel, rows - r0), width = std::min(kColumnsAtOnce, columns - c0);
      const std::uint8_t* corner = from + r0 * row_bytes + c0 * column_bytes;
      for (std::int64_t c = 0; c < width; ++c, corner += column_bytes)
        if (row_bytes == V::kBytes && height == kPanel)
          for (std::int64_t r = 0; r < kPanel; ++r) tile[c][r] = V::at(corner + r * V::kBytes);
        else
          for (std::int64_t r = 0; r < height; ++r) tile[c][r] = V::at(corner + r * row_bytes);
      for (std::int64_t r = 0; r < height; ++r)
        for (std::int64_t c = 0; c < width; ++c) to[(r0 + r) * columns + c0 + c] = tile[c][r];
    }
}

template <class V>
void read_rows_as(const Stored& m, std::int64_t begin, std::int64_t end, float* to) {
  const std::int64_t row_bytes = m.row_stride * V::kBytes, column_bytes = m.column_stride * V::kBytes;
  const std::uint8_t* from = static_cast<const std::uint8_t*>(m.data) + begin * row_bytes;
  const bool across = std::abs(row_bytes) < std::abs(column_bytes) && end - begin > 1;
  (across ? read_across<V> : read_along<V>)(from, end - begin, m.columns, row_bytes, column_bytes, to);
}

typedef float f32x4 __attribute__((vector_size(16)));
typedef std::uint32_t u32x4 __attribute__((vector_size(16)));

float sum(f32x4 x) { return (x[0] + x[1]) + (x[2] + x[3]); }

// 4 weights of a row are 4 bytes of a panel. Adding 1.5 * 2^23 rounds to an integer, ties to even.
void pack8(const float* row, std::int64_t in, std::int64_t o, std::uint8_t* panel, float* scale) {
  const f32x4 magic = f32x4{} + 12582912.0f;
  const auto load = [row, in](std::int64_t i) {
    f32x4 w{};
    std::memcpy(&w, row + i, std::min<std::int64_t>(4, in - i) * sizeof(float));
    return w;
  };
  f32x4 top{}, bad{};  // bad: NaN if there is a NaN or an infinity
  for (std::int64_t i = 0; i < in; i += 4) {
    const f32x4 w = load(i), magnitude = w < f32x4{} ? -w : w;
    top = top < magnitude ? magnitude : top;
    bad += w * 0.0f;
  }
  const float most = std::max({top[0], top[1], top[2], top[3]});
  const bool finite = sum(bad) == 0.0f;
  *scale = finite ? most / 127.0f : NAN;  // so that an overflow reaches the logits
  const float inverse = most > 1e-30f && finite ? 127.0f / most : 0.0f;
  for (std::int64_t i = 0; i < in; i += 4) {
    const f32x4 rounded = (finite ? load(i) : f32x4{}) * inverse + magic;
    u32x4 q;
    std::memcpy(&q, &rounded, sizeof q);
    q = q - (0x4b400000u - 128u);
    const std::uint32_t bytes = q[0] | q[1] << 8 | q[2] << 16 | q[3] << 24;
    std::memcpy(panel + i / 4 * kLine + o * 4, &bytes, 4);
  }
}

// Call f<type>() for a format of GGUF files.
template <class F>
void with_format(WeightType type, F&& f) {
  switch (type) {
#define NI_CALL(name) \
  case WeightType::name: return f.template operator()<WeightType::name>();
    NI_BLOCK_FORMATS(NI_CALL)
#undef NI_CALL
    default: return;
  }
}

// As many bytes as are processed at once where `count` bytes are adjacent, and the same bits in each byte of them.
template <int count>
using Word = std::conditional_t<count % 8 == 0, std::uint64_t,
                                std::conditional_t<count % 4 == 0, std::uint32_t, std::uint8_t>>;
template <class W>
constexpr W in_each_byte(int bits) {
  return static_cast<W>(std::uint64_t{0x0101010101010101} * static_cast<unsigned>(bits));
}
template <class W>
W load_word(const std::uint8_t* from) {
  W word;
  std::memcpy(&word, from, sizeof word);
  return word;
}

// Integers of `width` bits: the lowest bits of `span` bytes, then their next bits, and so on. They are moved to bit `to`.
template <int width, int span, int to, int count>
void add_fields(const std::uint8_t* from, std::uint8_t* codes) {
  using W = Word<span>;
  constexpr int kFields = 8 / width;
  constexpr W mask = in_each_byte<W>((1 << width) - 1);
  if constexpr (span == 1 && width == 1)  // byte i becomes bit i of `from`
    for (int at = 0; at < count; at += 8) {
      const std::uint64_t bit = in_each_byte<std::uint64_t>(from[at / 8]) & 0x8040201008040201;
      const std::uint64_t one = (bit + in_each_byte<std::uint64_t>(127)) >> 7 & in_each_byte<std::uint64_t>(1);
      const std::uint64_t sum = load_word<std::uint64_t>(codes + at) | one << to;
      std::memcpy(codes + at, &sum, 8);
    }
  else
    for (int at = 0; at < count; at += span * kFields)
      for (int i = 0; i < span; i += sizeof(W)) {
        const W word = load_word<W>(from + at / kFields + i);
        for (int field = 0; field < kFields; ++field) {
          std::uint8_t* const place = codes + at + field * span + i;
          const W sum = load_word<W>(place) | static_cast<W>((word >> (field * width) & mask) << to);
          std::memcpy(place, &sum, sizeof sum);
        }
      }
}

// The group scales of a block, then its group minimums.
template <WeightType type>
void read_values(const std::uint8_t* block, std::uint8_t* v) {
  constexpr BlockFormat f(type);
  const std::uint8_t* s = block + f.at_scales;
  if constexpr (type == WeightType::q4_k || type == WeightType::q5_k)
    for (int i = 0; i < 4; ++i) {  // the high bits of the last four lie above the first four
      v[i] = s[i] & 63, v[i + 4] = (s[i + 8] & 15) | (s[i] >> 6 << 4);
      v[i + 8] = s[i + 4] & 63, v[i + 12] = (s[i + 8] >> 4) | (s[i + 4] >> 6 << 4);
    }
  else if constexpr (type == WeightType::iq4_xs)
    for (int i = 0; i < 8; ++i)
      v[i] = (s[2 + i / 2] >> (i % 2 * 4) & 15) | ((s[i / 4] >> (i % 4 * 2) & 3) << 4);
  else if constexpr (type == WeightType::q3_k)
    for (int i = 0; i < 16; ++i)
      v[i] = (s[i % 8] >> (i / 8 * 4) & 15) | ((s[8 + i % 4] >> (i / 4 * 2) & 3) << 4);
  else if constexpr (type == WeightType::q2_k)
    for (int i = 0; i < 16; ++i) v[i] = s[i] & 15, v[i + 16] = s[i] >> 4;
  else
    std::memcpy(v, s, f.num_values());
}

// `width` lines of a group of 32 inputs: bits [from, from + width) of their codes (layout.h).
template <int width, int from>
void write_lines(const std::uint8_t* codes, std::int64_t o, std::uint8_t* lines) {
  constexpr std::uint32_t mask = in_each_byte<std::uint32_t>((1 << width) - 1);
  for (int line = 0; line < width; ++line) {
    std::uint32_t bytes = 0;
    for (int field = 0; field < 8 / width; ++field)
      bytes |= (load_word<std::uint32_t>(codes + 4 * (field * width + line)) >> from & mask) << (field * width);
    std::memcpy(lines + line * kLine + 4 * o, &bytes, 4);
  }
}

// Write the block of output o of a panel to its record.
template <WeightType type>
void pack_block(const std::uint8_t* block, std::int64_t o, std::uint8_t* record) {
  constexpr BlockFormat f(type);
  constexpr int n = f.num_values();
  std::memcpy(record + f.scale_bytes() * o, block + f.at_scale, f.scale_bytes());
  if constexpr (f.minimum) std::memcpy(record + f.minimums() + 2 * o, block + f.at_minimum, 2);
  if constexpr (n > 0) {
    std::uint8_t v[n], *rows = record + f.values() + o;
    read_values<type>(block, v);
    if constexpr (f.scale_bits == 8)
      for (int i = 0; i < n; ++i) rows[i * kPanel] = v[i];
    else
      for (int i = 0; i < n / 2; ++i) rows[i * kPanel] = (v[i] & 15) | (v[i + n / 2] << 4);
    if constexpr (f.scale_bits == 6)
      for (int i = 0; i < n / 4; ++i)
        rows[(n / 2 + i) * kPanel] =
            v[i] >> 4 | v[i + n / 4] >> 4 << 2 | v[i + n / 2] >> 4 << 4 | v[i + 3 * n / 4] >> 4 << 6;
  }
  std::uint8_t codes[f.inputs] = {};
  add_fields<f.bits, f.low_span, 0, f.inputs>(block + f.at_low, codes);
  if constexpr (f.more > 0) add_fields<f.more, f.high_span, f.bits, f.inputs>(block + f.at_high, codes);
  if constexpr (type == WeightType::q8_0)
    for (std::uint8_t& code : codes) code ^= 128;  // signed bytes become unsigned
  for (int g = 0; g < f.inputs / 32; ++g) {
    std::uint8_t* lines = record + f.codes() + g * f.lines() * kLine;
    write_lines<f.bits, 0>(codes + 32 * g, o, lines);
    if constexpr (f.more > 0) write_lines<f.more, f.bits>(codes + 32 * g, o, lines + f.bits * kLine);
  }
}

template <WeightType type>
void unpack_blocks(const Matrix& w, const std::uint8_t* panel, std::int64_t o, float* to) {
  constexpr BlockFormat f(type);
  constexpr int n = f.num_values();
  const auto half = [](const std::uint8_t* p) {
    std::uint16_t h;
    std::memcpy(&h, p, 2);
    return from_f16(h);
  };
  for (std::int64_t at = 0; at < w.in; at += f.inputs, panel += f.record()) {
    const float scale = f.exponent ? std::ldexp(1.0f, panel[o] - 128) : half(panel + 2 * o);
    const float minimum = f.minimum ? half(panel + f.minimums() + 2 * o) : 0.0f;
    std::uint8_t v[n ? n : 1];
    const std::uint8_t* rows = panel + f.values() + o;
    for (int i = 0; i < n; ++i) {
      if constexpr (f.scale_bits == 8) v[i] = rows[i * kPanel];
      else v[i] = rows[i % (n / 2) * kPanel] >> (i / (n / 2) * 4) & 15;
      if constexpr (f.scale_bits == 6) v[i] |= (rows[(n / 2 + i % (n / 4)) * kPanel] >> (i / (n / 4) * 2) & 3) << 4;
    }
    const std::int64_t count = std::min<std::int64_t>(f.inputs, w.in - at);
    for (std::int64_t i = 0; i < count; ++i) {
      const std::int64_t j = i % 32, group = i / f.group;
      const std::uint8_t* lines = panel + f.codes() + i / 32 * f.lines() * kLine + 4 * o + j % 4;
      int code = lines[j / 4 % f.bits * kLine] >> (j / 4 / f.bits * f.bits) & ((1 << f.bits) - 1);
      if constexpr (f.more > 0)
        code |= (lines[(f.bits + j / 4 % f.more) * kLine] >> (j / 4 / f.more * f.more) & ((1 << f.more) - 1)) << f.bits;
      if constexpr (f.table != nullptr) code = f.table[code];
      float own = scale, least = f.minimum && !n ? -minimum : 0.0f;
      if constexpr (n > 0)
        own *= f.scale_bits == 8 ? static_cast<float>(static_cast<std::int8_t>(v[group]))
                                 : static_cast<float>(v[group] - f.scale_zero);
      if constexpr (n > 0 && f.minimum) least = minimum * static_cast<float>(v[f.num_scales + group]);
      to[at + i] = own * static_cast<float>(code - f.offset) - least;
    }
  }
}

#include "quantize.h"

// Pack `count` outputs of one panel, row-major float32.
void pack_panel(WeightType type, const float* weights, std::int64_t count, std::int64_t in,
                std::uint8_t* data, float* scale) {
  if (type == WeightType::i8) std::memset(data, 128, panel_bytes(type, in));  // 128 encodes 0
  for (std::int64_t o = 0; o < count; ++o) {
    const float* row = weights + o * in;
    switch (type) {
      case WeightType::f32:
        for (std::int64_t i = 0; i < in; ++i) reinterpret_cast<float*>(data)[i * kPanel + o] = row[i];
        break;
      case WeightType::f16:
        for (std::int64_t i = 0; i < in; ++i) reinterpret_cast<std::uint16_t*>(data)[i * kPanel + o] = to_f16(row[i]);
        break;
      case WeightType::bf16:
        for (std::int64_t i = 0; i < in; ++i)
          reinterpret_cast<std::uint16_t*>(data)[i / 2 * 64 + o * 2 + i % 2] = to_bf16(row[i]);
        break;
      case WeightType::i8: pack8(row, in, o, data, scale + o); break;
      default:  // only blocks of a file are packed in the other formats (pack_blocks)
        with_quantized(type, [&]<WeightType format>() {
          constexpr BlockFormat f(format);
          quantize_row<format>(row, in, [&](std::int64_t b, const std::uint8_t* block) {
            pack_block<format>(block, o, data + b * f.record());
          });
        });
    }
  }
}

}  // namespace

bool packs_floats(WeightType type, std::int64_t in) {
  const bool whole = type == WeightType::q5_0 || type == WeightType::q4_k || type == WeightType::q6_k;
  return type <= WeightType::q8_0 || (whole && padded_depth(type, in) == in);
}

std::int64_t padded_depth(WeightType type, std::int64_t in) {
  switch (type) {
    case WeightType::bf16: return round_up(in, 2);
    case WeightType::f32:
    case WeightType::f16: return in;
    default: return round_up(in, has_blocks(type) ? BlockFormat(type).inputs : kGroup);
  }
}

std::size_t panel_bytes(WeightType type, std::int64_t in) {
  const std::int64_t depth = padded_depth(type, in);
  switch (type) {
    case WeightType::f32: return depth * kPanel * 4;
    case WeightType::f16:
    case WeightType::bf16: return depth * kPanel * 2;
    case WeightType::i8: return depth * kPanel;
    default: return depth / BlockFormat(type).inputs * BlockFormat(type).record();
  }
}

std::size_t prepared_bytes(WeightType type, std::int64_t in) {
  const std::int64_t depth = padded_depth(type, in);
  switch (type) {
    case WeightType::f32:
    case WeightType::f16: return round_up(depth * 4, 64);
    case WeightType::bf16: return round_up(depth * 2, 64);
    case WeightType::i8: return depth * 2 + 64;  // two digits, with AMX
    // With AMX tiles of 64 inputs and a tile of sums for each 256.
    default: return round_up(round_up(depth, 64) + depth / kSmallGroup * 12 + depth / 256 * 64, 64);
  }
}

// Few inputs are padded to more in i8 than in float32.
std::size_t most_prepared_bytes(std::int64_t in) {
  return std::max(prepared_bytes(WeightType::f32, in), prepared_bytes(WeightType::i8, in));
}

Matrix matrix_of(WeightType type, std::int64_t out, std::int64_t in) {
  if (type == WeightType::i8 && in > kMostInputsInt8)
    throw std::invalid_argument("a matrix of " + std::to_string(in) + " inputs in int8: the limit is " +
                                std::to_string(kMostInputsInt8) + "; use bfloat16");
  return {.type = type,
          .prepared_as = type,
          .out = out,
          .in = in,
          .depth = padded_depth(type, in),
          .panels = (out + kPanel - 1) / kPanel,
          .prepared = prepared_bytes(type, in),
          .panel_bytes = panel_bytes(type, in)};
}

bool share_rows(const std::vector<Matrix*>& matrices) {
  WeightType type = matrices[0]->type;
  for (const Matrix* m : matrices) {
    if (m->type != type && !(has_blocks(m->type) && has_blocks(type))) return false;
    if (whole_scales(m->type)) type = m->type;
  }
  for (Matrix* m : matrices) m->prepared_as = type;
  return true;
}

void read_rows(const Stored& from, std::int64_t begin, std::int64_t end, float* to) {
  switch (from.type) {
    case ValueType::f32: return read_rows_as<F32>(from, begin, end, to);
    case ValueType::f16: return read_rows_as<Half<from_f16>>(from, begin, end, to);
    case ValueType::bf16: return read_rows_as<Half<from_bf16>>(from, begin, end, to);
  }
}

void pack_panels(WeightType type, const Stored& weights, std::int64_t begin, std::int64_t end,
                 std::uint8_t* data, float* scale, float* scratch) {
  for (std::int64_t p = begin; p < end; ++p) {
    const std::int64_t first = p * kPanel, count = std::min(kPanel, weights.rows - first);
    read_rows(weights, first, first + count, scratch);
    pack_panel(type, scratch, count, weights.columns, data + p * panel_bytes(type, weights.columns), scale + first);
  }
}

void quantize_rows(WeightType type, const Stored& weights, std::int64_t begin, std::int64_t end, std::uint8_t* blocks,
                   float* scratch) {
  read_rows(weights, begin, end, scratch);
  with_quantized(type, [&]<WeightType format>() {
    constexpr BlockFormat f(format);
    std::uint8_t* to = blocks + begin * row_bytes(type, weights.columns);
    for (std::int64_t r = begin; r < end; ++r, scratch += weights.columns, to += row_bytes(type, weights.columns))
      quantize_row<format>(scratch, weights.columns, [&](std::int64_t b, const std::uint8_t* block) {
        std::memcpy(to + b * f.block, block, f.block);
      });
  });
}

std::size_t row_bytes(WeightType type, std::int64_t in) {
  const BlockFormat f(type);
  return in / f.inputs * f.block;
}

void pack_blocks(WeightType type, const std::uint8_t* blocks, std::int64_t rows, std::int64_t in, std::int64_t begin,
                 std::int64_t end, std::uint8_t* data) {
  with_format(type, [&]<WeightType format>() {
    constexpr BlockFormat f(format);
    const std::int64_t records = in / f.inputs;
    for (std::int64_t p = begin; p < end; ++p)
      for (std::int64_t r = 0; r < records; ++r)
        for (std::int64_t o = 0; o < std::min(kPanel, rows - p * kPanel); ++o)
          pack_block<format>(blocks + ((p * kPanel + o) * records + r) * f.block, o, data + (p * records + r) * f.record());
  });
}

void unpack_row(const Matrix& w, std::int64_t output, float* to) {
  const std::uint8_t* panel = w.data + output / kPanel * w.panel_bytes;
  const std::int64_t o = output % kPanel;
  switch (w.type) {
    case WeightType::f32:
      for (std::int64_t i = 0; i < w.in; ++i) to[i] = reinterpret_cast<const float*>(panel)[i * kPanel + o];
      return;
    case WeightType::f16:
      for (std::int64_t i = 0; i < w.in; ++i)
        to[i] = from_f16(reinterpret_cast<const std::uint16_t*>(panel)[i * kPanel + o]);
      return;
    case WeightType::bf16:
      for (std::int64_t i = 0; i < w.in; ++i)
        to[i] = from_bf16(reinterpret_cast<const std::uint16_t*>(panel)[i / 2 * 64 + o * 2 + i % 2]);
      return;
    case WeightType::i8:
      for (std::int64_t i = 0; i < w.in; ++i)
        to[i] = w.scale[output] * static_cast<float>(panel[i / 4 * kLine + o * 4 + i % 4] - 128);
      return;
    default: return with_format(w.type, [&]<WeightType type>() { unpack_blocks<type>(w, panel, o, to); });
  }
}

}  // namespace nanoinfer
