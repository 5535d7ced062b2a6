// Packing of a whole matrix on all threads of a pool. Each thread has the source of one panel in memory: a float32 copy,
// or rows of blocks as they are in the file.
#pragma once

#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <stdexcept>
#include <system_error>
#include <vector>

#include "format.h"
#include "thread_pool.h"

namespace nanoinfer {

// data: (panels, panel_bytes); scale: (panels * kPanel), which only i8 writes. Throws std::bad_alloc.
inline void pack(ThreadPool& threads, WeightType type, const Stored& weights, std::uint8_t* data, float* scale) {
  const std::int64_t panels = (weights.rows + kPanel - 1) / kPanel, panel_floats = kPanel * weights.columns;
  std::vector<float> scratch(threads.size() * panel_floats);  // here: a thread of the pool must not throw
  threads.run({panels, [&](int rank, Range part) {
    pack_panels(type, weights, part.begin, part.end, data, scale, scratch.data() + rank * panel_floats);
  }});
}

// Round a matrix to rows of blocks of a GGUF file: (rows, row_bytes).
inline void quantize(ThreadPool& threads, WeightType type, const Stored& weights, std::uint8_t* blocks) {
  std::vector<float> scratch(threads.size() * kPanel * weights.columns);
  threads.run({(weights.rows + kPanel - 1) / kPanel, [&](int rank, Range part) {
    for (std::int64_t p = part.begin; p < part.end; ++p)
      quantize_rows(type, weights, p * kPanel, std::min((p + 1) * kPanel, weights.rows), blocks,
                    scratch.data() + rank * kPanel * weights.columns);
  }});
}

// The same for rows of blocks of a GGUF file.
inline void pack_blocks(ThreadPool& threads, WeightType type, const std::uint8_t* blocks, std::int64_t rows,
                        std::int64_t in, std::uint8_t* data) {
  threads.run({(rows + kPanel - 1) / kPanel, [&](int, Range part) {
    pack_blocks(type, blocks, rows, in, part.begin, part.end, data);
  }});
}

// Read `count` rows; consecutive ones are read at once. Return 0, or errno, or -1 where the file has ended.
inline int read_rows(const RowPlace* places, std::int64_t count, std::int64_t bytes, std::uint8_t* to) {
  for (std::int64_t begin = 0, end; begin < count; begin = end) {
    const RowPlace& first = places[begin];
    end = begin + 1;
    while (end < count && places[end].descriptor == first.descriptor &&
           places[end].offset - first.offset == (end - begin) * bytes)
      ++end;
    for (std::int64_t at = begin * bytes, done = 0; at < end * bytes; at += done) {
      done = pread(static_cast<int>(first.descriptor), to + at, end * bytes - at, first.offset + at - begin * bytes);
      if (done < 0 && errno == EINTR) done = 0;
      else if (done <= 0) return done < 0 ? errno : -1;
    }
  }
  return 0;
}

// The same for rows that are still in files. The source of a panel stays in the second-level cache, and a matrix needs no
// memory but its panels'. Throws std::runtime_error if a row cannot be read.
inline void pack_blocks(ThreadPool& threads, WeightType type, const RowPlace* places, std::int64_t rows, std::int64_t in,
                        std::uint8_t* data) {
  const std::int64_t bytes = row_bytes(type, in), panel = panel_bytes(type, in);
  std::vector<std::uint8_t> scratch(threads.size() * kPanel * bytes);
  std::atomic<int> failed{0};
  threads.run({(rows + kPanel - 1) / kPanel, [&](int rank, Range part) {
    std::uint8_t* const blocks = scratch.data() + rank * kPanel * bytes;
    for (std::int64_t p = part.begin; p < part.end && !failed; ++p) {
      const std::int64_t count = std::min(kPanel, rows - p * kPanel);
      if (const int error = read_rows(places + p * kPanel, count, bytes, blocks)) failed = error;
      else pack_blocks(type, blocks, count, in, 0, 1, data + p * panel);
    }
  }});
  if (failed > 0) throw std::runtime_error(std::generic_category().message(failed));
  if (failed < 0) throw std::runtime_error("it ends within a tensor");
}

}  // namespace nanoinfer
