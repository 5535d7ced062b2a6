"""A kernel that writes the sampler's random number, for test_triton_sampler.py."""

import triton
import triton.language as tl

from nanoinfer.kernels.triton.sampler import uniform


@triton.jit
def write_uniform(words, found):
    tl.store(found, uniform(words))
