// Python bindings for nanoinfer.roofline.ceilings: the ceilings of arithmetic (peak.h) and of memory.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include <atomic>
#include <cstring>
#include <memory>
#include <stdexcept>
#include <string>

#include "gil.h"
#include "isa.h"
#include "memory.h"
#include "names.h"
#include "thread_pool.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace nanoinfer {
namespace {

std::int64_t compute(const std::string& format, std::int64_t steps, int threads, const std::string& isa) {
  const Kernels& kernels = kernels_for(isa);
  const WeightType type = weight_type(format);
  if (steps < 1 || steps > (std::int64_t{1} << 40)) throw std::invalid_argument("steps must be in [1, 2**40]");
  if (threads < 1 || threads > 1024) throw std::invalid_argument("threads must be in [1, 1024]");
  const ReleasedGil nogil;
  std::atomic<std::int64_t> total{0};
  ThreadPool(threads).run({threads, [&](int, Range part) {
    float sink = 0;
    for (std::int64_t i = part.begin; i < part.end; ++i) total += kernels.peak(type, steps, &sink);
  }});
  return total;
}

constexpr std::int64_t kReadBytes = 1 << 20;  // of an item: the largest buffer has fewer items than a phase may have

// A buffer to measure read bandwidth with. Its constructor, too, is called without the interpreter lock.
class ReadBuffer {
 public:
  ReadBuffer(std::int64_t num_bytes, int threads, const std::string& isa)
      : kernels_(kernels_for(isa)), threads_(ThreadPool::shared(checked_threads(threads))), memory_(checked_size(num_bytes)) {
    std::memset(memory_.data(), 1, memory_.size());  // allocates every page
  }
  ~ReadBuffer() {
    const ReleasedGil nogil;
    memory_ = Buffer();
    threads_.reset();
  }
  std::uint64_t read() {
    const ReleasedGil nogil;
    ThreadPool& threads = ThreadPool::current(threads_);
    std::atomic<std::uint64_t> total{0};
    const std::int64_t size = memory_.size(), count = (size + kReadBytes - 1) / kReadBytes;
    threads.run({count, [&](int, Range part) {
      const std::int64_t begin = part.begin * kReadBytes, end = std::min(part.end * kReadBytes, size);
      total += kernels_.read(memory_.data() + begin, end - begin);
    }});
    return total;
  }

 private:
  static std::size_t checked_size(std::int64_t n) {
    if (n < 256 || n > (std::int64_t{1} << 40)) throw std::invalid_argument("num_bytes must be from 256 to 2**40");
    return n / 256 * 256;
  }
  static int checked_threads(int n) {
    if (n < 1 || n > 1024) throw std::invalid_argument("threads must be from 1 to 1024");
    return n;
  }
  const Kernels& kernels_;
  std::shared_ptr<ThreadPool> threads_;
  Buffer memory_;
};

}  // namespace

void bind_peak(nb::module_& m) {
  nb::class_<ReadBuffer>(m, "ReadBuffer", "Memory to measure read bandwidth with.")
      .def(nb::init<std::int64_t, int, const std::string&>(), nb::kw_only(), "num_bytes"_a, "threads"_a,
           "isa"_a = "", nb::call_guard<ReleasedGil>())
      .def("read", &ReadBuffer::read, "Read the buffer once with all threads; return a checksum.");

  m.def("compute", &compute, nb::kw_only(), "format"_a, "steps"_a, "threads"_a, "isa"_a = "",
        "Multiply and add in registers with weights of a format, `steps` steps in each thread; return the number of\n"
        "multiplications and additions. Their rate is an upper bound for a matrix product in this format.");
}

}  // namespace nanoinfer
