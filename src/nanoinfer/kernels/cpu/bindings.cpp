// Python bindings of the native extension (module nanoinfer._native). Thin on purpose: argument types are
// declared in the signatures, where nanobind checks them; the work is in the headers beside this file.
#include <nanobind/nanobind.h>

#include <cstdint>

#include "philox.h"

namespace nanoinfer {
void bind_decoder(nanobind::module_& m);
void bind_kernels(nanobind::module_& m);
void bind_peak(nanobind::module_& m);
void bind_sampler(nanobind::module_& m);
}

namespace nb = nanobind;
using namespace nb::literals;

NB_MODULE(_native, m) {
  nb::set_leak_warnings(false);  // what a daemon thread holds when the interpreter exits is no leak
  m.doc() = "Native CPU code of nanoinfer.";
  m.def("uniform", &nanoinfer::philox_uniform, nb::kw_only(), "seed"_a, "sample"_a, "position"_a,
        "The uniform in [0, 1) of one token: Philox4x32-10 keyed by (seed, sample, position).\n\n"
        "Args: seed, sample, position: integers in [0, 2**64).\n"
        "Returns: a float with 53 random bits, equal bit for bit to nanoinfer.sampling.rng.uniform_reference.\n"
        "Raises: TypeError for anything else.");
  nanoinfer::bind_decoder(m);
  nanoinfer::bind_kernels(m);
  nanoinfer::bind_peak(m);
  nanoinfer::bind_sampler(m);
}
