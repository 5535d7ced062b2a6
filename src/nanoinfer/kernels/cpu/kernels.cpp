// The kernels of the native decoder: one source, compiled once for each instruction set.
//
// The story, fastest idea last; each step is a measurement in docs/log.md:
//   1. A matrix product with row-major weights reads one long row per output: as many memory streams as rows in
//      flight, and the hardware's prefetchers lose them. Here 32 outputs are interleaved in a panel, and a
//      thread reads its panels from first to last: one stream.
//   2. Software prefetch runs kPrefetch bytes ahead of the stream, across the ends of panels.
//   3. Each lane owns one output, so nothing is ever summed across lanes, and every row of activations has
//      accumulators of its own that add in the order of the inputs. So the result of a row depends neither on
//      how many rows there are nor on the thread that computes it, bit for bit. The price: rows cannot share
//      the work of one output (a reduction split over threads), which only costs where there are fewer panels
//      than threads.
//   4. Weights of 8 and 4 bits multiply activations of 8 bits (a scale for every kGroup inputs of a row), four
//      products an instruction where the CPU has VNNI, in exact integers.
//   5. Keys are stored transposed (kBlock positions interleaved), so attention is the same product again:
//      lanes are positions, and a score needs no sum across lanes.
//
// Built by CMakeLists.txt with NANOINFER_ISA=<name> and that set's compiler flags. No header of the standard
// library with inline functions may be included here (see kernels.h).
#include "kernels.h"

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

namespace nanoinfer {
namespace NANOINFER_ISA {

#include "vec.h"

constexpr std::size_t kPrefetch = 4096;

// Rows of activations that share one pass over a panel: as many as there are registers for accumulators.
constexpr int kRowsFloat = kWidth == 16 ? 12 : kWidth == 8 ? 3 : 2;
constexpr int kRowsInt = kWidth == 16 ? 6 : 2;  // an integer and a float accumulator each
// Prepared rows that are worked on together are kept to what the second-level cache holds beside a panel.
constexpr std::size_t kRowBlockBytes = 384 << 10;

// Matrix products ---------------------------------------------------------------------------------------

// Rows come in tiles of M. A prepared row is a list of 4-byte units (a float, two bfloat16, four int8); a tile holds
// unit 0 of its M rows, then unit 1, ...: one pointer walks through all of them, however many rows there are.
struct Tile {
  const std::uint8_t* w;
  const std::uint8_t* x;
  std::int64_t depth;

  template <class T>
  const T* units(std::int64_t from, int rows) const {
    return (const T*)x + from * rows;
  }
};

// How `rows` rows are split into tiles of nearly equal height, at most `most`.
struct Tiling {
  std::int64_t rows, tiles;

  Tiling(std::int64_t rows, std::int64_t most) : rows(rows), tiles((rows + most - 1) / most) {}
  std::int64_t begin(std::int64_t tile) const { return rows * tile / tiles; }
  std::int64_t tile_of(std::int64_t row) const { return ((row + 1) * tiles + rows - 1) / rows - 1; }
};

template <int M>
struct Acc {
  f32x16 v[M][2];
};

#define NI_ROWS _Pragma("GCC unroll 16") for (int m = 0; m < M; ++m)
#define NI_HALVES _Pragma("GCC unroll 2") for (int h = 0; h < 2; ++h)

template <int M>
NI_INLINE void tile_f32(const Tile& t, Acc<M>& acc) {
  const float *w = (const float*)t.w, *x = t.units<float>(0, M);
  for (std::int64_t k = 0; k < t.depth; ++k, w += kPanel, x += M) {
    prefetch((const char*)w + kPrefetch);
    prefetch((const char*)w + kPrefetch + 64);
    const f32x16 w0 = load(w), w1 = load(w + 16);
    NI_ROWS {
      const f32x16 a = broadcast(x[m]);
      acc.v[m][0] = fma(w0, a, acc.v[m][0]);
      acc.v[m][1] = fma(w1, a, acc.v[m][1]);
    }
  }
}

template <int M>
NI_INLINE void tile_f16(const Tile& t, Acc<M>& acc) {
  const std::uint16_t* w = (const std::uint16_t*)t.w;
  const float* x = t.units<float>(0, M);
  for (std::int64_t k = 0; k < t.depth; ++k, w += kPanel, x += M) {
    prefetch((const char*)w + kPrefetch);
    const f32x16 w0 = load_f16(w), w1 = load_f16(w + 16);
    NI_ROWS {
      const f32x16 a = broadcast(x[m]);
      acc.v[m][0] = fma(w0, a, acc.v[m][0]);
      acc.v[m][1] = fma(w1, a, acc.v[m][1]);
    }
  }
}

template <int M>
NI_INLINE void tile_bf16(const Tile& t, Acc<M>& acc) {  // two inputs a step
  const std::uint8_t* w = t.w;
  const std::int32_t* x = t.units<std::int32_t>(0, M);
  for (std::int64_t k = 0; k < t.depth / 2; ++k, w += 128, x += M) {
    prefetch(w + kPrefetch);
    prefetch(w + kPrefetch + 64);
    const i32x16 w0 = load_ints(w), w1 = load_ints(w + 64);
    NI_ROWS {
      acc.v[m][0] = dot2_bf16(acc.v[m][0], w0, x[m]);
      acc.v[m][1] = dot2_bf16(acc.v[m][1], w1, x[m]);
    }
  }
}

// The units of a row with 8-bit activations: depth / 4 of four int8, then a scale for each group, then a sum.
struct Int8Units {
  const std::int32_t* x;
  const float* scale;
  const std::int32_t* sum;
};
template <int M>
NI_INLINE Int8Units int8_units(const Tile& t) {
  const std::int64_t quads = t.depth / 4, groups = t.depth / kGroup;
  return {t.units<std::int32_t>(0, M), t.units<float>(quads, M), t.units<std::int32_t>(quads + groups, M)};
}

// Weights are stored as w + 128, unsigned: sum (w + 128) a - 128 sum a = sum w a, so a group starts at -128 sum a.
template <int M>
NI_INLINE void tile_i8(const Tile& t, Acc<M>& acc) {
  const std::uint8_t* w = t.w;
  Int8Units u = int8_units<M>(t);
  for (std::int64_t g = 0; g < t.depth / kGroup; ++g, u.scale += M, u.sum += M) {
    i32x16 dot[M][2];
    NI_ROWS NI_HALVES dot[m][h] = broadcast(-128 * u.sum[m]);
    for (int k = 0; k < kGroup / 4; ++k, w += 128, u.x += M) {
      prefetch(w + kPrefetch);
      prefetch(w + kPrefetch + 64);
      const i32x16 w0 = load_ints(w), w1 = load_ints(w + 64);
      NI_ROWS {
        dot[m][0] = dot4(dot[m][0], w0, u.x[m]);
        dot[m][1] = dot4(dot[m][1], w1, u.x[m]);
      }
    }
    NI_ROWS NI_HALVES acc.v[m][h] = fma(to_float(dot[m][h]), broadcast(u.scale[m]), acc.v[m][h]);
  }
}

// A panel is first, for each group, 32 scales (bfloat16) and 32 zero points (bytes); then 4-bit numbers q, of which
// one load gives inputs 4 j ... 4 j + 3 in the low halves of its bytes and inputs 32 later in the high halves.
// w = scale (q - zero), so a group adds  scale_w scale_a (sum q a - zero sum a); all but the scales is exact.
template <int M>
NI_INLINE void tile_i4(const Tile& t, Acc<M>& acc) {
  const std::int64_t groups = t.depth / kGroup;
  const std::uint8_t* meta = t.w;
  const std::uint8_t* w = t.w + ((groups * 96 + 63) & ~std::int64_t{63});
  Int8Units u = int8_units<M>(t);
  for (std::int64_t g = 0; g < groups; ++g, meta += 96, u.x += M * (kGroup / 8), u.scale += M, u.sum += M) {
    i32x16 dot[M][2];
    NI_ROWS NI_HALVES dot[m][h] = broadcast(0);
    for (int k = 0; k < kGroup / 8; ++k, w += 128, u.x += M) {
      prefetch(w + kPrefetch);
      prefetch(w + kPrefetch + 64);
      const i32x16 q0 = load_ints(w), q1 = load_ints(w + 64);
      const i32x16 low0 = low_nibbles(q0), low1 = low_nibbles(q1);
      NI_ROWS {
        dot[m][0] = dot4(dot[m][0], low0, u.x[m]);
        dot[m][1] = dot4(dot[m][1], low1, u.x[m]);
      }
      const i32x16 high0 = high_nibbles(q0), high1 = high_nibbles(q1);
      NI_ROWS {
        dot[m][0] = dot4(dot[m][0], high0, u.x[M * (kGroup / 8) + m]);
        dot[m][1] = dot4(dot[m][1], high1, u.x[M * (kGroup / 8) + m]);
      }
    }
    NI_HALVES {
      const f32x16 scale = load_bf16((const std::uint16_t*)meta + 16 * h), zero = load_u8(meta + 64 + 16 * h);
      NI_ROWS {
        const f32x16 sum = fma(zero, broadcast(-(float)u.sum[m]), to_float(dot[m][h]));
        acc.v[m][h] = fma(sum, scale * broadcast(u.scale[m]), acc.v[m][h]);
      }
    }
  }
}

NI_INLINE f32x16 finish(Epilogue epilogue, f32x16 y, const float* at) {
  switch (epilogue) {
    case Epilogue::gelu_tanh: return gelu_tanh(y);
    case Epilogue::gelu_erf: return gelu_erf(y);
    case Epilogue::add: return load(at) + y;
    default: return y;
  }
}

template <WeightType type, int M>
void tile(const MatmulTask& task, std::int64_t panel, std::int64_t row) {
  const Matrix& w = *task.w;
  const Tile t{w.data + panel * w.panel_bytes, task.x + row * task.x_stride, w.depth};
  Acc<M> acc;
  NI_ROWS NI_HALVES acc.v[m][h] = broadcast(0.0f);
  if constexpr (type == WeightType::f32) tile_f32<M>(t, acc);
  if constexpr (type == WeightType::f16) tile_f16<M>(t, acc);
  if constexpr (type == WeightType::bf16) tile_bf16<M>(t, acc);
  if constexpr (type == WeightType::i8) tile_i8<M>(t, acc);
  if constexpr (type == WeightType::i4) tile_i4<M>(t, acc);
  NI_HALVES {
    const std::int64_t column = panel * kPanel + 16 * h;
    const f32x16 bias = load(w.bias + column);
    f32x16 scale = broadcast(1.0f);
    if constexpr (type == WeightType::i8) scale = load(w.scale + column);
    NI_ROWS {
      float* y = task.y + (row + m) * task.y_stride + column;
      const f32x16 sum = type == WeightType::i8 ? fma(acc.v[m][h], scale, bias) : acc.v[m][h] + bias;
      store(y, finish(task.epilogue, sum, y));
    }
  }
}

using TileFunction = void (*)(const MatmulTask&, std::int64_t, std::int64_t);

// The function for each number of rows, 1 to kMax.
template <WeightType type, int... M>
struct Tiles {
  static constexpr int kMax = sizeof...(M);
  static constexpr TileFunction kTable[] = {tile<type, M>...};
};
#define NI_TILES_2(type) Tiles<type, 1, 2>
#define NI_TILES_3(type) Tiles<type, 1, 2, 3>
#define NI_TILES_6(type) Tiles<type, 1, 2, 3, 4, 5, 6>
#define NI_TILES_12(type) Tiles<type, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12>
template <WeightType type, int rows>
struct TilesFor;
template <WeightType type>
struct TilesFor<type, 2> : NI_TILES_2(type) {};
template <WeightType type>
struct TilesFor<type, 3> : NI_TILES_3(type) {};
template <WeightType type>
struct TilesFor<type, 6> : NI_TILES_6(type) {};
template <WeightType type>
struct TilesFor<type, 12> : NI_TILES_12(type) {};

template <class T>
void matmul_as(const MatmulTask& task, std::int64_t begin, std::int64_t end) {
  const Tiling tiling(task.rows, T::kMax);
  std::int64_t block = (std::int64_t)(kRowBlockBytes / (task.x_stride * T::kMax));  // tiles
  if (block < 1) block = 1;
  for (std::int64_t top = 0; top < tiling.tiles; top += block) {
    const std::int64_t bottom = top + block < tiling.tiles ? top + block : tiling.tiles;
    for (std::int64_t panel = begin; panel < end; ++panel)
      for (std::int64_t i = top; i < bottom; ++i) {
        const std::int64_t from = tiling.begin(i), to = tiling.begin(i + 1);
        T::kTable[to - from - 1](task, panel, from);
      }
  }
}

void matmul(const MatmulTask& task, std::int64_t begin, std::int64_t end) {
  switch (task.w->type) {
    case WeightType::f32: return matmul_as<TilesFor<WeightType::f32, kRowsFloat>>(task, begin, end);
    case WeightType::f16: return matmul_as<TilesFor<WeightType::f16, kRowsFloat>>(task, begin, end);
    case WeightType::bf16: return matmul_as<TilesFor<WeightType::bf16, kRowsFloat>>(task, begin, end);
    case WeightType::i8: return matmul_as<TilesFor<WeightType::i8, kRowsInt>>(task, begin, end);
    case WeightType::i4: return matmul_as<TilesFor<WeightType::i4, kRowsInt>>(task, begin, end);
  }
}

// Rows of activations -----------------------------------------------------------------------------------

// Round 16 floats to integers, ties to even; |x| < 2^22.
NI_INLINE i32x16 round(f32x16 x) {
  const f32x16 magic = broadcast(12582912.0f);
  const f32x16 t = x + magic;
  i32x16 r;
  NI_EACH r.v[i] = bits<vi>(t.v[i]) - 0x4b400000;
  return r;
}

// Up to kGroup floats as int8: scale = largest / 127, so the largest becomes +-127. A group with a NaN or an infinity
// gets a scale of NaN, which reaches the logits.
struct Int8Group {
  std::int8_t q[kGroup];
  float scale;
  std::int32_t sum;
};
NI_INLINE Int8Group quantize_group(const float* x, std::int64_t n) {
  f32x16 v[4], top = broadcast(0.0f), check = broadcast(0.0f);
  for (int i = 0; i < 4; ++i) {
    v[i] = n > 16 * i ? load_first(x + 16 * i, n - 16 * i) : broadcast(0.0f);
    top = max(top, abs(v[i]));
    check = check + v[i] * broadcast(0.0f);
  }
  const float most = largest(top), bad = sum(check);  // bad is 0 or NaN
  const bool usable = most > 1e-30f && bad == 0;
  const f32x16 inverse = broadcast(usable ? 127.0f / most : 0.0f);
  Int8Group g;
  g.scale = most / 127.0f + bad;
  i32x16 total = broadcast(0);
  for (int i = 0; i < 4; ++i) {
    const i32x16 r = usable ? round(v[i] * inverse) : broadcast(0);
    NI_EACH total.v[i] += r.v[i];
    store_i8(g.q + 16 * i, r);
  }
  g.sum = sum(total);
  return g;
}

void prepare(WeightType type, const float* x, std::int64_t n, std::int64_t depth, std::int64_t row, std::int64_t rows,
             std::size_t stride, std::uint8_t* out) {
  const Tiling tiling(rows, type == WeightType::i8 || type == WeightType::i4 ? kRowsInt : kRowsFloat);
  const std::int64_t tile = tiling.tile_of(row), from = tiling.begin(tile), height = tiling.begin(tile + 1) - from;
  std::uint32_t* to = (std::uint32_t*)(out + from * stride) + (row - from);  // unit u of this row is to[u * height]
  switch (type) {
    case WeightType::f32:
    case WeightType::f16:
      for (std::int64_t k = 0; k < n; ++k) to[k * height] = bits<std::uint32_t>(x[k]);
      return;
    case WeightType::bf16:
      for (std::int64_t k = 0; k < depth; k += 16) {
        std::uint32_t pairs[8];
        store_bf16((std::uint16_t*)pairs, load_first(x + k, n - k));
        for (std::int64_t j = 0; j < 8 && k + 2 * j < depth; ++j) to[(k / 2 + j) * height] = pairs[j];
      }
      return;
    case WeightType::i8:
    case WeightType::i4:
      for (std::int64_t g = 0; g < depth / kGroup; ++g) {
        const Int8Group group = quantize_group(x + g * kGroup, n - g * kGroup);
        std::uint32_t quads[kGroup / 4];
        __builtin_memcpy(quads, group.q, sizeof quads);
        for (std::int64_t j = 0; j < kGroup / 4; ++j) to[(g * (kGroup / 4) + j) * height] = quads[j];
        to[(depth / 4 + g) * height] = bits<std::uint32_t>(group.scale);
        to[(depth / 4 + depth / kGroup + g) * height] = (std::uint32_t)group.sum;
      }
      return;
  }
}

void layer_norm(const float* x, const float* weight, const float* bias, std::int64_t n, float eps, float* y) {
  f32x16 total = broadcast(0.0f);
  for (std::int64_t k = 0; k < n; k += 16) total = total + load_first(x + k, n - k);
  const f32x16 mean = broadcast(sum(total) / (float)n);
  f32x16 squares = broadcast(0.0f);
  for (std::int64_t k = 0; k < n; k += 16) {
    const f32x16 d = first(n - k, load_first(x + k, n - k) - mean, 0.0f);
    squares = fma(d, d, squares);
  }
  const f32x16 rstd = broadcast(1.0f / __builtin_sqrtf(sum(squares) / (float)n + eps));
  for (std::int64_t k = 0; k < n; k += 16) {
    const f32x16 scaled = (load_first(x + k, n - k) - mean) * rstd;
    store_first(y + k, fma(scaled, load_first(weight + k, n - k), load_first(bias + k, n - k)), n - k);
  }
}

// Attention ---------------------------------------------------------------------------------------------
//
// A head's part of a block:  keys (D, kBlock), transposed    values (kBlock, D rounded up to 16)
// and for int8, before them: float scale of each key (kBlock), of each value (kBlock).

NI_INLINE std::int64_t padded(std::int64_t head_dim) { return (head_dim + 15) & ~std::int64_t{15}; }

template <CacheType type>
struct CacheOf;
template <>
struct CacheOf<CacheType::f32> {
  using T = float;
  static constexpr std::size_t kScales = 0;
  NI_INLINE f32x16 get(const T* p) { return load(p); }
};
template <>
struct CacheOf<CacheType::bf16> {
  using T = std::uint16_t;
  static constexpr std::size_t kScales = 0;
  NI_INLINE f32x16 get(const T* p) { return load_bf16(p); }
};
template <>
struct CacheOf<CacheType::i8> {
  using T = std::int8_t;
  static constexpr std::size_t kScales = 2 * kBlock * sizeof(float);
  NI_INLINE f32x16 get(const T* p) { return load_i8(p); }
};

// Scores of M queries against the keys of B blocks: lanes are positions. One query takes several blocks at once, so
// that additions of different scores overlap; each score is a sum in the order of the dimensions either way.
template <CacheType type, int M, int B>
NI_INLINE void scores(const AttentionTask& t, const std::uint8_t* const* blocks, const float* q, float* out,
                      std::int64_t row) {
  using C = CacheOf<type>;
  const typename C::T* k[B];
  f32x16 acc[M][B];
  for (int b = 0; b < B; ++b) k[b] = (const typename C::T*)(blocks[b] + t.offset + C::kScales);
  NI_ROWS for (int b = 0; b < B; ++b) acc[m][b] = broadcast(0.0f);
  for (std::int64_t d = 0; d < t.head_dim; ++d)
    _Pragma("GCC unroll 4") for (int b = 0; b < B; ++b) {
      const f32x16 keys = C::get(k[b] + d * kBlock);
      NI_ROWS acc[m][b] = fma(keys, broadcast(q[m * t.q_stride + d]), acc[m][b]);
    }
  for (int b = 0; b < B; ++b) {
    f32x16 scale = broadcast(1.0f / __builtin_sqrtf((float)t.head_dim));
    if constexpr (type == CacheType::i8) scale = scale * load((const float*)(blocks[b] + t.offset));
    NI_ROWS store(out + m * row + b * kBlock, acc[m][b] * scale);
  }
}

// Blocks lie far apart in memory, so the hardware does not foresee the next one.
NI_INLINE void prefetch_lines(const std::uint8_t* p, std::int64_t bytes) {
  for (std::int64_t at = 0; at < bytes; at += 64) prefetch(p + at);
}

template <CacheType type>
NI_INLINE const std::uint8_t* values_at(const AttentionTask& t, std::int64_t block) {
  using C = CacheOf<type>;
  return t.blocks[block] + t.offset + C::kScales + t.head_dim * kBlock * sizeof(typename C::T);
}

// Weighted sums of values for M queries, 64 (or fewer) dimensions at a time: lanes are dimensions. Query m sees the
// positions below shortest + m and no others: a weight of 0 does not undo a NaN.
template <CacheType type, int M, int N>
NI_INLINE void mix(const AttentionTask& t, const float* weights, std::int64_t row, std::int64_t shortest,
                   std::int64_t d, float* out) {
  using C = CacheOf<type>;
  const std::int64_t width = padded(t.head_dim), length = shortest + M - 1;
  f32x16 acc[M][N];
  NI_ROWS for (int j = 0; j < N; ++j) acc[m][j] = broadcast(0.0f);
  for (std::int64_t base = 0; base < length; base += kBlock) {
    const std::uint8_t* part = t.blocks[base / kBlock] + t.offset;
    const typename C::T* v = (const typename C::T*)values_at<type>(t, base / kBlock) + d;
    const float* scale = (const float*)part + kBlock;  // of values, int8 only
    const std::int64_t count = length - base < kBlock ? length - base : kBlock;
    const std::int64_t common = shortest - base < count ? shortest - base : count;  // seen by all queries
    const auto add = [&](std::int64_t s, bool everyone) __attribute__((always_inline)) {
      f32x16 values[N];
      _Pragma("GCC unroll 4") for (int j = 0; j < N; ++j) values[j] = C::get(v + s * width + 16 * j);
      NI_ROWS {
        if (!everyone && base + s >= shortest + m) continue;
        float p = weights[m * row + base + s];
        if constexpr (type == CacheType::i8) p *= scale[s];
        const f32x16 share = broadcast(p);
        _Pragma("GCC unroll 4") for (int j = 0; j < N; ++j) acc[m][j] = fma(values[j], share, acc[m][j]);
      }
    };
    if (M == 1 && base + 2 * kBlock < length)
      prefetch_lines(values_at<type>(t, base / kBlock + 2), kBlock * width * sizeof(*v));
    std::int64_t s = 0;
    for (; s < common; ++s) add(s, /*everyone=*/true);
    for (; s < count; ++s) add(s, /*everyone=*/false);
  }
  NI_ROWS for (int j = 0; j < N; ++j) store_first(out + m * t.out_stride + d + 16 * j, acc[m][j], t.head_dim - d - 16 * j);
}

// M queries at positions first_position ...: scores, softmax over each query's own length, mix.
template <CacheType type, int M>
void attend(const AttentionTask& t, std::int64_t query) {
  const float* q = t.q + query * t.q_stride;
  float* out = t.out + query * t.out_stride;
  const std::int64_t shortest = t.start + query + 1, length = shortest + M - 1;
  const std::int64_t row = (length + kBlock - 1) / kBlock * kBlock;
  float* s = t.scratch;  // (M, row)
  constexpr int kAtOnce = M == 1 ? 4 : 1;
  const std::int64_t blocks = row / kBlock;
  std::int64_t b = 0;
  for (; b + kAtOnce <= blocks; b += kAtOnce) {
    if constexpr (M == 1)
      for (std::int64_t next = b + kAtOnce; next < b + 2 * kAtOnce && next < blocks; ++next)
        prefetch_lines(t.blocks[next] + t.offset, t.head_dim * kBlock * sizeof(typename CacheOf<type>::T));
    scores<type, M, kAtOnce>(t, t.blocks + b, q, s + b * kBlock, row);
  }
  if constexpr (M == 1) {
    if (blocks - b == 3) scores<type, 1, 3>(t, t.blocks + b, q, s + b * kBlock, row), b += 3;
    if (blocks - b == 2) scores<type, 1, 2>(t, t.blocks + b, q, s + b * kBlock, row), b += 2;
  }
  for (; b < blocks; ++b) scores<type, M, 1>(t, t.blocks + b, q, s + b * kBlock, row);
  if constexpr (M == 1)
    for (b = 0; b < 2 && b < blocks; ++b) prefetch_lines(values_at<type>(t, b), kBlock * padded(t.head_dim) * sizeof(typename CacheOf<type>::T));
  NI_ROWS {
    const std::int64_t own = shortest + m;
    float* mine = s + m * row;
    f32x16 top = broadcast(-__builtin_huge_valf()), total = broadcast(0.0f);
    for (std::int64_t i = 0; i < own; i += 16) top = max(first(own - i, load(mine + i), -__builtin_huge_valf()), top);
    const f32x16 most = broadcast(largest(top));
    for (std::int64_t i = 0; i < row; i += 16) {
      const f32x16 e = own > i ? first(own - i, exp(load(mine + i) - most), 0.0f) : broadcast(0.0f);
      store(mine + i, e);
      if (own > i) total = total + e;
    }
    const f32x16 share = broadcast(1.0f / sum(total));
    for (std::int64_t i = 0; i < own; i += 16) store(mine + i, load(mine + i) * share);
  }
  std::int64_t d = 0;
  if constexpr (M <= kRowsFloat / 2)
    for (; d + 48 < t.head_dim; d += 64) mix<type, M, 4>(t, s, row, shortest, d, out);
  for (; d + 16 < t.head_dim; d += 32) mix<type, M, 2>(t, s, row, shortest, d, out);
  if (d < t.head_dim) mix<type, M, 1>(t, s, row, shortest, d, out);
}

template <CacheType type>
void attention_as(const AttentionTask& task) {
  constexpr int kTall = kWidth == 16 ? (int)kQueryTile : 2;
  std::int64_t i = 0;
  for (; i + kTall <= task.num_queries; i += kTall) attend<type, kTall>(task, i);
  for (; i < task.num_queries; ++i) attend<type, 1>(task, i);
}

void attention(const AttentionTask& task) {
  switch (task.type) {
    case CacheType::f32: return attention_as<CacheType::f32>(task);
    case CacheType::bf16: return attention_as<CacheType::bf16>(task);
    case CacheType::i8: return attention_as<CacheType::i8>(task);
  }
}

NI_INLINE float int8_scale(const float* x, std::int64_t n) {
  float most = 0, check = 0;
  for (std::int64_t i = 0; i < n; ++i) {
    most = __builtin_fabsf(x[i]) > most ? __builtin_fabsf(x[i]) : most;
    check += x[i] * 0.0f;
  }
  return most / 127.0f + check;
}
NI_INLINE std::int8_t to_int8(float x, float scale) {  // scale 0: all are 0; NaN: its scale says so
  return scale > 1e-32f && scale < __builtin_huge_valf() ? (std::int8_t)__builtin_rintf(x / scale) : (std::int8_t)0;
}

void store_kv(CacheType type, const float* k, const float* v, std::int64_t head_dim, std::uint8_t* part,
              std::int64_t slot) {
  const std::int64_t width = padded(head_dim);
  if (type == CacheType::f32) {
    float *keys = (float*)part, *values = keys + head_dim * kBlock + slot * width;
    for (std::int64_t d = 0; d < head_dim; ++d) keys[d * kBlock + slot] = k[d];
    for (std::int64_t d = 0; d < head_dim; ++d) values[d] = v[d];
  } else if (type == CacheType::bf16) {
    std::uint16_t *keys = (std::uint16_t*)part, *values = keys + head_dim * kBlock + slot * width;
    for (std::int64_t d = 0; d < head_dim; d += 16) {
      std::uint16_t narrow[16];
      store_bf16(narrow, load_first(k + d, head_dim - d));
      for (std::int64_t j = 0; j < 16 && d + j < head_dim; ++j) keys[(d + j) * kBlock + slot] = narrow[j];
      store_bf16(values + d, load_first(v + d, head_dim - d));  // the row is padded to 16
    }
  } else {
    float* scales = (float*)part;
    const float key_scale = scales[slot] = int8_scale(k, head_dim);
    const float value_scale = scales[kBlock + slot] = int8_scale(v, head_dim);
    std::int8_t* keys = (std::int8_t*)(scales + 2 * kBlock);
    std::int8_t* values = keys + head_dim * kBlock + slot * width;
    for (std::int64_t d = 0; d < head_dim; ++d) keys[d * kBlock + slot] = to_int8(k[d], key_scale);
    for (std::int64_t d = 0; d < head_dim; ++d) values[d] = to_int8(v[d], value_scale);
  }
}

// The memory ceiling --------------------------------------------------------------------------------------

std::uint64_t read(const std::uint8_t* data, std::size_t n) {
  i32x16 sums[4];
  for (int j = 0; j < 4; ++j) sums[j] = broadcast(0);
  for (std::size_t at = 0; at < n; at += 256) {
    for (int j = 0; j < 4; ++j) {
      prefetch(data + at + kPrefetch + 64 * j);
      const i32x16 x = load_ints(data + at + 64 * j);
      NI_EACH sums[j].v[i] ^= x.v[i];
    }
  }
  std::uint64_t total = 0;
  for (int j = 0; j < 4; ++j)
    NI_EACH for (int l = 0; l < kWidth; ++l) total += (std::uint32_t)sums[j].v[i][l];
  return total;
}

#define NI_TEXT_OF(name) #name
#define NI_TEXT(name) NI_TEXT_OF(name)
extern const Kernels kKernels;
const Kernels kKernels = {NI_TEXT(NANOINFER_ISA), matmul, prepare, layer_norm, store_kv, attention, read};

}  // namespace NANOINFER_ISA
}  // namespace nanoinfer
