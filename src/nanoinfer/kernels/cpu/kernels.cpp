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
// Built by sources.cmake with NANOINFER_ISA=<name> and that set's compiler flags. No header of the standard
// library with inline functions may be included here (see kernels.h).
#include "kernels.h"

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(NANOINFER_NEON)
#include <arm_neon.h>
#endif

namespace nanoinfer {
namespace NANOINFER_ISA {

#include "vec.h"
#include "products.h"
#include "rows.h"
#include "attention.h"
#include "peak.h"

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
const Kernels kKernels = {NI_TEXT(NANOINFER_ISA), matmul, prepare, layer_norm, store_kv, attention, read,
                          peak};

}  // namespace NANOINFER_ISA
}  // namespace nanoinfer
