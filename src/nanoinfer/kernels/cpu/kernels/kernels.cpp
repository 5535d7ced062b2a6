// The kernels of the native decoder: one source, compiled once for each instruction set.
//
// The design (docs/log/2026-11.md has the measurement of each step):
//   1. 32 outputs are interleaved in a panel, and a thread reads its panels from first to last as one stream, which hardware
//      prefetchers follow. Software prefetch reads weights some kilobytes ahead, across the ends of panels.
//   2. Each lane computes one output, and every row of activations has its own accumulators, which add in the order of the
//      inputs. The result of a row therefore does not depend on the number of rows or on the thread, bit for bit.
//   3. Weights of 8 and 4 bits are multiplied with activations of 8 bits in exact integers, with four products in each
//      instruction if the CPU has VNNI.
//   4. Keys are stored transposed (kBlock positions interleaved), so attention uses the same product: lanes are positions.
//
// sources.cmake compiles this file with NANOINFER_ISA=<name> and the compiler flags of that instruction set. It must not
// include standard headers with inline functions (see kernels.h).
#include "layout.h"

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(NANOINFER_NEON)
#include <arm_neon.h>
#endif

namespace nanoinfer {
namespace NANOINFER_ISA {

#include "attention.h"
#include "low_rank.h"
#include "peak.h"
#include "recurrent.h"

// The memory ceiling --------------------------------------------------------------------------------------

std::uint64_t read(const std::uint8_t* data, std::size_t n) {
  i32x16 sums[4];
  for (int j = 0; j < 4; ++j) sums[j] = broadcast(0);
  for (std::size_t at = 0; at < n; at += 256) {
    for (int j = 0; j < 4; ++j) {
      prefetch_l2(data + at + kPrefetchRow + 64 * j);
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
const Kernels kKernels = {NI_TEXT(NANOINFER_ISA), kBlockRows, matmul, prepare, norm, rotate, hadamard, store_kv, attention, join, read,
                          peak, project, expand, convolve, gate, update_state};

}  // namespace NANOINFER_ISA
}  // namespace nanoinfer
