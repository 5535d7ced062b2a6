// Packing and matrix products, in every weight format and on every instruction set of this machine.
//
// The reference multiplies, in double precision, what the packed format stores (unpack_row) with what the format's
// activations are rounded to. A kernel may differ by the rounding of a float32 sum: kRtol of the sum of magnitudes.
#include <algorithm>

#include "check.h"
#include "layout.h"

using namespace nanoinfer;
using namespace nanoinfer::test;

namespace {

constexpr double kRtol = 2e-6;
constexpr std::int64_t kMaxRows = 17;  // more than a tile holds, on every instruction set

struct Packed {  // a matrix in memory of its own, exactly as large as the kernels are promised
  Matrix m{};
  std::vector<std::uint8_t> data;
  Floats scale, bias;

  Packed(WeightType type, const Floats& weights, std::int64_t in, const Floats& b = {})
      : Packed(type, static_cast<std::int64_t>(weights.size()) / in, in, b) {
    Floats scratch(kPanel * in);
    pack_panels(type, {weights.data(), ValueType::f32, m.out, in, in, 1}, 0, m.panels, data.data(), scale.data(),
                scratch.data());
  }
  Packed(WeightType type, const std::vector<std::uint8_t>& blocks, std::int64_t out, std::int64_t in)
      : Packed(type, out, in, Floats{}) {
    pack_blocks(type, blocks.data(), out, in, 0, m.panels, data.data());
  }
  Packed(WeightType type, std::int64_t out, std::int64_t in, const Floats& b) {
    m = matrix_of(type, out, in);
    data.resize(m.panels * m.panel_bytes);
    scale.resize(m.panels * kPanel);
    bias.resize(m.panels * kPanel);
    std::copy(b.begin(), b.end(), bias.begin());
    m.data = data.data();
    m.scale = scale.data();
    m.bias = bias.data();
  }
  std::int64_t stride() const { return m.panels * kPanel; }
  Floats row(std::int64_t output) const {
    Floats to(m.in);
    unpack_row(m, output, to.data());
    return to;
  }
};

// (rows, w.stride()); as two threads would: the first panel, then the others.
Floats multiply(const Kernels& k, const Packed& w, const float* x, std::int64_t rows,
                Epilogue epilogue = Epilogue::store, Floats y = {}) {
  const std::size_t bytes = prepared_bytes(w.m.type, w.m.in);
  std::vector<std::uint8_t> prepared(padded_rows(rows) * bytes);
  for (std::int64_t r = 0; r < rows; ++r)
    k.prepare(w.m.prepared_as, x + r * w.m.in, w.m.in, w.m.depth, r, rows, bytes, prepared.data(), /*largest=*/0);
  y.resize(rows * w.stride());
  const MatmulTask task{&w.m, prepared.data(), bytes, rows, y.data(), w.stride(), epilogue};
  k.matmul(task, 0, 1);
  k.matmul(task, 1, w.m.panels);
  return y;
}

// What a row of activations is rounded to. With AMX, rows for i8 have one scale and 16 bits, those for blocks of 256 one scale for each.
std::vector<double> activations(const Kernels& k, WeightType type, const float* x, std::int64_t n) {
  std::vector<double> a(x, x + n);
  const bool amx = std::string(k.name).starts_with("amx"), digits = amx && type == WeightType::i8;
  const bool blocks = amx && whole_scales(type);
  if (type == WeightType::bf16)
    for (double& v : a) v = as_bf16(static_cast<float>(v));
  if (const std::int64_t group = digits ? n : blocks ? 256 : group_of(type))
    for (std::int64_t g = 0; g < n; g += group) {
      const std::int64_t size = std::min(group, n - g);
      const float integer = digits ? 127 << 8 : 127;
      const float most = largest(x + g, size), inverse = integer / most, scale = most / integer;
      for (std::int64_t i = g; i < g + size; ++i) a[i] = std::nearbyint(x[i] * inverse) * static_cast<double>(scale);
    }
  return a;
}

void check_row(Test& t, const Kernels& k, const Packed& w, const float* x, const float* got) {
  const std::vector<double> a = activations(k, w.m.prepared_as, x, w.m.in);
  for (std::int64_t o = 0; o < w.m.out; ++o) {
    const Floats weights = w.row(o);
    double sum = w.bias[o], magnitude = std::fabs(w.bias[o]);
    for (std::int64_t i = 0; i < w.m.in; ++i) sum += a[i] * weights[i], magnitude += std::fabs(a[i] * weights[i]);
    t.check(is_near(got[o], sum, kRtol * magnitude, 0), "%s %s: output %lld of %lld x %lld is %.9g, must be %.9g",
            k.name, name_of(w.m.type), (long long)o, (long long)w.m.out, (long long)w.m.in, got[o], sum);
  }
}

// Each row alone is right, and among other rows it is the same bit for bit.
void test_products(Test& t, const Kernels& k, WeightType type) {
  for (const std::int64_t out : {1, 33, 70})
    for (const std::int64_t in : {1, 7, 63, 64, 65, 130, 200}) {
      const Packed w(type, random(out * in, 1, 0.1f), in, random(out, 2));
      const Floats x = random(kMaxRows * in, 3);
      Floats alone;
      for (std::int64_t r = 0; r < kMaxRows; ++r) {
        const Floats y = multiply(k, w, &x[r * in], 1);
        check_row(t, k, w, &x[r * in], y.data());
        alone.insert(alone.end(), y.begin(), y.end());
      }
      for (std::int64_t rows = 2; rows <= kMaxRows; ++rows) {
        const std::int64_t from = kMaxRows - rows;
        const Floats y = multiply(k, w, &x[from * in], rows);
        t.check(same_bits(y.data(), &alone[from * w.stride()], rows * w.stride()),
                "%s %s: %lld x %lld, %lld rows are not what each is alone", k.name, name_of(type), (long long)out,
                (long long)in, (long long)rows);
      }
    }
}

// Blocks of a GGUF file: random codes and group scales, and scales of a usual size.
std::vector<std::uint8_t> random_blocks(WeightType type, std::int64_t count) {
  const BlockFormat f(type);
  const std::uint16_t halves[] = {0x2800, 0xa400, 0x2c66, 0x0000};  // 2^-5, -2^-6, 0.0687, 0
  std::mt19937 random_bytes(13);
  std::vector<std::uint8_t> blocks(count * f.block);
  for (std::uint8_t& byte : blocks) byte = static_cast<std::uint8_t>(random_bytes());
  for (std::int64_t b = 0; b < count; ++b) {
    std::uint8_t* block = &blocks[b * f.block];
    if (f.exponent) block[f.at_scale] = static_cast<std::uint8_t>(120 + b % 9);
    else std::memcpy(block + f.at_scale, &halves[b % 4], 2);
    if (f.minimum) std::memcpy(block + f.at_minimum, &halves[(b + 1) % 4], 2);
  }
  return blocks;
}

// A row alone is right, and it is the same among few and many others. tests/native compares unpacked blocks with ggml's values.
// shared: the matrix takes the rows of one in that format.
void test_blocks(Test& t, const Kernels& k, WeightType type, WeightType shared) {
  constexpr std::int64_t kRows = 41;
  const BlockFormat f(type);
  const std::int64_t least = std::max(f.inputs, BlockFormat(shared).inputs);
  for (const std::int64_t in : {least, 3 * least, 10 * least}) {
    Packed w(type, random_blocks(type, 70 * in / f.inputs), 70, in);
    Matrix other = matrix_of(shared, 70, in);
    t.check(share_rows({&w.m, &other}), "%s and %s do not share rows", name_of(type), name_of(shared));
    const Floats x = random(kRows * in, 14), all = multiply(k, w, x.data(), kRows);
    for (std::int64_t r = 0; r < kRows; r += 3) {
      const Floats alone = multiply(k, w, &x[r * in], 1);
      check_row(t, k, w, &x[r * in], alone.data());
      t.check(same_bits(alone.data(), &all[r * w.stride()], w.stride()),
              "%s %s: row %lld of many is not what it is alone", k.name, name_of(type), (long long)r);
    }
    for (const std::int64_t rows : {2, 5, 7, 13}) {
      const Floats few = multiply(k, w, x.data(), rows);
      t.check(same_bits(few.data(), all.data(), rows * w.stride()), "%s %s: %lld rows are not what each is among others",
              k.name, name_of(type), (long long)rows);
    }
  }
}

// So many prepared rows that they are worked on in several parts.
void test_many_rows(Test& t, const Kernels& k, WeightType type) {
  const std::int64_t rows = 110, in = 4096;
  const Packed w(type, random(33 * in, 4, 0.1f), in);
  const Floats x = random(rows * in, 5), y = multiply(k, w, x.data(), rows);
  for (std::int64_t r = 0; r < rows; r += 11)
    t.check(same_bits(&y[r * w.stride()], multiply(k, w, &x[r * in], 1).data(), w.stride()),
            "%s %s: row %lld of many is not what it is alone", k.name, name_of(type), (long long)r);
}

double gelu(double x, Epilogue e) {
  if (e == Epilogue::gelu_erf) return x * 0.5 * (1 + std::erf(x / std::sqrt(2.0)));
  return x * 0.5 * (1 + std::tanh(std::sqrt(2 / M_PI) * (x + 0.044715 * x * x * x)));
}

void test_epilogues(Test& t, const Kernels& k, WeightType type) {
  const std::int64_t rows = 7, in = 65;
  const Packed w(type, random(40 * in, 6, 0.3f), in, random(40, 7));
  const Floats x = random(rows * in, 8), residual = random(rows * w.stride(), 9);
  const Floats plain = multiply(k, w, x.data(), rows);
  const Floats added = multiply(k, w, x.data(), rows, Epilogue::add, residual);
  for (std::size_t i = 0; i < plain.size(); ++i)
    t.check(added[i] == residual[i] + plain[i], "%s %s: add gives %g", k.name, name_of(type), added[i]);
  for (const Epilogue e : {Epilogue::gelu_tanh, Epilogue::gelu_erf}) {
    const Floats got = multiply(k, w, x.data(), rows, e);
    for (std::size_t i = 0; i < plain.size(); ++i)
      t.check(is_near(got[i], gelu(plain[i], e), 2e-6, 2e-6), "%s %s: gelu(%.9g) is %.9g", k.name, name_of(type),
              plain[i], got[i]);
  }
}

void test_gelu_range(Test& t, const Kernels& k) {
  Floats x = {1e-30f, -1e-30f, 1e4f, -1e4f, 1e30f, -1e30f};
  for (int i = -2000; i <= 2000; ++i) x.push_back(static_cast<float>(i) * 0.01f);
  const Packed one(WeightType::f32, {1.0f}, 1);
  for (const Epilogue e : {Epilogue::gelu_tanh, Epilogue::gelu_erf}) {
    const Floats got = multiply(k, one, x.data(), static_cast<std::int64_t>(x.size()), e);
    for (std::size_t i = 0; i < x.size(); ++i) {
      const double expected = gelu(x[i], e), y = got[i * kPanel];
      t.check(is_near(y, expected, 1e-6, 1e-6), "%s: gelu(%.9g) is %.9g, must be %.9g", k.name, x[i], y, expected);
    }
  }
}

void test_nan_and_infinity(Test& t, const Kernels& k, WeightType type) {
  const std::int64_t rows = 4, in = 70, out = 35;
  const Floats weights = random(out * in, 10), x = random(rows * in, 11);
  for (const float bad : {NAN, INFINITY, -INFINITY})
    for (const std::int64_t at : {0, 15, 63, 64, 69}) {
      Floats poisoned = x;
      poisoned[2 * in + at] = bad;
      const Packed w(type, weights, in);
      const Floats y = multiply(k, w, poisoned.data(), rows);
      poisoned = weights;
      poisoned[33 * in + at] = bad;
      const Packed v(type, poisoned, in);
      const Floats z = multiply(k, v, x.data(), rows);
      for (std::int64_t r = 0; r < rows; ++r)
        for (std::int64_t o = 0; o < out; ++o) {
          t.check(std::isfinite(y[r * w.stride() + o]) == (r != 2), "%s %s: %g in row 2: row %lld, output %lld is %g",
                  k.name, name_of(type), bad, (long long)r, (long long)o, y[r * w.stride() + o]);
          t.check(std::isfinite(z[r * v.stride() + o]) == (o != 33), "%s %s: %g in weights of 33: output %lld is %g",
                  k.name, name_of(type), bad, (long long)o, z[r * v.stride() + o]);
        }
    }
}

// 1 x -1 + (1 + e)(1 - e) is -e^2 when the second product is not rounded, else 0: is this the code for the set?
void test_fused(Test& t, const Kernels& k) {
  const float e = 0x1p-13f, x[] = {-1, 1 - e};
  const float got = multiply(k, Packed(WeightType::f32, {1, 1 + e}, 2), x, 1)[0];
  const float expected = std::string(k.name) == "scalar" ? 0.0f : -e * e;
  t.check(got == expected, "%s: multiply-add gives %g, must give %g", k.name, got, expected);
}

// The error of packed weights; and their bytes, which are the same on every machine.
void test_packing(Test& t, WeightType type) {
  const std::int64_t out = 70, in = 200;
  const Floats weights = random(out * in, 12, 0.1f);
  const Packed w(type, weights, in);
  t.bits(std::string("packed ") + name_of(type), w.data.data(), w.data.size());
  for (std::int64_t o = 0; o < out; ++o) {
    const Floats got = w.row(o);
    const std::int64_t group = type == WeightType::q8_0 ? kSmallGroup : kGroup;
    for (std::int64_t g = 0; g < in; g += group) {
      const std::int64_t size = std::min(group, in - g);
      const float* from = &weights[o * in + g];
      const auto [low, high] = std::minmax_element(from, from + size);
      double error = 0, allowed = 0;
      for (std::int64_t i = 0; i < size; ++i) {
        const double step = type == WeightType::f32   ? 0
                            : type == WeightType::f16 ? std::fmax(std::fabs(from[i]) * 0x1p-10, 0x1p-24)
                            : type == WeightType::bf16 ? std::fabs(from[i]) * 0x1p-7
                            : type == WeightType::i8 ? largest(&weights[o * in], in) / 127
                            : type == WeightType::q8_0 ? largest(from, size) / 127 * 1.125  // the scale is rounded too
                                                     : (std::fmax(*high, 0.0f) - std::fmin(*low, 0.0f)) / 15;
        error += std::pow(got[g + i] - from[i], 2);
        allowed += step * step / 4 * 1.01;  // each number: at most half a step
      }
      t.check(error <= allowed, "packing as %s: squared error %g, at most %g", name_of(type), error, allowed);
    }
  }
}

}  // namespace

int main(int argc, char** argv) {
  Test t("products", argc, argv);
  for (const WeightType type : kTypes) test_packing(t, type);
  for (const WeightType type : kBlockTypes) {
    const BlockFormat f(type);
    const Packed w(type, random_blocks(type, 70 * 3), 70, 3 * f.inputs);
    t.bits(std::string("blocks ") + name_of(type), w.data.data(), w.data.size());
  }
  for (const Kernels* k : kernels_to_test()) {
    for (const WeightType type : kTypes) {
      test_products(t, *k, type);
      test_many_rows(t, *k, type);
      test_epilogues(t, *k, type);
      test_nan_and_infinity(t, *k, type);
    }
    for (const WeightType type : kBlockTypes) {
      test_blocks(t, *k, type, type);
      if (!whole_scales(type)) test_blocks(t, *k, type, WeightType::q4_k);
    }
    test_gelu_range(t, *k);
    test_fused(t, *k);
    std::printf("products on %s\n", k->name);
  }
  return t.result();
}
