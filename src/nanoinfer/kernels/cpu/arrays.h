// Float arrays as arguments from Python: on the CPU, contiguous, read-only.
#pragma once

#include <nanobind/ndarray.h>

namespace nanoinfer {

using Floats1 = nanobind::ndarray<const float, nanobind::ndim<1>, nanobind::c_contig, nanobind::device::cpu>;
using Floats2 = nanobind::ndarray<const float, nanobind::ndim<2>, nanobind::c_contig, nanobind::device::cpu>;

}  // namespace nanoinfer
