// Python binding of the arithmetic ceiling (peak.h) for nanoinfer.roofline.measure.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include <atomic>
#include <stdexcept>
#include <thread>
#include <vector>

#include "gil.h"
#include "isa.h"
#include "names.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace nanoinfer {
namespace {

// Joins its threads at the end of its scope. Apple's C++ library has no std::jthread.
struct Threads {
  std::vector<std::thread> threads;
  ~Threads() {
    for (std::thread& thread : threads) thread.join();
  }
};

std::int64_t compute(const std::string& format, std::int64_t steps, int threads, const std::string& isa) {
  const Kernels& kernels = kernels_for(isa);
  const WeightType type = weight_type(format);
  if (steps < 1 || steps > (std::int64_t{1} << 40)) throw std::invalid_argument("steps must be in [1, 2**40]");
  if (threads < 1 || threads > 1024) throw std::invalid_argument("threads must be in [1, 1024]");
  const ReleasedGil nogil;
  std::atomic<std::int64_t> total{0};
  const auto work = [&] {
    float sink = 0;
    total += kernels.peak(type, steps, &sink);
    if (sink == 0.5f) total += 0;
  };
  {
    Threads others;
    for (int i = 1; i < threads; ++i) others.threads.emplace_back(work);
    work();
  }
  return total;
}

}  // namespace

void bind_peak(nb::module_& m) {
  m.def("compute", &compute, nb::kw_only(), "format"_a, "steps"_a, "threads"_a, "isa"_a = "",
        "Multiply and add in registers with weights of a format, `steps` steps in each thread; return the number of\n"
        "multiplications and additions. Their rate is an upper bound for a matrix product in this format.");
}

}  // namespace nanoinfer
