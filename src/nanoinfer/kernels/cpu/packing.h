// Packing of a whole matrix on all threads of a pool. No float32 copy of it exists, only of one panel in each thread.
#pragma once

#include <vector>

#include "format.h"
#include "thread_pool.h"

namespace nanoinfer {

// data: (panels, panel_bytes); scale: (panels * kPanel), which only i8 writes. Throws std::bad_alloc.
inline void pack(ThreadPool& threads, WeightType type, const Stored& weights, std::uint8_t* data, float* scale) {
  const std::int64_t panels = (weights.rows + kPanel - 1) / kPanel, panel_floats = kPanel * weights.columns;
  std::vector<float> scratch(threads.size() * panel_floats);  // here: a thread of the pool must not throw
  threads.run([&](int rank) {
    const Range mine = range_of(panels, rank, threads.size());
    pack_panels(type, weights, mine.begin, mine.end, data, scale, scratch.data() + rank * panel_floats);
  });
}

// The same for rows of blocks of a GGUF file.
inline void pack_blocks(ThreadPool& threads, WeightType type, const std::uint8_t* blocks, std::int64_t rows,
                        std::int64_t in, std::uint8_t* data) {
  threads.run([&](int rank) {
    const Range mine = range_of((rows + kPanel - 1) / kPanel, rank, threads.size());
    pack_blocks(type, blocks, rows, in, mine.begin, mine.end, data);
  });
}

}  // namespace nanoinfer
