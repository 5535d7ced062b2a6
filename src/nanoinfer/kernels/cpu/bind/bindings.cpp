// The native extension (module nanoinfer._native). nanobind checks the argument types in the signatures; the bindings
// of each part are in the bind_*.cpp files.
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
  nb::set_leak_warnings(false);  // daemon threads may hold objects when the interpreter exits
  m.doc() = "Native CPU code of nanoinfer.";
  m.def("uniform", &nanoinfer::philox_uniform, nb::kw_only(), "seed"_a, "sample"_a, "position"_a,
        "The uniform number in [0, 1) of one token: Philox4x32-10 of (sample, position) with the seed as key.\n\n"
        "Args: seed, sample, position: integers in [0, 2**64).\n"
        "Returns: a float with 53 random bits, equal bit for bit to nanoinfer.sampling.rng.uniform_reference.\n"
        "Raises: TypeError for anything else.");
  nanoinfer::bind_decoder(m);
  nanoinfer::bind_kernels(m);
  nanoinfer::bind_peak(m);
  nanoinfer::bind_sampler(m);
}
