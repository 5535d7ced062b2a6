"""Random numbers: one uniform number for each token, a pure function of (seed, sample, position) (docs/sampling.md).

The generator is Philox4x32-10 (Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3", SC 2011). The reference
below is plain Python. With the native extension, `uniform` is the C++ version (kernels/cpu/sampler/philox.h),
about ten times faster and equal bit for bit.
"""

from __future__ import annotations

_MUL = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_WORD = 0xFFFFFFFF
# Offsets for `sample`: they give further random numbers for the same token.
ACCEPT = 1 << 40
"""Decides whether a proposed token is accepted (speculative/verify.py)."""
REPLACE = 2 << 40
"""Samples the replacement of a rejected token."""


def philox4x32(counter: tuple[int, int, int, int], key: tuple[int, int]) -> tuple[int, int, int, int]:
    """Return the 128 random bits of `counter` under `key`, 32-bit words: ten Philox rounds."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        p0, p1 = _MUL[0] * c0, _MUL[1] * c2
        c0, c1, c2, c3 = (p1 >> 32) ^ c1 ^ k0, p1 & _WORD, (p0 >> 32) ^ c3 ^ k1, p0 & _WORD
        k0, k1 = (k0 + _WEYL[0]) & _WORD, (k1 + _WEYL[1]) & _WORD
    return c0, c1, c2, c3


def uniform_reference(*, seed: int, sample: int, position: int) -> float:
    """Return the uniform number in [0, 1) of one token, with 53 random bits.

    Args:
        seed: the request's seed, 0 <= seed < 2**64.
        sample: index of the sample within its request (0 when n=1).
        position: index of the token among the output tokens of its sample.
    """
    r = philox4x32((position & _WORD, position >> 32, sample & _WORD, sample >> 32), (seed & _WORD, seed >> 32))
    return ((r[0] >> 5 << 26) | (r[1] >> 6)) * 2.0**-53


try:
    from nanoinfer._native import uniform
except ImportError:  # built with NANOINFER_NO_NATIVE=1: the same numbers, but slower
    uniform = uniform_reference

__all__ = ["ACCEPT", "REPLACE", "philox4x32", "uniform", "uniform_reference"]
